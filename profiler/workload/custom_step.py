"""A training step that the user wrote: where its phases begin is seen at the model, at backward and at optimizers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from profiler.workload.compiled_forwards import is_compiled, leave_uncompiled
from profiler.workload.forward_patches import Forward, ForwardPatches
from profiler.workload.reachable import tensors_held
from profiler.workload.replayed_iterators import ReplayedIterator
from profiler.workload.tensor_parts import sizes_of
from profiler.workload.tensor_trees import cached_by_identity, tensors_in
from profiler.workload.torch_state import under_transform

leave_uncompiled(__name__)

Begin = Callable[[Any, Tensor | None], None]  # is told of a phase, as ``OnPhase``


class StepError(ValueError):
    """A step that is none, or that nothing is known for; the message says what to do."""


class CustomStep:
    """Runs a function that is one whole training step, and tells as each of its phases begins.

    A forward begins with the step, or where the backward before it is over: a step of several micro-batches has
    several. One of them is ``measured``; the others are evaluations. A call of the model in training mode, with
    gradients enabled, belongs to the forward under way; backward begins where the autograd engine is started on a graph
    that reaches such a call.

    Args:
        function: the function without arguments that runs the step.
        model: the model that it trains.

    Attributes:
        replays: the stand-ins of the iterators that it takes from, while it is measured.
        measured: the number of the forward that is measured.
        forwards: the number of forwards in the last run.
        retains: whether backward went more than once through the graph of the measured one, in the last run.
        stepped: the optimizers whose step the last run called and did not skip.
        result: the result of the last run; bound until the next one returns, as in ``loss = step()``.
        autocast: the type that autocast cast to in the last call of the model; None where it was off.
        input_shapes: the shapes of the tensors that this call got.
        input_elements: the number of elements, for each forward, of the tensors that calls of the model got.
        inputs_take_gradients: for each forward that went backward, which of these tensors take a gradient.
    """

    def __init__(self, function: Callable[[], Any], model: nn.Module) -> None:
        self.function = function
        self.model = model
        self.replays: list[ReplayedIterator] = []
        self.measured = 0
        self.forwards = 0
        self.retains = False
        self.stepped: list[torch.optim.Optimizer] = []
        self.result: Any = None
        self.autocast: torch.dtype | None = None
        self.input_shapes: tuple[tuple[int, ...], ...] = ()
        self.input_elements: list[int] = []
        self.inputs_take_gradients: list[tuple[bool, ...]] = []

    def run(self, begin: Begin, before_update: Callable[[torch.optim.Optimizer], None]) -> float:
        """Run the step.

        Args:
            begin: called as ``on_phase`` of ``Workload.step``.
            before_update: called with each optimizer that is about to step.

        Returns:
            The loss: what the function returns where that is a number, else what backward began from.

        Raises:
            ValueError: it does not call the model, or runs no backward through it.
        """
        watch = _Watch(self, begin)
        watch.begin_forward()  # Before anything is installed: the step may be run once within this call.
        self.stepped = []
        patches = ForwardPatches(compile_safe=is_compiled(self.model))
        patches.wrap(self.model, watch.called)
        hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: before_update(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self.stepped.append(optimizer)),
        ]
        try:
            with _backward_seen(watch.backward):
                for replay in self.replays:
                    replay.rewind()
                result = self.function()
        finally:
            for hook in hooks:
                hook.remove()
            patches.remove()
        watch.check()
        self.forwards, self.input_elements = watch.backwards, watch.input_elements
        self.inputs_take_gradients = watch.inputs_take_gradients[: watch.backwards]
        self.retains = watch.measured_backwards > 1
        loss = _number(result)
        self.result = result
        del result
        begin("end", None)
        return watch.loss if loss is None else loss


class _Watch:
    """The state of one run."""

    def __init__(self, step: CustomStep, begin: Begin) -> None:
        self._step, self._begin = step, begin
        self._number = -1
        self._calls: list[range] = []  # the sequence numbers of the nodes that calls of this forward made
        self._inside = False
        self._over = False
        self.backwards = 0
        self.measured_backwards = 0
        self.input_elements: list[int] = []
        self.inputs_take_gradients: list[tuple[bool, ...]] = []
        self.called_at_all = self.transformed = False
        self.loss = float("nan")

    @property
    def _is_measured(self) -> bool:
        return self._number == self._step.measured

    def begin_forward(self) -> None:
        """The step begins, or the model is called after a backward."""
        self._number, self._over = self._number + 1, False
        self.input_elements.append(0)
        self.inputs_take_gradients.append(())
        self._calls.clear()
        self._begin("forward" if self._is_measured else "evaluation", None)

    def called(self, forward: Forward) -> Forward:
        """Returns the function that runs in place of the model's forward."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside or not (self._step.model.training and torch.is_grad_enabled()):
                return forward(*args, **kwargs)
            if self._over:
                self.begin_forward()
            self.called_at_all = True
            self.transformed |= under_transform()
            inputs = tensors_held((args, kwargs))
            self.input_elements[-1] += sum(tensor.numel() for tensor in inputs)
            self.inputs_take_gradients[-1] += tuple(tensor.requires_grad for tensor in inputs)
            if self._is_measured:
                self._step.autocast = _autocast_of(self._step.model)
                self._step.input_shapes = tuple(map(sizes_of, inputs))
            del inputs
            first, self._inside = next_node(), True
            try:
                return forward(*args, **kwargs)
            finally:
                self._inside = False
                self._calls.append(range(first, next_node()))

        return run

    @contextlib.contextmanager
    def backward(self, roots: Sequence[Any]) -> Iterator[None]:
        """Surrounds a run of the autograd engine."""
        root = next((root for root in roots if self._reaches_the_model(root)), None)
        if root is None:
            yield
            return
        self.backwards += not self._over
        self._over = True
        if root.numel() == 1:
            self.loss = float(root.detach())
        if self._is_measured:
            self.measured_backwards += 1
            self._begin("backward", root)
        del roots, root
        yield
        if self._number >= self._step.measured:
            self._begin("optimizer", None)

    def _reaches_the_model(self, root: Any) -> bool:
        if not isinstance(root, Tensor) or not self._calls:
            return False
        numbers = (node._sequence_nr() for node in graph_nodes(root))
        return any(number in made for number in numbers for made in self._calls)

    def check(self) -> None:
        """Refuse a step that was none; raises StepError."""
        if not self.called_at_all:
            raise StepError(
                "Workload: the step does not call the model in training mode with gradients enabled; pass the module "
                "that it calls as model(...), or a module whose forward calls the method that trains (log_prob, "
                "loss), call that in the step, and call model.train()"
            )
        if self.transformed:
            raise StepError(
                "the step calls the model under torch.func (jvp, grad, vmap) or forward-mode differentiation, whose "
                "tensors stand for others and cannot be made again; plan a step without them"
            )
        if not self.backwards:
            raise StepError(
                "Workload: the step runs no backward through the model's output; let the function run forward, "
                "backward and the optimizer's step"
            )


