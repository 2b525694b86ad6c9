"""Plans on compiled models: the bits of the compiled model without a plan, the predicted bytes, and clear words."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InductorError

import planner
from planner import Rule, Rules, zoo
from profiler.op_graph import ChoiceError
from profiler.workload.compiled_forwards import is_compiled
from profiler.workload.workload import Workload
from tests.support.exactness import assert_same, state_after
from tests.support.nightly import at_night
from tests.support.odd_models import workload
from tests.support.small_blocks import Stack

Way = Callable[..., None]
BLOCKS = ["blocks.*"]


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def inductor() -> str:
    """The backend's name; skips where it cannot compile for the CPU."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(8))
    except (BackendCompilerFailed, InductorError) as error:
        pytest.skip(f"needs a C++ compiler that Inductor can use: {error}")
    return "inductor"


# Ways to compile ---------------------------------------------------------------


def whole_by_method(work: Workload, backend: Any = "aot_eager", **options: Any) -> None:
    work.model.compile(backend=backend, **options)


def whole_by_wrapping(work: Workload, backend: Any = "aot_eager", **options: Any) -> None:
    work.model = torch.compile(work.model, backend=backend, **options)  # type: ignore[assignment]


def blocks_by_method(work: Workload, backend: Any = "aot_eager", **options: Any) -> None:
    for block in blocks_of(work.model):
        block.compile(backend=backend, **options)


def blocks_by_wrapping(work: Workload, backend: Any = "aot_eager", **options: Any) -> None:
    blocks = blocks_of(work.model)
    for k in range(len(blocks)):
        blocks[k] = torch.compile(blocks[k], backend=backend, **options)  # type: ignore[assignment]


def blocks_by_forward(work: Workload, backend: Any = "aot_eager", **options: Any) -> None:
    for block in blocks_of(work.model):
        block.forward = torch.compile(block.forward, backend=backend, **options)


def blocks_of(model: Any) -> Any:
    if isinstance(model, Stack):
        return model.blocks
    if hasattr(model, "bert"):
        return model.bert.encoder.layer
    return model.resnet.encoder.stages[0].layers  # The others are left uncompiled: each is of kinds of its own.


WHOLE = [whole_by_method, whole_by_wrapping]
WAYS = [*WHOLE, blocks_by_method, blocks_by_wrapping, blocks_by_forward]


# Plans -------------------------------------------------------------------------


def smallest_budget(profile: planner.Profile) -> int:
    with pytest.raises(planner.Infeasible) as caught:
        planner.solve(profile, 1, solver="rotor")
    return caught.value.minimum_budget_bytes


@functools.cache
def uncompiled_plan(ops: str = "") -> planner.Plan:
    """From the profile of an uncompiled model: all blocks recomputed, or ``ops`` inside them."""
    rules = Rules(rules=[Rule(modules="blocks.*", ops=ops or ())])
    return planner.state(planner.profile(workload("dropout"), stages=BLOCKS, rules=rules, menus=False), rules)


@pytest.fixture
def plan() -> planner.Plan:
    return uncompiled_plan()


def warned(caught: Any) -> list[str]:
    return [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]


def planned_and_measured(make: Callable[[], Workload], way: Way, depths: tuple[float, ...], backend: str) -> None:
    """Profile a compiled model; its plans take the bytes predicted and compute what it computes without."""
    expected, work = make(), make()
    way(expected, backend)
    way(work, backend)
    profile = planner.profile(work)
    smallest = smallest_budget(profile)
    assert profile.precision.endswith("compiled") and smallest < profile.unplanned_peak_bytes
    plain = state_after(expected)
    for depth in depths:
        budget = int(smallest + depth * (profile.unplanned_peak_bytes - smallest))
        plan = planner.solve(profile, budget, solver="rotor")
        with planner.apply(work.model, plan), warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            assert planner.measure(work, repeats=1).peak_bytes == plan.predicted_peak_bytes <= budget
    with planner.apply(work.model, planner.solve(profile, smallest, solver="rotor")):
        assert_same(state_after(work), plain)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("dropout", whole_by_wrapping),
        ("dropout", blocks_by_wrapping),
        ("batchnorm", whole_by_method),
        ("batchnorm", blocks_by_forward),
    ],
)
def test_a_compiled_model_is_profiled_and_planned_as_it_runs(name: str, way: Way) -> None:
    planned_and_measured(lambda: workload(name), way, (0.0, 0.5, 1.0), "aot_eager")


