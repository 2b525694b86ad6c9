"""Models under fully_shard and plans, on two ranks, with settings of the sharding: exact, within what they predict."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import planner
from benchmarks.outside_meter import OutsideMeter
from benchmarks.rank_processes import values_of_ranks
from profiler.workload.tensor_parts import local_part
from tests.support.late_release import late_bytes
from tests.support.parallel_models import Block, Transformer, next_words, words

STEPS = 3
LATE_BYTES = late_bytes(nn.Sequential(Block(), Block()))  # The largest unit here is two blocks.


def _each_block(model: Transformer, **settings: Any) -> None:
    for block in model.blocks.children():
        fully_shard(block, **settings)
    fully_shard(model, **settings)


def _one_keeps(model: Transformer) -> None:
    for number, block in enumerate(model.blocks.children()):
        fully_shard(block, reshard_after_forward=number != 1)
    fully_shard(model)


def _inside(model: Transformer) -> None:
    for linear in [module for module in model.blocks.modules() if isinstance(module, nn.Linear)]:
        fully_shard(linear)
    _each_block(model)


def _around(model: Transformer) -> None:
    blocks = [*model.blocks.children()]
    fully_shard(blocks[:2])
    fully_shard(blocks[2:])
    fully_shard(model)


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
RULES = planner.Rule(modules="blocks.*", ops=["gelu", "native_layer_norm"])
CAPTURED = ("given back after forward", "kept", "one kept", "units around stages")
SETTINGS: dict[str, Callable[[Transformer], None]] = {
    "given back after forward": _each_block,
    "kept": lambda model: _each_block(model, reshard_after_forward=False),
    "one kept": _one_keeps,
    "in half precision": lambda model: _each_block(model, mp_policy=HALF),
    "units inside stages": _inside,
    "units around stages": _around,
}


class Loop:
    """A sharded model, as its rank trains it."""

    def __init__(self, shard: Callable[[Transformer], None]) -> None:
        torch.manual_seed(0)
        self.model = Transformer(4)
        shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = words()
        torch.manual_seed(7)

    def steps(self) -> list[tuple[float, str]]:
        """The loss of each, and a digest of what this rank has of the gradients."""
        return [self._step() for _ in range(STEPS)]

    def _step(self) -> tuple[float, str]:
        self.optimizer.zero_grad()
        loss = next_words(self.model(self.batch), self.batch)
        loss.backward()
        seen = loss.item(), digest(self.model)
        self.optimizer.step()
        return seen

    def workload(self) -> planner.Workload:
        def loss(output: Tensor) -> Tensor:
            return next_words(output, self.batch)

        return planner.Workload(
            model=self.model, inputs=self.batch, loss=loss, optimizer=self.optimizer, keeps_output=False
        )


def digest(model: nn.Module) -> str:
    parts = (local_part(p.grad).detach().numpy().tobytes() for p in model.parameters() if p.grad is not None)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def under_plans(rank: int, names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    said: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        shard = SETTINGS[name]
        expected = Loop(shard).steps()
        profile = planner.profile(Loop(shard).workload())
        plans = [_smallest(profile, "profiled")]
        if shard is _each_block:
            plans += [planner.solve(profile, "100%"), _smallest(profile, "solve")]
        if name in CAPTURED:
            plans.append(planner.state(profile, RULES))
        said[name] = [_row(shard, plan, expected) for plan in plans]
    return said


def _smallest(profile: planner.Profile, reshard: Any) -> planner.Plan:
    try:
        return planner.solve(profile, "1KiB", reshard=reshard)
    except planner.Infeasible as refusal:
        return planner.solve(profile, refusal.minimum_budget_bytes, reshard=reshard)


def _row(shard: Callable[[Transformer], None], plan: planner.Plan, expected: list[tuple[float, str]]) -> dict[str, Any]:
    gc.collect()
    with OutsideMeter() as meter:
        loop = Loop(shard)
        with planner.apply(loop.model, plan):
            meter.begin()
            seen = loop.steps()
    return {
        "equal": seen == expected,
        "peak_bytes": meter.peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "predicted_bytes": plan.predicted_peak_bytes,
        "unplanned_bytes": plan.unplanned_peak_bytes,
        "fingerprint": plan.fingerprint,
        "recomputed": plan.recomputed_ops,
        "programs": sum(bool(stage.option) for stage in plan.stages),
    }


FEW = ("given back after forward", "units inside stages")
REST = tuple(name for name in SETTINGS if name not in FEW)


@pytest.mark.parametrize("names", [FEW, REST], ids=" and ".join)
@pytest.mark.nightly
def test_plans_are_exact_and_within_what_they_predict(names: Sequence[str]) -> None:
    first, second = values_of_ranks(under_plans, names, limit_seconds=580)
    for name in names:
        for both in zip(first[name], second[name], strict=True):
            assert all(row["equal"] for row in both), name
            assert both[0]["fingerprint"] == both[1]["fingerprint"], name
            worst_bytes = max(row["peak_bytes"] for row in both)
            assert worst_bytes <= both[0]["predicted_bytes"] + LATE_BYTES, (name, both)
            assert both[0]["predicted_bytes"] <= both[0]["budget_bytes"], (name, both)
        assert (first[name][-1]["programs"] == 4) == (name in CAPTURED), name
        smallest = first[name][0]
        assert smallest["recomputed"] > 0, name
        assert smallest["predicted_bytes"] + LATE_BYTES < smallest["unplanned_bytes"], name
