"""The tape runs what backward asks for again: those ops alone, in order, once, and lets go of what nothing needs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor

from profiler.recomputation.op_schema import traits_of
from tests.support.op_cases.calls import ONE, Call, assert_exact
from tests.support.op_cases.registry import ROWS, WIDTH, Pair
from tests.support.op_cases.runs import total


def chain(s: Pair, x: Tensor) -> Tensor:
    """Only the result of the last op is saved."""
    return (x * 2 + 1).neg().exp()


def test_a_chain_runs_again_in_order_and_lets_go_of_each_link() -> None:
    call = Call(chain, ["mul", "add", "neg", "exp"])
    assert call.alive == ONE  # The output.
    loss = total(call.output)
    del call.output
    assert call.backward(loss) == ["mul", "add", "neg", "exp"]
    first, *others = call.observer.alive_bytes
    assert [alive - first for alive in others] == [ONE, ONE, ONE]


def test_what_is_kept_does_not_run_again() -> None:
    assert Call(chain, ["neg", "exp"]).backward() == ["neg", "exp"]
    assert Call(chain, ["exp"]).backward() == ["exp"]


def test_what_comes_after_the_last_saved_tensor_is_not_needed() -> None:
    def body(s: Pair, x: Tensor) -> Tensor:
        return (x.exp() * 2 + 1).neg()

    assert Call(body, ["exp", "mul", "add", "neg"]).backward() == ["exp"]


def two_readers(s: Pair, x: Tensor) -> Any:
    y = x * 2
    return y.exp(), y.sigmoid()


def test_an_op_runs_again_once_for_all_its_readers() -> None:
    """The last op goes backward first; what it read stays for the other one, and no longer."""
    call = Call(two_readers, ["mul", "exp", "sigmoid"])
    bytes_before = call.alive
    assert bytes_before == 2 * ONE
    assert call.backward() == ["mul", "sigmoid", "exp"]
    assert_exact(two_readers, ["mul", "exp", "sigmoid"])


def test_what_was_made_again_goes_when_its_last_reader_has_run_though_the_tape_lives_on() -> None:
    """After its backward, the second exp's links are gone while the first one still waits."""

    def body(s: Pair, x: Tensor) -> Any:
        first = x.exp()
        return (first.detach() * 2 + x).exp() + first

    call = Call(body, ["exp", "mul", "add"])
    loss = total(call.output)
    del call.output
    assert call.backward(loss) == ["exp", "mul", "add", "exp"]
    first, second, third, fourth = call.observer.alive_bytes
    # Each time there is what was asked for, and what the next op reads: first, then its double, then the sum.
    assert [second - first, third - second, fourth - third] == [ONE, ONE, 0]


def overwritten(s: Pair, x: Tensor) -> Any:
    y = x * 2
    z = y.exp()
    return z, y.relu_()


def test_who_reads_a_version_runs_before_it_is_overwritten() -> None:
    """Backward asks for the changed tensor first; the reader of what was there before must not come too late."""
    assert Call(overwritten, ["mul", "exp", "relu_"]).backward() == ["mul", "exp", "relu_"]
    assert_exact(overwritten, ["mul", "exp", "relu_"])


def test_a_tensor_changed_by_an_op_that_is_not_chosen_is_kept_as_it_is_then() -> None:
    assert Call(overwritten, ["mul", "exp"]).backward() == ["mul", "exp"]
    assert_exact(overwritten, ["mul", "exp"])


def test_every_change_is_made_again_before_the_tensor_is_handed_out() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        y = x * 2
        y.add_(1).neg_().sigmoid_()
        return y * 3

    assert Call(body, ["mul", "add_", "neg_", "sigmoid_"]).backward()[:4] == ["mul", "add_", "neg_", "sigmoid_"]
    assert_exact(body, ["mul", "add_", "neg_", "sigmoid_"])


def test_a_change_by_an_op_that_is_kept_is_not_made_twice() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        y = torch.zeros(ROWS, WIDTH)
        y.copy_(x)
        y.add_(1)
        return y.sigmoid_().mul(2)

    for kinds in (["zeros", "copy_", "add_", "sigmoid_"], ["zeros", "copy_", "add_"], ["add_"], ["sigmoid_"]):
        assert_exact(body, kinds)


def test_views_are_taken_again_of_what_was_made_again() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        y = x * 2
        return y[:, :8] @ y[:, 8:].t()

    assert Call(body, ["mul"]).backward() == ["mul"]
    assert_exact(body, ["mul"])


def test_an_op_that_takes_the_shape_alone_holds_nothing_and_waits_for_nothing() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        return x * torch.rand_like(x.detach() * 2)

    call = Call(body, ["rand_like"])
    assert call.alive == ONE  # The output; neither what was drawn nor the tensor whose shape it took.
    assert call.backward() == ["rand_like"]
    assert_exact(body, ["rand_like"])


def test_what_is_drawn_again_is_what_was_drawn_and_draws_nothing_more() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        return x * torch.rand_like(x), x * torch.randn(ROWS, WIDTH)

    call = Call(body, ["rand_like", "randn"])
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert sorted(call.backward()) == ["rand_like", "randn"]
    assert torch.equal(torch.get_rng_state(), state)
    assert_exact(body, ["rand_like", "randn"])


def test_a_second_backward_finds_what_the_first_one_made() -> None:
    call = Call(two_readers, ["mul", "exp", "sigmoid"])
    loss = total(call.output)
    assert call.backward(loss, retain_graph=True) == ["mul", "sigmoid", "exp"]
    assert call.input.grad is not None
    first = call.input.grad.clone()
    assert call.backward(loss) == []
    assert torch.equal(call.input.grad, first + first)


