"""Models of transformers with their defaults, and batches of other shapes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

import planner
from profiler.workload.workload import Workload

SIZES: dict[str, Any] = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4}


def made(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if kind == "GPT2":
        config = transformers.GPT2Config(
            n_layer=4, n_head=2, n_embd=32, n_positions=32, vocab_size=100, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config).train()
    sizes = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    text = "Text" if kind == "Gemma3" else ""
    config = getattr(transformers, f"{kind}{text}Config")(**sizes)
    return getattr(transformers, f"{kind}ForCausalLM")(config).train()


def step_of(model: nn.Module, batch: int = 4) -> Workload:
    tokens = torch.randint(0, 100, (batch, 32), generator=torch.Generator().manual_seed(1))
    return Workload(
        model=model,
        inputs={"input_ids": tokens, "labels": tokens},
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Qwen3", "Gemma3"])
def test_whole_blocks_are_stages_though_the_model_would_build_a_cache(kind: str) -> None:
    model = made(kind)
    assert model.config.use_cache is True
    with pytest.warns(UserWarning, match=f"use_cache is off in training calls of {type(model).__name__}") as caught:
        profile = planner.profile(step_of(model), menus=False)
    assert len([w for w in caught if "use_cache" in str(w.message)]) == 1
    classes = {stage.module_class for stage in profile.stages if stage.kind == "stage"}
    assert any("Block" in each or "DecoderLayer" in each for each in classes)
    assert sum(stage.kind == "stage" for stage in profile.stages) <= 8
    plan = planner.solve(profile, profile.unplanned_peak_bytes // 2)
    assert model.config.use_cache is True
    work = step_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with planner.apply(model, plan):
            assert planner.measure(work).peak_bytes == plan.predicted_peak_bytes
            planned = [work.step() for _ in range(2)]
            model.eval()
            with torch.no_grad():
                assert model(**work.inputs).past_key_values is not None
            model.train()
    assert model.config.use_cache is True
    unplanned = step_of(made(kind))
    assert [unplanned.step() for _ in range(2)] == planned


@pytest.mark.parametrize("when", ["profiled", "applied"])
def test_checkpointing_of_the_model_s_own_is_refused(when: str) -> None:
    model = made("Llama")
    model.config.use_cache = False
    plan = planner.solve(planner.profile(step_of(model), menus=False), "100%") if when == "applied" else None
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"call model.gradient_checkpointing_disable\(\)"):
        planner.profile(step_of(model)) if plan is None else planner.apply(model, plan)
    model.gradient_checkpointing_disable()
    planner.profile(step_of(model), menus=False) if plan is None else planner.apply(model, plan)


def switched(module: nn.Module, off: str) -> nn.Module:
    """A model whose switch of its own checkpointing is on, and which is turned off by a method of that name."""
    setattr(module, off, lambda *_: None)
    vars(module)["gradient_checkpointing" if "gradient" in off else "grad_checkpointing"] = True
    return module


@pytest.mark.parametrize(
    ("wrapped", "named"),
    [
        (checkpoint_wrapper, "CheckpointWrapper is around '0'"),
        (offload_wrapper, "OffloadWrapper is around '0'"),
        (lambda block: switched(block, "set_grad_checkpointing"), r"call model.set_grad_checkpointing\(False\)"),
    ],
)
def test_blocks_that_are_checkpointed_or_offloaded_already_are_refused(
    wrapped: Callable[[nn.Module], nn.Module], named: str
) -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    work = planner.Workload(nn.Sequential(wrapped(block), nn.Linear(8, 8)), torch.randn(4, 8), loss=Tensor.mean)
    with pytest.raises(ValueError, match=named):
        planner.profile(work, menus=False)


def test_what_turns_checkpointing_off_in_diffusers_is_named() -> None:
    model = switched(nn.Sequential(nn.Linear(8, 8)), "disable_gradient_checkpointing")
    work = planner.Workload(model, torch.randn(4, 8), loss=Tensor.mean)
    with pytest.raises(ValueError, match=r"call model.disable_gradient_checkpointing\(\)"):
        planner.profile(work, menus=False)


def test_smaller_batches_are_named_once_and_larger_ones_each() -> None:
    model = made("GPT2")
    model.config.use_cache = False
    profile = planner.profile(step_of(model), menus=False)
    for plan in (planner.solve(profile, "100%"), planner.solve(profile, profile.unplanned_peak_bytes // 2)):
        with warnings.catch_warnings(record=True) as caught, planner.apply(model, plan):
            warnings.simplefilter("always")
            for batch in (4, 3, 2, 3, 6, 4, 8, 6):
                step_of(model, batch).step()
        said = [str(warning.message) for warning in caught]
        assert len(said) == 3
        assert "a batch of shapes [(3, 32), (3, 32)] is smaller than the profiled one of [(4, 32), (4, 32)]" in said[0]
        assert "needs less memory" in said[0]
        assert ["(6, 32)" in said[1], "(8, 32)" in said[2]] == [True, True]
