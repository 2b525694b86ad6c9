"""The examples of frameworks train within their budgets, as their first lines say they are run."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from tests.support.nightly import by_day

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("plain_loop", "torchtune_recipe", "accelerate_loop", "lightning_fit", "trainer", "lora", "trl_sft")
NAMES += ("llama", "unet", "value_in_branch", "three_lengths", "two_towers", "trl_grpo", "diffusers_unet", "timm_loop")


@pytest.fixture
def as_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of what a process of its own would begin with, all that an example changes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["example"])
    random = torch.get_rng_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_rng_state(random)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:planner. use_cache", "ignore:apply. the memory of this")
@pytest.mark.usefixtures("as_a_script")
@pytest.mark.parametrize("name", by_day(NAMES, ["value_in_branch"]))
def test_an_example_trains_within_its_budget(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "timm_loop":  # It needs a torchvision of the same build as torch; the index has none for the CPU alone.
        pytest.importorskip("timm")
    runpy.run_path(str(file_of(name)), run_name="__main__")
    check_printed(capsys.readouterr().out)


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on private memory, as Linux has it")
def test_a_step_that_does_not_fit_into_its_process_trains_in_it():
    ended = subprocess.run(
        [sys.executable, file_of("does_not_fit")], capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    check_printed(ended.stdout)
    (room_mib,) = re.findall(r"ROOM = (\d+)", file_of("does_not_fit").read_text(encoding="utf-8"))
    (unplanned,) = re.findall(r"unplanned (\d+) bytes", ended.stdout)
    assert int(unplanned) > int(room_mib) * 2**20


def file_of(name: str) -> Path:
    """The file of an example, short and with the command that runs it."""
    file = EXAMPLES / f"{name}.py"
    source = file.read_text(encoding="utf-8")
    assert f"python examples/{name}.py" in source
    assert len(source.splitlines()) < 60
    return file


def check_printed(said: str) -> None:
    """An example has trained six steps within its budget; as without a plan, where it compares."""
    ((budget, peak),) = re.findall(r"budget (\d+) bytes, measured (\d+) bytes", said)
    assert 0 < int(peak) <= int(budget)
    assert "other than without a plan" not in said
    losses = said.partition("losses")[2].split()
    assert len(losses) == 6
    assert all(-1 < float(loss) < 10 for loss in losses)  # GRPO's may be below 0.
