"""Steps as users write them: where their phases begin, and that all they hold is counted and put back."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.errors import ProfileError
from profiler.workload.workload import StepPhase, Workload

WIDTH = 32
BATCH = 64


class Blocks(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def made() -> tuple[nn.Module, Tensor, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Blocks()
    return model, torch.randn(BATCH, WIDTH), torch.optim.AdamW(model.parameters(), lr=1e-3)


def phases_of(work: Workload) -> list[StepPhase]:
    phases: list[StepPhase] = []
    work.step(lambda phase, _: phases.append(phase))
    return phases


def test_phases_are_found_wherever_gradients_are_cleared() -> None:
    model, x, optimizer = made()

    def step() -> None:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    assert phases_of(Workload(model=model, step=step)) == ["forward", "backward", "optimizer", "end"]


def test_of_several_micro_batches_the_measured_one_is_the_forward_and_the_others_are_evaluations() -> None:
    model, x, optimizer = made()

    def step() -> None:
        for _ in range(3):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    work = Workload(model=model, step=step)
    work.step()
    assert work.custom_step is not None
    assert work.custom_step.forwards == 3
    middle = ["forward", "backward", "optimizer"]
    for measured, expected in (
        (0, [*middle, "evaluation", "optimizer", "evaluation", "optimizer", "end"]),
        (1, ["evaluation", *middle, "evaluation", "optimizer", "end"]),
        (2, ["evaluation", "evaluation", *middle, "end"]),
    ):
        work.custom_step.measured = measured
        assert phases_of(work) == expected


@pytest.mark.parametrize("limit", [None, "1TiB"])
@pytest.mark.parametrize("rows", [(64, 16, 16), (16, 64, 16), (16, 64)])
@pytest.mark.slow
def test_the_largest_of_unequal_micro_batches_is_measured_and_each_counts_once(
    rows: tuple[int, ...], limit: str | None
) -> None:
    model, _, optimizer = made()
    batches = torch.randn(sum(rows), WIDTH).split(rows)

    def step() -> None:
        optimizer.zero_grad()
        for batch in batches:
            model(batch).square().mean().backward()
        optimizer.step()

    profile = planner.profile(Workload(model=model, step=step), menus=False, limit=limit)
    assert profile.input_shapes == ((64, WIDTH),)
    assert profile.evaluations == len(rows)


def test_a_limit_too_low_for_another_micro_batch_says_so_and_that_a_smaller_one_fits() -> None:
    model, _, optimizer = made()

    def step() -> None:
        for batch in torch.ones(512, WIDTH).split(256):
            model(batch).square().mean().backward()
        optimizer.step()

    with pytest.raises(ProfileError, match=r"in another micro-batch .*what would about fit: half the batch"):
        planner.profile(Workload(model=model, step=step), menus=False, limit="500KiB")


def test_a_backward_that_does_not_reach_the_model_is_none_of_the_step() -> None:
    model, x, optimizer = made()
    critic = nn.Linear(WIDTH, 1)

    def step() -> float:
        made = model(x)
        critic(made.detach()).mean().backward()
        loss = critic(made).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    assert phases_of(Workload(model=model, step=step)) == ["forward", "backward", "optimizer", "end"]


def test_evaluation_without_gradients_is_no_forward() -> None:
    model, x, optimizer = made()

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()

    assert phases_of(Workload(model=model, step=step)) == ["forward", "backward", "optimizer", "end"]


def usual_step(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    held = SimpleNamespace()

    def step() -> None:
        held.output = model(x)
        held.loss = held.output.square().mean()
        held.loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_the_usual_loop_has_the_bytes_of_the_step_that_is_built_in() -> None:
    model, x, optimizer = made()
    built_in = Workload(model=model, inputs=x, loss=lambda y: y.square().mean(), optimizer=optimizer)
    profiles = [
        planner.profile(work, stages=["blocks.*"])
        for work in (built_in, Workload(model=model, step=usual_step(model, x, optimizer)))
    ]
    first, second = profiles
    assert second.unplanned_peak_bytes == first.unplanned_peak_bytes
    assert second.resident.total == first.resident.total
    assert [bytes_in(stage) for stage in second.stages] == [bytes_in(stage) for stage in first.stages]
    assert second.fingerprint == first.fingerprint
    options = [[(o.rerun, o.freed_bytes) for menu in p.menus for o in menu.options] for p in profiles]
    assert len(options[0]) > 0


def bytes_in(record: Any) -> list[tuple[int, int, int]]:
    phases = (record.forward, record.backward, record.dropped)
    return [(phase.start_bytes, phase.peak_bytes, phase.end_bytes) for phase in phases]


@pytest.mark.slow
def test_everything_that_the_step_refers_to_is_as_before() -> None:
    model, x, optimizer = made()
    average = copy.deepcopy(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses: list[float] = []
    notes = {"latest": None}
    state = SimpleNamespace(steps=0)
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        state.steps += 1
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        notes["latest"] = loss.detach()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(weight, 0.5)

    before = [p.detach().clone() for p in [*model.parameters(), *average.parameters()]]
    planner.profile(Workload(model=model, step=step))
    assert (count, state.steps, losses, notes) == (0, 0, [], {"latest": None})
    assert all(map(torch.equal, before, [*model.parameters(), *average.parameters()]))
    assert not optimizer.state
    assert schedule.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 1e-3


class Two(nn.Module):
    """As a GAN: the part that does not step is frozen meanwhile; it also keeps a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Blocks(), Blocks()
        self.kept = torch.zeros(1000)


