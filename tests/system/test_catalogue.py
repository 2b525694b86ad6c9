"""One of each kind of model of transformers, switches at their defaults: exact, and within every budget.

``python -m benchmarks.catalogue`` does the same for all families.
"""

from __future__ import annotations

import pytest

from benchmarks.catalogue import rows_of
from benchmarks.catalogue_families import FAMILIES, Family
from tests.support.nightly import by_day

KINDS = """
    AlbertForMaskedLM ASTForAudioClassification AutoformerForPrediction BartForConditionalGeneration
    BeitForImageClassification BertForMaskedLM BigBirdForMaskedLM BlipForConditionalGeneration BloomForCausalLM
    CLIPModel ConvNextForImageClassification DebertaV2ForMaskedLM DeepseekV3ForCausalLM FNetForMaskedLM
    GPT2LMHeadModel InformerForPrediction LlamaForCausalLM MambaForCausalLM MixtralForCausalLM
    MobileNetV1ForImageClassification ModernBertForMaskedLM PatchTSTForPrediction PerceiverForMaskedLM
    ResNetForImageClassification SegformerForImageClassification SwinForImageClassification T5ForConditionalGeneration
    ViTMAEForPreTraining WhisperForConditionalGeneration
"""


# The others are of kinds that these are of, too.
BY_DAY = """
    AutoformerForPrediction LlamaForCausalLM MixtralForCausalLM
"""

BY_VALUES = ("AutoformerForPrediction",)  # its topk


@pytest.mark.parametrize("name", by_day(KINDS.split(), BY_DAY.split()))
def test_a_family_is_exact_and_within_its_budgets_or_says_that_it_may_not_be(name: str) -> None:
    for row in rows_of(FAMILIES[name]):
        assert not row["differs"], row
        assert row["predicted_peak_bytes"] <= row["budget_bytes"], row
        assert row["measured_peak_bytes"] <= row["predicted_peak_bytes"] or (name in BY_VALUES and row["said"]), row


def test_there_are_at_least_sixty_families_and_their_switches_are_defaults() -> None:
    assert len(FAMILIES) >= 60
    assert all(type(value) is not bool for family in FAMILIES.values() for value in _values(family))


def _values(family: Family) -> list[object]:
    nested = [list(size.values()) if isinstance(size, dict) else [size] for size in family.sizes.values()]
    return [value for values in nested for value in values]


# Of one a part of what a stage saves is not used, the other lets go of something after its last stage.
@pytest.mark.parametrize("name", ["LlavaForConditionalGeneration", "CanineForSequenceClassification"])
def test_a_family_is_exact_and_within_its_budgets_over_a_link(name: str) -> None:
    for row in rows_of(FAMILIES[name], menus=False, link_gbps=25.0):
        assert not row["differs"] and not row["said"], row
        assert row["measured_peak_bytes"] <= row["predicted_peak_bytes"] <= row["budget_bytes"], row
