"""Models that draw what they run, profiled in their largest step: all steps are exact, and within the budget."""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from benchmarks.outside_meter import OutsideMeter
from planner.plans.cost_model import chain_of
from profiler.workload.workload import Workload
from solvers.chain.baselines import droppable_runs, segmented_schedule
from tests.support.drawn_depth import (
    DRAWS,
    assert_promises_kept,
    drawing,
    fill_states,
    run_of,
    running_everything,
    seed_all,
)
from tests.support.exactness import budgets, choosing_inside, following
from tests.support.nightly import by_day


def fresh(work: Workload) -> torch.optim.Optimizer:
    return torch.optim.AdamW(work.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", by_day(DRAWS, ["inside_scaled", "experts"]))
def test_steps_of_any_depth_are_exact_and_within_budget(name: str) -> None:
    work = drawing(name)
    seed_all(3)
    with running_everything(work, name):
        # A stage that branches inside is planned to run as a program then, and says that it does not.
        profile = planner.profile(work, menus=not name.startswith("inside"))
    assert not profile.unsteady
    expected = run_of(work, fresh(work))
    assert expected.peak_bytes <= profile.unplanned_peak_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for budget_bytes in budgets(profile):
            assert_promises_kept(work, planner.solve(profile, budget_bytes, solver="rotor"), expected, fresh(work))


@pytest.mark.slow
@pytest.mark.parametrize("name", by_day(["tensor", "python", "exit", "experts", "repeated", "inside"], ["inside"]))
def test_segments_and_options_hold_when_stages_are_left_out(name: str) -> None:
    work = drawing(name)
    with running_everything(work, name):
        profile = planner.profile(work, menus=name != "inside")
    chain = chain_of(profile)
    expected = run_of(work, fresh(work))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for schedule in (segmented_schedule(droppable_runs(chain)), choosing_inside(chain)):
            assert_promises_kept(work, following(profile, schedule), expected, fresh(work))


CONFIGS: dict[str, dict[str, Any]] = {
    "Wav2Vec2": {"ctc_zero_infinity": True},
    "Hubert": {"ctc_zero_infinity": True},
    "Bart": {"encoder_layerdrop": 0.2, "decoder_layerdrop": 0.2},
    "OPT": {"layerdrop": 0.2},
}


def transformer(name: str) -> Workload:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ids = torch.randint(3, 100, (4, 24))
    sizes: dict[str, Any] = {"vocab_size": 100, "use_cache": False, "max_position_embeddings": 64}
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if name in ("Wav2Vec2", "Hubert"):
        kind = "ForCTC"
        sizes = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 128}
        sizes |= {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
        sizes |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "vocab_size": 32}
        inputs = {"input_values": torch.randn(2, 800), "labels": torch.randint(1, 30, (2, 6))}
    elif name == "Bart":
        kind = "ForConditionalGeneration"
        for side in ("encoder", "decoder"):
            sizes |= {f"{side}_layers": 4, f"{side}_ffn_dim": 128, f"{side}_attention_heads": 2}
        sizes["d_model"] = 32
    else:
        kind = "ForCausalLM"
        sizes |= {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 128, "num_hidden_layers": 6}
        sizes["num_attention_heads"] = 2
    model = getattr(transformers, name + kind)(getattr(transformers, name + "Config")(**sizes, **CONFIGS[name]))
    return Workload(model=model.train(), inputs=inputs, optimizer=torch.optim.AdamW(model.parameters()))


@contextmanager
def without_layerdrop(model: nn.Module) -> Iterator[None]:
    """Inside, all layers run."""
    rated: list[Any] = [each for each in (model.config, *model.modules()) if hasattr(each, "layerdrop")]
    rates = [each.layerdrop for each in rated]
    for each in rated:
        each.layerdrop = 0.0
    try:
        yield
    finally:
        for each, rate in zip(rated, rates, strict=True):
            each.layerdrop = rate


@pytest.mark.slow
@pytest.mark.parametrize("name", by_day(CONFIGS, []))
def test_transformers_with_layerdrop_keep_their_budgets(name: str) -> None:
    work = transformer(name)
    seed_all(2)
    fill_states(work)
    with without_layerdrop(work.model):
        profile = planner.profile(work, menus=False)
    expected = run_of(work, fresh(work))
    for budget_bytes in budgets(profile):
        assert_promises_kept(work, planner.solve(profile, budget_bytes, solver="rotor"), expected, fresh(work))


class NearlyAlways(nn.Module):
    """Leaves all of its blocks out at numbers that hardly any run draws; there is nothing to go backward through."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if random.random() > 1e-9:
                x = x + block(x)
        return x


@pytest.mark.parametrize("own", [False, True])
def test_a_step_that_draws_leaves_gradients_and_outputs_as_they_are_between_steps(own: bool) -> None:
    def parts() -> tuple[nn.Module, Tensor, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = NearlyAlways()
        return model, torch.randn(128, 64), torch.optim.AdamW(model.parameters())

    def step_of(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        held: dict[str, Tensor] = {}

        def step() -> None:
            if own:
                optimizer.zero_grad()
            held["output"] = model(x)
            held["loss"] = held["output"].square().mean()
            held["loss"].backward()
            optimizer.step()
            if not own:
                optimizer.zero_grad()

        return step

    def peak_bytes(plan: planner.Plan | None) -> int:
        gc.collect()
        with OutsideMeter() as meter:
            model, x, optimizer = parts()
            step = step_of(model, x, optimizer)
            if plan is not None:
                planner.apply(model, plan)
            for number in range(3):
                if number == 1:
                    meter.begin()
                step()
        return meter.peak_bytes

    model, x, optimizer = parts()
    if own:
        work = Workload(model=model, step=step_of(model, x, optimizer), optimizer=optimizer)
    else:
        work = Workload(model=model, inputs=x, loss=lambda output: output.square().mean(), optimizer=optimizer)
    profile = planner.profile(work)
    assert profile.unsteady == ()
    assert profile.unplanned_peak_bytes == peak_bytes(None)
    for budget_bytes in budgets(profile):
        plan = planner.solve(profile, budget_bytes)
        assert peak_bytes(plan) <= plan.predicted_peak_bytes