def test_a_step_that_freezes_one_of_two_networks_after_the_other_is_profiled() -> None:
    torch.manual_seed(0)
    both, x = Two(), torch.randn(BATCH, WIDTH)
    parts = (both.first, both.second)
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in parts]

    def step() -> None:
        for optimizer, other in zip(optimizers, parts[::-1], strict=True):
            other.requires_grad_(False)
            loss = both.second(both.first(x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            other.requires_grad_(True)

    profile = planner.profile(Workload(model=both.first, step=step))
    assert all(parameter.requires_grad for parameter in both.parameters())
    assert profile.resident.loop >= 4000  # What the module around the model keeps.


def test_an_optimizer_that_the_step_does_not_refer_to_is_refused_before_it_steps() -> None:
    model, x, optimizer = made()
    hidden = torch.optim.SGD(model.parameters(), lr=1.0)
    step_of = (hidden.step for _ in itertools.count())

    def step() -> None:
        model(x).square().mean().backward()
        next(step_of)()

    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ProfileError, match="pass optimizer="):
        planner.profile(Workload(model=model, step=step, optimizer=optimizer))
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda model, x: None, "does not call the model"),
        (lambda model, x: model(x).sum(), "runs no backward through"),
    ],
)
def test_a_step_that_is_none_is_refused(run: Callable[[nn.Module, Tensor], Any], message: str) -> None:
    model, x, _ = made()
    with pytest.raises(ProfileError, match=message):
        planner.profile(Workload(model=model, step=lambda: run(model, x)))


def test_a_step_that_updates_in_every_second_call_is_told_to_run_both_micro_batches() -> None:
    model, x, optimizer = made()
    calls = SimpleNamespace(count=0)

    def step() -> None:
        model(x).square().mean().backward()
        calls.count += 1
        if calls.count % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(ProfileError, match="let one call run the n micro-batches of an update"):
        planner.profile(Workload(model=model, step=step, optimizer=optimizer))


class Ways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([Blocks(4), Blocks(7)])

    def forward(self, x: Tensor, way: int) -> Tensor:
        return self.ways[way](x)


def test_a_step_that_goes_another_way_in_every_second_call_is_named() -> None:
    _, x, _ = made()
    model, calls = Ways(), [0]
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        calls[0] += 1
        optimizer.zero_grad()
        model(x, calls[0] % 2).square().mean().backward()
        optimizer.step()

    with pytest.raises(ProfileError, match=r"ran \d+ of its \d+ stages in another call"):
        planner.profile(Workload(model=model, step=step, optimizer=optimizer))


