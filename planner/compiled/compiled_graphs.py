"""The graphs that a backend has compiled, and the steps that run them in turn."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch._guards import CompileContext, TracingContext, compile_context, tracing

from planner.compiled.graph_shares import GraphTurns
from profiler.capture.programs import StepOrder
from profiler.step_graph import StepGraph
from profiler.tensors.storages import StorageTable
from profiler.tensors.tensor_trees import tensors_in
from profiler.workload.autograd_nodes import graph_nodes

OnStep = Callable[[GraphTurns], None]


class CompiledGraph:
    """One graph of a model; what it runs can be made anew for another order of its ops.

    Args:
        number: of the graph.
        module: as Dynamo traced it.
        make: makes a backend of torch.compile from what chooses an order.
        steps: are told when it runs.

    Attributes:
        step: its ops, measured; None until it is compiled.
        order: of its ops, as compiled.
    """

    def __init__(self, number: int, module: fx.GraphModule, make: Callable[..., Any], steps: StepWatch) -> None:
        self.number = number
        self.step: StepGraph | None = None
        self.order: StepOrder | None = None
        self._module, self._make, self._steps = module, make, steps
        self._contexts = TracingContext.try_get(), CompileContext.get()
        self._program: Callable[..., Any] | None = None

    def compile(self, inputs: Sequence[Any], choose: Callable[..., StepOrder]) -> None:
        """Compile it the first time, within Dynamo; ``choose`` is asked for the order."""

        def chosen(graph: Any) -> StepOrder:
            self.order = choose(self, graph)
            return self.order

        self._program = self._make(chosen)(self._module, inputs)

    def compile_again(self, order: StepOrder) -> None:
        """Take another order from the next call on; backward of earlier calls goes by theirs."""
        if order == self.order:
            return
        traced = [node.meta["example_value"] for node in self._module.graph.find_nodes(op="placeholder")]
        tracing_context, own_context = self._contexts
        with tracing(tracing_context), compile_context(own_context):
            self._program = self._make(lambda graph: order)(self._module, traced)
        self.order = order

    def __call__(self, *args: Any) -> Any:
        """Run its forward."""
        self._steps.begin(self, args)
        assert self._program is not None
        outputs = self._program(*args)
        self._steps.end(outputs)
        return outputs


class StepWatch:
    """Sees which graphs run in turn until a backward begins: that is a step.

    Args:
        on_step: is told of each step that is new, as the one after it begins.
    """

    def __init__(self, on_step: OnStep) -> None:
        self._on_step = on_step
        self._turns: list[_Turn] = []
        self._backward = False
        self._known: set[tuple[int, ...]] = set()
        self._beside: dict[tuple[int, ...], dict[int, int]] = {}  # by graphs so far what the last one reads beside
        self._storages = StorageTable()

    def begin(self, graph: CompiledGraph, args: Sequence[Any]) -> None:
        """A graph is about to run."""
        if self._backward:
            self._finish()
        self._turns = [turn for turn in self._turns if turn.is_alive()]
        self._turns.append(_Turn(graph.number))
        so_far = self._numbers()
        if so_far not in self._beside:
            made = {number for turn in self._turns for number in turn.made}
            there = self._storages.numbers([*tensors_in(args), *_saved_behind(args)])
            self._beside[so_far] = {n: self._storages.bytes_of[n] for n in there - made}

    def end(self, outputs: Any) -> None:
        """It has run."""
        tensors = tensors_in(outputs)
        turn = self._turns[-1]
        turn.made = self._storages.numbers(tensors)
        token = _Token()
        turn.token = weakref.ref(token)
        for node in dict.fromkeys(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None):
            node.metadata[_Token] = token  # type: ignore[index]  # The stubs have a method.
            node.register_prehook(self._backward_begins)

    def _backward_begins(self, _: object) -> None:
        self._backward = True

    def _numbers(self) -> tuple[int, ...]:
        return tuple(turn.graph for turn in self._turns)

    def _finish(self) -> None:
        graphs = self._numbers()
        self._turns, self._backward = [], False
        if graphs in self._known:
            return
        beside: dict[int, int] = {}
        for count in range(len(graphs)):
            beside.update(self._beside[graphs[: count + 1]])
        self._on_step(GraphTurns(graphs=graphs, resident_bytes=sum(beside.values())))
        self._known.add(graphs)


class _Token:
    """Lives as long as the autograd nodes of a graph's outputs."""


class _Turn:
    """A graph's run in a step: the numbers of the storages that it made, and whether its backward may still come."""

    def __init__(self, graph: int) -> None:
        self.graph = graph
        self.made: set[int] = set()
        self.token: Callable[[], _Token | None] = _Token

    def is_alive(self) -> bool:
        return self.token() is not None


def _saved_behind(args: Sequence[Any]) -> list[Tensor]:
    """What ops between graphs keep for their backward."""
    saved: list[Tensor] = []
    for tensor in tensors_in(args):
        for node in graph_nodes(tensor):
            if node.name() == "CompiledFunctionBackward":  # Of a graph, of which it is known what it keeps.
                continue
            names = [name for name in dir(node) if name.startswith("_saved_")]
            saved += tensors_in([getattr(node, name) for name in names])
            saved += tensors_in(getattr(node, "saved_tensors", ()))
    return saved