SMALL: dict[str, dict[str, int]] = {
    "gpt2": {"layers": 2, "hidden": 32, "seq": 16, "batch": 2, "vocab": 64},
    "bert": {"layers": 2, "hidden": 32, "seq": 16, "batch": 2, "vocab": 64},
    "resnet50": {"image": 32, "batch": 4, "hidden": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), [("gpt2", whole_by_method), at_night("resnet50", blocks_by_method)])
def test_real_networks(name: str, way: Way) -> None:
    planned_and_measured(lambda: zoo.build(name, **SMALL[name]), way, (0.0, 0.5), "aot_eager")


@pytest.mark.nightly
@pytest.mark.slow
def test_a_real_network_with_blocks_compiled_by_inductor(inductor: str) -> None:
    # It has dropout, which Inductor draws in its own way: the second run draws the same.
    planned_and_measured(lambda: zoo.build("bert", **SMALL["bert"]), blocks_by_method, (0.0, 0.5), inductor)


# Orders of compiling and applying -----------------------------------------------


@pytest.mark.parametrize("way", [whole_by_method, blocks_by_wrapping, blocks_by_forward])
def test_a_plan_acts_on_a_model_that_is_compiled_and_has_run(way: Way, plan: planner.Plan) -> None:
    expected, work = workload("dropout"), workload("dropout")
    way(expected)
    way(work)
    plain_peak = planner.measure(work, repeats=1).peak_bytes
    with planner.apply(work.model, plan), pytest.warns(RuntimeWarning, match="peak is not promised.*Compile before"):
        assert planner.measure(work, repeats=1).peak_bytes < 0.7 * plain_peak
        assert_same(state_after(work), state_after(expected))
    assert planner.measure(work, repeats=1).peak_bytes == plain_peak


@pytest.mark.parametrize("way", WAYS)
def test_a_planned_model_can_be_compiled(way: Way, plan: planner.Plan) -> None:
    expected, work = workload("dropout"), workload("dropout")
    way(expected)
    plain_peak = planner.measure(expected, repeats=1).peak_bytes
    handle = planner.apply(work.model, plan)
    way(work)
    with pytest.warns(RuntimeWarning, match="peak is not promised"):
        assert planner.measure(work, repeats=1).peak_bytes < 0.7 * plain_peak
    assert_same(state_after(work), state_after(expected))
    handle.remove()
    # The compiled forwards of the user are left in place, and hold nothing of the plan any more.
    assert is_compiled(work.model)
    assert planner.measure(work, repeats=1).peak_bytes == plain_peak


def test_putting_a_plan_on_and_off_compiles_once(plan: planner.Plan) -> None:
    backend = CountingBackend()
    work = workload("dropout")
    whole_by_method(work, backend)
    made = []
    for _ in range(10):
        with planner.apply(work.model, plan):
            work.step()
        work.step()
        made.append(backend.made)
    assert made[0] > 0 and made[1] == made[-1]


class CountingBackend:
    """``aot_eager`` that numbers its graphs and notes which one runs."""

    def __init__(self) -> None:
        self.made = 0
        self.runs: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        number = self.made
        self.made += 1
        compiled = lookup_backend("aot_eager")(graph, inputs)

        def run(*args: Any) -> Any:
            self.runs.append(number)
            return compiled(*args)

        return run

    def taken(self) -> list[int]:
        """The runs since the last time."""
        runs, self.runs = self.runs, []
        return runs


@pytest.mark.parametrize("way", [whole_by_method, blocks_by_method])
def test_a_second_run_is_of_the_code_that_ran_first(way: Way, plan: planner.Plan) -> None:
    # By the time the first loss goes backward there is code for any batch size, which would fit as well.
    backend = CountingBackend()
    work = workload("dropout")
    way(work, backend)
    assert isinstance(work.inputs, torch.Tensor) and work.loss is not None
    with planner.apply(work.model, plan):
        losses, forwards = [], []
        for size in (64, 40):
            losses.append(work.loss(work.model(work.inputs[:size])))
            forwards.append(backend.taken())
        assert not set(forwards[0]) & set(forwards[1])
        for loss, forward in zip(reversed(losses), reversed(forwards), strict=True):
            loss.backward()
            again = backend.taken()
            assert again and set(again) <= set(forward)


def test_eval_mode_and_no_grad_are_as_without_a_plan(plan: planner.Plan) -> None:
    work = workload("dropout")
    whole_by_method(work)
    expected = work.model.eval()(work.inputs)
    with planner.apply(work.model, plan):
        assert torch.equal(work.model(work.inputs), expected)
        with torch.no_grad():
            assert torch.equal(work.model(work.inputs), expected)
        work.model.train()
        work.step()


