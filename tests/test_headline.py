"""The headline benchmark: its models, what it measures of them, and what it does without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import headline_models
from planner.targets import load_target

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
    with torch.device("meta"):
        model = headline_models.MaskedLanguageModel(headline_models.config_of())
    assert 330e6 < sum(p.numel() for p in model.parameters()) < 340e6
    workload = headline_models.bert_large(**TINY, batch=2)
    assert workload.autocast is torch.float16 and workload.scaler is not None
    assert torch.isfinite(torch.tensor(workload.step()))


@pytest.mark.parametrize("wrong", [{"masked": 13}, {"masked": 0}, {"attention": "flash"}, {"amp": "int8"}])
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected .* got .*;"):
        headline_models.bert_small(**{**TINY, "batch": 2, **wrong})
