"""What compare, max-batch, advise and train say in a report, and that --report writes it."""

from __future__ import annotations

import dataclasses

import pytest

from planner.capacity import advice as advising, batch_search
from planner.capacity.advice import Advice
from planner.capacity.batch_limits import Limit, MaxBatch
from planner.capacity.levers import Combination, Lever
from planner.explain.memory_breakdown import MemoryBreakdown, MemoryItem
from planner.report.command_results import section_of_advice, section_of_comparison, section_of_limits
from planner.training import solver_comparison
from planner.training.solver_comparison import ComparisonRow
from tests.support.command_line import SMALL, done, refused

KIB = 1024
ROWS = [
    ComparisonRow(solver="none", status="unplanned", predicted_peak_bytes=9 * KIB, measured_peak_bytes=9 * KIB,
                  predicted_seconds=1.0, measured_seconds=1.0),
    ComparisonRow(solver="keep_all", status="infeasible", minimum_budget_bytes=9 * KIB, reason="too little"),
    ComparisonRow(solver="rotor", status="optimal", predicted_peak_bytes=5 * KIB, measured_peak_bytes=6 * KIB,
                  predicted_seconds=1.5, measured_seconds=1.25),
    ComparisonRow(solver="chen_sqrt", status="unknown", minimum_budget_bytes=7 * KIB, reason="too little"),
]  # fmt: skip
NO_PLAN = Limit(mode="none", size=64, predicted_size=64, peak_bytes=3 * KIB, predicted_peak_bytes=3 * KIB,
                samples_per_second=20.0, throughput=20.0, relative=1.0, confirmed=True)  # fmt: skip
RECOMPUTE = Limit(mode="recompute", size=128, predicted_size=100, peak_bytes=4 * KIB, predicted_peak_bytes=4 * KIB,
                  samples_per_second=2500.0, throughput=2500.0, relative=125.0)  # fmt: skip
LIMITS = MaxBatch(
    vary="batch", step=64, budget_bytes=4 * KIB, states_bytes=KIB, profiled=(8, 16), linear=True, notes=("slow disk",),
    none=NO_PLAN, recompute=RECOMPUTE, offload=Limit(mode="offload", size=None, reason="no link"), best=RECOMPUTE,
)  # fmt: skip
PLAIN = Combination(budget_bytes=4 * KIB, peak_bytes=6 * KIB, seconds=2.0, peak_basis="measured",
                    seconds_basis="measured", result="same")  # fmt: skip
SPLIT = dataclasses.replace(PLAIN, micro_batches=2, peak_bytes=3 * KIB, seconds=3.0, result="rounding")
CAST = dataclasses.replace(PLAIN, precision="bfloat16", peak_bytes=4 * KIB, seconds=1.0, result="other")
ADVICE = Advice(
    model_class="Net", device="cpu", precision="float32", optimizer="AdamW", samples=8, budget_bytes=4 * KIB,
    states_bytes=KIB, levers=(Lever(kind="offload", name="offload", applies=False, reason="no link"),),
    memory=(MemoryBreakdown(moment="forward and backward", phase="forward", stage="h", peak_bytes=6 * KIB,
            items=(MemoryItem(group="activations", what="kept", size_bytes=5 * KIB),
                   MemoryItem(group="inputs", what="batch", size_bytes=KIB))),),
    combinations=(CAST, SPLIT, PLAIN), exact=SPLIT, cheapest=CAST, nearest=SPLIT, notes=(),
)  # fmt: skip


def test_solvers_stand_beside_what_was_measured():
    section = section_of_comparison(ROWS, 6 * KIB)
    assert (
        section.sentence == "Within 6.00 KiB the plan of rotor is the fastest, measured 1.25 times the unplanned step."
    )
    assert section.tables[0].rows[2] == ("rotor", "optimal", "5.00 KiB", "6.00 KiB", "1.50 s", "1.25 s", "1.25 x")
    assert section.tables[0].rows[3][:2] == ("chen_sqrt", "does not fit")
    assert ("keep_all", "too little (9.00 KiB)") in section.facts
    assert section.chart is not None
    assert section.chart.series[1] == ("measured", (9 * KIB, None, 6 * KIB, None))
    assert section_of_comparison(ROWS[:2], 6 * KIB).sentence.startswith("No solver has a plan within 6.00 KiB")


