"""The callback for transformers' Trainer and TRL's: losses of the run without it, and peaks within the budget."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import TrainerCallback

import planner
from benchmarks.outside_meter import live_tensor_bytes
from benchmarks.trainer_builds import StepMeter, dpo_trainer, plain_trainer, rows, sft_trainer
from planner.integrations.transformers import MemoryBudgetCallback
from planner.training.dynamic_shapes import DynamicHandle
from tests.support.nightly import at_night

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*peak is not promised.*")
ROWS = rows(32, (32,))


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Run:
    """A training: its losses, the weights afterwards, peaks from outside, and what the log says of the plan."""

    def __init__(
        self,
        build: Callable[..., Any],
        folder: Path,
        budget: str | int | None = None,
        *,
        resume: str | None = None,
        callbacks: tuple[TrainerCallback, ...] = (),
        **settings: Any,
    ) -> None:
        gc.collect()
        others_bytes = live_tensor_bytes()
        self.trainer = trainer = build(str(folder), **settings)
        meter = StepMeter()
        self.callback = None if budget is None else MemoryBudgetCallback(trainer, budget, verify=False)
        for callback in (self.callback, *callbacks, meter):
            if callback is not None:
                trainer.add_callback(callback)
        try:
            trainer.train(resume_from_checkpoint=resume)
        finally:
            assert planner.handle_of(trainer.model) is None
            assert not {"training_step", "get_batch_samples"} & set(vars(trainer))
        self.log: list[dict[str, Any]] = trainer.state.log_history
        self.losses = [entry["loss"] for entry in self.log if "loss" in entry]
        self.values = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        self.random = torch.get_rng_state()
        self.peak_bytes = max(meter.steps.peaks_bytes) - others_bytes
        self.facts = [entry for entry in self.log if "budget_bytes" in entry]


def assert_same_training(got: Run, expected: Run) -> None:
    assert got.losses == expected.losses and got.losses
    assert all(torch.equal(value, expected.values[name]) for name, value in got.values.items())
    assert torch.equal(got.random, expected.random)
    assert got.facts and all(fact["predicted_peak_bytes"] <= fact["budget_bytes"] for fact in got.facts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "budget", "settings"),
    [
        at_night(plain_trainer, "80%", {"data": ROWS, "gradient_accumulation_steps": 3, "max_steps": 2}),
        (plain_trainer, "80%", {"data": ROWS, "bf16": True, "adapter": "LoRA", "max_steps": 3}),
        at_night(plain_trainer, "85%", {"data": ROWS, "adapter": "DoRA", "max_steps": 2}),
        at_night(plain_trainer, "85%", {"data": ROWS, "adapter": "prompt tuning", "max_steps": 2}),
        at_night(sft_trainer, "98%", {"adapter": "LoRA", "max_steps": 2, "per_device_train_batch_size": 2}),
        at_night(dpo_trainer, "99%", {"max_steps": 2, "per_device_train_batch_size": 2}),
    ],
    ids=["accumulation", "bf16 LoRA", "DoRA", "prompt tuning", "SFT LoRA", "DPO"],
)
def test_losses_are_those_without_it_and_peaks_are_within_the_budget(
    build: Callable[..., Any], budget: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    expected = Run(build, tmp_path / "plain", **settings)
    got = Run(build, tmp_path / "planned", budget, **settings)
    assert_same_training(got, expected)
    assert got.peak_bytes <= got.facts[0]["budget_bytes"] < expected.peak_bytes
    assert got.callback is not None and got.callback.training.plan is not None
    assert any(stage.decision != "keep" for stage in got.callback.training.plan.stages)


def trainer_of_lists(folder: str, **settings: Any) -> Any:
    """A trainer whose batches are lists of samples, as GRPO's: its own step makes tensors of them."""
    made = plain_trainer(folder, **settings)
    collate = made.data_collator
    made.data_collator = lambda samples: samples

    class OfLists(type(made)):
        def training_step(self, model: Any, inputs: Any, items: Any = None) -> Any:
            samples = [inputs.pop() for _ in range(len(inputs))]  # What a step does to its batch is done to a copy.
            return super().training_step(model, collate(samples), items)

        def _get_num_items_in_batch(self, batches: Any, device: Any) -> None:
            return None

    made.__class__ = OfLists
    return made


@pytest.mark.nightly
@pytest.mark.slow
def test_a_trainer_whose_batches_are_lists_is_planned(tmp_path: Path) -> None:
    settings = {"data": ROWS, "max_steps": 2}
    expected = Run(trainer_of_lists, tmp_path / "plain", **settings)
    assert_same_training(Run(trainer_of_lists, tmp_path / "planned", "80%", **settings), expected)


