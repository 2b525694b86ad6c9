"""Random tensors are followed to where Python reads them, and read as other numbers there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from profiler.trace.drawn_values import DrawnValues, Number, read_instead

BIG, SMALL = 0.999, 0.001
ALMOST_ONE = 1.0 - 2.0**-24


def choices_of(run: Callable[[], Any]) -> list[tuple[Number, ...]]:
    following = DrawnValues({})
    with following.following():
        run()
    return list(following.choices.values())


@pytest.mark.parametrize(
    ("read", "choices"),
    [
        (lambda: bool(torch.rand(()) < 0.3), (False, True)),
        (lambda: torch.rand(1).item(), (0.0, 0.5, ALMOST_ONE)),
        (lambda: float(torch.empty(()).uniform_()), (0.0, 0.5, ALMOST_ONE)),
        (lambda: bool(torch.bernoulli(torch.full((), 0.3))), (False, True)),
        (lambda: int(torch.randint(2, 6, ())), (2, 3, 4, 5)),
        (lambda: torch.randint(100, (1,)).item(), (0, 99)),
        (lambda: list(range(torch.empty((), dtype=torch.long).random_(3, 5))), (3, 4)),
        (lambda: (torch.rand(5) < 0.5).tolist(), (False, True)),
        (lambda: [bool(kept) for kept in torch.rand(5) < 0.5], (False, True)),
        (lambda: (torch.rand(4) < 0.5).any().item(), (False, True)),
    ],
)
def test_what_may_be_read_of_a_draw(read: Callable[[], Any], choices: tuple[Number, ...]) -> None:
    assert choices_of(read) == [choices]


def test_what_is_computed_of_data_is_no_draw() -> None:
    data, weight = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    x = torch.nn.functional.dropout(data @ weight, 0.5)
    assert choices_of(lambda: (x.mean().item(), bool((data > 0).any()), (x * torch.rand(8)).sum().item())) == []


def test_numbers_are_read_instead_at_their_place_only_and_drawn_all_the_same() -> None:
    def here() -> float:
        return torch.rand(()).item()

    def there() -> bool:
        return bool(torch.rand(()) < 0.5)

    following = DrawnValues({})
    with following.following():
        here()
    (place,) = following.choices
    torch.manual_seed(0)
    plain = [here(), there(), here()]
    after = torch.get_rng_state()
    torch.manual_seed(0)
    with read_instead({place: 0.25}):
        assert [here(), there(), here()] == [0.25, plain[1], 0.25]
    assert torch.equal(torch.get_rng_state(), after)


def test_tensors_read_as_before_afterwards_also_after_an_exception() -> None:
    before = dict(vars(Tensor))
    with pytest.raises(ZeroDivisionError), read_instead({("nowhere", 1, 0): 0.0}):
        assert dict(vars(Tensor)) != before
        raise ZeroDivisionError
    assert dict(vars(Tensor)) == before
    assert torch.tensor(3).item() == 3
