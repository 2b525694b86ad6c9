"""How many rooms one call of the main functions goes through, counted by ``sys.setprofile``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import planner

ROOT = Path(planner.__file__).resolve().parent.parent
PACKAGES = ("profiler", "solvers", "planner")


def rooms_passed(call: Callable[[], Any]) -> tuple[set[str], Any]:
    """The folders of our packages whose functions a call runs, and its result."""
    files: set[str] = set()

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            files.add(frame.f_code.co_filename)

    sys.setprofile(see)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    paths = [Path(name).relative_to(ROOT) for name in files if Path(name).is_relative_to(ROOT)]
    return {path.parent.as_posix() for path in paths if path.parts[0] in PACKAGES}, result


def test_each_function_passes_few_rooms():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(2048, 32)
    workload = planner.Workload(model=model, inputs=inputs, loss=lambda y: y.square().mean(), optimizer=optimizer)
    for name in ("profile", "solve", "apply"):
        getattr(planner, name)  # Its module is imported when it is first used.
    profiling, profile = rooms_passed(lambda: planner.profile(workload))
    solving, plan = rooms_passed(lambda: planner.solve(profile, "80%"))
    applying, handle = rooms_passed(lambda: planner.apply(model, plan))

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # The first ones check more.
    stepping, _ = rooms_passed(step)
    handle.remove()
    assert len(stepping) <= 6
    assert len(profiling) <= 10 and len(solving) <= 7 and len(applying) <= 5
    assert "planner/distributed" not in solving
