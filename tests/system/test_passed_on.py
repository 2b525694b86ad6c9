"""Blocks that return what they were given beside what they make, as T5 passes a bias on, are planned op by op."""

from __future__ import annotations

import pytest

import planner
from planner.zoo import build


@pytest.mark.nightly
def test_blocks_of_t5_are_captured_as_wholes() -> None:
    profile = planner.profile(build("t5", layers=3, hidden=32, heads=2, seq=32, batch=4))
    blocks = [stage for stage in profile.stages if stage.module_class == "T5Block"]
    assert [stage.name for stage in blocks] == [
        f"{side}.block.{k}" for side in ("encoder", "decoder") for k in range(3)
    ]
    assert all(profile.menus[stage.menu].graph is not None for stage in blocks)
