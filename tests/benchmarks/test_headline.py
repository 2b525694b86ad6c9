"""The headline benchmark: its models, what it measures of them, and what it does without a GPU."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import planner
from benchmarks import headline, headline_full, headline_models, headline_resnet, headline_rows, headline_scaled
from planner.targets import load_target
from planner.zoo import build
from planner.zoo.transformers_models import bert_config

TINY: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 2, "seq": 12, "vocab": 40, "masked": 3}


def test_the_loss_is_the_mean_over_the_masked_positions_alone() -> None:
    workload = load_target("benchmarks.headline_models:bert_small", {**TINY, "batch": 2})
    model: Any = workload.model.eval()
    inputs = workload.inputs
    assert isinstance(inputs, dict)
    hidden = model.bert(input_ids=inputs["input_ids"]).last_hidden_state
    every = model.head(hidden).log_softmax(-1)  # of all positions, as a head without gathering has them
    own = [
        -every[row, inputs["positions"][row, k], inputs["labels"][row, k]].item() for row in range(2) for k in range(3)
    ]
    assert workload.forward().item() == pytest.approx(sum(own) / 6, rel=1e-5)


def test_masked_positions_of_a_sequence_are_distinct_and_the_head_shares_its_weight() -> None:
    workload = headline_models.bert_small(**TINY, batch=5)
    assert isinstance(workload.inputs, dict)
    assert all(len(set(row.tolist())) == 3 for row in workload.inputs["positions"])
    model: Any = workload.model
    assert model.head.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight


def test_bert_large_has_its_published_size_and_trains_in_mixed_precision() -> None:
    defaults = {p.name: p.default for p in inspect.signature(headline_models.bert_large).parameters.values()}
    config = bert_config(**{name: defaults[name] for name in ("layers", "hidden", "heads", "seq", "vocab")})
    with torch.device("meta"):
        model = headline_models.MaskedLanguageModel(config)
    assert 330e6 < sum(p.numel() for p in model.parameters()) < 340e6
    workload = headline_models.bert_large(**TINY, batch=2)
    assert workload.autocast is torch.float16 and workload.scaler is not None
    assert torch.isfinite(torch.tensor(workload.step()))


@pytest.mark.parametrize("wrong", [{"masked": 13}, {"masked": 0}, {"attention": "flash"}, {"amp": "int8"}])
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected .* got .*;"):
        headline_models.bert_small(**{**TINY, "batch": 2, **wrong})


def test_the_full_form_without_a_gpu_says_so_and_succeeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["headline", "--full", "--out", str(tmp_path)])
    assert headline.main() == 0
    assert "no CUDA device" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_the_scaled_form_holds_every_batch_under_the_cap() -> None:
    found = headline_scaled.scaled(1, build=lambda n: headline_models.bert_small(**TINY, batch=8 * n), measured=(2, 3))
    none, *planned = found.rows
    measured = [row for row in planned if row.measured_peak_bytes is not None]
    assert none.batch == 4 and none.times == 1.0
    assert none.measured_peak_bytes == none.predicted_peak_bytes
    assert {row.way for row in measured} == {"recompute"} and len(measured) >= 2
    cap = none.measured_peak_bytes or 0
    assert all((row.measured_peak_bytes or 0) <= cap for row in measured)
    assert all((row.predicted_peak_bytes or 0) <= cap for row in planned)
    assert any(row.way == "recompute and offload" and row.rate is None for row in planned)


def test_rows_stand_beside_the_reference() -> None:
    frame = headline_rows.table(headline_rows.reference())
    assert list(frame["times_unplanned"]) == ["1.0", "10.0", "14.3"]
    assert list(frame["relative_speed"]) == ["1.000", "0.744", "0.646"]


@pytest.mark.parametrize(("speed", "verdict"), [(0.744, "speed with recomputation alone: reached"), (0.743, "NOT")])
def test_what_is_reached_is_said(speed: float, verdict: str) -> None:
    none = headline_rows.Row(form="a", way="no plan", batch=4, rate=8.0)
    rows = [none, headline_rows.Row(form="a", way="recompute", batch=40, rate=8.0 * speed, base=none)]
    assert headline_rows.reached(rows) == []  # nothing measured
    own = [replace(row, measured_peak_bytes=1) for row in rows]
    assert verdict in headline_rows.reached(own)[-1]


def test_a_search_gives_one_row_for_each_way_that_is_open() -> None:
    def limit(mode: Any, size: int | None, rate: float | None = None) -> planner.results.Limit:
        return planner.results.Limit(mode=mode, size=size, samples_per_second=rate, peak_bytes=9, confirmed=True)

    none, recompute = limit("none", 18, 24.0), limit("recompute", 180, 18.0)
    found = planner.results.MaxBatch(
        vary="batch",
        step=1,
        budget_bytes=10,
        states_bytes=1,
        profiled=(1, 2),
        linear=True,
        notes=(),
        none=none,
        recompute=recompute,
        offload=limit("offload", None),
        best=none,
    )
    rows = headline_full.rows_of(found, "bert")
    assert [(row.way, row.times, row.speed) for row in rows] == [("no plan", 1.0, 1.0), ("recompute", 10.0, 0.75)]


@pytest.mark.nightly
def test_resnet_checkpoints_are_the_16_residual_sums_and_the_solver_is_no_worse() -> None:
    workload = build("resnet50", hidden=2, image=32, batch=2)
    plans = headline_resnet.plans_of(planner.profile(workload, menus=False, rules=headline_resnet.CHECKPOINTS))
    stated = plans["by hand"]
    assert sum(stage.name.count(".layers.") for stage in stated.stages if stage.decision != "keep") == 16
    assert plans["solver, same budget"].predicted_peak_bytes <= stated.predicted_peak_bytes
    assert plans["solver, same budget"].predicted_seconds <= stated.predicted_seconds
    assert plans["solver, same seconds"].predicted_peak_bytes <= stated.predicted_peak_bytes
    assert plans["solver, same seconds"].predicted_seconds <= stated.predicted_seconds
