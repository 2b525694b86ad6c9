"""The examples of frameworks train within their budgets, as their first lines say they are run."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("plain_loop", "torchtune_recipe", "accelerate_loop", "lightning_fit", "trainer", "lora", "trl_sft")


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


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.usefixtures("as_a_script")
@pytest.mark.parametrize("name", NAMES)
def test_an_example_trains_within_its_budget(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = EXAMPLES / f"{name}.py"
    source = file.read_text(encoding="utf-8")
    assert f"python examples/{name}.py" in source
    assert len(source.splitlines()) < 60
    runpy.run_path(str(file), run_name="__main__")
    said = capsys.readouterr().out
    ((budget, peak),) = re.findall(r"budget (\d+) bytes, measured (\d+) bytes", said)
    assert 0 < int(peak) <= int(budget)
    losses = said.partition("losses")[2].split()
    assert len(losses) == 6
    assert all(0 < float(loss) < 10 for loss in losses)