def test_what_the_step_does_itself_is_refused_beside_it() -> None:
    model, _, _ = made()
    with pytest.raises(ValueError, match="no autocast, clip_norm beside step"):
        Workload(model=model, step=lambda: None, autocast="bf16", clip_norm=1.0)
    with pytest.raises(ValueError, match="expected step to be a function"):
        Workload(model=model, step=3)  # type: ignore[arg-type]


@pytest.mark.slow
def test_autocast_of_the_step_is_the_precision_of_its_profile() -> None:
    model, x, optimizer = made()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    profile = planner.profile(Workload(model=model, step=step))
    assert "autocast" in profile.precision
    assert profile.input_shapes == ((BATCH, WIDTH),)


def test_what_grows_from_step_to_step_is_said() -> None:
    model, x, optimizer = made()
    outputs: list[Tensor] = []

    def step() -> None:
        outputs.append(model(x).detach())
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def one_call() -> None:
        output = model(x)
        outputs.append(output.detach())
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    profile = planner.profile(Workload(model=model, step=one_call), menus=False)
    assert any("what the loop holds grows" in line for line in profile.unsteady)
    with pytest.raises(ValueError, match="calls the model several times before one backward"):
        planner.profile(Workload(model=model, step=step), menus=False)


@pytest.mark.parametrize("how", ["once", "backward twice", "gradient norm first"])
def test_a_graph_that_backward_goes_through_twice_is_said(how: str) -> None:
    model, x, optimizer = made()

    def step() -> None:
        loss = model(x).square().mean()
        if how == "backward twice":
            (0.5 * loss).backward(retain_graph=True)
        elif how == "gradient norm first":
            torch.autograd.grad(loss, next(model.parameters()), retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    profile = planner.profile(Workload(model=model, step=step), menus=False)
    assert any("more than once through one graph" in line for line in profile.unsteady) == (how != "once")


def test_a_plan_for_a_step_of_micro_batches_keeps_its_budget_and_its_losses() -> None:
    def losses(budget: int | None) -> tuple[list[float], int]:
        model, x, optimizer = made()

        def step() -> float:
            total = 0.0
            optimizer.zero_grad()
            for part in x.chunk(2):
                loss = model(part).square().mean()
                loss.backward()
                total += loss.item()
            optimizer.step()
            return total

        work = Workload(model=model, step=step)
        if budget is not None:
            profile = planner.profile(work, stages=["blocks.*"])
            plan = planner.solve(profile, profile.unplanned_peak_bytes * 95 // 100)
            planner.apply(model, plan)
            assert planner.measure(work).peak_bytes == plan.predicted_peak_bytes
            assert plan.recomputed_ops > 0
        return [work.step() for _ in range(3)], 0

    assert losses(1) == losses(None)


@pytest.mark.parametrize("described", ["step", "inputs"])
def test_a_container_of_models_is_refused_with_what_works_for_several(described: str):
    models = nn.ModuleDict({"generator": nn.Linear(2, 2), "critic": nn.Linear(2, 2)})
    given: Any = {"step": lambda: None} if described == "step" else {"inputs": torch.ones(1, 2)}
    with pytest.raises(ValueError, match=r"'generator', 'critic'. Plan each .* with the same step"):
        Workload(model=models, **given)


def test_a_model_under_a_transform_is_refused_in_words() -> None:
    model, x, _ = made()

    def step() -> None:
        output, slope, *_ = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        (output - slope).square().mean().backward()
        model.zero_grad()

    with pytest.raises(ProfileError, match="calls the model under torch.func .*plan a step without them"):
        planner.profile(Workload(model=model, step=step))


def test_under_compiled_autograd_a_profile_is_refused_and_a_plan_says_that_it_does_not_hold() -> None:
    model, x, optimizer = made()
    step = usual_step(model, x, optimizer)
    plan = planner.solve(planner.profile(Workload(model=model, step=step), menus=False), "100%")
    with torch._dynamo.config.patch(compiled_autograd=True):
        with planner.apply(model, plan), pytest.warns(RuntimeWarning, match="compiled autograd is on"):
            step()
        with pytest.raises(ProfileError, match="compiled autograd is on"):
            planner.profile(Workload(model=model, step=step))
