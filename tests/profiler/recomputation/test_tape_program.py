"""A tape that is recorded as one before goes by what that one prepared, and by nothing that is otherwise now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from profiler.recomputation import op_tape, selective_call
from profiler.recomputation.selective_call import SelectiveCall
from profiler.recomputation.tape_program import ArgumentForm
from tests.support.op_cases.calls import selected
from tests.support.op_cases.registry import ROWS, WIDTH, Pair, of_pair
from tests.support.op_cases.runs import differences, inner, run


@torch.library.custom_op("tape_program::twice_or_thrice", mutates_args=())
def twice_or_thrice(x: Tensor) -> Tensor:
    """A kernel that does more where gradients are on."""
    return x * (3 if torch.is_grad_enabled() else 2)


@twice_or_thrice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


Variant = Callable[[Pair, Tensor, int], Any]


def scale(s: Pair, x: Tensor, variant: int) -> Any:
    return (x * (2.0, 3.0)[variant] + 1).exp()


def sign_of_zero(s: Pair, x: Tensor, variant: int) -> Any:
    return (x.abs() * (0.0, -0.0)[variant]).exp() + (1 / (x.abs() * (0.0, -0.0)[variant])).sign().sin().sin()


def kind_of_number(s: Pair, x: Tensor, variant: int) -> Any:
    return ((x * 4).round().to(torch.int32) * (2, 2.5)[variant]).float().exp() * x.sigmoid()


def part(s: Pair, x: Tensor, variant: int) -> Any:
    return (x * 2).exp().narrow(0, (0, 1)[variant], ROWS - 1).sin().sin()


def order(s: Pair, x: Tensor, variant: int) -> Any:
    y = (x * 2).exp()
    return y.reshape((ROWS * WIDTH, 1) if variant else (1, ROWS * WIDTH)).sin().sin().sum(0)


def part_by_another_way(s: Pair, x: Tensor, variant: int) -> Any:
    y = (x * 2).exp()
    return y[(slice(1, None), slice(None, -1))[variant]].sin().sin()


def which_is_read(s: Pair, x: Tensor, variant: int) -> Any:
    made = [x.exp(), x.sigmoid()]
    return (made[variant] * 2).sin().sin() + made[0] + made[1]


def inside_or_outside(s: Pair, x: Tensor, variant: int) -> Any:
    made = x.exp()
    return ((made, x)[variant] * 2).sin().sin() + made.sin().sin()


def bound(s: Pair, x: Tensor, variant: int) -> Any:
    y = x.exp()
    return (
        y.clamp(min=0.9, max=None if variant else 1.1).sin().sin()
        + y.clamp(max=1.0, min=(None, 0.5)[variant]).sin().sin()
    )


def optional(s: Pair, x: Tensor, variant: int) -> Any:
    y, low = x.exp(), x.sigmoid()
    return y.clamp(low if variant else None, y + 1).sin().sin() + low


def how_many(s: Pair, x: Tensor, variant: int) -> Any:
    y, z = x.exp(), x.sigmoid()
    return torch.cat([y, z] if variant else [z, y, x]).sin().sin()


def two_lists(s: Pair, x: Tensor, variant: int) -> Any:
    y, z = x.exp(), x.sigmoid()
    made = torch.stack([y, y, z] if variant else [z, y, z]).sin().sin()
    return torch._foreach_mul([y, z], [made[0], made[variant]])[0].sin().sin()


def version(s: Pair, x: Tensor, variant: int) -> Any:
    """What is changed in place is another tensor."""
    made = [x * 2, x + 1]
    made[variant].mul_(2)
    return made[0].sin().sin() + made[1].sin().sin()


def size_by_data(s: Pair, x: Tensor, variant: int) -> Any:
    y = x.exp()
    return y.masked_select(y > (1.0, 1.5)[variant]).sin().sin()


def by_name(s: Pair, x: Tensor, variant: int) -> Any:
    y = x.exp()
    return torch.add(y, x, alpha=(2, 3)[variant]).sin().sin()


def gradients(s: Pair, x: Tensor, variant: int) -> Any:
    with torch.set_grad_enabled(not variant):
        y = twice_or_thrice(x.detach().exp())
    return (y * x).sin().sin()


def drawn(s: Pair, x: Tensor, variant: int) -> Any:
    return torch.nn.functional.dropout(x.exp(), (0.5, 0.25)[variant]).sin().sin()


VARIANTS: Sequence[Variant] = (
    *(scale, sign_of_zero, kind_of_number, part, order, part_by_another_way, which_is_read, inside_or_outside, bound),
    optional,
    *(how_many, two_lists, version, size_by_data, by_name, gradients, drawn),
)
KINDS = (
    *("mul", "add", "exp", "sin", "sigmoid", "abs", "reciprocal", "sign", "round", "_to_copy", "clamp", "cat", "stack"),
    *("_foreach_mul", "mul_", "masked_select", "gt", "bernoulli_", "div_", "empty_like", "native_dropout", "slice"),
    *("view", "narrow", "_unsafe_view", "select", "twice_or_thrice", "tape_program::twice_or_thrice"),
)


@pytest.mark.parametrize("body", VARIANTS, ids=lambda body: body.__name__)
def test_what_is_otherwise_than_in_the_call_before_is_as_it_is_now(body: Variant) -> None:
    now = [0]
    made = of_pair(lambda s, x: body(s, x, now[0]))
    selection = selected(made, KINDS)
    assert selection.rerun
    again = 0
    for now[0] in (0, 0, 1, 1, 0, 1):
        plain, _ = run(made, None)
        found, call = run(made, selection)
        assert differences(plain, found) == [], now[0]
        again += call is not None and call.diverged is None
    assert again >= 3


@pytest.mark.parametrize("body", VARIANTS, ids=lambda body: body.__name__)
def test_as_much_is_held_for_ops_that_run_again_as_without_anything_prepared(body: Variant) -> None:
    now = [0]
    made = of_pair(lambda s, x: body(s, x, now[0]))
    selection = selected(made, KINDS)

    def held() -> list[tuple[int, torch.Size]]:
        stage, inputs = made.make()
        call = SelectiveCall(stage, selection)
        call.run(stage.forward, inner(inputs), {})
        return [(ordinal, recorded.tensor().shape) for ordinal, recorded in call.recorded_inputs()]

    for now[0] in (0, 1, 0, 1):
        torch.manual_seed(5)
        found = held()
        selective_call.prepared_for.cache_clear()
        torch.manual_seed(5)
        assert found == held()


def test_arguments_are_as_in_the_call_before_where_their_lists_are_as_long() -> None:
    one, two, three = torch.zeros(3, 1).unbind()
    form = ArgumentForm.of(([one, two], [three], [4, 5]), {"alpha": 6})
    assert form.flat(([one, two], [three], [4, 7]), {"alpha": 8}) == [one, two, three, [4, 7], 8]
    assert form.call([one, two, three, [4, 7], 8]) == ([[one, two], [three], [4, 7]], {"alpha": 8})
    assert form.flat(([one], [two, three], [4, 5]), {"alpha": 6}) is None
    assert form.flat(([one, two], [three], [4, one]), {"alpha": 6}) is None
    assert form.flat(([one, two], [three], 4), {"alpha": 6}) is None
    assert form.flat(([one, two], [three], [4, 5]), {"beta": 6}) is None
    assert form.flat(([one, two], [three], [4, 5], 6), {}) is None


def chain(s: Pair, x: Tensor) -> Any:
    y = (x * 2).add_(1)
    return torch.cat([(y * 2).sin(), x.sigmoid()]).sin()


def test_a_call_like_the_one_before_prepares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = of_pair(chain)
    selection = selected(made, ("add_", "mul", "sin", "sigmoid", "cat"))
    plain, _ = run(made, None)
    run(made, selection)
    prepared: list[Any] = []
    instruction = op_tape.Instruction
    monkeypatch.setattr(op_tape, "Instruction", lambda *args: prepared.append(args) or instruction(*args))
    found, _ = run(made, selection)
    assert differences(plain, found) == []
    assert prepared == []