@contextlib.contextmanager
def _backward_seen(around: Callable[[Sequence[Any]], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Has calls of the autograd engine inside run within ``around(roots)``, but for calls within another one."""
    autograd: Any = torch.autograd
    # ``Tensor.backward`` calls the first. The last one is seen where a module holds a reference to the others.
    plain = {name: getattr(autograd, name) for name in ("backward", "grad", "_engine_run_backward")}
    inside = False

    def seen(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return call(*args, **kwargs)
            roots = args[0] if args else next((kwargs[name] for name in ("tensors", "outputs") if name in kwargs), ())
            try:
                inside = True
                with around([roots] if isinstance(roots, Tensor) else list(roots)):
                    del roots
                    return call(*args, **kwargs)
            finally:
                inside = False

        return run

    try:
        for name, call in plain.items():
            setattr(autograd, name, seen(call))
        yield
    finally:
        for name, call in plain.items():
            setattr(autograd, name, call)


def _autocast_of(model: nn.Module) -> torch.dtype | None:
    kind = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _number(result: Any) -> float | None:
    """A loss as a number; None where it is none."""
    if isinstance(result, Tensor):
        return float(result.detach()) if result.numel() == 1 else None
    if isinstance(result, (int, float)) and not isinstance(result, bool):
        return float(result)
    inner = getattr(result, "loss", None)
    return _number(inner) if isinstance(inner, Tensor) else None


def next_node() -> int:
    """The sequence number that the next autograd node of this thread will get."""
    return torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined]  # The stubs lack the submodule.


def graph_nodes(loss: Tensor) -> Iterator[Any]:
    """Every node that the backward of ``loss`` can reach."""
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(following for following, _ in node.next_functions)
    seen.clear()


def kept_by_nodes(outputs: list[Tensor]) -> list[Tensor]:
    """Tensors that the nodes of a graph still keep: those go with the last tensor of the graph, not with backward.

    They are in attributes (``ctx.x = x`` in a function of the user's own), were saved for a backward that did not come
    this way (of outputs that have no part in the loss), or are leaves that forward made, with their gradients.
    """
    nodes = list(dict.fromkeys(output.grad_fn for output in outputs if output.grad_fn is not None))
    seen = set(nodes)
    found: list[Tensor] = []
    while nodes:
        node = nodes.pop()
        found += tensors_in([getattr(node, "__dict__", {}), *_still_saved(node), *_leaf_of(node)])
        following = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= following
        nodes += following
    return found


def _still_saved(node: Any) -> list[Any]:
    """Returns the tensors that autograd holds for a node's backward, as hooks have packed them; none after it."""
    try:
        values = [getattr(node, name) for name in _saved_by(type(node))]
    except RuntimeError:  # Of a function of the user's own, after its backward.
        return []
    return [one.data for value in values for one in (value if isinstance(value, tuple) else (value,))]


def _leaf_of(node: Any) -> list[Any]:
    """The leaf whose gradient a node adds up, and that gradient; none of a parameter's, which others know."""
    leaf = getattr(node, "variable", None)
    return [leaf, leaf.grad] if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) else []


@cached_by_identity
def _saved_by(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
