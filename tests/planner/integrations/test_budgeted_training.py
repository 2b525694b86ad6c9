"""What integrations share: plans for a step that is not ours, made anew as batches grow, and everything put back."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.integrations import budgeted_training
from planner.integrations.budgeted_training import BudgetedTraining, _BatchSignatures, require, state_of
from planner.plans.profiling import profile
from planner.training.dynamic_shapes import DynamicHandle
from profiler.workload.workload import Workload

WIDTH = 32


class Loop:
    """A framework's loop: dropout, its own counters, and an optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        block = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)]
        self.model = nn.Sequential(*[nn.Sequential(*[nn.Sequential(*block) for _ in range(2)]) for _ in range(4)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.seen = 0

    def step(self, batch: Tensor) -> Tensor:
        self.seen += 1
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def workload(self, batch: Any) -> Workload:
        return Workload(model=self.model, inputs=batch, step=lambda: self.step(batch), optimizer=self.optimizer)


def trained(rows: list[int], training: BudgetedTraining | None = None, after: Callable[[], None] = lambda: None) -> Any:
    loop = Loop()
    batches = [torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(size)) for size in rows]
    torch.manual_seed(1)
    losses = []
    for batch in batches:
        if training is not None:
            training.begin_step([batch], loop.workload)
            training.begin_batch(batch)
        losses.append(float(loop.step(batch)))
        after()
    return losses, loop


@pytest.mark.slow
def test_losses_counters_and_random_numbers_are_those_of_the_plain_loop():
    expected, _ = trained([64, 64, 48])
    numbers = torch.get_rng_state()
    training = BudgetedTraining("70%", verify=False)
    losses, loop = trained([64, 64, 48], training)
    assert (losses, loop.seen) == (expected, 3)
    assert torch.equal(torch.get_rng_state(), numbers)
    facts = training.facts()
    assert facts["predicted_peak_bytes"] <= facts["budget_bytes"] < facts["unplanned_peak_bytes"]
    assert training.plan is not None and any(stage.decision != "keep" for stage in training.plan.stages)
    training.remove()
    training.remove()
    assert planner.handle_of(loop.model) is None and training.handle is None and training.facts() == facts


@pytest.mark.slow
def test_smaller_batches_keep_the_plan_and_a_larger_one_brings_plans_for_each_shape():
    sizes = [64, 32, 128, 96, 128]
    expected, _ = trained(sizes)
    training, handles = BudgetedTraining("160KiB", verify=False), []
    losses, _ = trained(sizes, training, lambda: handles.append(training.handle))
    assert losses == expected
    first, last = handles[0], handles[-1]
    assert handles[1] is first and not isinstance(first, DynamicHandle)
    assert isinstance(last, DynamicHandle) and handles[2] is last and last.wait(60)
    assert sorted(status for status in last.statuses.values()) == ["interpolated", "profiled", "profiled"]
    assert all(last.promised.values())
    training.remove()


@pytest.mark.slow
def test_texts_and_numbers_of_samples_make_no_other_batch():
    signature = _BatchSignatures().of_batch
    one, other = ([{"prompt": text, "answer": k, "x": torch.ones(3)}] for k, text in enumerate(("two words", "one")))
    assert signature(one) == signature(other)
    assert signature({"x": torch.ones(3), "name": ["a"]}) == signature({"x": torch.ones(3), "name": ["b", "c"]})
    assert signature({"x": torch.ones(3), "task": "mask"}) != signature({"x": torch.ones(3), "task": "next"})
    assert not signature([{"x": torch.ones(3)}]).covers(signature([{"x": torch.ones(4)}]))


def test_a_budget_that_no_plan_meets_is_refused_and_leaves_the_model_alone():
    loop, training = Loop(), BudgetedTraining(1000, verify=False)
    with pytest.raises(planner.Infeasible) as caught:
        training.begin_step([torch.randn(64, WIDTH)], loop.workload)
    assert caught.value.minimum_budget_bytes > 1000
    assert planner.handle_of(loop.model) is None and loop.seen == 0 and not loop.optimizer.state


@pytest.mark.parametrize("wrong", [{"budget": "much"}, {"budget": "1GiB", "limit": "much"}])
def test_sizes_are_read_before_anything_is_built_on_them(wrong):
    with pytest.raises(ValueError, match="expected a size"):
        BudgetedTraining(**wrong)


def test_a_missing_package_is_named_with_what_installs_it():
    require("transformers", "torch")
    with pytest.raises(ImportError, match="no no_such_package; run pip install trl"):
        require("trl", "torch", "no_such_package")


class Parts(Loop):
    """The same loop of four blocks that share nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            *[
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
                for _ in "4444"
            ]
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)


def freeze(loop: Parts) -> None:
    for parameter in loop.model[0].parameters():
        parameter.requires_grad_(False)


def thaw(loop: Parts) -> None:
    for parameter in loop.model.parameters():
        parameter.requires_grad_(True)


def replace_a_block(loop: Parts) -> None:
    loop.model[1] = copy.deepcopy(loop.model[1])
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=0.01)


def tie(loop: Parts) -> None:
    first, second, *_ = (part for part in loop.model.modules() if isinstance(part, nn.Linear))
    first.weight = second.weight


def change_type(loop: Parts) -> None:
    loop.model.to(torch.bfloat16)


def drop_nothing(loop: Parts) -> None:
    for part in loop.model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0


def evaluate_a_part(loop: Parts) -> None:
    loop.model[2].eval()


CHANGES = (freeze, thaw, replace_a_block, tie, change_type, drop_nothing, evaluate_a_part)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_has_changed_is_another_state_and_one_that_has_not_is_the_same(change: Callable[[Parts], None]):
    loop = Parts()
    freeze(loop) if change is thaw else thaw(loop)
    before = state_of(loop.model, loop.optimizer)
    loop.step(torch.randn(4, WIDTH, requires_grad=True))
    loop.model.eval().train()
    assert state_of(loop.model, [loop.optimizer]) == before
    change(loop)
    assert state_of(loop.model, loop.optimizer) != before


def test_parameters_that_the_optimizer_gets_make_another_state():
    loop = Parts()
    loop.optimizer = torch.optim.AdamW(loop.model[1:].parameters())
    before = state_of(loop.model, loop.optimizer)
    loop.optimizer.add_param_group({"params": list(loop.model[0].parameters())})
    assert state_of(loop.model, loop.optimizer) != before


@pytest.mark.slow
def test_a_changed_model_is_planned_again_within_the_same_bytes_and_the_plan_of_a_state_comes_back(monkeypatch):
    profiled: list[int] = []

    def counted(workload: Workload, **options: Any) -> planner.Profile:
        found = profile(workload, **options)
        profiled.append(found.unplanned_peak_bytes)
        return found

    monkeypatch.setattr(budgeted_training, "profile", counted)
    loop, batch = Parts(), torch.randn(64, WIDTH)
    for parameter in loop.model[:3].parameters():
        parameter.requires_grad_(False)
    training = BudgetedTraining(200_000, verify=False)

    def step() -> None:
        training.begin_step([batch], loop.workload, loop.optimizer)
        training.begin_batch(batch)
        loop.step(batch)

    step()
    first = training.plan
    step()
    assert len(profiled) == 1
    thaw(loop)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
    assert len(profiled) == 2 and profiled[1] > 200_000 >= training.facts()["predicted_peak_bytes"]
    for parameter in loop.model[:3].parameters():
        parameter.requires_grad_(False)
    step()
    assert len(profiled) == 2 and training.plan is first
    training.remove()
    assert planner.handle_of(loop.model) is None


@pytest.mark.slow
def test_where_nothing_fits_the_changed_model_it_trains_on_with_what_needs_least_and_says_so():
    loop, batch = Parts(), torch.randn(64, WIDTH)
    for parameter in loop.model[:3].parameters():
        parameter.requires_grad_(False)
    training = BudgetedTraining("100%", verify=False)
    training.begin_step([batch], loop.workload, loop.optimizer)
    budget_bytes = training.facts()["budget_bytes"]
    thaw(loop)
    with pytest.warns(RuntimeWarning, match="no plan keeps it within the budget"):
        training.begin_step([batch], loop.workload, loop.optimizer)
    assert training.facts()["budget_bytes"] > budget_bytes
    training.remove()
