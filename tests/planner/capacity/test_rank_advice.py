"""What is said of one rank of many follows from the model, the number of ranks and the budget."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

import planner
from planner.capacity.rank_advice import RankAdvice, advise_rank, rank_report_of
from planner.cli.output import Output
from tests.support.command_line import refused, run

WIDTH, LAYERS, BATCH = 32, 4, 256
SETTINGS = {"layers": LAYERS, "hidden": WIDTH, "batch": BATCH}
MODEL_BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
COUNT_BYTES = 4 * 2 * LAYERS  # of steps, of each parameter


def of(shard: Any, ranks: int, budget: str | None = None) -> RankAdvice:
    return advise_rank("zoo:mlp", world_size=ranks, shard=shard, budget=budget, settings=SETTINGS, menus=False)


@pytest.fixture(scope="module")
def sharded() -> RankAdvice:
    return of("fsdp2", 8, "95%")


def test_states_are_split_and_the_batch_is_not(sharded: RankAdvice) -> None:
    resident = sharded.profile.resident
    assert resident.parameters == sharded.gradient_bytes == MODEL_BYTES // 8
    assert resident.optimizer == 2 * MODEL_BYTES // 8 + COUNT_BYTES
    assert sharded.samples == BATCH and resident.inputs == 2 * 4 * BATCH * WIDTH  # the target's, too
    block_bytes = MODEL_BYTES // LAYERS
    assert (sharded.kept_gathered_bytes, sharded.gathered_bytes) == (0, 2 * block_bytes)
    assert sharded.sent_bytes == 3 * MODEL_BYTES * 7 // 8  # gathered twice, and summed


def test_distributed_data_parallel_has_all_of_it_and_buckets() -> None:
    advice = of("ddp", 64)
    resident = advice.profile.resident
    assert resident.parameters == resident.buffers == advice.gradient_bytes == MODEL_BYTES
    assert advice.gathered_bytes == advice.kept_gathered_bytes == 0
    assert advice.sent_bytes == 2 * (MODEL_BYTES * 63 // 64)
    assert advice.budget_bytes is advice.plan is None and advice.fits


def test_where_rows_are_fewer_than_ranks_the_first_rank_has_the_largest_part() -> None:
    advice = of("fsdp2", 64)
    assert advice.profile.resident.parameters == 4 * LAYERS * (WIDTH + 1)  # a row of each weight, a number of each bias


def test_the_plan_is_within_the_budget_and_the_smallest_below_it(sharded: RankAdvice) -> None:
    assert sharded.fits and sharded.plan is not None and sharded.budget_bytes is not None
    unplanned_bytes = sharded.profile.unplanned_peak_bytes
    assert sharded.budget_bytes == int(0.95 * unplanned_bytes)
    assert sharded.minimum_budget_bytes <= sharded.plan.predicted_peak_bytes <= sharded.budget_bytes
    assert sum(sharded.memory[0].of_group(group) for group in ("model states", "inputs", "outputs")) > 0
    assert sharded.memory[0].peak_bytes == unplanned_bytes
    assert not dist.is_initialized()


def test_the_tables_say_what_is_predicted(sharded: RankAdvice, capsys: pytest.CaptureFixture[str]) -> None:
    Output().show(rank_report_of(sharded))
    said = " ".join(capsys.readouterr().out.split())
    assert "holds, predicted, in fully_shard on 8 ranks" in said and "parameters, its part" in said
    assert f"{BATCH} samples on each rank, {8 * BATCH} together" in said
    assert "no communication is in them" in said and "planned for the budget" in said


def test_the_command() -> None:
    asked = [
        "--set",
        "layers=2",
        "hidden=16",
        "batch=64",
        "--world-size",
        "64",
        "--shard",
        "fsdp2",
        "--json",
    ]
    result = run("advise", "zoo:mlp", *asked, "--budget", "1KB")
    document = json.loads(result.stdout)
    assert result.exit_code == 3 and "nothing found fits: the smallest plan of a rank" in result.stderr
    assert document["plan"] is None and not document["fits"] and document["predicted"]
    assert (document["world_size"], document["shard"], document["samples"]) == (64, "fsdp2", 64)
    assert document["minimum_budget_bytes"] == document["smallest"]["predicted_peak_bytes"]
    assert document["resident"]["together"] < document["unplanned_peak_bytes"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--world-size", "8"], "simulated ranks need both; add --shard ddp or fsdp2"),
        (["--shard", "ddp"], "simulated ranks need both; add --world-size 8"),
        (["--world-size", "1", "--shard", "ddp"], "--world-size: expected at least 2 ranks, got 1"),
        (["--world-size", "8", "--shard", "zero"], "expected ddp or fsdp2, got 'zero'"),
        (["--world-size", "8", "--shard", "ddp", "-o", "a.png"], "no picture of simulated ranks"),
        (["--world-size", "8", "--shard", "ddp", "--budget", "many"], "expected"),
        ([], "--budget: it is missing; add the most bytes alive at once"),
    ],
)
def test_the_command_refuses(wrong: list[str], said: str) -> None:
    assert said in " ".join(refused("advise", "zoo:mlp", *wrong).split())


def test_a_function_is_a_target_and_its_model_must_not_be_wrapped_yet() -> None:
    def wrapped() -> planner.Workload:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        return planner.Workload(model=model, inputs=torch.ones(1, 2), loss=lambda y: y.sum())

    with pytest.raises(ValueError, match="expected a model without wrappers, got one in DistributedDataParallel"):
        planner.advise_rank(wrapped, world_size=2, shard="ddp")
    assert not dist.is_initialized()
