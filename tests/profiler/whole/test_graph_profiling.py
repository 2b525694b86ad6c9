"""Profiles of steps as graphs of ops: odd steps are measured to the byte, or refused as profiles of stages are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.capture.step_dataflow import CHANGES
from profiler.whole import graph_profiling
from tests.support.events import Events

WIDTH, BATCH = 32, 64


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)))


def work_of(model: nn.Module | None = None, inputs: Any = None, **more: Any) -> planner.Workload:
    model = net() if model is None else model
    inputs = torch.randn(BATCH, WIDTH) if inputs is None else inputs
    more = {"loss": lambda y: y.square().mean(), **more}
    optimizer = torch.optim.AdamW(model.parameters())
    return planner.Workload(model=model, inputs=inputs, optimizer=optimizer, **more)


def own_step(run: Callable[[nn.Module, Tensor], Tensor]) -> planner.Workload:
    """A step of the user's own: what it runs, then the optimizer."""
    model, inputs = net(), torch.randn(BATCH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = run(model, inputs)
        optimizer.step()
        return loss

    return planner.Workload(model=model, step=step, optimizer=optimizer)


def backward(loss: Tensor, **more: Any) -> Tensor:
    loss.backward(**more)
    return loss


def once(model: nn.Module, inputs: Tensor) -> Tensor:
    return backward(model(inputs).square().mean())


def micro_batches(model: nn.Module, inputs: Tensor) -> Tensor:
    once(model, inputs)
    return once(model, -inputs)


def with_a_teacher(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        wanted = model(inputs)
    return backward((model(inputs) - wanted - 1).square().mean())


def other_shapes(model: nn.Module, inputs: Tensor) -> Tensor:
    once(model, inputs[: BATCH // 2])
    return once(model, inputs)


def two_calls(model: nn.Module, inputs: Tensor) -> Tensor:
    return backward(model(inputs).mean() + model(-inputs).square().mean())


def two_backwards(model: nn.Module, inputs: Tensor) -> Tensor:
    output = model(inputs)
    backward(output.mean(), retain_graph=True)
    return backward(output.square().mean())


class Masked(nn.Module):
    """Takes a batch by names; returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Any]:
        hidden = self.layer(x).relu()
        return {"hidden": hidden, "pair": (self.layer(hidden) * mask, x)}


def tied() -> nn.Module:
    model = net()
    model[1][0].weight = model[0][0].weight  # type: ignore[index]
    return model


def frozen() -> nn.Module:
    model = net()
    model[0].requires_grad_(False)
    return model


WORKS: dict[str, Callable[[], planner.Workload]] = {
    "autocast": lambda: work_of(autocast=torch.bfloat16),
    "frozen parameters": lambda: work_of(frozen()),
    "tied weights": lambda: work_of(tied()),
    "accumulation": lambda: work_of(accumulate=True),
    "clipping": lambda: work_of(clip_norm=1.0),
    "batch by names": lambda: work_of(
        Masked(),
        {"x": torch.randn(BATCH, WIDTH), "mask": torch.ones(BATCH, 1)},
        loss=lambda y: y["hidden"].mean() + y["pair"][0].square().mean(),
    ),
    "own step": lambda: own_step(once),
    "micro-batches": lambda: own_step(micro_batches),
    "call without gradients": lambda: own_step(with_a_teacher),
}


@pytest.mark.parametrize("make", WORKS.values(), ids=WORKS)
def test_an_odd_step_takes_what_its_plan_predicts(make: Callable[[], planner.Workload]) -> None:
    profile = planner.profile(make(), graph=True)
    with pytest.raises((planner.Infeasible, planner.NothingFound)) as refused:
        planner.solve(profile, 1, time_limit_seconds=1)
    budget = (refused.value.minimum_budget_bytes + profile.unplanned_peak_bytes) // 2
    plan = planner.solve(profile, budget, time_limit_seconds=1)
    work = make()
    with planner.apply(work.model, plan):
        assert planner.measure(work, repeats=1).peak_bytes == plan.predicted_peak_bytes <= budget


def test_micro_batches_are_counted() -> None:
    profile = planner.profile(own_step(micro_batches), graph=True)
    assert profile.evaluations == 2 and planner.profile(work_of(), graph=True).evaluations == 1
    plan = planner.solve(profile, "95%", time_limit_seconds=1)
    again = [*plan.runs.forward, *plan.runs.backward]
    for ordinal in set(again):
        again.remove(ordinal)
    assert again
    assert plan.recomputed_seconds == pytest.approx(2 * sum(plan.graph.ops[ordinal].seconds for ordinal in again))


def planned() -> planner.Workload:
    work = work_of()
    planner.apply(work.model, planner.solve(planner.profile(work), "100%"))
    return work


def checkpointed() -> planner.Workload:
    model = net()
    model.gradient_checkpointing = True  # type: ignore[assignment]
    return work_of(model)


REFUSED: dict[str, Callable[[], planner.Workload]] = {
    "eval mode": lambda: work_of(net().eval()),
    "planned": planned,
    "checkpointing of its own": checkpointed,
    "DataParallel": lambda: work_of(nn.DataParallel(net())),
    "nothing to train": lambda: work_of(net().requires_grad_(False)),
    "a step that fails": lambda: work_of(inputs=torch.ones(4, WIDTH + 1)),
    "an optimizer of others": lambda: planner.Workload(
        model=net(), inputs=torch.ones(4, WIDTH), loss=Tensor.mean, optimizer=torch.optim.AdamW(net().parameters())
    ),
    "several calls": lambda: own_step(two_calls),
    "nested tensors of the older kind": lambda: work_of(
        inputs=torch.nested.nested_tensor([torch.ones(2, WIDTH), torch.ones(3, WIDTH)])
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_what_profiles_of_stages_refuse_is_refused_in_the_same_words(make: Callable[[], planner.Workload]) -> None:
    with pytest.raises(ValueError, match="expected") as of_stages:
        planner.profile(make())
    with pytest.raises(ValueError, match="expected") as of_graph:
        planner.profile(make(), graph=True)
    assert str(of_graph.value) == str(of_stages.value)
    assert type(of_graph.value) is type(of_stages.value)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (other_shapes, "expected a step whose forwards run the same ops on the same shapes, got some that differ"),
        (
            two_backwards,
            "expected one that lets go of what forward has saved, as the plan counts on, got retain_graph=True",
        ),
    ],
)
def test_what_only_stages_are_planned_for_is_refused_with_that_remedy(run: Any, said: str) -> None:
    with pytest.raises(planner.CaptureError, match=f"{said}.*a plan of stages works there"):
        planner.profile(own_step(run), graph=True)


def test_what_fails_under_the_compiler_alone_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: Any) -> None:
        raise RuntimeError("the compiler's own words\nand many more")

    monkeypatch.setattr("profiler.measurement.op_costs.costs_of", break_down)
    with pytest.raises(planner.CaptureError, match=r"got RuntimeError: the compiler's own words; a plan of stages"):
        planner.profile(work_of(), graph=True)


def test_plain_steps_and_steps_of_programs_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Events()

    class Counting(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():  # Of the programs it is no part.
                timed.note("plain")
            return super().forward(input)

    meter_of = graph_profiling.time_meter
    monkeypatch.setattr(graph_profiling, "time_meter", lambda device: timed.note("time") or meter_of(device))
    profile = planner.profile(work_of(Counting(*net())), graph=True)
    found = timed.taken()
    assert found[found.index("time") :] == 3 * ["time", "plain", "time"]
    assert len(profile.step_seconds) == 3 and min(profile.step_seconds) <= profile.unplanned_seconds


def test_a_step_that_does_not_fit_is_refused_with_what_works_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(*_: Any, **__: Any) -> None:
        raise MemoryError("12 bytes are left")

    monkeypatch.setattr("profiler.whole.graph_profiling.measure", ends)
    said = "got none left in a plain step .12 bytes are left.*profiles of stages are made where a step does not fit"
    with pytest.raises(planner.ProfileError, match=said):
        planner.profile(work_of(), graph=True)


class Unfolding(nn.Module):
    """The gradient of unfold's input has the storage of the gradient of what it makes, which is larger."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.unfold(self.layer(x).view(BATCH, 1, 4, WIDTH // 4), 2)


def test_storages_that_ops_make_larger_than_what_they_return_are_counted_whole() -> None:
    work = work_of(Unfolding())
    profile = planner.profile(work, graph=True)
    (fold,) = [op for op in profile.graph.ops if op.kind == "col2im"]
    (made,) = [profile.graph.storages[number] for number in fold.makes]
    unfolded_bytes = BATCH * (2 * 2) * (3 * (WIDTH // 4 - 1)) * 4
    assert (made.traced_bytes, made.size_bytes) == (BATCH * WIDTH * 4, unfolded_bytes)
    plan = planner.solve(profile, profile.unplanned_peak_bytes)
    with planner.apply(work.model, plan):
        assert planner.measure(work, repeats=1).peak_bytes == plan.predicted_peak_bytes


class Averaging(nn.Module):
    """Replaces a buffer by another tensor, as running means are often written."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(BATCH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.exp(self.mean)
        for _ in range(3):
            x = torch.sigmoid(self.layer(x)) * made
        self.mean = 0.5 * self.mean + x.detach()
        return x


def test_what_reads_a_buffer_that_is_replaced_runs_once() -> None:
    profile = planner.profile(work_of(Averaging()), graph=True)
    (exp,) = [op for op in profile.graph.ops if op.kind == "exp"]
    assert exp.once_reason == CHANGES
    with pytest.raises((planner.Infeasible, planner.NothingFound)) as refused:
        planner.solve(profile, 1, time_limit_seconds=2)
    plan = planner.solve(profile, refused.value.minimum_budget_bytes, time_limit_seconds=2)
    work = work_of(Averaging())
    with planner.apply(work.model, plan):
        assert planner.measure(work, repeats=1).peak_bytes <= plan.predicted_peak_bytes
