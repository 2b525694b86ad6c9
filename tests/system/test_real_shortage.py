"""A process that the system really gives no more memory: ``planner train --retry`` goes on with what there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
