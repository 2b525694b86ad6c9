"""Model states: formulas against hand counts, and against real steps to the byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import planner
from planner import zoo
from planner.explain.state_table import (
    CASTS,
    GRADIENTS,
    OTHERS,
    PARAMETERS,
    TEMPORARIES,
    ModelStates,
    Weight,
    cast_bytes,
    model_states,
    state_bytes_by_name,
    state_bytes_of,
)
from profiler.measurement.step_measurement import measure_states
from tests.support.master_weights import with_masters

Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
SGD, ADAM, ADAFACTOR = torch.optim.SGD, torch.optim.Adam, torch.optim.Adafactor


class Model(nn.Module):
    """A weight of every kind: table, matrix, vector, kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(60, 48)
        self.first = nn.Linear(48, 32)
        self.norm = nn.LayerNorm(32)
        self.kernel = nn.Conv1d(32, 16, 3)
        self.head = nn.Linear(16, 100)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.first(self.table(tokens))).transpose(1, 2)
        return self.head(self.kernel(hidden).transpose(1, 2))


def work(make: Make, precision: str = "float32", **settings: Any) -> planner.Workload:
    torch.manual_seed(0)
    model = Model().bfloat16() if precision == "bfloat16" else Model()
    return planner.Workload(
        model=model,
        inputs=torch.randint(0, 60, (2, 8)),
        loss=lambda output: output.float().square().mean(),
        optimizer=make(model.parameters()),
        autocast=torch.bfloat16 if precision == "autocast" else None,
        **settings,
    )


def of(states: ModelStates, part: str) -> tuple[int, int | None]:
    return next((row.measured_bytes, row.formula_bytes) for row in states.rows if row.part == part)


def variants(**settings: Any) -> Iterable[dict[str, Any]]:
    for variant in ({}, {"foreach": True}, {"fused": True}):
        yield {**settings, **variant}


CASES: list[tuple[Any, dict[str, Any]]] = [
    *((SGD, v) for v in variants()),
    *((SGD, v) for v in variants(momentum=0.9)),
    *((SGD, v) for v in variants(momentum=0.9, weight_decay=0.1, nesterov=True)),
    *((SGD, v) for v in variants(weight_decay=0.1, maximize=True)),
    *((ADAM, v) for v in variants()),
    *((ADAM, v) for v in variants(weight_decay=0.1, amsgrad=True)),
    *((ADAM, v) for v in variants(weight_decay=0.1, maximize=True)),
    *((torch.optim.AdamW, v) for v in variants()),
    *((ADAFACTOR, v) for v in ({}, {"foreach": True}, {"maximize": True}, {"foreach": True, "maximize": True})),
]


def transformers_adafactor(parameters: Iterable[Tensor], **settings: Any) -> torch.optim.Optimizer:
    return pytest.importorskip("transformers.optimization").Adafactor(parameters, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "settings"), [*CASES, (transformers_adafactor, {}), (transformers_adafactor, {"beta1": 0.9})]
)
def test_formulas_agree_with_real_steps_to_the_byte(kind: Any, settings: dict[str, Any], precision: str) -> None:
    states = model_states(work(lambda parameters: kind(parameters, **settings), precision))
    rows = [row for row in states.rows if row.part != TEMPORARIES]
    assert {row.part: row.formula_bytes for row in rows} == {row.part: row.measured_bytes for row in rows}
    assert states.held_bytes == states.formula_held_bytes
    assert states.first_peak_bytes is not None and states.first_peak_bytes <= states.peak_bytes


def temporaries_bytes(kind: Any, settings: dict[str, Any], *, unscale: bool = False, clip: bool = False) -> int:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if unscale else None
    found = work(lambda p: kind(p, **settings), scaler=scaler, clip_norm=1.0 if clip else None)
    measured, formula = of(model_states(found), TEMPORARIES)
    assert formula is None
    return measured


@pytest.mark.parametrize("settings", [{}, {"foreach": True}])
@pytest.mark.slow
def test_unscaling_and_clipping_are_a_part_of_the_step(settings: dict[str, Any]) -> None:
    assert temporaries_bytes(SGD, settings) == 0
    assert temporaries_bytes(SGD, settings, unscale=True) == 8 + 8  # the scale, and one over it, in float64
    assert temporaries_bytes(SGD, settings, clip=True) > 8 + 8
    assert temporaries_bytes(SGD, settings, unscale=True, clip=True) > temporaries_bytes(SGD, settings, clip=True)


