"""The benchmark of other people's packages: its registry, one model of a package that is always there, and a crash."""

from __future__ import annotations

import os

import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import planner
from benchmarks.evidence import training_tables
from benchmarks.packages import __main__ as table, measuring
from benchmarks.packages.models import MODELS
from benchmarks.packages.training import PackageModel, Training, of, trained


def test_models_of_a_package_that_is_not_there_are_skipped():
    assert MODELS["transformers gpt2"].installed
    missing = PackageModel(name="", needs=("torch", "no_such_package"), build=MODELS["transformers gpt2"].build, own="")
    assert not missing.installed


def test_a_name_is_a_module_or_what_it_holds():
    assert of("torch.nn") is nn and of("torch.nn.Linear") is nn.Linear
    with pytest.raises(AttributeError):
        of("torch.nn.NoSuchThing")
    with pytest.raises(ModuleNotFoundError):
        of("no_such_package.Model")


class _Blocks(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))
        self.blocks, self.checkpointed = nn.ModuleList(blocks), checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)  # type: ignore[assignment]
        return x


def _small(checkpointed: bool) -> Training:
    model, x = _Blocks(checkpointed), torch.randn(512, 32)
    return trained(model, lambda: model(x).square().mean())


SMALL = PackageModel(name="small", needs=("torch",), build=_small, own="checkpoint")


@pytest.mark.slow
def test_the_rows_of_a_model_say_what_the_plans_are():
    rows = list(measuring.rows_of(SMALL))
    assert [row["budget"] for row in rows] == ["80%", "60%", "smallest"]
    assert all(row["differs"] == "" and row["own_bytes"] < row["unplanned_bytes"] for row in rows)
    planned = [row for row in rows if not row["refused"]]
    assert [max(0, row["measured_bytes"] - row["budget_bytes"]) for row in planned] == [0] * len(planned)
    assert [row["above_bytes"] for row in planned] == [0] * len(planned)
    assert f"models: 1; plans: {len(planned)}; with a difference or an error: 0" in table.summary(rows)[0]
    frame = pd.DataFrame(rows, columns=table.COLUMNS).replace("", None)
    assert f"{len(planned)} of {len(planned)} plans of 1 models exact" in training_tables.packages(frame)


def test_a_difference_of_one_bit_and_a_missing_gradient_are_told():
    expected = {"loss": 1.0, "weight": torch.ones(3), "gradient of weight": torch.ones(3)}
    changed = {"loss": 1.0, "weight": torch.nextafter(torch.ones(3), torch.tensor(2.0)), "gradient of weight": None}
    assert measuring.differences(expected, changed) == {"weight", "gradient of weight"}
    assert measuring.differences(expected, dict(expected)) == set()


def test_a_process_that_dies_is_a_row(monkeypatch):
    monkeypatch.setattr(table.sys, "executable", os.path.join(os.sep, "bin", "false"))
    (row,) = table.rows_alone("transformers gpt2")
    assert row["differs"] == "exit code 1" and row["model"] == "transformers gpt2"


def test_warnings_of_the_planner_are_told(monkeypatch):
    import warnings

    said = "peak is not promised: an index"

    def profiled(workload: object) -> object:
        warnings.warn(said, UserWarning, stacklevel=2)
        warnings.warn("of the package itself", UserWarning, stacklevel=1)
        return object()

    class Applied:
        def remove(self) -> None: ...

    monkeypatch.setattr(planner, "profile", profiled)
    monkeypatch.setattr(planner, "solve", lambda *_: None)
    monkeypatch.setattr(planner, "apply", lambda *_: Applied())
    assert measuring.profiled(_small(False))[1] == said
