from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from planner.distributed.simulated_ranks import simulated_group
from profiler.workload.data_parallel import casts_as_unit
from profiler.workload.given_models import check_ready

HALF, FULL, WORDS = (torch.ones(2, 4, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.int64))
TO_HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
BACK_TO_FULL = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
LEFT_AS_GIVEN = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)


@pytest.mark.parametrize(
    ("policy", "given", "casts"),
    [
        (MixedPrecisionPolicy(), FULL, False),
        (TO_HALF, FULL, True),
        (TO_HALF, HALF, False),
        (TO_HALF, WORDS, False),
        (BACK_TO_FULL, HALF, True),
        (LEFT_AS_GIVEN, FULL, False),
    ],
)
def test_a_unit_casts_what_its_policy_says(policy: MixedPrecisionPolicy, given: torch.Tensor, casts: bool) -> None:
    with simulated_group(2):
        unit = nn.Linear(4, 4)
        fully_shard(unit, mp_policy=policy)
        assert casts_as_unit(unit, [given]) == casts
        assert not casts_as_unit(nn.Linear(4, 4), [given])


def test_units_that_torch_cannot_put_back_in_the_middle_of_a_step_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_group(2):
        unit = nn.Linear(4, 4)
        fully_shard(unit)
        ends = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._reset_iter_state"
        monkeypatch.setattr(ends, lambda state: None, raising=False)
        check_ready(unit, "Workload")
        monkeypatch.delattr(ends)
        with pytest.raises(ValueError, match=r"under fully_shard, .* expected torch 2\.13 or newer, got 2\."):
            check_ready(unit, "Workload")
        check_ready(nn.Linear(4, 4), "Workload")
