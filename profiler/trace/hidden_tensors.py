"""Tensors that functions keep for backward in attributes of their context, where no saved-tensor hook sees them."""

from __future__ import annotations

from torch import Tensor

from profiler.tensors.tensor_trees import tensors_in
from profiler.trace.step_record import Trace
from profiler.workload.autograd_nodes import graph_nodes


def note_hidden(trace: Trace, loss: Tensor) -> None:
    """Note with each call which function keeps tensors so that were made in it, as bitsandbytes' 8-bit layers do.

    Args:
        trace: of the forward.
        loss: with its graph; backward has not begun.
    """
    for node in graph_nodes(loss):
        hidden = trace.storages.numbers(tensors_in(getattr(node, "__dict__", {}))) - trace.always_alive
        if not hidden:
            continue
        number, function = node._sequence_nr(), type(node).__name__.removesuffix("Backward")
        for call in trace.calls:
            if call.first_node <= number < call.end_node and hidden - call.input_storages:
                call.hides = function
                call.hidden |= hidden - call.input_storages
