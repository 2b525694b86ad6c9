"""What is wrapped for several ranks, and that an optimizer follows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from planner import zoo
from planner.distributed.sharding import repeated_blocks, shard, sharded
from planner.distributed.simulated_ranks import simulate_collectives, simulated_group
from profiler.workload.workload import Workload


@pytest.fixture
def four_ranks() -> Iterator[None]:
    with simulated_group(4):
        yield


SMALL = {"layers": 2, "hidden": 16, "batch": 2}


@pytest.mark.parametrize(
    ("name", "settings", "blocks"),
    [
        ("gpt2", {"layers": 3, "hidden": 16}, ["GPT2Block"] * 3),
        ("t5", {"layers": 2, "hidden": 16}, ["T5Block"] * 4),
        ("mlp", {"layers": 3, "hidden": 8, "batch": 2}, ["Linear"] * 3),
        ("resnet50", {"batch": 1}, ["ResNetStage"] * 4),
    ],
)
def test_blocks_are_those_that_a_person_would_wrap(name, settings, blocks):
    assert [type(block).__name__ for block in repeated_blocks(zoo.build(name, **settings).model)] == blocks


def test_a_block_that_shares_a_parameter_with_its_surroundings_is_none():
    first, tied, last, head = (nn.Linear(4, 4) for _ in range(4))
    head.weight = tied.weight
    model = nn.ModuleDict({"blocks": nn.ModuleList([first, tied, last]), "norm": nn.LayerNorm(4), "head": head})
    assert repeated_blocks(model) == [first, last]


def test_lists_in_lists_and_several_classes():
    lists = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(2))
    assert len(repeated_blocks(lists)) == 4  # A list has no forward at which its parameters would be gathered.
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))) == []
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []


def test_an_optimizer_steps_the_parameters_that_are_there_after_sharding(four_ranks):
    workload = sharded(zoo.build("gpt2", **SMALL), "fsdp2")
    simulate_collectives(workload.model)
    units = [name for name, module in workload.model.named_modules() if isinstance(module, FSDPModule)]
    assert units == ["", "transformer.h.0", "transformer.h.1"]
    (group,) = workload.optimizers[0].param_groups
    assert all(a is b for a, b in zip(group["params"], workload.model.parameters(), strict=True))
    before = [p.to_local().clone() for p in group["params"] if isinstance(p, DTensor)]
    assert torch.isfinite(torch.tensor(workload.step())) and len(before) == len(group["params"])
    assert any(not torch.equal(a, p.to_local()) for a, p in zip(before, group["params"], strict=True))


def test_a_wrapper_of_distributed_data_parallel_has_its_defaults(four_ranks):
    workload = sharded(zoo.build("mlp", **SMALL), "ddp")
    simulate_collectives(workload.model)
    assert isinstance(workload.model, DistributedDataParallel) and not workload.model.gradient_as_bucket_view
    assert torch.isfinite(torch.tensor(workload.step()))


def test_what_cannot_be_wrapped_says_why(four_ranks):
    workload = zoo.build("mlp", **SMALL)
    with pytest.raises(ValueError, match="expected ddp or fsdp2, got 'zero'"):
        shard(workload.model, "zero")  # type: ignore[arg-type]
    own = Workload(model=workload.model, step=lambda: workload.model(workload.inputs))
    with pytest.raises(ValueError, match="got a step of your own, .* wrap the model in DistributedDataParallel"):
        sharded(own, "ddp")
    workload.step()
    with pytest.raises(ValueError, match="expected an optimizer without states"):
        sharded(workload, "ddp")
    model = shard(workload.model, "fsdp2")
    with pytest.raises(ValueError, match="expected a model without wrappers, got one in fully_shard"):
        shard(model, "ddp")
    with pytest.raises(ValueError, match="got one in DistributedDataParallel"):
        shard(DistributedDataParallel(nn.Linear(2, 2)), "fsdp2")
