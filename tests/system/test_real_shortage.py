"""Processes that the system really gives no more memory: they go on with what there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import planner
import planner.zoo
from planner.targets import load_target
from tests.support.command_line import done

TARGET = """
import resource
from pathlib import Path

import torch

import planner
from profiler.workload.workload import Workload


def build(room=0):
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Dropout(0.1)) for _ in range(8)]
    model = torch.nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    work = Workload(model=model, inputs=torch.randn(65536, 16), loss=lambda y: y.square().mean(), optimizer=optimizer)
    if room:
        planner.measure(work, repeats=1)  # what torch and its profiler set up once is there before the limit
        lines = Path("/proc/self/status").read_text().splitlines()
        used = next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmData:"))
        resource.setrlimit(resource.RLIMIT_DATA, (used + room * 2**20, resource.RLIM_INFINITY))
    return work
"""
ROOM_MIB = 60  # beside what is there already; the plan that keeps everything takes about 110 more
OWN_MAPPING_BYTES = (
    2**20
)  # every larger tensor is a mapping of its own: what is freed no longer counts against the limit
SKIP = "needs glibc's malloc, /proc and a limit on private memory, as Linux has them"


@pytest.mark.skipif(sys.platform != "linux", reason=SKIP)
@pytest.mark.nightly
def test_a_process_that_may_have_no_more_memory_goes_on_with_less(tmp_path: Path):
    (tmp_path / "target.py").write_text(TARGET)
    target = f"{tmp_path / 'target.py'}:build"
    done("profile", target, "--no-menus", "-o", tmp_path / "profile.json")
    done("solve", tmp_path / "profile.json", "--budget", "100%", "-o", tmp_path / "plan.json")
    options = ["--set", f"room={ROOM_MIB}", "--steps", "2", "--retry", "5", "--json"]
    threads = str(torch.get_num_threads())  # sums come out alike only where they are split alike
    surroundings = {"MALLOC_MMAP_THRESHOLD_": str(OWN_MAPPING_BYTES), "OMP_NUM_THREADS": threads}
    ended = subprocess.run(
        [sys.executable, "-m", "planner", "train", target, "--plan", tmp_path / "plan.json", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **surroundings},
    )
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert document["status"] == "trained" and document["retries"] >= 1
    assert all(failure["allocation_bytes"] for failure in document["out_of_memory"])
    assert "can't allocate memory" in document["out_of_memory"][0]["message"]
    first = document["out_of_memory"][0]
    assert first["restored"] and first["actual_bytes"] < first["predicted_peak_bytes"]
    assert document["measured_peak_bytes"] <= document["budget_bytes"] < first["budget_bytes"]
    work = load_target(target, {})
    assert document["losses"] == [work.step() for _ in range(2)]


SIZES = {"layers": 6, "hidden": 128, "heads": 4, "seq": 128, "batch": 20, "vocab": 500}
READY = """
import json, psutil, planner, planner.zoo
planner.profile(planner.zoo.build("gpt2", layers=1), menus=False)
print(json.dumps(psutil.Process().memory_info()._asdict()))
"""
LIMITS_OF_GROUPS = ("memory.limit_in_bytes", "memory.max")  # of both versions


@pytest.fixture(scope="module")
def unplanned_bytes() -> int:
    return planner.profile(planner.zoo.build("gpt2", **SIZES), menus=False).unplanned_peak_bytes


@pytest.fixture
def group() -> Iterator[Path]:
    """A new control group that can have a limit on memory."""
    for parent in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        made = parent / f"planner-test-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        if any((made / name).exists() for name in LIMITS_OF_GROUPS):
            yield made
            made.rmdir()
            return
        made.rmdir()
    pytest.skip("needs the right to make control groups for memory")


def trains_in_a_third(limiting: Callable[[dict[str, int]], str], unplanned_bytes: int, folder: Path) -> None:
    """Profile, solve and train within what a process that is ready uses, and a third of the unplanned peak.

    Args:
        limiting: the limits as bash commands, from bytes by what psutil calls that use.
        unplanned_bytes: the peak of a plain step.
        folder: for the files.
    """
    threads = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}

    def ended(command: list[str]) -> str:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500, env=threads)
        assert run.returncode == 0, run.stderr[-3000:]
        return run.stdout

    ready = json.loads(ended([sys.executable, "-c", READY]).splitlines()[-1])
    limits = limiting({use: used_bytes + unplanned_bytes // 3 for use, used_bytes in ready.items()})

    def planner_says(*args: Any) -> str:
        return ended(["bash", "-c", f'{limits} && exec "$@"', "bash", sys.executable, "-m", "planner", *map(str, args)])

    target = ["zoo:gpt2", "--set", *(f"{name}={value}" for name, value in SIZES.items())]
    planner_says("profile", *target, "--no-menus", "-o", folder / "profile.json")
    measured = planner.Profile.load(folder / "profile.json")
    assert measured.frugal and measured.unplanned_peak_bytes == unplanned_bytes
    budget = ["--budget", unplanned_bytes // 4, "--solver", "rotor"]
    planner_says("solve", folder / "profile.json", *budget, "-o", folder / "plan.json")
    assert "within the budget" in planner_says("train", *target, "--plan", folder / "plan.json", "--steps", "2")


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason=SKIP)
def test_a_process_with_a_third_of_the_memory_profiles_plans_and_trains(unplanned_bytes: int, tmp_path: Path) -> None:
    def limiting(most: dict[str, int]) -> str:
        return f"ulimit -d {most['data'] // 1024} && ulimit -v {most['vms'] // 1024}"

    trains_in_a_third(limiting, unplanned_bytes, tmp_path)


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason=SKIP)
def test_a_process_that_its_control_group_would_kill_profiles_plans_and_trains(
    group: Path, unplanned_bytes: int, tmp_path: Path
) -> None:
    limit = next(group / name for name in LIMITS_OF_GROUPS if (group / name).exists())

    def limiting(most: dict[str, int]) -> str:
        return f"echo {most['rss']} > {limit} && echo $$ > {group / 'cgroup.procs'}"

    trains_in_a_third(limiting, unplanned_bytes, tmp_path)
