"""Losses of a head in pieces against the same losses of all rows at once, in double precision."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.recomputation.head_output import HeadOutput
from profiler.recomputation.heads import HeadInPieces

CLASSES, FEATURES, ROWS_AT_ONCE = 11, 6, 32
LOSSES = {}


def loss(function):
    LOSSES[function.__name__] = function
    return function


@loss
def of_flat_rows(logits, labels):
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), ignore_index=-100)


@loss
def smoothed_and_weighted(logits, labels):
    weight = torch.linspace(0.1, 2, CLASSES, dtype=torch.float64)
    return F.cross_entropy(logits.reshape(-1, CLASSES), labels.reshape(-1), weight=weight, label_smoothing=0.1)


@loss
def of_shifted_tokens(logits, labels):
    shifted, wanted = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return F.cross_entropy(shifted.view(-1, shifted.size(-1)), wanted.view(-1), reduction="sum") / 7


@loss
def of_some_rows(logits, labels):
    there = labels != -100
    return nn.CrossEntropyLoss()(logits[there], labels[there])


@loss
def of_each_row(logits, labels):
    return (F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none") * torch.arange(200)).sum()


@loss
def with_classes_second(logits, labels):
    return F.cross_entropy(logits.transpose(1, 2), labels)


@loss
def with_classes_second_of_each(logits, labels):
    return F.cross_entropy(logits.permute(0, 2, 1), labels, reduction="none").square().mean()


@loss
def capped(logits, labels):
    return F.cross_entropy((30 * torch.tanh(logits / 30)).view(-1, CLASSES), labels.view(-1))


@loss
def of_logarithms(logits, labels):
    return F.nll_loss(F.log_softmax(logits, dim=-1).view(-1, CLASSES), labels.view(-1))


@loss
def of_shares(logits, _):
    shares = torch.arange(200 * CLASSES, dtype=torch.float64).view(200, CLASSES).cos().softmax(-1)
    return F.cross_entropy(logits.view(-1, CLASSES), shares)


@loss
def added_up(logits, labels):
    return of_flat_rows(logits, labels) + 0.5 * of_shifted_tokens(logits, labels)


@loss
def without_any_label(logits, labels):
    return F.cross_entropy(logits.view(-1, CLASSES), torch.full_like(labels, -100).view(-1), reduction="sum")


class Adapted(nn.Module):
    """A frozen layer beside one of low rank that is trained."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, 2), nn.Linear(2, CLASSES)
        self.base.requires_grad_(False)

    def forward(self, rows):
        return self.base(rows) + 0.5 * self.up(self.down(rows))


HEADS = {
    "linear": lambda: nn.Linear(FEATURES, CLASSES),
    "without bias": lambda: nn.Linear(FEATURES, CLASSES, bias=False),
    "adapted": Adapted,
    "norm and linear": lambda: nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, CLASSES)),
    "frozen": lambda: nn.Linear(FEATURES, CLASSES).requires_grad_(False),
}


def results(make, function, *, in_pieces):
    """The loss, and gradients of the rows and the parameters."""
    torch.manual_seed(0)
    head, rows = make().double(), torch.randn(4, 50, FEATURES, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, CLASSES, (4, 50))
    labels[0, :7] = -100
    pieces = HeadInPieces(head, ROWS_AT_ONCE)
    run = pieces.wrapped(head.forward) if in_pieces else head.forward
    value = function(run(rows * 1.0), labels)
    value.backward()
    return pieces, [value.detach(), rows.grad, *(parameter.grad for parameter in head.parameters())]


@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("function", LOSSES.values(), ids=LOSSES)
def test_a_loss_in_pieces_has_the_value_and_gradients_of_the_loss_at_once(make, function):
    pieces, found = results(make, function, in_pieces=True)
    _, expected = results(make, function, in_pieces=False)
    assert (pieces.waited, pieces.made_whole) == (1, 0)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "function",
    [
        lambda logits, labels: logits.exp().sum(),
        lambda logits, labels: of_flat_rows(logits, labels) + logits.square().mean(),
        lambda logits, labels: F.mse_loss(logits, torch.ones_like(logits)),
        lambda logits, labels: logits[..., 2].sum() + logits.transpose(0, 1)[3].sum(),
        lambda logits, labels: torch.einsum("btc,btc->", logits, logits),
        lambda logits, labels: F.cross_entropy(logits, torch.ones(4, CLASSES, dtype=torch.long)),
    ],
)
def test_what_needs_all_of_it_gets_it_with_its_gradients(function):
    pieces, found = results(HEADS["linear"], function, in_pieces=True)
    _, expected = results(HEADS["linear"], function, in_pieces=False)
    assert pieces.made_whole == 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


class _Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.square()

    @staticmethod
    def backward(ctx, *gradients):
        return 2 * ctx.saved_tensors[0] * gradients[0]