def test_fused_unscaling_is_a_part_of_the_step() -> None:
    fused = {"fused": True}
    assert temporaries_bytes(ADAM, fused, unscale=True) >= temporaries_bytes(ADAM, fused) + 8


def held_per_parameter(states: ModelStates) -> float:
    """Without the number of steps, which is no matter of parameters."""
    counts = sum(row.measured_bytes for row in states.rows if row.part == "optimizer: step")
    return (states.held_bytes - counts) / states.parameter_count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "precision", "expected"),
    [
        (lambda p: SGD(p, lr=0.1), "float32", 4 + 4),
        (lambda p: SGD(p, lr=0.1, momentum=0.9), "float32", 4 + 4 + 4),
        (lambda p: ADAM(p), "float32", 4 + 4 + 8),
        (lambda p: torch.optim.AdamW(p), "autocast", 4 + 4 + 8),
        (lambda p: SGD(p, lr=0.1, momentum=0.9), "bfloat16", 2 + 2 + 2),
        (lambda p: ADAM(p), "bfloat16", 2 + 2 + 4),
    ],
)
def test_the_usual_counting(make: Make, precision: str, expected: int) -> None:
    states = model_states(work(make, precision))
    assert held_per_parameter(states) == expected


@pytest.mark.parametrize(("momentum", "expected"), [(False, 2 + 2 + 12), (True, 2 + 2 + 8)])
def test_the_usual_counting_with_master_copies(momentum: bool, expected: int) -> None:
    states = model_states(with_masters(SGD if momentum else torch.optim.AdamW))
    count = states.parameter_count
    assert of(states, PARAMETERS) == of(states, GRADIENTS) == (2 * count, 2 * count)
    assert of(states, OTHERS) == (4 * count, 4 * count)
    assert held_per_parameter(states) == expected
    assert of(states, TEMPORARIES)[1] is None
    assert of(states, TEMPORARIES)[0] >= (4 - 2) * count  # Gradients in float32 where those in bfloat16 were.


def test_adafactor_keeps_a_row_and_a_column_of_each_matrix() -> None:
    weights = [Weight(shape=(30, 20)), Weight(shape=(7,)), Weight(shape=(5, 3, 2))]
    found = state_bytes_by_name("torch.optim.Adafactor", [(weights, {"foreach": None})])
    assert found == {
        "step": 3 * 4,
        "row_var": 4 * (30 + 5 * 3),
        "col_var": 4 * (20 + 5 * 2),
        "variance": 4 * 7,
    }


def test_on_cuda_numbers_of_steps_are_on_the_host_unless_the_optimizer_is_fused() -> None:
    weights = [Weight(shape=(3,), on_host=False), Weight(shape=(200,), on_host=False)]
    settings = {"fused": None, "foreach": None, "weight_decay": 0.0}
    found = state_bytes_by_name("torch.optim.adam.Adam", [(weights, settings)])
    assert found == {"exp_avg": 4 * 203, "exp_avg_sq": 4 * 203}
    fused = state_bytes_by_name("torch.optim.adam.Adam", [(weights, {**settings, "fused": True})])
    assert fused is not None and fused["step"] == 2 * 4


def test_eight_bit_moments_have_a_scale_for_each_block() -> None:
    weights = [Weight(shape=(64, 65)), Weight(shape=(100,))]
    found = state_bytes_by_name("bitsandbytes.optim.adam.Adam8bit", [(weights, {})])
    blocks = 17  # 4160 elements, 256 a block
    assert found == {
        "state1": 4160 + 400, "state2": 4160 + 400, "absmax1": 4 * blocks, "absmax2": 4 * blocks,
        "qmap1": 1024, "qmap2": 1024,
    }  # fmt: skip


def test_eight_bit_adam_is_measured_where_it_is_installed() -> None:
    kinds = pytest.importorskip("bitsandbytes").optim
    states = model_states(work(lambda parameters: kinds.Adam8bit(parameters, min_8bit_size=1000)))
    found = [row for row in states.rows if row.part.startswith("optimizer: ")]
    assert len(found) == 6 and all(row.measured_bytes == row.formula_bytes for row in found)


