"""Ops of a plan: every outcome and its reason on a stage written by hand, and names in short."""

from __future__ import annotations

from dataclasses import replace

import pytest

import planner
from planner.explain.op_decisions import (
    StageGroup,
    always_live_tensors,
    decisions_of_ops,
    grouped_decisions,
    groups_of_stages,
    makers,
    plan_ops_report,
    storages_kept_by,
)
from planner.plans.plan import StageDecision
from planner.units import common_path, names_in_short
from profiler.op_graph import StageOp, StageOps, StageStorage
from profiler.records import MenuRecord, OptionRecord
from profiler.step_graph import StepRuns
from tests.support.planned_blocks import with_record
from tests.support.printed_text import text_of

MIB = 2**20


def op(kind: str, module: str, **values) -> StageOp:
    return StageOp(op=f"aten.{kind}.default", module=module, seconds=values.pop("seconds", 0.001), **values)


# An input and a weight from outside (0, 1); mm makes 2 (4 MiB), a view of it, gelu makes 3 (4 MiB) from 2, exp makes
# 4 (1 MiB) from 3, room 5 (1 MiB) is filled with random numbers, and mul makes the output 6 from 4 and 5.
OPS = StageOps(
    ops=(
        op("mm", "fc", reads=((0, 0), (1, 0)), allocates=(2,), seconds=0.020),
        op("view", "fc", reads=((2, 0),)),
        op("gelu", "act", reads=((2, 0),), allocates=(3,), seconds=0.002),
        op("exp", "act", reads=((3, 0),), allocates=(4,), seconds=0.004),
        op("empty_like", "drop", reads=((4, 0),), allocates=(5,)),
        op(
            "bernoulli_",
            "drop",
            reads=((5, 0),),
            writes=(5,),
            random=True,
            not_rerunnable_reason="it draws from its own generator",
        ),
        op("mul", "drop", reads=((4, 0), (5, 1)), allocates=(6,)),
    ),
    storages=(
        StageStorage(size_bytes=2 * MIB, op=-1, saved=True, always_live=True),
        StageStorage(size_bytes=3 * MIB, op=-1, saved=True, always_live=True),
        StageStorage(size_bytes=4 * MIB, op=0, saved=True),
        StageStorage(size_bytes=4 * MIB, op=2, saved=True),
        StageStorage(size_bytes=MIB, op=3, saved=True),
        StageStorage(size_bytes=MIB, op=4, versions=1, saved=True),
        StageStorage(size_bytes=MIB, op=6, returned=True),
    ),
)


def kind(decision: StageDecision, kept: tuple[int, ...] = (), rerun: tuple[int, ...] = ()) -> StageGroup:
    option = OptionRecord(
        name="some", runs=StepRuns((), ()), kept=kept, rerun=rerun, forward_seconds=0.0, backward_seconds=0.0,
        freed_bytes=0, forward_peak_bytes=0, backward_peak_bytes=0,
    )  # fmt: skip
    menu = MenuRecord(ops=OPS, options=(option,))
    number = 1 if decision == "selective" else 0
    return StageGroup(members=(0,), names=("block",), decision=decision, option=number, menu=menu, runs=1)


def said(group: StageGroup) -> list[tuple[str, int, str]]:
    return [(op.outcome, op.size_bytes, op.why) for op in decisions_of_ops(group)]


def test_a_stage_of_which_a_part_runs_again() -> None:
    assert said(kind("selective", kept=(2, 5), rerun=(2, 3))) == [
        ("kept", 4 * MIB, "5.00 ms a MiB to make again"),
        ("view", 0, ""),
        ("recomputed", 4 * MIB, "500 µs a MiB"),
        ("recomputed", MIB, "4.00 ms a MiB"),
        ("view", 0, ""),
        ("kept", MIB, "must not run again: it draws from its own generator"),
        ("not needed", 0, "the stage's output"),
    ]


def test_what_is_kept_for_an_op_that_runs_again_and_what_runs_again_for_another() -> None:
    saved = tuple(replace(s, saved=s.op not in (2, 0)) for s in OPS.storages)
    menu = MenuRecord(ops=replace(OPS, storages=saved), options=kind("selective", (5,), (0, 2, 3)).menu.options)  # type: ignore[union-attr]
    found = replace(kind("selective"), menu=menu)
    assert said(found)[0] == ("recomputed", 0, "runs again to reach op 2 (gelu)")
    assert said(found)[2] == ("recomputed", 0, "runs again to reach op 3 (exp)")
    held = replace(menu.options[0], kept=(2, 5), rerun=(2, 3))
    assert said(replace(found, menu=replace(menu, options=(held,))))[0] == (
        "kept", 4 * MIB, "op 2 (gelu), which runs again, reads it",
    )  # fmt: skip


def test_an_op_behind_one_that_must_not_run_again_says_so() -> None:
    fixed = replace(OPS.ops[2], not_rerunnable_reason="it communicates")
    menu = MenuRecord(ops=replace(OPS, ops=(*OPS.ops[:2], fixed, *OPS.ops[3:])))
    unsaved = replace(menu.ops, storages=tuple(replace(s, saved=s.saved and s.op != 2) for s in OPS.storages))
    found = said(replace(kind("keep"), menu=replace(menu, ops=unsaved)))
    assert found[3] == ("kept", MIB, "must not run again: op 2 (gelu) before it must not, it communicates")


