"""What is known of an op without running it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from profiler.recomputation.op_schema import traits_of, why_not_rerunnable

aten = torch.ops.aten
X, Y = torch.ones(2), torch.zeros(2)


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "written"),
    [
        (aten.add.Tensor, (X, Y), {}, []),
        (aten.add_.Tensor, (X, Y), {}, [X]),
        (aten.add.out, (X, Y), {"out": Y}, [Y]),
        (aten._foreach_add_.List, ([X, Y], [Y, X]), {}, [X, Y]),
        (aten.batch_norm_update_stats.default, (X, Y, Y, 0.1), {}, []),  # Statistics are told apart.
        (aten.rrelu_with_noise.default, (X, Y), {}, [Y]),
        (aten.view.default, (X, [2]), {}, []),
    ],
)
def test_what_a_call_changes(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Any]) -> None:
    traits = traits_of(op)
    assert [id(tensor) for tensor in traits.writes(args, kwargs)] == [id(tensor) for tensor in written]
    assert bool(traits.written) == bool(written)


@pytest.mark.parametrize(
    ("trait", "those", "others"),
    [
        ("random", [aten.bernoulli_.float, aten.native_dropout.default, aten.randn.default], [aten.mul.Tensor]),
        ("shape_only", [aten.rand_like.default, aten.new_zeros.default, aten.empty_like.default], [aten.clone.default]),
        ("blank", [aten.empty.memory_format, aten.new_empty.default], [aten.zeros.default, aten.zeros_like.default]),
        ("fills", [aten.copy_.default, aten.normal_.default, aten.mul.out], [aten.mul_.Tensor, aten.relu_.default]),
        (
            "aliases",
            [aten.view.default, aten.relu_.default, aten.split.Tensor],
            [aten.relu.default, aten.clone.default],
        ),
    ],
)
def test_traits(trait: str, those: list[Any], others: list[Any]) -> None:
    assert [getattr(traits_of(op), trait) for op in those] == [True] * len(those)
    assert [getattr(traits_of(op), trait) for op in others] == [False] * len(others)


def test_results_that_attention_may_leave_unwritten() -> None:
    flash, efficient = aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention
    assert traits_of(flash.default).unwritten == (6, 7)
    assert traits_of(efficient.default).unwritten == (2, 3)
    assert traits_of(aten._scaled_dot_product_flash_attention_for_cpu.default).unwritten == ()


def test_running_statistics_are_renewed_in_training_alone() -> None:
    given = (torch.ones(4, 2), X, Y, torch.zeros(2), torch.ones(2))
    norm = traits_of(aten.native_batch_norm.default)
    assert norm.statistics == (3, 4) and not norm.written
    assert norm.renews_statistics((*given, True, 0.1, 1e-5))
    assert not norm.renews_statistics((*given, False, 0.1, 1e-5))
    assert not norm.renews_statistics(given)
    assert traits_of(aten._native_batch_norm_legit_functional.default).statistics == ()
    assert not traits_of(aten.native_layer_norm.default).renews_statistics((X, [2], X, Y, 1e-5))
    # One that has no argument of that kind always renews them.
    assert traits_of(aten.batch_norm_update_stats.default).renews_statistics((X, Y, Y, 0.1))


def test_why_a_call_must_not_run_again() -> None:
    plain = traits_of(aten.randn.generator)
    assert why_not_rerunnable(plain, ([2],), {}) == ""
    assert "generator of its own" in why_not_rerunnable(plain, ([2],), {"generator": torch.Generator()})
    lstm = traits_of(aten._cudnn_rnn.default)
    assert lstm.state == 15
    without = [X] * 15
    assert why_not_rerunnable(lstm, (*without, None), {}) == ""
    assert "a state of its own" in why_not_rerunnable(lstm, (*without, Y), {})
    assert why_not_rerunnable(traits_of(torch.ops._c10d_functional.all_reduce.default), (X, "sum", ""), {}).startswith(
        "it communicates"
    )


def test_what_is_no_plain_op_must_not_run_again() -> None:
    traits = traits_of(torch.ops.higher_order.cond)
    assert traits.not_rerunnable_reason == "it is no plain op" and not traits.written
    assert traits.writes((X,), {}) == [] and not traits.renews_statistics((X,))


def test_an_op_that_communicates_changes_all_its_tensors() -> None:
    if not torch.distributed.is_available():
        pytest.skip("torch is built without distributed")
    traits = traits_of(torch.ops.c10d.allreduce_.default)
    assert traits.not_rerunnable_reason == "it communicates with other processes"
    assert [id(tensor) for tensor in traits.writes(([X, Y], None, None, None, True), {})] == [id(X), id(Y)]