# What cannot be kept ---------------------------------------------------------------


def test_one_graph_of_a_planned_model_is_refused_with_the_name_of_a_stage(plan: planner.Plan) -> None:
    work = workload("dropout")
    whole_by_method(work, fullgraph=True)
    with planner.apply(work.model, plan), pytest.raises(RuntimeError, match=r"blocks\.0.*fullgraph=True"):
        work.step()


@pytest.mark.parametrize("way", [blocks_by_method, blocks_by_forward])
def test_stages_that_are_one_graph_each_are_planned(way: Way, plan: planner.Plan) -> None:
    work = workload("dropout")
    way(work, fullgraph=True)
    plain_peak = planner.measure(work, repeats=1).peak_bytes
    with planner.apply(work.model, plan):
        assert planner.measure(work, repeats=1).peak_bytes < 0.7 * plain_peak


@pytest.mark.parametrize("way", [whole_by_wrapping, blocks_by_method, blocks_by_forward])
def test_options_of_single_ops_are_said_not_to_be_kept_before_training(way: Way) -> None:
    plan = uncompiled_plan("gelu")
    assert {stage.decision for stage in plan.stages if stage.kind == "stage"} == {"selective"}
    expected, work = workload("dropout"), workload("dropout")
    way(expected)
    way(work)
    with planner.apply(work.model, plan), pytest.warns(RuntimeWarning) as caught:
        peak = planner.measure(work, repeats=1).peak_bytes
        assert_same(state_after(work), state_after(expected))
    said = [text for text in warned(caught) if "blocks.3" in text]
    assert len(said) == 1 and "it stays compiled and is recomputed as a whole" in said[0]
    assert peak < plan.predicted_peak_bytes
    assert planner.measure(work, repeats=1).peak_bytes == planner.measure(expected, repeats=1).peak_bytes


def test_a_stage_with_something_compiled_inside_is_recomputed_as_a_whole() -> None:
    work = workload("dropout")
    for block in blocks_of(work.model):
        block.inner.compile(backend="aot_eager")
    with planner.apply(work.model, uncompiled_plan("gelu")), pytest.warns(RuntimeWarning, match="as a whole"):
        expected = workload("dropout")
        assert_same(state_after(work), state_after(expected))


def test_rules_for_single_ops_of_a_compiled_model_are_refused() -> None:
    work = workload("dropout")
    whole_by_method(work)
    with pytest.raises(ChoiceError, match=r"captured as a graph can recompute single ops.*'blocks\.0'.*compiled"):
        planner.profile(work, stages=BLOCKS, rules=Rule(modules="blocks.*", ops="gelu"))


def test_only_what_is_compiled_by_itself_counts_as_compiled() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert not is_compiled(model)
    model[1].forward = torch.compiler.disable(model[1].forward)
    assert not is_compiled(model)
    model[1].compile()
    assert is_compiled(model) and not is_compiled(model[0])
    wrapped: Any = torch.compile(model[0])
    assert is_compiled(wrapped)


# Inductor ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.nightly
def test_inductor_computes_the_same_where_the_plan_cuts_its_graph(inductor: str) -> None:
    expected, work = workload("batchnorm"), workload("batchnorm")
    whole_by_method(expected, inductor)
    whole_by_method(work, inductor)
    profile = planner.profile(work)
    plan = planner.solve(profile, smallest_budget(profile), solver="rotor")
    plain = state_after(expected, steps=1)
    with planner.apply(work.model, plan):
        assert planner.measure(work, repeats=1).peak_bytes == plan.predicted_peak_bytes
        planned = state_after(work, steps=1)
    for kind in ("gradients", "state"):
        for key, value in plain[kind].items():
            torch.testing.assert_close(planned[kind][key], value)


@pytest.mark.parametrize("strict", [False, True])
def test_a_planned_model_is_exported_as_the_unplanned_one(strict: bool) -> None:
    work = workload("plain")
    x = work.inputs
    assert isinstance(x, torch.Tensor)
    ops = [node.target for node in torch.export.export(work.model, (x,), strict=strict).graph.nodes]
    profile = planner.profile(work, stages=BLOCKS, menus=False)
    plan = planner.state(profile, Rule(modules="blocks.*"))
    expected = state_after(work)
    planned = workload("plain")
    with planner.apply(planned.model, plan):
        exported = torch.export.export(planned.model, (x,), strict=strict)
        assert [node.target for node in exported.graph.nodes] == ops
        assert torch.equal(exported.module()(x), planned.model(x))
        assert_same(state_after(planned), expected)
