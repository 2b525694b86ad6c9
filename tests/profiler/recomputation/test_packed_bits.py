"""Zeros and ones are held as bits, come back bit for bit where they were, and what cannot be so is kept as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.outside_meter import live_tensor_bytes
from profiler.op_graph import Choice, ChoiceError, StageOp, StageOps, StageStorage
from profiler.recomputation import packed_bits
from profiler.recomputation.packed_bits import PackedBits, is_packable
from tests.support.op_cases.calls import ONE, Call, assert_exact
from tests.support.op_cases.registry import ROWS, WIDTH, Pair

SHAPES = [(1,), (7,), (8,), (9,), (3, 5), (64, 33), (2, 3, 5, 7), (2**18 + 11,)]
DTYPES = [torch.bool, torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_come_back_bit_for_bit_from_an_eighth_of_a_byte_each(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensor = (torch.rand(shape) < 0.3).to(dtype)
        packed = PackedBits(tensor)
        assert packed.held_bytes == tensor.numel() // 8 + tensor.numel() % 8 * tensor.element_size()
        again = packed.unpacked()
        assert again.dtype is dtype and torch.equal(again, tensor)
        target = torch.full_like(tensor, 1)
        assert packed.unpack_into(target) is target and torch.equal(target, tensor)


def test_every_byte_of_eight_values() -> None:
    every = torch.tensor([[byte >> bit & 1 for bit in range(8)] for byte in range(256)]).bool()
    assert torch.equal(PackedBits(every).unpacked(), every)


def test_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_bits, "_CPU_VALUES", 16)
    tensor = torch.rand(100) < 0.5
    assert torch.equal(PackedBits(tensor).unpacked(), tensor)


def test_it_lies_as_it_did() -> None:
    for tensor in (torch.rand(2, 5, 3, 4).to(memory_format=torch.channels_last) < 0.5, (torch.rand(6, 4) < 0.5).t()):
        again = PackedBits(tensor).unpacked()
        assert again.stride() == tensor.stride() and torch.equal(again, tensor)


def test_a_part_of_a_storage_and_what_is_no_plain_tensor_is_not_packed() -> None:
    whole = torch.rand(4, 6) < 0.5
    assert is_packable(whole) and is_packable(whole.t())
    assert not any(map(is_packable, (whole[1:], whole[:, :2], whole[:1].expand(4, 6), whole[:0], 3, None)))
    assert not is_packable(torch.eye(3).to_sparse())


def test_nothing_stays_behind() -> None:
    packed = PackedBits(torch.rand(3, 5) < 0.5)
    before_bytes = live_tensor_bytes()
    assert torch.equal(packed.unpacked(), packed.unpacked())
    assert live_tensor_bytes() == before_bytes


# In a stage


def dropped_out(s: Pair, x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x * 2, 0.4, True).exp()


def test_a_dropout_draws_nothing_again() -> None:
    """``mul`` is the dropout's own: the mask is saved by it, in a tensor of floats."""
    call = Call(dropped_out, ["empty_like", "div_", "exp"], ["bernoulli_"])
    assert call.alive == 2 * ONE + ONE // 32  # The output, what exp reads, and a bit for each float.
    assert "bernoulli_" not in call.backward()
    assert_exact(dropped_out, ["empty_like", "div_"], ["bernoulli_"])
    assert_exact(dropped_out, ["empty_like", "div_", "mul", "exp"], ["bernoulli_"])


def chosen(s: Pair, x: Tensor) -> Tensor:
    return torch.where((x * 3).sin() > 0.1, x.exp(), x * 2)


def test_what_a_comparison_reads_is_not_needed_again() -> None:
    call = Call(chosen, [], ["gt"])
    again = call.backward()
    assert "sin" not in again and "gt" not in again and "mul" not in again
    assert_exact(chosen, [], ["gt"])
    assert_exact(chosen, ["mul", "sin", "exp"], ["gt"])


def changed_later(s: Pair, x: Tensor) -> Tensor:
    mask = x > 0
    y = torch.where(mask, x.exp(), x)
    return y + x.masked_fill(mask.clone().logical_not_(), 2.0).sin()


def test_what_is_changed_in_place_is_exact_whoever_changes_it() -> None:
    for kinds in ([], ["clone"], ["clone", "exp", "sin"]):
        for packed in (["gt"], ["logical_not_"], ["gt", "logical_not_"]):
            assert_exact(changed_later, kinds, packed)


def of_its_own_generator(s: Pair, x: Tensor) -> Tensor:
    draws = torch.empty(ROWS, WIDTH).bernoulli_(0.5, generator=torch.Generator().manual_seed(3))
    return (x * draws).sin()


def test_draws_that_must_not_be_repeated_may_be_packed() -> None:
    assert_exact(of_its_own_generator, ["empty", "mul"], ["bernoulli_"])


# What is to run again


def small_flow() -> StageOps:
    """A storage from outside, a comparison that must not run twice, and what reads its result."""
    ops = (
        StageOp(op="aten.mul.Tensor", module="", seconds=1.0, reads=((0, 0),), allocates=(1,)),
        StageOp(
            op="aten.gt.Scalar",
            module="",
            seconds=1.0,
            reads=((1, 0),),
            allocates=(2,),
            not_rerunnable_reason="no",
        ),
        StageOp(op="aten.where.self", module="", seconds=1.0, reads=((2, 0), (0, 0)), allocates=(3,)),
    )
    storages = (
        StageStorage(op=-1, saved=True, always_live=True, size_bytes=64),
        StageStorage(op=0, size_bytes=64),
        StageStorage(op=1, saved=True, size_bytes=64),
        StageStorage(op=2, returned=True, size_bytes=64),
    )
    return StageOps(ops=ops, storages=storages)


def test_a_packed_op_ends_what_has_to_run_again() -> None:
    flow = small_flow()
    assert flow.packable() == {1}
    with pytest.raises(ChoiceError, match="must not"):
        Choice.of(flow, ())
    choice = Choice.of(flow, (), packable=flow.packable())
    assert choice.again == ({1}, {1}) and "1 as bits" in choice.name
    assert flow.held_for(*choice.again) == {} and flow.held_for(choice.rerun) == {1: {1}}