def test_casts_of_parameters_are_counted_once_and_without_frozen_ones() -> None:
    work_ = work(lambda parameters: ADAM(parameters), "autocast")
    model = work_.model
    assert isinstance(model, Model)
    cast = [model.first, model.kernel, model.head]
    assert of(model_states(work_), CASTS) == (2 * sum(p.numel() for m in cast for p in m.parameters()),) * 2
    model.head.requires_grad_(False)
    assert cast_bytes(model, torch.bfloat16) == 2 * sum(p.numel() for m in cast[:2] for p in m.parameters())
    assert cast_bytes(model, None) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "resnet50"])
def test_casts_of_real_models(name: str) -> None:
    sizes = {"resnet50": {"image": 32, "batch": 2}}.get(name, {"layers": 1, "batch": 1, "hidden": 32, "seq": 16})
    found = zoo.build(name, **sizes)
    found.autocast = torch.bfloat16
    measured, formula = of(model_states(found), CASTS)
    assert measured == formula and measured > 0


class Doubting(torch.optim.Optimizer):
    """An optimizer that nobody knows: three states, and a great deal beside them as it makes them."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                room = torch.randn(50, *parameter.shape)
                state["doubt"] = room.mean(0)
            state["doubt"].mul_(0.9).add_(parameter.grad)
            parameter.sub_(state["doubt"], alpha=0.01)


def test_an_unknown_optimizer_is_measured_not_guessed() -> None:
    states = model_states(work(Doubting))
    count = states.parameter_count
    assert of(states, "optimizer: doubt") == (4 * count, None)
    assert of(states, TEMPORARIES)[1] is None and states.formula_held_bytes is None
    unknown = {row.how for row in states.rows if row.formula_bytes is None and row.part != TEMPORARIES}
    assert unknown == {"measured: no formula is known"}
    assert state_bytes_of([type("Own", (ADAM,), {})([torch.ones(2, requires_grad=True)])]) is None


@pytest.mark.parametrize("mode", ["capturable", "differentiable"])
def test_modes_without_a_formula_are_measured(mode: str) -> None:
    settings: dict[str, Any] = {"foreach": False, mode: True}
    assert state_bytes_of([ADAM([torch.ones(2, requires_grad=True)], **settings)]) is None


def test_measuring_leaves_everything_as_it_was() -> None:
    found = work(lambda parameters: ADAM(parameters), scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    before = [p.detach().clone() for p in found.model.parameters()]
    random = torch.get_rng_state()
    model_states(found)
    assert all(torch.equal(a, b) for a, b in zip(before, found.model.parameters(), strict=True))
    assert torch.equal(random, torch.get_rng_state())
    assert found.optimizer is not None and not found.optimizer.state
    assert all(p.grad is None for p in found.model.parameters())


def test_states_that_the_optimizer_brings_along_have_no_first_step() -> None:
    found = work(lambda parameters: ADAM(parameters))
    found.step()
    assert model_states(found).first_peak_bytes is None
    assert measure_states(found).first is None


def test_without_an_optimizer_there_are_parameters_and_gradients() -> None:
    found = work(lambda parameters: ADAM(parameters))
    found.optimizer = None
    assert [row.part for row in model_states(found).rows] == [PARAMETERS, GRADIENTS]


def test_a_model_in_eval_mode_is_refused() -> None:
    found = work(lambda parameters: ADAM(parameters))
    found.model.eval()
    with pytest.raises(planner.errors.ProfileError, match=r"model\.train"):
        model_states(found)


def test_a_compiled_model_is_still_compiled_afterwards() -> None:
    calls = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        return lambda *args: calls.append(0) or graph(*args)

    found = work(lambda parameters: ADAM(parameters), "autocast")
    found.model.compile(backend=backend)
    states = model_states(found)
    assert of(states, CASTS)[0] == of(states, CASTS)[1]
    calls.clear()
    found.step()
    assert calls


def test_the_frame_has_a_row_for_each_part() -> None:
    frame = model_states(work(Doubting)).to_frame()
    assert list(frame.columns) == ["part", "measured_bytes", "formula_bytes", "how"]
    assert [pd.isna(value) for value in frame["formula_bytes"]].count(True) == 2
