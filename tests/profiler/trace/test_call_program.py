"""A captured call runs as two programs, and is its module's own call bit for bit, whatever order its ops run in."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, cross_entropy, huber_loss, l1_loss, mse_loss, smooth_l1_loss
from torch.utils.checkpoint import checkpoint

from profiler.trace import call_program
from profiler.trace.call_program import CallProgram
from profiler.trace.captured_call import GradientLayouts, capture_call
from profiler.trace.captures import difference
from profiler.trace.joint_graph import CaptureError
from profiler.trace.programs import StepOrder, order_of
from profiler.workload.data_parallel import shows_order_of_gradients
from profiler.workload.tensor_trees import tensors_in


class Seeing(nn.Module):
    """Adds up what it sees in a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.detach().sum())
        return self.linear(x).relu()


class Several(nn.Module):
    """Takes arguments by name, plain ones too, and returns several things."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, *, mask: Tensor, scale: float, more: dict[str, Tensor]) -> dict[str, Any]:
        y = self.linear(x) * scale + more["bias"]
        return {"y": y.masked_fill(mask, 0.0), "z": (y.exp(), None), "kept": mask.sum(), "scale": scale}


class PassingOn(nn.Module):
    """Returns what it was given beside what it makes, as layers that share a bias do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, bias: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return bias, (self.linear(x) + bias).masked_fill(mask, 0.0), mask


class Tied(nn.Module):
    """Uses one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def dense(batch: tuple[int, ...] = (4, 8)) -> tuple[Any, dict[str, Any]]:
    return (torch.randn(batch, requires_grad=True) * 1,), {}


def several() -> tuple[Any, dict[str, Any]]:
    more = {"bias": torch.randn(8, requires_grad=True) * 1}
    return (torch.randn(4, 8, requires_grad=True) * 1,), {"mask": torch.rand(4, 8) < 0.5, "scale": 2.0, "more": more}


def passing_on() -> tuple[Any, dict[str, Any]]:
    bias = torch.randn(4, 8, requires_grad=True) * 1
    return (torch.randn(4, 8, requires_grad=True) * 1,), {"bias": bias, "mask": torch.rand(4, 8) < 0.5}


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True)


CALLS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, dict[str, Any]]]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), dense),
    "dropout": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), dense),
    "transformer": (transformer, lambda: dense((2, 4, 8))),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3)),
        lambda: dense((2, 3, 8, 8)),
    ),
    "seeing": (Seeing, dense),
    "several": (Several, several),
    "passing on": (PassingOn, passing_on),
    "tied": (Tied, dense),
}
ORDERS: dict[str, Callable[[StepOrder], StepOrder]] = {
    "once": lambda once: once,
    "all again": lambda once: StepOrder(once.forward, [*once.forward, *once.backward]),
}


def trained(call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Outputs, gradients and buffers after two calls, and the next number that is drawn."""
    torch.manual_seed(1)
    leaves = [t.detach().requires_grad_() if t.requires_grad else t for t in tensors_in((args, kwargs))]
    found: dict[str, Any] = {}
    for number in range(2):
        given = iter([t * 1 if t.requires_grad else t for t in leaves])
        output = call(*[next(given) for _ in args], **_filled(kwargs, given))
        outputs = tensors_in(output)
        sum((t * torch.linspace(-1, 1, t.numel()).view_as(t)).sum() for t in outputs if t.requires_grad).backward()  # type: ignore[union-attr]
        found |= {f"output {number}.{k}": t.detach() for k, t in enumerate(outputs)}
        found[f"tree {number}"] = repr(type(output))
    found |= {f"gradient of {name}": p.grad for name, p in module.named_parameters()}
    found |= {f"gradient of input {k}": leaf.grad for k, leaf in enumerate(leaves)}
    found |= dict(module.named_buffers())
    return found | {"next draw": torch.rand(3)}


