"""The tape runs what backward asks for again: those ops alone, in order, once, and lets go of what nothing needs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.rerun import RUNNING_AGAIN, RerunError
from profiler.selective import Selection, SelectiveCall
from profiler.stage_ops import kind_of
from tests.op_cases.observed import Observer
from tests.op_cases.registry import ROWS, WIDTH, Case, Pair, of_pair
from tests.op_cases.runs import differences, flow_of, inner, run, total

ONE = ROWS * WIDTH * 4
Body = Callable[[Pair, Tensor], Any]


def selected(made: Case, kinds: Collection[str]) -> Selection:
    """That by which all ops of these kinds run again."""
    flow = flow_of(made)
    return Selection.of(flow, {k for k, op in enumerate(flow.ops) if op.kind in kinds})


class Call:
    """One forward with ops of some kinds to run again, and a look at what its backward does."""

    def __init__(self, body: Body, kinds: Collection[str]) -> None:
        made = of_pair(body)
        selection = selected(made, kinds)
        self.stage, inputs = made.make()
        given = inner(inputs)
        self.input = inputs[0]
        self.observer = Observer([*self.stage.parameters(), *inputs, *given])
        with self.observer:
            self.output = SelectiveCall(self.stage, selection).run(self.stage.forward, given, {})

    def backward(self, loss: Tensor | None = None, **settings: Any) -> list[str]:
        """Kinds of the ops that ran again, in order."""
        before = len(self.observer.again)
        loss = total(self.output) if loss is None else loss
        with self.observer:
            loss.backward(**settings)
        return [kind_of(op) for op in self.observer.again[before:]]

    @property
    def alive(self) -> int:
        """Bytes that ops have made and that are alive."""
        return sum(size * count for size, count in self.observer.alive().items())


def exact(body: Body, kinds: Collection[str]) -> None:
    made = of_pair(body)
    plain, _ = run(made, None)
    found, call = run(made, selected(made, kinds))
    assert differences(plain, found) == []
    assert call is not None and call.diverged is None


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
    exact(two_readers, ["mul", "exp", "sigmoid"])


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
    exact(overwritten, ["mul", "exp", "relu_"])


def test_a_tensor_changed_by_an_op_that_is_not_chosen_is_kept_as_it_is_then() -> None:
    assert Call(overwritten, ["mul", "exp"]).backward() == ["mul", "exp"]
    exact(overwritten, ["mul", "exp"])


def test_every_change_is_made_again_before_the_tensor_is_handed_out() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        y = x * 2
        y.add_(1).neg_().sigmoid_()
        return y * 3

    assert Call(body, ["mul", "add_", "neg_", "sigmoid_"]).backward()[:4] == ["mul", "add_", "neg_", "sigmoid_"]
    exact(body, ["mul", "add_", "neg_", "sigmoid_"])


def test_a_change_by_an_op_that_is_kept_is_not_made_twice() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        y = torch.zeros(ROWS, WIDTH)
        y.copy_(x)
        y.add_(1)
        return y.sigmoid_().mul(2)

    for kinds in (["zeros", "copy_", "add_", "sigmoid_"], ["zeros", "copy_", "add_"], ["add_"], ["sigmoid_"]):
        exact(body, kinds)


def test_views_are_taken_again_of_what_was_made_again() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        y = x * 2
        return y[:, :8] @ y[:, 8:].t()

    assert Call(body, ["mul"]).backward() == ["mul"]
    exact(body, ["mul"])


def test_an_op_that_takes_the_shape_alone_holds_nothing_and_waits_for_nothing() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        return x * torch.rand_like(x.detach() * 2)

    call = Call(body, ["rand_like"])
    assert call.alive == ONE  # The output; neither what was drawn nor the tensor whose shape it took.
    assert call.backward() == ["rand_like"]
    exact(body, ["rand_like"])


def test_what_is_drawn_again_is_what_was_drawn_and_draws_nothing_more() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        return x * torch.rand_like(x), x * torch.randn(ROWS, WIDTH)

    call = Call(body, ["rand_like", "randn"])
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert sorted(call.backward()) == ["rand_like", "randn"]
    assert torch.equal(torch.get_rng_state(), state)
    exact(body, ["rand_like", "randn"])


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

    exact(body, ["neg"])
    exact(body, ["neg", "mul"])


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


def test_what_an_op_reads_again_must_not_have_changed() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        return (x + s.a.bias.detach()).exp()

    call = Call(body, ["add", "exp"])
    with torch.no_grad():
        call.stage.get_parameter("a.bias").add_(1)
    with pytest.raises(RerunError, match="changed in place since; change a copy"):
        call.backward()


def test_what_is_kept_must_not_have_changed_either() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        return (x * s.a.bias.detach()).exp()

    call = Call(body, ["exp"])
    with torch.no_grad():
        call.stage.get_parameter("a.bias").add_(1)
    with pytest.raises(RuntimeError, match=r"a tensor of shape \(16,\) is at version 2, expected version 1"):
        call.backward()


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

    exact(body, ["mul", "exp", "unsafe_split", "sigmoid_"])
    exact(body, ["mul", "exp", "sigmoid_"])


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

    exact(body, ["mul"])
    exact(body, ["mul", "exp"])


def test_what_an_op_changes_that_is_not_chosen_is_what_backward_gets() -> None:
    """Through ``.data``, so that autograd does not complain: it takes what is there then."""

    def body(s: Pair, x: Tensor) -> Any:
        z = x.sigmoid()
        z.data.mul_(0.5)
        return z * 2

    exact(body, ["sigmoid"])


@torch.library.custom_op("tape::counted", mutates_args=("count",))
def counted(x: Tensor, count: Tensor) -> Tensor:
    """The tensor times how often this was called."""
    count += 1
    return x * count


def test_an_op_that_changes_what_is_kept_does_not_run_again() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        count = torch.zeros(())
        return (x * counted(x.detach(), count)).exp() * count

    exact(body, ["counted"])
    exact(body, ["counted", "mul", "exp"])
    exact(body, ["counted", "zeros"])  # Not kept, but made again.


def test_a_backward_inside_takes_what_is_still_there() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        y = x.exp()
        (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y * slope

    call = Call(body, ["exp"])
    assert call.observer.again == []
    assert call.backward() == []
    exact(body, ["exp"])


def test_what_a_backward_inside_has_made_again_is_recorded_no_further() -> None:
    """The double is there all the time; it has been made again for its exponential, which was gone."""

    def body(s: Pair, x: Tensor) -> Any:
        y = x * 2
        total = y.exp().sum()
        (slope,) = torch.autograd.grad(total, x, retain_graph=True)
        return (y + slope).exp()

    exact(body, ["mul", "exp", "add"])


def test_autocast_around_backward_does_not_reach_what_runs_again() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        return (x @ s.a.weight.detach()).exp() * 2

    gradients = []
    for kinds in ((), ("mm", "exp")):
        call = Call(body, kinds)
        with torch.autocast("cpu", torch.bfloat16):
            assert call.backward() == list(kinds)
        gradients.append(call.input.grad)
    assert torch.equal(*gradients)


def test_a_parameter_given_other_data_is_read_as_autograd_reads_it() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        return (x * s.a.bias).exp() * 2

    gradients = []
    for kinds in ((), ("exp",)):
        call = Call(body, kinds)
        call.stage.get_parameter("a.bias").data = torch.full((WIDTH,), 3.0)
        call.backward()
        gradients.append(call.input.grad)
    assert torch.equal(*gradients)


def test_a_kept_result_does_not_keep_its_own_graph_alive() -> None:
    gc.disable()
    try:
        call = Call(two_readers, ["sigmoid"])
        del call.output
        assert call.alive == 0
    finally:
        gc.enable()


def surroundings() -> list[Any]:
    """What an exception must not leave otherwise."""
    return [
        torch._C._len_torch_dispatch_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),  # type: ignore[attr-defined]
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        RUNNING_AGAIN.get(),
        torch.get_rng_state().tolist(),
    ]


class Broken(TorchDispatchMode):
    """An op that fails when it runs again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if RUNNING_AGAIN.get() and "bernoulli" in str(func):
            raise MemoryError("no room")
        return func(*args, **(kwargs or {}))


def test_an_op_that_fails_in_backward_leaves_nothing_behind() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        with torch.no_grad():
            mask = torch.bernoulli(torch.full((ROWS, WIDTH), 0.5))
        return (x * mask).exp()

    call = Call(body, ["full", "bernoulli", "mul", "exp"])
    loss = total(call.output)
    del call.output
    torch.rand(3)
    before = surroundings()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(MemoryError, match="no room"), Broken():
        loss.backward()
    assert surroundings() == before
    gc.collect()
    del loss
    assert call.alive == 0