def test_the_largest_batch_of_each_mode():
    section = section_of_limits(LIMITS)
    assert "batch=128 with recompute has the best throughput: 2,500 samples a second" in section.sentence
    assert section.tables[0].rows == (
        ("no plan", "64", "64", "3.00 KiB", "20", "1.000 x"),
        ("recompute", "128", "100", "4.00 KiB (predicted)", "2,500", "125.000 x"),
        ("recompute and offload", "-", "-", "-", "-", "-"),
    )
    assert ("recompute and offload", "no link") in section.facts
    assert section.chart is not None
    assert section.chart.series == (("predicted", (3 * KIB, 4 * KIB)), ("measured", (3 * KIB, None)))


def test_advice_says_what_fits_and_where_memory_goes():
    section = section_of_advice(ADVICE)
    assert section.sentence == (
        "Within 4.00 KiB: 2 micro-batches takes 3.00 KiB, 1.50 times the unplanned step, and leaves training as it is; "
        "autocast bfloat16 takes 4.00 KiB, 0.50 times the unplanned step, and changes training."
    )
    alone, memory = section.tables
    assert alone.rows[1] == (
        "2 micro-batches",
        "up to rounding",
        "measured",
        "3.00 KiB",
        "1.00 KiB",
        "3.00 s",
        "1.50 x",
    )
    assert memory.rows == (("inputs", "1.00 KiB"), ("activations", "5.00 KiB"), ("together", "6.00 KiB"))
    nothing = dataclasses.replace(ADVICE, exact=None, cheapest=None, nearest=PLAIN)
    assert section_of_advice(nothing).sentence.endswith("comes nearest, 2.00 KiB above it.")


def test_reports_of_max_batch_and_advise(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_search, "max_batch", lambda *args, **options: LIMITS)
    monkeypatch.setattr(advising, "advise", lambda *args, **options: ADVICE)
    for command, words in (
        ("max-batch", "128 with recompute has the best"),
        ("advise", "and leaves training as it is"),
    ):
        path = tmp_path / f"{command}.html"
        assert f"written: {path}" in done(command, "zoo:mlp", "--budget", "4KiB", "-o", path).stderr
        text = path.read_text()
        assert words in text
        assert f"<code>planner {command} zoo:mlp --budget 4KiB -o {path}</code>" in text


def test_a_report_of_compare(tmp_path, monkeypatch):
    monkeypatch.setattr(solver_comparison, "compare_solvers", lambda *args, **options: ROWS)
    done(
        "compare",
        "zoo:mlp",
        "--set",
        "layers=1",
        "hidden=4",
        "batch=4",
        "--budget",
        "6KiB",
        "-o",
        tmp_path / "c.html",
    )
    assert "the plan of rotor is the fastest" in (tmp_path / "c.html").read_text()


@pytest.mark.slow
def test_a_report_of_train_has_measured_peak_and_losses(files, tmp_path):
    path = tmp_path / "t.html"
    command = ["train", "zoo:mlp", *SMALL, "--plan", files / "plan.json", "--steps", "2", "--json", "-o", path]
    result = done(*command)
    assert f"written: {path}" in result.stderr
    text = path.read_text()
    assert "measured peak" in text
    assert "Losses" in text


def test_pages_that_cannot_be_are_refused_before_anything_is_measured(files, tmp_path):
    for command in (
        ("train", "--plan", files / "plan.json"),
        *((c, "--budget", "1MB") for c in ("compare", "max-batch", "advise")),
    ):
        name, *options = command
        said = refused(name, "zoo:mlp", *options, "-o", tmp_path / "no" / "r.html")
        assert said.startswith(f"{tmp_path / 'no' / 'r.html'}: there is no folder")
    said = refused("advise", "zoo:mlp", "--world-size", "2", "--shard", "ddp", "-o", tmp_path / "r.html")
    assert "there is no page and no picture of simulated ranks" in said
    assert list(tmp_path.iterdir()) == []