def _filled(kwargs: dict[str, Any], given: Any) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            filled[name] = next(given)
        else:
            filled[name] = {k: next(given) for k in value} if isinstance(value, dict) else value
    return filled


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.slow
def test_a_program_computes_what_the_module_does(name: str, order: str) -> None:
    torch.manual_seed(0)
    make, arguments = CALLS[name]
    module, (args, kwargs) = make(), arguments()
    other = copy.deepcopy(module)
    captured = capture_call(module, module.forward, args, kwargs)
    program = CallProgram(captured, ORDERS[order](order_of(captured.graph))).bound(other)
    expected, got = trained(module, module, args, kwargs), trained(program, other, args, kwargs)
    assert expected.keys() == got.keys()
    for what, value in expected.items():
        same = torch.equal(value, got[what]) if isinstance(value, Tensor) else value == got[what]
        assert same, what


@pytest.mark.parametrize("name", ["dropout", "several"])
def test_gradients_may_come_one_by_one_as_before_torch_2_13(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_program, "_BOXED", False)
    monkeypatch.setattr(call_program._Call, "boxed_grads_call", False)
    test_a_program_computes_what_the_module_does(name, "all again")


@pytest.mark.parametrize("name", CALLS)
def test_a_program_is_held_against_the_call_bit_for_bit(name: str) -> None:
    torch.manual_seed(0)
    make, arguments = CALLS[name]
    module, (args, kwargs) = make(), arguments()
    captured = capture_call(module, module.forward, args, kwargs)
    program = CallProgram(captured, ORDERS["all again"](order_of(captured.graph)))
    alone, state = copy.deepcopy(module), torch.get_rng_state()
    assert difference(program.bound(module), module, module.forward, args, kwargs) == ""
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    alone(*args, **kwargs)
    assert torch.equal(torch.get_rng_state(), after)  # As after one call.
    for one, other in zip(alone.buffers(), module.buffers(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("side", "number", "what"), [("forward_code", 0, "output 0"), ("backward_code", 1, "'0.bias'")]
)
def test_what_a_program_makes_otherwise_is_named(side: str, number: int, what: str) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    captured = capture_call(module, module.forward, (x,), {})
    program = CallProgram(captured, order_of(captured.graph))
    code = getattr(program, side)

    def off(arguments: list[Any]) -> Any:
        made = list(code(arguments))
        made[number] = torch.nextafter(made[number], torch.full_like(made[number], 9))
        return tuple(made)

    setattr(program, side, off)
    assert what in difference(program.bound(module), module, module.forward, (x,), {})
    assert not difference(program.bound(module), module, module.forward, (x,), {}, rounded=True)

    def far_off(arguments: list[Any]) -> Any:
        return tuple(each if each is None else each * 1.01 for each in code(arguments))

    setattr(program, side, far_off)
    assert difference(program.bound(module), module, module.forward, (x,), {}, rounded=True)


def test_capturing_leaves_a_module_as_it_was() -> None:
    module, counting = Seeing(), Counting()
    randomness = torch.get_rng_state()
    with pytest.raises(CaptureError, match="sets attributes"):
        capture_call(counting, counting.forward, (torch.ones(4, 8, requires_grad=True),), {})
    capture_call(module, module.forward, (torch.ones(4, 8, requires_grad=True),), {})
    assert (counting.calls, counting.past, module.seen.item()) == (0, [], 0)
    assert torch.equal(randomness, torch.get_rng_state())


@pytest.mark.parametrize(
    "order",
    [ORDERS["all again"], lambda once: StepOrder(once.forward, [*once.backward, *once.backward])],
    ids=["forward again", "backward twice"],
)
def test_ops_run_again_with_the_flags_of_their_first_run(order: Callable[[StepOrder], StepOrder]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
    x = torch.randn(64, 32, requires_grad=True)
    captured = capture_call(module, module.forward, (x * 1,), {})
    program = CallProgram(captured, order(order_of(captured.graph))).bound(module)

    def gradients(call: Callable[..., Any], *, inside: bool) -> list[Tensor]:
        with torch.backends.mkldnn.flags(enabled=False):
            loss = call(x * 1).square().sum()
            if inside:
                return list(torch.autograd.grad(loss, [x, *module.parameters()]))
        return list(torch.autograd.grad(loss, [x, *module.parameters()]))

    expected = gradients(module, inside=False)
    assert not all(map(torch.equal, expected, gradients(module, inside=True)))
    assert all(map(torch.equal, expected, gradients(program, inside=False)))
    assert torch.backends.mkldnn.enabled


class EightLayers(nn.Module):
    """Each adds a bias in the same op as it multiplies, in which both gradients are made."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) for _ in range(8))
        self.biases = nn.ParameterList(torch.randn(8) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = torch.addmm(bias, x, weight).tanh()
        return x


class Selecting(nn.Module):
    """Has a parameter that its output does not depend on, though its ops read it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rate = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (self.rate > 0.5)


def test_hooks_of_parameters_without_a_gradient_are_not_called() -> None:
    module = Selecting()
    program = CallProgram(
        captured := capture_call(module, module.forward, (torch.ones(4, 8),), {}), order_of(captured.graph)
    )
    called: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: called.append(name))
    for call in (module, program.bound(module)):
        call(torch.ones(4, 8)).sum().backward()
        assert sorted(called) == ["linear.bias", "linear.weight"]
        called.clear()


def test_frozen_parameters_get_no_gradient() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    module[0].requires_grad_(False)
    x = torch.randn(4, 8)
    captured = capture_call(module, module.forward, (x,), {})
    program = CallProgram(captured, order_of(captured.graph)).bound(module)
    program(x).sum().backward()
    assert [p.grad is None for p in module.parameters()] == [True, True, False, False]


def test_what_backward_needs_alone_is_kept_where_all_runs_again() -> None:
    module, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(32, 64, requires_grad=True)
    captured = capture_call(module, module.forward, (x,), {})
    saved: dict[str, int] = {}
    for name, order in ORDERS.items():
        program = CallProgram(captured, order(order_of(captured.graph))).bound(module)
        kept: dict[int, int] = {}
        known = {p.untyped_storage()._cdata for p in (*module.parameters(), x)}

        def pack(tensor: Tensor, kept: dict[int, int] = kept, known: set[int] = known) -> Tensor:
            if (storage := tensor.untyped_storage())._cdata not in known:
                kept[storage._cdata] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            program(x).sum().backward()
        saved[name] = sum(kept.values())
    assert saved == {"once": 2 * 4 * 32 * 64, "all again": 0}


class Counting(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.past = nn.Linear(8, 8), 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.past.append(self.calls)
        return self.linear(x)


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.past: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.past.append(1)
        return x.exp()


class Rolling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp() * random.random()


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Lending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), self.weight


class Writing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2).exp()


