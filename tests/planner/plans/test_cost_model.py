"""What options inside stages cost in a chain: never less than the forward of the ops that run again."""

from __future__ import annotations

from dataclasses import replace

import pytest

import planner
from planner.plans.cost_model import chain_of
from profiler.records import MenuRecord


def luckiest(menu: MenuRecord) -> MenuRecord:
    """As if every option had been measured to cost nothing."""
    options = [
        replace(o, forward_seconds=menu.keep_forward_seconds, backward_seconds=menu.keep_backward_seconds)
        for o in menu.options
    ]
    return replace(menu, options=tuple(options))


def test_no_option_is_free_however_it_was_measured(blocks: planner.Profile) -> None:
    lucky = replace(blocks, menus=tuple(luckiest(menu) for menu in blocks.menus))
    checked = 0
    for record, stage in zip(lucky.stages, chain_of(lucky).stages, strict=True):
        if record.menu < 0:
            continue
        menu, keep = lucky.menus[record.menu], stage.options[0]
        whole = sum(op.seconds for op in menu.ops.ops)
        for option, made in zip(menu.options, stage.options[1:], strict=True):
            again = sum(menu.ops.ops[ordinal].seconds for ordinal in {*option.rerun} - {*option.packed}) / whole
            extra = made.forward_seconds + made.backward_seconds - keep.forward_seconds - keep.backward_seconds
            assert extra == pytest.approx(again * menu.keep_forward_seconds)
            checked += extra > 0
    assert checked
