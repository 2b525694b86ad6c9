"""Makes a program for forward and one for backward from an order of runs.

Views are made anew of what they look at. What backward needs and does not make, forward hands over: torch saves it. A
value goes after its last use, as the generated code says.
"""

from __future__ import annotations

import operator
import types
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.graph import _BoxedCodeGen
from torch.utils import _pytree as pytree

from profiler.step_graph import StepGraph, StepRuns
from profiler.trace.joint_graph import (
    RUNNING_STATISTICS,
    JointGraph,
    device_of,
    draws,
    is_batch_norm,
    random_state,
    run_from_state,
    second_call,
)
from profiler.workload.torch_state import flags_now, set_flags

AGAIN = "planner_again"  # in what is noted of a call in a program of backward: forward has run it before


class StepOrder(NamedTuple):
    """The order of the runs of a joint graph's ops, by side.

    Attributes:
        forward, backward: names of ops, each as often as it is to run.
    """

    forward: Sequence[str]
    backward: Sequence[str]

    @classmethod
    def of(cls, step: StepGraph, runs: StepRuns) -> StepOrder:
        """Runs of a step's ops by their names."""
        forward, backward = ([step.ops[ordinal].name for ordinal in side] for side in runs)
        return cls(forward, backward)


def order_of(graph: JointGraph) -> StepOrder:
    """Each op once, in the order in which they were traced."""
    makers = set(graph.makers.values())
    return StepOrder(
        [op.name for op in graph.ops if op in makers and op in graph.forward_ops],
        [op.name for op in graph.ops if op in makers and op not in graph.forward_ops],
    )


def programs_of(graph: JointGraph, order: StepOrder) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The programs of forward and backward.

    Args:
        graph: the graph of the step.
        order: the order of the runs.

    Returns:
        Forward, which takes the graph's inputs and returns its outputs and what is saved; and backward, which takes
        what was saved and the gradients of the outputs, and returns the gradients of the inputs.
    """
    by_name = {op.name: op for op in graph.ops}
    first, then = ([by_name[name] for name in names] for names in order)
    runs = Counter([*first, *then])
    values = _Values(graph)
    forward = _Writer(values, (op for op in runs if runs[op] > 1), ())
    for node in graph.inputs:
        forward.take(node)
    for op in first:
        forward.run(op)
    saved = values.missing_in(then, set(first), graph.outputs[graph.forward_outputs :])
    states = [op for op in dict.fromkeys(then) if op in forward.states]
    forward.finish([*graph.outputs[: graph.forward_outputs], *saved], states)
    backward = _Writer(values, (op for op in then if runs[op] > 1), first)
    for node in saved:
        backward.take(node)
    for op in states:
        backward.take_state(op)
    for node in graph.tangents:
        backward.take(node)
    for op in then:
        backward.run(op)
    backward.finish(graph.outputs[graph.forward_outputs :], ())
    return fx.GraphModule(graph.module, forward.graph), fx.GraphModule(graph.module, backward.graph)


def outputs_program(graph: JointGraph, order: StepOrder) -> fx.GraphModule:
    """The program of a forward that hands nothing over: it takes the graph's inputs and returns its outputs."""
    by_name = {op.name: op for op in graph.ops}
    runs = Counter(by_name[name] for name in order.forward)
    writer = _Writer(_Values(graph), (op for op in runs if runs[op] > 1), ())
    for node in graph.inputs:
        writer.take(node)
    for name in order.forward:
        writer.run(by_name[name])
    writer.finish(graph.outputs[: graph.forward_outputs], ())
    return fx.GraphModule(graph.module, writer.graph)


class AsInForward(fx.Interpreter):
    """Runs a program of a backward call by call, recomputed ops with the flags of forward: kernels read some of them.

    Args:
        program: the program of the backward.
        flags: torch's in forward, as ``flags_now`` gives them.
    """

    def __init__(self, program: fx.GraphModule, flags: list[Any]) -> None:
        super().__init__(program)
        self._flags = flags

    def run_node(self, n: fx.Node) -> Any:
        """The result of a call."""
        if AGAIN not in n.meta:
            return super().run_node(n)
        now = flags_now()
        set_flags(self._flags, now)
        try:
            return super().run_node(n)
        finally:
            set_flags(now, self._flags)


def with_direct_calls(program: fx.GraphModule) -> fx.GraphModule:
    """The program with torch's own functions in the place of ops that they call: they take half as long to do so.

    To be run where torch functions are not overridden (``torch._C.DisableTorchFunction``).
    """
    for node in program.graph.nodes:
        node.target = _direct_call(node) or node.target
    program.recompile()
    return program