class Checkpointed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(torch.exp, x, use_reentrant=False)  # type: ignore[return-value]


class Halving(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(Tensor.half, Tensor.float):
            return x.exp()


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Checkpointed(), "hooks on saved tensors"),
        (Halving(), "hooks on saved tensors"),
        (Branching(), "traced as one graph"),
        (Lending(), "of its own"),
        (Writing(), "changes its arguments"),
        (Counting(), "sets attributes"),
        (Noting(), "sets attributes"),
        (Rolling(), "not torch's"),
    ],
)
def test_what_no_program_could_do_is_refused(module: nn.Module, why: str) -> None:
    with pytest.raises(CaptureError, match=why):
        capture_call(module, module.forward, (torch.randn(4, 8, requires_grad=True) * 1,), {})


def test_a_call_without_anything_to_train_is_refused() -> None:
    module = nn.Linear(8, 8).requires_grad_(False)
    with pytest.raises(CaptureError, match="nothing to train"):
        capture_call(module, module.forward, (torch.randn(4, 8),), {})


def test_uses_of_an_input_add_up_in_the_order_of_eager_code() -> None:
    """What others contribute to the gradient comes first, and sums of three floats depend on the order."""

    class Uses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() * 3 + x.exp() / 7 + x

    module, args = Uses(), (torch.randn(64, requires_grad=True) * 1,)
    captured = capture_call(module, module.forward, args, {})
    assert [len(numbers) for numbers in captured.gradients] == [3]
    program = CallProgram(captured, order_of(captured.graph))
    assert difference(program.bound(module), module, module.forward, args, {}) == ""