def test_a_stage_that_keeps_everything_says_what_it_would_take_to_make_it_again() -> None:
    found = said(kind("keep"))
    assert [outcome for outcome, _, _ in found] == ["kept", "view", "kept", "kept", "view", "kept", "not needed"]
    assert found[3] == ("kept", MIB, "4.00 ms a MiB to make again")
    assert sum(size for _, size, _ in found) == OPS.saved_bytes


def test_a_stage_that_runs_again_as_a_whole_runs_up_to_its_last_saved_tensor() -> None:
    found = said(kind("recompute"))
    assert [outcome for outcome, _, _ in found] == [
        "recomputed", "view", "recomputed", "recomputed", "view", "recomputed", "not needed",
    ]  # fmt: skip


def test_ops_are_named_with_what_fills_the_room_they_make() -> None:
    assert makers(OPS)[5] == 5
    assert always_live_tensors(kind("keep")) == (2, 5 * MIB)


def test_what_stays_is_read_in_backward_and_not_written_by_an_op_that_runs_again() -> None:
    """Of two batch norms' results, one changed in place by an op that does not run again, only that one stays."""
    norms = StageOps(
        ops=(
            op("batch_norm", "a", allocates=(0, 1)),
            op("relu_", "a", reads=((0, 0),), writes=(0,)),
            op("batch_norm", "b", reads=((0, 1),), allocates=(2, 3)),
            op("rsub", "b", allocates=(4,)),
        ),
        storages=(
            StageStorage(size_bytes=8, op=0, versions=1, saved=True),
            StageStorage(size_bytes=1, op=0, output=1, saved=True),
            StageStorage(size_bytes=8, op=2, saved=True),
            StageStorage(size_bytes=1, op=2, output=1, saved=True),
            StageStorage(size_bytes=8, op=3),
        ),
    )
    option = replace(kind("selective").menu.options[0], kept=(0, 1, 2, 4), rerun=(0,))  # type: ignore[union-attr]
    assert storages_kept_by(norms, option) == [0, 2]
    assert storages_kept_by(norms, replace(option, rerun=(0, 1))) == [2]


def test_alike_ops_come_together_those_that_run_again_first() -> None:
    twice = replace(OPS, ops=tuple(replace(each, op="aten.gelu.default", module="act") for each in OPS.ops))
    menu = replace(kind("selective", (2, 5), (2, 3)).menu, ops=twice)  # type: ignore[type-var]
    found = grouped_decisions(replace(kind("selective"), menu=menu))
    assert [(ops.outcome, ops.ordinals) for ops in found] == [
        ("recomputed", (2, 3)), ("kept", (0, 4, 5)), ("not needed", (6,)),
    ]  # fmt: skip
    assert found[0].size_bytes == 5 * MIB


@pytest.fixture(scope="module")
def plan(blocks: planner.Profile) -> planner.Plan:
    """With a part of some stage running again, or all of it, as the menus allow."""
    return planner.solve(blocks, "75%", solver="rotor")


def test_every_kind_of_stage_is_said_once(plan: planner.Plan) -> None:
    kinds = groups_of_stages(plan)
    members = sorted(k for found in kinds for k in found.members)
    assert members == [k for k, stage in enumerate(plan.stages) if stage.kind == "stage"]
    text = text_of(plan_ops_report(plan, every_op=True))
    for found in kinds:
        assert f"{found.title.replace('transformer.', '')}, {found.decision}:" in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_without_request_only_stages_of_which_a_part_runs_again_are_told_of(plan: planner.Plan) -> None:
    stages = tuple(replace(plan.stages[k], decision="selective" if k == 2 else "keep") for k in range(len(plan.stages)))
    text = text_of(plan_ops_report(replace(plan, stages=stages)))
    assert (text.count(", selective:"), text.count(", keep:")) == (1, 0)


def test_every_op_is_listed_on_request(plan: planner.Plan) -> None:
    kinds = [found for found in groups_of_stages(plan) if found.menu is not None]
    text = text_of(plan_ops_report(plan, every_op=True), width=200)  # a wrapped "895 µs each" would count as a row
    assert text.count("held anyway") == len(kinds)
    assert all(text.count("_safe_softmax") >= 1 for _ in kinds)
    rows = sum(line.split()[0].isdigit() for line in text.splitlines() if line.split())
    assert rows == sum(len(found.ops.ops) for found in kinds if found.ops is not None)


def test_a_plan_without_menus_says_decisions_alone(plan: planner.Plan) -> None:
    stages = tuple(replace(with_record(stage, menu=-1), decision="keep", option="") for stage in plan.stages)
    text = text_of(plan_ops_report(replace(plan, menus=(), stages=stages), every_op=True))
    assert text.count(", keep:") == sum(stage.kind == "stage" for stage in plan.stages)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["h.0"], "h.0"),
        (["h.0", "h.1", "h.2", "h.5"], "h.0 to 2, 5 (4 stages)"),
        (["0", "2", "4", "6"], "0, 2, ... 6 (4 stages)"),
        (["block", "block#1", "block#2"], "block ... block#2 (3 stages)"),
        (["a.0.x", "a.1.x"], "a.0.x, 1.x (2 stages)"),
        (["encoder", "decoder"], "encoder, decoder (2 stages)"),
    ],
)
def test_names_in_short(names: list[str], words: str) -> None:
    assert names_in_short(names) == words


def test_the_path_around_stages_leaves_no_bare_number() -> None:
    assert common_path(["t.drop", "t.h.0"]) == "t."
    assert common_path(["t.h.0", "t.h.1"]) == "t."
    assert common_path(["0", "1"]) == ""
    assert common_path([]) == ""
