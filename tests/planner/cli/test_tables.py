"""Tables: what a person reads says what the documents say, within 100 columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pandas as pd
import pytest

from planner.cli import tables
from planner.cli.solutions import SolutionSummary, StageSummary
from planner.plans.pareto_curves import COLUMNS
from planner.plans.plan import Plan
from planner.training.solver_comparison import ComparisonRow
from profiler.records import OpRecord, Phase, Profile, ResidentBytes, StageRecord
from tests.support.printed_text import text_of
from tests.support.training_runs import trained

MIB = 2**20


def line_with(text: str, *words: str) -> str:
    return next(line for line in text.splitlines() if all(word in line for word in words))


STAGE = StageSummary(name="embed", kind="stage", decision="keep", kept_bytes=2 * MIB, runs=1, extra_seconds=0.0)
SUMMARY = SolutionSummary(
    model_class="Net", device="cpu", precision="float32", solver="rotor", status="feasible",
    budget_bytes=90 * MIB, predicted_peak_bytes=80 * MIB, unplanned_peak_bytes=160 * MIB,
    predicted_seconds=0.15, unplanned_seconds=0.1, slowdown=1.5, lower_bound_seconds=0.14,
    gap=0.0667, solve_seconds=0.02, recomputed_seconds=0.0293, recomputed_ops=42, resident_bytes=30 * MIB,
    stages=(
        STAGE,
        replace(
            STAGE, name="block[0].very.long.module.path", decision="recompute", kept_bytes=256 * 1024, runs=2,
            extra_seconds=0.00432,
        ),
        replace(STAGE, name="block.1", decision="segment", kept_bytes=0, runs=3, extra_seconds=0.0125),
        replace(STAGE, name="after block.1", kind="outside", kept_bytes=0),
    ),
)  # fmt: skip


def test_a_plan_shows_decision_bytes_runs_and_time_per_stage():
    text = text_of(tables.solution_report(SUMMARY))
    row = line_with(text, "block[0].very.long.module.path")
    assert row.split() == ["block[0].very.long.module.path", "recompute", "256", "KiB", "2", "4.32", "ms"]
    assert line_with(text, "block.1", "segment").split()[-3:] == ["3", "12.50", "ms"]
    assert line_with(text, "embed").split() == ["embed", "keep", "2.00", "MiB", "1", "-"]


def test_a_plan_shows_its_claims():
    text = text_of(tables.solution_report(SUMMARY))
    assert "50% of the unplanned 160 MiB" in line_with(text, "predicted peak")
    assert "10.0 MiB to spare" in line_with(text, "budget")
    assert "1.50 x" in line_with(text, "predicted time")
    assert "3 extra runs of 2 stages, 42 ops" in line_with(text, "recomputed")
    assert "rotor" in line_with(text, "solver")
    assert "6.7%" in line_with(text, "status", "feasible")


@pytest.mark.parametrize(
    ("stages", "ops", "said"),
    [
        ([("keep", 1)], 0, "nothing"),
        ([("selective", 1), ("keep", 1), ("selective", 1)], 27, "27 ops inside 2 stages"),
        ([("selective", 1), ("keep", 1)], 0, "nothing; 1 stage as a program in which each op runs once"),
        ([("selective", 1)], 1, "1 op inside 1 stage"),
        ([("recompute", 2)], 1, "1 extra run of 1 stage, 1 op"),
        (
            [("recompute", 2), ("segment", 3), ("selective", 1)],
            69,
            "3 extra runs of 2 stages, and ops inside 1 other stage; 69 ops in all",
        ),
    ],
)
def test_a_plan_tells_stages_that_run_again_from_ops_inside_others(stages, ops, said):
    summaries = tuple(replace(STAGE, decision=decision, runs=runs) for decision, runs in stages)
    text = text_of(tables.solution_report(replace(SUMMARY, stages=summaries, recomputed_ops=ops)))
    assert line_with(text, "recomputed").split(maxsplit=1)[1].strip() == said


def test_an_optimal_plan_says_so():
    text = text_of(tables.solution_report(replace(SUMMARY, status="optimal", gap=0.0)))
    assert "no plan of these stages within the budget is faster" in line_with(text, "status", "optimal")


def test_a_solution_of_a_chain_needs_no_model():
    summary = replace(SUMMARY, model_class=None, device=None, precision=None, recomputed_ops=None)
    text = text_of(tables.solution_report(summary))
    assert "Solution of a chain" in text and "ops" not in line_with(text, "recomputed")


def test_a_graph_shows_its_claims_and_the_nodes_that_cost_most():
    once = StageSummary(name="once", side="backward", decision="keep", runs=1, extra_seconds=0.0)
    again = [
        replace(once, name=f"again{k}", side="forward", decision="recompute", runs=2, extra_seconds=0.001 * k)
        for k in range(1, 31)
    ]
    summary = SolutionSummary(
        solver="moments", status="feasible", budget_bytes=90 * MIB, predicted_peak_bytes=80 * MIB,
        unplanned_peak_bytes=160 * MIB, predicted_seconds=1.5, unplanned_seconds=1.0, slowdown=1.5,
        lower_bound_seconds=1.4991, gap=0.0006, solve_seconds=0.02, resident_bytes=30 * MIB,
        recomputed_seconds=0.465, stages=(*again, once),
    )  # fmt: skip
    text = text_of(tables.solution_report(summary))
    assert "feasible: at most 0.06% of the time could be saved" in line_with(text, "status")
    assert "no schedule of this graph within the budget takes less than 1.50 s" in " ".join(text.split())
    assert "30 extra runs of 30 nodes of 31" in line_with(text, "recomputed")
    assert text.index("again30") < text.index("again29") and "again11" in text
    assert not any(line.split()[:1] in (["again10"], ["once"]) for line in text.splitlines())


def stage(name: str, **values) -> StageRecord:
    phases = {"forward": Phase(seconds=0.00111), "backward": Phase(seconds=0.00222)}
    return StageRecord(name=name, kind="stage", **{**phases, **values})


@pytest.fixture
def profile():
    twice = "recomputing it gives another result"
    return Profile(
        model_class="Net", input_shapes=((1, 1),),
        device="cpu", device_name="a machine", torch_version="2", precision="float32",
        stages=(
            stage("good", recompute_seconds=0.00333, recompute_ops=17, kept_bytes=MIB),
            stage("noisy", reason=twice),
            stage("noisy.too", reason=twice),
            stage("counter", reason="a counter changed"),
        ),
        shared=(), resident=ResidentBytes(parameters=MIB, buffers=0, optimizer=2 * MIB, inputs=512),
        optimizer=Phase(seconds=0.004, peak_bytes=5 * MIB), unplanned_peak_bytes=9 * MIB, unplanned_seconds=0.05,
        step_seconds=(0.05,), op_records=(),
    )  # fmt: skip


def test_a_profile_shows_its_stages_and_why_some_never_run_again(profile):
    text = text_of(tables.profile_report(profile))
    assert line_with(text, "good").split() == ["good", "1.11", "2.22", "1.00", "MiB", "0", "B", "3.33", "17"]
    assert "never (1)" in line_with(text, "noisy.too")
    assert "never (2)" in line_with(text, "counter", "2.22")
    assert "another result" in line_with(text, "(1)", "never runs again")
    assert text.count("another result") == 1


def test_a_profile_shows_what_is_resident(profile):
    text = text_of(tables.profile_report(profile))
    assert "parameters 1.00 MiB, optimizer 2.00 MiB, batch 512 B" in line_with(text, "resident")
    assert "buffers" not in text
    assert "9.00 MiB (9,437,184 bytes)" in line_with(text, "unplanned peak")
    assert "peak 5.00 MiB" in line_with(text, "optimizer step")


def test_ops_come_largest_first_with_totals_of_all():
    def op(name: str, size: int, kept: bool, side: Literal["forward", "backward"] = "forward") -> OpRecord:
        return OpRecord(side=side, place="s", module="m", op=name, seconds=0.001, output_bytes=size, kept=kept)

    ops = [
        op("small", 1024, True),
        op("large", 3072, False),
        op("middle", 2048, True),
        op("back", 512, False, "backward"),
    ]
    limited = text_of(tables.ops_report(ops, limit=2))
    assert limited.index("large") < limited.index("middle")
    assert "small" not in limited
    assert "3 ops, 3.00 ms, 6.00 KiB of new storage, 3.00 KiB of it kept" in line_with(limited, "3 ops")
    assert "small" in text_of(tables.ops_report(ops, limit=0))


def test_a_frontier_shows_both_ends_of_every_curve():
    rows = [
        ("none", 100 * MIB, 100 * MIB, 0.010, 0.010, "optimal", 0.0),
        ("rotor", 40 * MIB, 40 * MIB, 0.014, 0.013, "feasible", 0.001),
        ("rotor", 100 * MIB, 100 * MIB, 0.010, 0.010, "optimal", 0.001),
        ("lower_bound", 40 * MIB, None, 0.013, 0.013, "bound", 0.0),
    ]
    text = text_of(tables.frontier_report(pd.DataFrame(rows, columns=list(COLUMNS)), "title"))
    expected = ["rotor", "2", "40.0", "MiB", "14.00", "ms", "10.00", "ms", "100", "MiB", "2.00", "ms"]
    assert line_with(text, "rotor").split() == expected
    assert "lower_bound" not in text


def test_a_comparison_shows_predicted_beside_measured_and_what_would_fit():
    rows = [
        ComparisonRow(
            solver="none", status="unplanned", predicted_peak_bytes=100, measured_peak_bytes=100,
            predicted_seconds=0.01, measured_seconds=0.01,
        ),
        ComparisonRow(
            solver="rotor", status="optimal", predicted_peak_bytes=51, measured_peak_bytes=50,
            predicted_seconds=0.012, measured_seconds=0.0125,
        ),
        ComparisonRow(solver="keep_all", status="infeasible", minimum_budget_bytes=100, reason="x needs 100 bytes"),
        ComparisonRow(solver="chen_sqrt", status="unknown", minimum_budget_bytes=90, reason="x needs 90 bytes"),
    ]  # fmt: skip
    text = text_of(tables.comparison_report(rows, 60))
    assert "does not fit" in line_with(text, "chen_sqrt") and "unknown" not in text
    assert "+2.00%" in line_with(text, "rotor") and "1.25 x" in line_with(text, "rotor")
    assert line_with(text, "keep_all", "infeasible").split()[2:] == ["-"] * 6
    assert "x needs 100 bytes" in text
    assert "reserved" not in text


def test_a_comparison_has_what_was_reserved_where_an_allocator_says_so():
    known = {"predicted_peak_bytes": 100, "measured_peak_bytes": 100, "predicted_seconds": 0.01}
    rows = [
        ComparisonRow(solver="none", status="unplanned", measured_seconds=0.01, reserved_bytes=2048, **known),
        ComparisonRow(solver="keep_all", status="infeasible", minimum_budget_bytes=100, reason="x needs 100 bytes"),
    ]
    text = text_of(tables.comparison_report(rows, 60))
    assert "reserved 2.00 KiB (2,048 bytes)" in line_with(text, "none", "reserved")
    assert line_with(text, "keep_all", "infeasible").split()[2:] == ["-"] * 6


def test_training_says_whether_the_peak_kept_to_the_budget(files):
    run = trained(Plan.load(files / "plan.json"), losses=(1.5, float("nan")))
    text = text_of(tables.training_report(run))
    assert "1.5, not finite" in text and "within the budget" in text and "1.50 x" in text
    assert "above the budget" in text_of(tables.training_report(replace(run, measured_peak_bytes=101)))