@pytest.mark.parametrize("name", ["mlp", "transformer", "convolution", "tied", "eight layers"])
def test_gradients_come_in_the_order_of_eager_code_where_hooks_see_it(name: str) -> None:
    """A hook that fails leaves those updated that came before. DistributedDataParallel fills its buckets so, too."""
    make, arguments = {**CALLS, "eight layers": (EightLayers, dense)}[name]
    module, (args, kwargs) = make(), arguments()
    captured = capture_call(module, module.forward, args, kwargs)
    program = CallProgram(captured, order_of(captured.graph)).bound(module)
    assert not program.in_order
    came: list[str] = []
    for each, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, each=each: came.append(each))
    assert program.in_order
    orders: list[list[str]] = []
    for call in (module.forward, program):
        came.clear()
        args, kwargs = arguments()
        call(*args, **kwargs).sum().backward()
        orders.append([*came])
    assert orders[0] == orders[1]
    assert len(orders[0]) == len([*module.parameters()]) <= len(program.program.of_parameters_last_first)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_order_of_gradients_shows_where_more_than_two_ranks_add_them_up(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    assert shows_order_of_gradients([]) == (ranks > 2)


@pytest.mark.parametrize("loss", [mse_loss, l1_loss, smooth_l1_loss, huber_loss, binary_cross_entropy, cross_entropy])
def test_a_program_that_makes_a_loss_makes_one_number(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Lossy(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return loss(x.sigmoid(), y)

    module, args = Lossy(), (torch.randn(4, 8, requires_grad=True) * 1, torch.rand(4, 8))
    captured = capture_call(module, module.forward, args, {})
    program = CallProgram(captured, order_of(captured.graph))
    assert difference(program.bound(module), module, module.forward, args, {}) == ""


def test_gradients_lie_as_they_are_said_to() -> None:
    layouts = GradientLayouts(((8, 1, 2), (4, 0, 1)))
    assert [layouts.of(0, (3, 2, 4)), layouts.of(1, (2, 3, 4)), layouts.of(2, (2,))] == [(8, 1, 2), (4, 0, 1), None]
    other = layouts._replace(same_sizes=False)
    assert [other.of(0, (5, 3, 6)), other.of(1, (7, 3, 5)), other.of(0, (2, 2))] == [(18, 1, 3), (5, 0, 1), None]
    module, args = nn.Linear(8, 4), (torch.randn(2, 3, 8, requires_grad=True) * 1,)
    captured = capture_call(module, module.forward, args, {}, GradientLayouts(((1, 2, 6),)))
    assert CallProgram(captured, order_of(captured.graph)).layouts == [((2, 3, 4), (1, 2, 6))]


def test_backward_inside_autocast_of_a_forward_outside_is_refused() -> None:
    module, x = nn.Linear(4, 4), torch.randn(2, 4)
    call = capture_call(module, module.forward, (x,), {})
    output = CallProgram(call, order_of(call.graph)).bound(module)(x)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CaptureError, match="outside of autocast"):
        output.sum().backward()


def test_the_statistics_of_a_norm_are_written_as_its_kernel_does() -> None:
    """A forward of the module's own before may have saved them: it counts no change, and its backward works."""
    module, x = nn.BatchNorm1d(4).train(), torch.randn(8, 4)
    call = capture_call(module, module.forward, (x,), {})
    program = CallProgram(call, order_of(call.graph)).bound(module)
    first = module(x)
    statistics = module.running_mean
    assert statistics is not None
    version = statistics._version
    program(x).sum().backward()
    assert statistics._version == version
    first.sum().backward()


def test_what_is_passed_on_is_the_very_argument() -> None:
    module, (args, kwargs) = PassingOn(), passing_on()
    captured = capture_call(module, module.forward, args, kwargs)
    program = CallProgram(captured, order_of(captured.graph)).bound(module)
    bias, made, mask = program(*args, **kwargs)
    assert bias is kwargs["bias"] and mask is kwargs["mask"] and made.grad_fn is not None
    again = program.outputs(args, kwargs)
    assert again[0] is bias and again[2] is mask and torch.equal(again[1], made)
