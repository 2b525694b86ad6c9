"""Several optimizers, optimizers that evaluate the loss themselves, and those of another model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.workload.workload import Workload
from tests.support.master_weights import with_masters

WIDTH = 16


def stack(blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(blocks)]
    )


def squares(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


def batch() -> Tensor:
    return torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1))


def assert_equal(left: nn.Module, right: nn.Module) -> None:
    assert all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


def two_optimizers(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model[0].parameters(), 0.01), torch.optim.SGD(model[1:].parameters(), 0.1, momentum=0.9)]


def test_several_optimizers_step_as_one_after_the_other() -> None:
    model, other = stack(), stack()
    work = Workload(model=model, inputs=batch(), loss=squares, optimizer=two_optimizers(model), clip_norm=0.1)
    by_hand = two_optimizers(other)
    for _ in range(3):
        other.zero_grad()
        squares(other(batch())).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        for optimizer in by_hand:
            optimizer.step()
        work.step()
    assert_equal(model, other)


class Around(torch.optim.Optimizer):
    """As accelerate's optimizer: it passes everything on to another one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.optimizer.step(closure)


@pytest.mark.slow
def test_an_optimizer_around_another_one_counts_with_the_inner_one() -> None:
    model = stack()
    inner = torch.optim.Adam(model.parameters(), 0.01)
    around, schedule = Around(inner), torch.optim.lr_scheduler.StepLR(inner, 10)

    def step() -> None:
        squares(model(batch())).backward()
        around.step()
        model.zero_grad()
        schedule.step()

    assert Workload(model=model, inputs=batch(), loss=squares, optimizer=around).optimizers == (around,)
    work = Workload(model=model, step=step)
    assert work.optimizers == (around,)  # The schedule refers to the inner one.
    planner.profile(work)
    assert not inner.state


def test_a_step_that_one_of_several_optimizers_left_out_is_no_whole_step() -> None:
    model = stack(2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    work = Workload(
        model=model, inputs=batch(), loss=lambda y: 1e4 * squares(y), optimizer=two_optimizers(model), scaler=scaler
    )
    work.step()
    assert not work.stepped
    while not work.stepped:
        work.step()
    assert all(optimizer.state for optimizer in work.optimizers)


@pytest.mark.slow
def test_several_optimizers_are_measured_and_left_as_they_were() -> None:
    model = stack()
    work = Workload(model=model, inputs=batch(), loss=squares, optimizer=two_optimizers(model))
    work.step()
    before = [copy.deepcopy(optimizer.state_dict()) for optimizer in work.optimizers]
    profile = planner.profile(work, menus=False)
    assert str([each.state_dict() for each in work.optimizers]) == str(before)
    bytes_of = [sum(p.numel() * p.element_size() for p in part.parameters()) for part in (model[0], model[1:])]
    assert profile.resident.optimizer == 2 * bytes_of[0] + 4 * len(list(model[0].parameters())) + bytes_of[1]
    plan = planner.solve(profile, "80%", solver="rotor")
    assert planner.train_planned(work, plan, steps=2).measured_peak_bytes <= plan.budget_bytes
    states = planner.model_states(work)
    assert states.optimizer == "Adam and SGD"
    assert {row.part for row in states.rows} >= {"optimizer: exp_avg", "optimizer: momentum_buffer"}


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda model: [], "got an empty list"),
        (lambda model: [torch.optim.SGD(model.parameters(), 0.1), 3], "got int"),
        (lambda model: [torch.optim.SGD(model.parameters(), 0.1)] * 2, "got the same one twice"),
        (lambda model: "adam", "a list of them or None, got str"),
    ],
)
def test_what_is_no_optimizer_is_refused(optimizer: Any, words: str) -> None:
    model = stack(1)
    with pytest.raises(ValueError, match=words):
        Workload(model=model, inputs=batch(), loss=squares, optimizer=optimizer(model))


@pytest.mark.parametrize("run", [planner.profile, planner.measure])
def test_an_optimizer_of_another_model_is_refused(run: Any) -> None:
    model = stack(1)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(stack(1).parameters())]
    with pytest.raises(ValueError, match=r"an Adam holds 4 parameters that .* no gradient .*model.parameters\(\)"):
        run(Workload(model=model, inputs=batch(), loss=squares, optimizer=optimizers))


@pytest.mark.slow
def test_optimizers_of_parts_of_copies_and_of_the_loss_are_taken() -> None:
    model = stack(2)
    scale = nn.Parameter(torch.ones(()))
    part = torch.optim.SGD(model[1][0].parameters(), 0.1)  # type: ignore[index]
    of_loss = torch.optim.SGD([scale], 0.1)
    planner.measure(Workload(model=model, inputs=batch(), loss=squares, optimizer=part), repeats=1)
    planner.measure(
        Workload(model=model, inputs=batch(), loss=lambda y: squares(y) * scale, optimizer=of_loss), repeats=1
    )
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        planner.measure(with_masters(kind), repeats=1)


CLOSED: list[dict[str, Any]] = [
    {"max_iter": 4, "history_size": 3},
    {"max_iter": 1, "history_size": 3},
    {"max_iter": 3, "history_size": 3, "line_search_fn": "strong_wolfe"},
]


