"""What is known of an op without running it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from profiler.recomputation.op_schema import overload_of, traits_of

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
        ("fills", [aten.copy_.default, aten.normal_.default, aten.mul.out], [aten.mul_.Tensor, aten.relu_.default]),
        ("casts", [aten.affine_grid_generator.default, aten._trilinear.default], [aten.bilinear.default]),
    ],
)
def test_traits(trait: str, those: list[Any], others: list[Any]) -> None:
    assert [getattr(traits_of(op), trait) for op in those] == [True] * len(those)
    assert [getattr(traits_of(op), trait) for op in others] == [False] * len(others)


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


def test_of_what_is_no_plain_op_nothing_is_known() -> None:
    traits = traits_of(torch.ops.higher_order.cond)
    assert traits == type(traits)()
    assert traits.writes((X,), {}) == [] and not traits.renews_statistics((X,))


def test_an_op_that_communicates_changes_all_its_tensors() -> None:
    if not torch.distributed.is_available():
        pytest.skip("torch is built without distributed")
    traits = traits_of(torch.ops.c10d.allreduce_.default)
    assert [id(tensor) for tensor in traits.writes(([X, Y], None, None, None, True), {})] == [id(X), id(Y)]


def test_an_op_is_found_by_its_name_where_there_is_one() -> None:
    assert overload_of("aten.mm.default") is aten.mm.default
    assert overload_of("aten.no_such_op.default") is None and overload_of("no_library_here.mm.default") is None
