"""Commands under torchrun: one document of all ranks, and ``--shard`` refused where there are none."""

from __future__ import annotations

import json

import pytest
from torch import nn

from planner.cli.output import Output
from planner.cli.several_ranks import ENGINES, check_joined, settings_of_rank
from planner.distributed import sharding
from tests.support.command_line import SMALL, refused
from tests.support.late_release import late_bytes
from tests.support.nightly import by_day
from tests.support.torchrun import output_of_ranks

TRAIN = ["train", "zoo:mlp", "--set", "layers=6", "hidden=32", "batch=256", "--budget", "95%", "--steps", "2", "--json"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", by_day(ENGINES, ["fsdp2"]))
def test_the_first_rank_prints_what_all_have_measured(engine: str) -> None:
    printed = output_of_ranks("-m", "planner", *TRAIN, "--shard", engine)
    document = json.loads(printed)
    assert document["status"] == "trained" and len(document["losses"]) == 2
    peaks = [rank["measured_peak_bytes"] for rank in document["ranks"]]
    assert len(peaks) == 2 and max(peaks) == document["measured_peak_bytes"]
    late = late_bytes(nn.Linear(32, 32)) if engine == "fsdp2" else 0
    assert 0 < max(peaks) <= document["budget_bytes"] + late


def test_it_is_refused_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for command in (("train", "zoo:mlp", *SMALL, "--budget", "80%"), ("max-batch", "zoo:mlp", "--budget", "1MiB")):
        said = refused(*command, "--shard", "ddp")
        assert "was not started by torchrun" in said and "torchrun --nproc-per-node" in said
    assert "--shard: expected ddp or fsdp2, got 'zero'" in refused(
        "train", "zoo:mlp", "--budget", "80%", "--shard", "zero"
    )


def test_ranks_that_know_nothing_of_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_joined(Output())
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="torchrun started 2 processes, but .* add --shard"):
        check_joined(Output())
    for command in (
        ["train", "zoo:mlp", "--budget", "80%"],
        ["max-batch", "zoo:mlp", "--budget", "1MiB"],
        ["profile", "zoo:mlp", "--set", "layers=2", "hidden=8", "batch=4"],
    ):
        assert "torchrun started 2 processes" in refused(*command)
    assert settings_of_rank("zoo:mlp", {"batch": 4, "seed": 7}, "ddp") == {"batch": 4, "seed": 8}
    assert settings_of_rank("zoo:mlp", {"batch": 4}, None) == {"batch": 4}
    assert settings_of_rank("model.py:built", {"seed": 7}, "ddp") == {"seed": 7}
    assert sharding.ENGINES == ENGINES