@pytest.mark.parametrize("settings", CLOSED)
def test_a_step_of_lbfgs_is_that_of_a_loop_with_a_closure(settings: dict[str, Any]) -> None:
    model, other = stack(2), stack(2)
    calls: list[int] = [0, 0]
    for number, each in enumerate((model, other)):
        each.register_forward_hook(lambda *_, n=number: calls.__setitem__(n, calls[n] + 1))
    work = Workload(
        model=model, inputs=batch(), loss=squares, optimizer=torch.optim.LBFGS(model.parameters(), **settings)
    )
    by_hand = torch.optim.LBFGS(other.parameters(), **settings)

    def closure() -> Tensor:
        by_hand.zero_grad()
        loss = squares(other(batch()))
        loss.backward()
        return loss

    for _ in range(4):
        assert work.step() == float(by_hand.step(closure).detach())  # type: ignore[arg-type]
    assert calls[0] == calls[1] > 0
    assert_equal(model, other)


@pytest.mark.slow
@pytest.mark.parametrize("settings", CLOSED)
def test_plans_under_lbfgs_keep_to_their_peak_with_the_whole_history(settings: dict[str, Any]) -> None:
    model = stack(6)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, **settings)
    work = Workload(model=model, inputs=torch.randn(2048, WIDTH), loss=squares, optimizer=optimizer)
    state = str(optimizer.state_dict())
    profile = planner.profile(work, menus=False)
    assert str(optimizer.state_dict()) == state
    assert (profile.evaluations > 1) == (settings["max_iter"] > 1)
    with pytest.raises(planner.Infeasible) as caught:
        planner.solve(profile, 1, solver="rotor")
    assert caught.value.minimum_budget_bytes < 0.7 * profile.unplanned_peak_bytes
    plan = planner.solve(profile, caught.value.minimum_budget_bytes, solver="rotor")
    searches = "line_search_fn" in settings
    assert any("line search" in line for line in profile.unsteady) == searches
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    allowed_bytes = gradient_bytes if searches else 0
    with planner.apply(model, plan):
        assert planner.measure(work, repeats=1).peak_bytes <= plan.predicted_peak_bytes + allowed_bytes
        for _ in range(5):
            work.step()
        assert planner.measure(work, repeats=1).peak_bytes <= plan.budget_bytes + allowed_bytes


def test_a_closure_beside_a_scaler_is_refused() -> None:
    model = stack(1)
    with pytest.raises(
        ValueError, match="GradScaler does not step LBFGS, whose step takes a closure; leave the scaler out"
    ):
        Workload(
            model=model,
            inputs=batch(),
            loss=squares,
            optimizer=torch.optim.LBFGS(model.parameters()),
            scaler=torch.amp.GradScaler("cpu"),
        )


class Lookahead(torch.optim.Optimizer):
    """Slow weights, on an attribute, that follow an optimizer's; its groups and states are the inner one's."""

    def __init__(self, fast: torch.optim.Optimizer) -> None:
        self._fast, self.defaults = fast, fast.defaults
        self.slow: list[Tensor] = []

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._fast.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._fast.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._fast.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.slow = self.slow or [p.detach().clone() for p in parameters]
        loss = self._fast.step(closure)
        with torch.no_grad():
            for slow, parameter in zip(self.slow, parameters, strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)
        return loss


class Sharpened(torch.optim.Optimizer):
    """As SAM: an optimizer of its own with states, that has an inner one in a list, for the same groups."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.several = [inner]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            state["before"] = parameter.grad.clone() if "before" not in state else state["before"].add_(parameter.grad)
            parameter.grad.add_(state["before"], alpha=0.1)
        return self.several[0].step(closure)


def inner_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    return dict(optimizer._fast.state if isinstance(optimizer, Lookahead) else vars(optimizer)["several"][0].state)


@pytest.mark.parametrize("around", [Lookahead, Sharpened])
@pytest.mark.parametrize("given", ["outer", "inner", "neither", "no step"])
@pytest.mark.slow
def test_an_optimizer_around_another_one_under_any_name_is_counted_and_put_back(
    around: type[Lookahead] | type[Sharpened], given: str
) -> None:
    def trained(planned: bool) -> list[Tensor]:
        model, x = stack(2), batch()
        inner = torch.optim.AdamW(model.parameters(), 0.01)
        outer = around(inner)

        def step() -> None:
            outer.zero_grad()
            squares(model(x)).backward()
            outer.step()

        if planned:
            if given == "no step":
                work = Workload(model=model, inputs=x, loss=squares, optimizer=outer)
            else:
                named = {"outer": outer, "inner": inner, "neither": None}[given]
                work = Workload(model=model, step=step, optimizer=named)
            assert work.optimizers == (outer,)
            profile = planner.profile(work, menus=False)
            weights = sum(p.nbytes for p in model.parameters())
            counts = 4 * sum(1 for _ in model.parameters())
            # AdamW's two moments and its numbers of steps, and one more tensor of each parameter's size.
            assert profile.resident.optimizer == 3 * weights + counts
            assert not inner_state(outer)
            assert not getattr(outer, "slow", []) and (around is Lookahead or not outer.state)
            planner.apply(model, planner.solve(profile, "100%"))
        for _ in range(3):
            step()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(trained(False), trained(True), strict=True))