def test_a_part_of_the_graph_asks_for_its_own_ops_alone() -> None:
    call = Call(two_readers, ["mul", "exp", "sigmoid"])
    assert call.backward(total(call.output[0]), retain_graph=True) == ["mul", "exp"]
    assert call.backward(total(call.output[1])) == ["sigmoid"]


def test_the_address_of_a_storage_that_is_gone_says_nothing() -> None:
    """What an op on the tape made is let go at once, and the next storage is likely to lie there."""

    def body(s: Pair, x: Tensor) -> Any:
        found = torch.zeros(())
        for _ in range(4):
            x.detach().neg().sum()
            found = found + (x * 3).sigmoid().sum()
        return found

    assert_exact(body, ["neg"])
    assert_exact(body, ["neg", "mul"])


def test_without_a_backward_nothing_stays_not_even_what_the_ops_read() -> None:
    seen: list[weakref.ref[Any]] = []

    def body(s: Pair, x: Tensor) -> Any:
        read = s.a.weight.detach()[:ROWS].neg()
        seen.append(weakref.ref(read.untyped_storage()))
        return (x + read).exp()

    gc.disable()
    try:
        call = Call(body, ["add", "exp"])
        assert seen[-1]() is not None
        del call
        assert seen[-1]() is None
    finally:
        gc.enable()


def test_a_saved_tensor_that_nobody_reads_goes_with_its_node() -> None:
    """And so does what its op read from outside, though the tape still has another one to make."""

    def body(s: Pair, x: Tensor) -> Any:
        read = s.a.weight.detach()[:ROWS].neg()
        return (x * 2).exp() + (x * 3 - read).exp()

    call = Call(body, ["mul", "sub", "exp"])
    loss = call.output.sum()
    del call.output
    assert call.backward(loss) == ["mul", "sub", "exp", "mul", "exp"]
    first, _, _, later, _ = call.observer.alive_bytes
    # In between, the second exponential has come and gone and left a gradient; the negated weight is gone as well.
    assert later - first == ONE - ONE


def test_a_version_is_made_without_those_who_read_it_afterwards() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        y = x * 2
        y.sigmoid_()
        return y, y.exp()

    call = Call(body, ["mul", "sigmoid_", "exp"])
    assert call.backward(total(call.output[0]), retain_graph=True) == ["mul", "sigmoid_"]
    assert call.backward(total(call.output[1])) == ["exp"]


def test_pieces_of_one_storage_are_changed_after_all_have_read_it() -> None:
    """By their schema, the pieces are tensors of their own."""

    def body(s: Pair, x: Tensor) -> Any:
        y = x * 2
        z = y.exp()
        return z, torch.unsafe_chunk(y, 4, 1)[0].sigmoid_()

    assert_exact(body, ["mul", "exp", "unsafe_split", "sigmoid_"])
    assert_exact(body, ["mul", "exp", "sigmoid_"])


def unseen(y: Tensor) -> None:
    """Change a tensor by no op, as a kernel of one's own does."""
    y.detach().numpy()[:] = 0.25
    torch.autograd.graph.increment_version(y)


def test_what_was_changed_by_no_op_is_kept() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        y = x * 2
        with torch.no_grad():
            unseen(y)
        return y * y, y.exp()

    assert_exact(body, ["mul"])
    assert_exact(body, ["mul", "exp"])


def test_what_an_op_changes_that_is_not_chosen_is_what_backward_gets() -> None:
    """Through ``.data``, so that autograd does not complain: it takes what is there then."""

    def body(s: Pair, x: Tensor) -> Any:
        z = x.sigmoid()
        z.data.mul_(0.5)
        return z * 2

    assert_exact(body, ["sigmoid"])


@torch.library.custom_op("tape::counted", mutates_args=("count",))
def counted(x: Tensor, count: Tensor) -> Tensor:
    """The tensor times how often this was called."""
    count += 1
    return x * count


def test_an_op_that_changes_what_is_kept_does_not_run_again() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        count = torch.zeros(())
        return (x * counted(x.detach(), count)).exp() * count

    assert_exact(body, ["counted"])
    assert_exact(body, ["counted", "mul", "exp"])
    assert_exact(body, ["counted", "zeros"])  # Not kept, but made again.


def test_a_kept_result_does_not_keep_its_own_graph_alive() -> None:
    gc.disable()
    try:
        call = Call(two_readers, ["sigmoid"])
        del call.output
        assert call.alive == 0
    finally:
        gc.enable()


def laid_out(s: Pair, x: Tensor) -> Tensor:
    """As cuDNN's weights are under autocast: tensors made over the storage of a buffer, and copied into."""
    buffer = x.new_empty(2 * WIDTH)
    empty: Any = x.new_empty(0)  # The description of set_ knows no storage.
    scales = [empty.clone().set_(buffer.untyped_storage(), k * WIDTH, (WIDTH,)) for k in range(2)]
    for k, scale in enumerate(scales):
        scale.copy_(s.a.weight.detach()[k])
    return x * buffer[:WIDTH] * buffer[WIDTH:]


def test_what_lies_over_the_storage_of_another_tensor_is_made_again_with_it() -> None:
    assert "storage" in traits_of(torch.ops.aten.set_.source_Storage_storage_offset).not_rerunnable_reason
    assert_exact(laid_out, ["new_empty", "copy_", "mul"])