def noting_trainer(folder: str, **settings: Any) -> Any:
    """A trainer that keeps the lengths of all batches in a container, as TRL's keep their metrics."""
    made = plain_trainer(folder, **settings)
    made._metrics = {"train": defaultdict(list)}

    class Noting(type(made)):
        def training_step(self, model: Any, inputs: Any, items: Any = None) -> Any:
            self._metrics["train"]["length"].append(inputs["input_ids"].shape[1])
            return super().training_step(model, inputs, items)

        def log(self, logs: Any, *more: Any) -> None:
            noted = self._metrics["train"].pop("length", [])
            super().log({**logs, "noted": len(noted)}, *more)

    made.__class__ = Noting
    return made


@pytest.mark.slow
def test_what_a_step_notes_in_a_container_of_the_trainer_is_put_back(tmp_path: Path) -> None:
    run = Run(noting_trainer, tmp_path, "80%", data=ROWS, max_steps=2)
    assert [entry["noted"] for entry in run.log if "loss" in entry] == [1, 1]


class HandleKinds(TrainerCallback):
    """Sees what is applied as each step ends; no thread solves while the meter looks through Python's objects."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        handle = planner.handle_of(kwargs["model"])
        self.seen.append(isinstance(handle, DynamicHandle))
        if isinstance(handle, DynamicHandle):
            assert handle.wait(60)


@pytest.mark.slow
def test_batches_that_are_padded_to_other_lengths_get_plans_of_their_own(tmp_path: Path) -> None:
    data = rows(16, (16, 16, 16, 16, 48, 48, 48, 48, 32, 32, 32, 32))
    settings = {"data": data, "per_device_train_batch_size": 4, "train_sampling_strategy": "sequential", "max_steps": 4}
    expected, kinds = Run(plain_trainer, tmp_path / "plain", **settings), HandleKinds()
    got = Run(plain_trainer, tmp_path / "planned", int(0.9 * expected.peak_bytes), callbacks=(kinds,), **settings)
    assert_same_training(got, expected)
    assert kinds.seen == [False, True, True, True]
    assert len(got.facts) == 2
    assert got.peak_bytes <= got.facts[-1]["budget_bytes"]


@pytest.mark.slow
def test_training_resumes_from_a_checkpoint_with_evaluation_between_steps(tmp_path: Path) -> None:
    settings = {"data": ROWS, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    settings |= {"evaluated": ROWS[:4], "max_steps": 4}
    expected = Run(plain_trainer, tmp_path, **settings)
    checkpoint = str(tmp_path / "checkpoint-2")
    got = Run(plain_trainer, tmp_path / "planned", "80%", resume=checkpoint, **settings)
    assert got.losses == expected.losses
    assert all(torch.equal(value, expected.values[name]) for name, value in got.values.items())
    measured = [[entry["eval_loss"] for entry in run.log if "eval_loss" in entry] for run in (got, expected)]
    assert measured[0] == measured[1] and len(measured[0]) == 4
    assert len(got.facts) == 1


@pytest.mark.slow
@pytest.mark.nightly
def test_a_budget_that_no_plan_meets_makes_batches_smaller_where_the_trainer_finds_their_size(tmp_path: Path) -> None:
    with pytest.raises(planner.Infeasible) as refusal:
        Run(plain_trainer, tmp_path / "least", 1, data=ROWS, max_steps=2)
    budget = int(0.9 * refusal.value.minimum_budget_bytes)
    got = Run(plain_trainer, tmp_path / "found", budget, data=ROWS, max_steps=2, auto_find_batch_size=True)
    assert got.trainer._train_batch_size < 8
    assert len(got.losses) == 2
    assert got.peak_bytes <= budget


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_checkpointing_of_the_trainers_own_is_refused(name: str, tmp_path: Path) -> None:
    switched: dict[str, Any] = {name: True}
    trainer = plain_trainer(str(tmp_path), data=ROWS, **switched)
    with pytest.raises(ValueError, match=r"expected \w+_checkpointing=False in TrainingArguments, got True; switch it"):
        MemoryBudgetCallback(trainer, "80%")


def test_what_is_no_trainer_and_what_is_no_size_are_refused(tmp_path: Path) -> None:
    trainer = plain_trainer(str(tmp_path), data=ROWS)
    with pytest.raises(ValueError, match=r"expected a transformers.Trainer, got a Llama.*make the trainer first"):
        MemoryBudgetCallback(trainer.model, "80%")
    with pytest.raises(ValueError, match="expected a size"):
        MemoryBudgetCallback(trainer, "much")