def test_gradients_of_functions_that_python_does_not_see_go_through_the_head():
    def function(logits, _):
        return _Squares.apply(logits).sum()

    _, found = results(HEADS["linear"], function, in_pieces=True)
    _, expected = results(HEADS["linear"], function, in_pieces=False)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_no_more_than_one_piece_is_there_at_once():
    head, rows = nn.Linear(8, 1000), torch.randn(1024, 8, requires_grad=True)
    sizes = []

    def seen(rows):
        sizes.append(len(rows))
        return F.linear(rows, head.weight, head.bias)

    logits = HeadInPieces(head, 128).wrapped(seen)(rows)
    assert isinstance(logits, HeadOutput) and logits.shape == (1024, 1000)
    assert logits.untyped_storage().nbytes() == 0
    F.cross_entropy(logits, torch.zeros(1024, dtype=torch.long)).backward()
    assert sizes == [1, *[128] * 8]  # one row for the type of the output


def test_no_gradient_of_the_size_of_a_weight_is_made_for_each_piece():
    head, rows = nn.Linear(64, 500), torch.randn(1024, 64, requires_grad=True)
    made = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.shape == head.weight.shape and "addmm_" not in str(func):
                made.append(str(func))
            return result

    value = HeadInPieces(head, 128).wrapped(head.forward)(rows)
    with Sizes():
        F.cross_entropy(value, torch.zeros(1024, dtype=torch.long))
    assert made == ["aten.zeros_like.default"]


def test_a_step_holds_no_output_that_it_was_taken_of():
    """It would be held until backward, with all that it refers to."""
    head = nn.Linear(8, CLASSES)
    waiting = HeadInPieces(head, 4).wrapped(head.forward)(torch.randn(20, 8))
    before, scaled = weakref.ref(waiting), torch.tanh(waiting / 30)
    del waiting
    assert isinstance(scaled, HeadOutput) and before() is None
    assert (scaled.kind.classes, scaled.kind.dtype) == (CLASSES, torch.float32)


def test_a_change_in_place_is_refused_in_words():
    logits = HeadInPieces(nn.Linear(8, 9), 4).wrapped(nn.Linear(8, 9).forward)(torch.randn(16, 8))
    with pytest.raises(RuntimeError, match="changes the output of a head whose loss runs in pieces"):
        logits /= 2


def test_the_scale_of_a_loss_is_taken_from_the_step_before():
    head, rows = nn.Linear(8, 9).double(), torch.randn(16, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.arange(16) % 9
    came = []

    def noted(given):
        made = F.linear(given, head.weight, head.bias)
        if made.requires_grad:
            made.register_hook(lambda gradient: came.append(gradient.abs().sum().item()))
        return made

    run = HeadInPieces(head, 4).wrapped(noted)
    for scale in (65536.0, 65536.0, 32768.0):
        rows.grad = None
        (F.cross_entropy(run(rows), labels) * scale).backward()
        (expected,) = torch.autograd.grad(F.cross_entropy(head(rows), labels) * scale, rows)
        torch.testing.assert_close(rows.grad, expected)
    first, second, third = (sum(came[k : k + 4]) for k in (0, 4, 8))
    assert second == pytest.approx(65536 * first)
    assert third == pytest.approx(second)


def test_a_second_backward_of_one_loss_adds_the_same_again():
    head, rows = nn.Linear(8, 9), torch.randn(16, 8, requires_grad=True)
    value = F.cross_entropy(HeadInPieces(head, 4).wrapped(head.forward)(rows), torch.arange(16) % 9)
    (value * 3).backward(retain_graph=True)
    assert rows.grad is not None
    once = rows.grad.clone()
    (value * 3).backward()
    torch.testing.assert_close(rows.grad, 2 * once)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_rows_are_those_of_the_head(dtype):
    torch.manual_seed(0)
    head, rows = nn.Linear(8, 1000), torch.randn(1024, 8, requires_grad=True)
    labels = torch.randint(0, 1000, (1024,))
    found = []
    for run in (head.forward, HeadInPieces(head, 128).wrapped(head.forward)):
        head.zero_grad()
        rows.grad = None
        with torch.autocast("cpu", dtype=dtype):
            logits = run(rows)
            assert logits.dtype is dtype
            value = F.cross_entropy(logits.float(), labels)
        value.backward()
        found.append([value.detach(), rows.grad, head.weight.grad, head.bias.grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=torch.finfo(dtype).eps ** 0.5, atol=1e-4)


def test_in_evaluation_and_without_gradients_it_runs_at_once():
    head, rows = nn.Linear(8, 9), torch.randn(16, 8)
    pieces = HeadInPieces(head, 4)
    run = pieces.wrapped(head.forward)
    with torch.no_grad():
        assert not isinstance(run(rows), HeadOutput)
    head.eval()
    assert not isinstance(run(rows), HeadOutput)
    head.train()
    assert not isinstance(run(rows[:4]), HeadOutput)
    assert isinstance(run(rows), HeadOutput)


def test_the_most_likely_classes_are_found_in_pieces():
    head, rows = nn.Linear(8, 9), torch.randn(2, 16, 8)
    pieces = HeadInPieces(head, 4)
    assert torch.equal(pieces.wrapped(head.forward)(rows).argmax(-1), head(rows).argmax(-1))
    assert pieces.made_whole == 0