def _direct_call(node: fx.Node) -> Any:
    """The function of ``torch`` with the arguments of an op; None where there is none, or none for sure."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten" or op._schema.is_mutable or draws(node):
        return None
    # Where the reduction is left out, torch's functions do not reduce, and ops take the mean.
    left_out = {argument.name for argument in op._schema.arguments[len(node.args) :]} - node.kwargs.keys()
    if "reduction" in left_out:
        return None
    taken = [str(argument.type) for argument in op._schema.arguments]
    if {"Tensor", "List[Tensor]"}.isdisjoint(taken) or "List[Optional[Tensor]]" in taken:  # Of indices some are None.
        return None
    name = op._schema.name.removeprefix("aten::")
    found = (getattr(space, name, None) for space in (torch, torch._C._nn))  # type: ignore[attr-defined]
    return next((function for function in found if isinstance(function, types.BuiltinFunctionType)), None)


class _Values:
    """The values that runs make: tensors with a storage of their own, each by its node in the joint graph."""

    def __init__(self, graph: JointGraph) -> None:
        self._makers = set(graph.makers.values())
        self._needed = {*graph.ops}
        self._tangents = set(graph.tangents)

    def made_by(self, op: fx.Node, *, again: bool) -> list[fx.Node]:
        """Returns what a run of an op makes: itself, or the items of its result that somebody reads."""
        if isinstance(op.meta["val"], Tensor):
            return [op]
        items = [user for user in op.users if user.target is operator.getitem and user in self._needed]
        return [item for item in items if not (again and is_batch_norm(op) and item.args[1] in RUNNING_STATISTICS)]

    def missing_in(self, ops: Iterable[fx.Node], ran: set[fx.Node], outputs: Iterable[Any]) -> list[fx.Node]:
        """Returns what ops and outputs read that ops before them do not make, gradients of outputs left out.

        Args:
            ops: the ops in the order of their runs.
            ran: the ops that have run before.
            outputs: the results returned in the end.
        """
        made: set[fx.Node] = set()
        missing: dict[fx.Node, None] = {}

        def read(node: fx.Node) -> None:
            if node in made or node in missing or node in self._tangents or node.op == "get_attr":
                return
            if node.op == "placeholder" or self._is_value(node):
                missing[node] = None
                return
            for source in node.all_input_nodes:
                read(source)

        for op in ops:
            for source in inputs_of(op, again=op in ran):
                read(source)
            made.update(self.made_by(op, again=op in ran))
            ran.add(op)
        for output in outputs:
            if isinstance(output, fx.Node):
                read(output)
        return list(missing)

    def _is_value(self, node: fx.Node) -> bool:
        return node in self._makers or (node.target is operator.getitem and node.args[0] in self._makers)


def inputs_of(op: fx.Node, *, again: bool) -> list[fx.Node]:
    """Returns what a run of an op reads; a recomputed batch norm reads no running statistics, which have changed."""
    if not again:
        return op.all_input_nodes
    _, args, kwargs = second_call(op)
    return [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, fx.Node)]


class _Writer:
    """Writes a program, run by run.

    Args:
        values: the values of the joint graph.
        again: the ops that will be recomputed.
        ran: ops that have run before this program.

    Attributes:
        graph: the program.
        states: the state, by op, of the generator that its first run drew from.
    """

    def __init__(self, values: _Values, again: Iterable[fx.Node], ran: Iterable[fx.Node]) -> None:
        self.graph = fx.Graph()
        self.graph.set_codegen(_BoxedCodeGen())
        self.states: dict[fx.Node, fx.Node] = {}
        self._values = values
        self._again, self._ran = set(again), set(ran)
        self._before = frozenset(self._ran)
        self._now: dict[fx.Node, fx.Node] = {}  # by node of the joint graph what stands for it
        self._views: dict[fx.Node, tuple[list[fx.Node], fx.Node]] = {}  # each with what it was made of

    def take(self, node: fx.Node) -> None:
        """The program takes this."""
        taken = self.graph.placeholder(node.name)
        taken.meta = dict(node.meta)
        self._now[node] = taken

    def take_state(self, op: fx.Node) -> None:
        """The program takes the state that this op drew from."""
        self.states[op] = self.graph.placeholder(f"{op.name}_state")
        self.states[op].meta["val"] = _fake_state(op)

    def run(self, op: fx.Node) -> None:
        """An op runs, for the first time or again."""
        again = op in self._ran
        result = self._rerun(op) if again else self._first_run(op)
        self._ran.add(op)
        for value in self._values.made_by(op, again=again):
            if value is op:
                self._now[op] = result
            else:
                self._now[value] = self.graph.call_function(operator.getitem, (result, value.args[1]))
                self._now[value].meta = dict(value.meta)

    def finish(self, outputs: Iterable[Any], states: Iterable[fx.Node]) -> None:
        """The program returns these, and the states that ops drew from."""
        returned = [self._of(each) if isinstance(each, fx.Node) else each for each in outputs]
        self.graph.output((*returned, *(self.states[op] for op in states)))
        for node in reversed(self.graph.find_nodes(op="call_function", target=operator.getitem)):
            if not node.users:  # Where calls are run one by one, such an item would stay to the end.
                self.graph.erase_node(node)

    def _first_run(self, op: fx.Node) -> fx.Node:
        if draws(op) and op in self._again:
            self.states[op] = self.graph.call_function(random_state, (device_of(op),))
            self.states[op].meta["val"] = _fake_state(op)
        return self.graph.node_copy(op, self._of)

    def _rerun(self, op: fx.Node) -> fx.Node:
        target, args, kwargs = second_call(op)
        if target is op.target and not draws(op):
            made = self.graph.node_copy(op, self._of)
        else:
            args, kwargs = fx.map_arg((args, kwargs), self._of)
            if draws(op):
                target, args = run_from_state, (self.states[op], device_of(op), target, *args)
            made = self.graph.call_function(target, args, kwargs)
        if op in self._before:
            made.meta[AGAIN] = True
        return made

    def _of(self, node: fx.Node) -> fx.Node:
        """Returns the node that stands for one of the joint graph now; a view is made where there is none yet."""
        if node in self._now:
            return self._now[node]
        sources = [self._of(source) for source in node.all_input_nodes]
        known = self._views.get(node)
        if known is None or known[0] != sources:
            known = self._views[node] = (sources, self.graph.node_copy(node, self._of))
        return known[1]


def _fake_state(op: fx.Node) -> Tensor:
    return _fake_mode_of(op).from_tensor(random_state(device_of(op)))


def _fake_mode_of(op: fx.Node) -> FakeTensorMode:
    value = next(leaf for leaf in pytree.tree_leaves(op.meta["val"]) if isinstance(leaf, FakeTensor))
    return value.fake_mode
