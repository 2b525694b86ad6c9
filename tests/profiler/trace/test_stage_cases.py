"""Every habit that a stage may have: it is refused as a program, or as one it computes the same, bit for bit."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from profiler.measurement.captured_stages import measured_graph
from profiler.step_graph import StepGraph, StepRuns, runs_once
from profiler.trace.call_program import CallProgram
from profiler.trace.captured_call import CapturedCall, capture_call
from profiler.trace.captures import difference
from profiler.trace.joint_graph import CaptureError
from profiler.trace.programs import StepOrder
from tests.support.stage_cases import CASES
from tests.support.stage_cases.registry import without_leaves

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:(Sparse|Error detected):UserWarning")]
SEED, COUNT = 1, 3
REFUSED = {
    "checkpoint_inside": "hooks on saved tensors",
    "reentrant_checkpoint_inside": "use_reentrant=True",
    "sparse": "traced as one graph",
    "data_dependent": "aten.nonzero",
    "item": "aten._local_scalar_dense",
    "batchnorm_average": "aten._local_scalar_dense",
    "embedding_sparse": "aten.nonzero",
    "reductions": "no parameter, buffer or argument",
    "embedding_clipped": "changes its arguments",
    "own_generator": "generator than torch's own",
    **dict.fromkeys(("lstm", "gru", "rnn"), "sets attributes of its modules"),
}
# Captured, and then refused as a program of each op once gives other bits than the stage.
OTHER_BITS = {
    "data_replaced": "output 0",  # What a tensor is set to is not traced.
    "autocast_inside": "the gradient of 'b.weight'",  # Autocast casts it once for two uses, and adds up in the cast.
    "buffer_replaced": "buffer 'mean'",  # The module has another buffer afterwards.
}
# The ops that must not run again, as they read a buffer that changes; of batch norms the one that counts batches.
ONCE = {
    "batchnorm": {"add"},
    "batchnorm_2d": {"add"},
    "batchnorm_twice": {"add"},
    "instancenorm": {"repeat", "copy"},
    "spectral_norm": {"mv"},
    "statistics_read": {"exp", "add"},
    "moving_average": {"clone", "mul"},
}


class Captured(NamedTuple):
    """A case's stage with its inputs, and the graph of its ops with what is known of them."""

    stage: nn.Module
    inputs: tuple[Tensor, ...]
    call: CapturedCall
    graph: StepGraph

    def difference(self, runs: StepRuns) -> str:
        """In what a program of these runs differs from the stage."""
        program = CallProgram(self.call, StepOrder.of(self.graph, runs)).bound(self.stage)
        torch.manual_seed(5)
        return difference(program, self.stage, self.stage.forward, self.inputs, {})


def captured(name: str) -> Captured:
    stage, leaves = CASES[name].make()
    inputs = without_leaves(leaves)
    call = capture_call(stage, stage.forward, inputs, {})
    return Captured(stage, inputs, call, measured_graph(call.graph, torch.device("cpu")))


def orders(graph: StepGraph) -> list[StepRuns]:
    """All that may run again does so before backward; and some of it anywhere in backward, perhaps twice."""
    once, draw = runs_once(graph), random.Random(SEED)
    free = [ordinal for ordinal in once.forward if not graph.ops[ordinal].once_reason]
    found = [StepRuns(once.forward, (*free, *once.backward))]
    for _ in range(COUNT):
        backward = [*once.backward]
        for ordinal in draw.choices(free, k=draw.randint(1, len(free))):
            backward.insert(draw.randint(0, len(backward)), ordinal)
        found.append(StepRuns(once.forward, tuple(backward)))
    return found


@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_whatever_runs_again_the_step_is_the_same_bit_for_bit(name: str) -> None:
    stage = captured(name)
    assert {op.kind for op in stage.graph.ops if op.once_reason} == ONCE.get(name, set())
    assert stage.difference(runs_once(stage.graph)) == OTHER_BITS.get(name, "")
    for runs in orders(stage.graph) if name not in OTHER_BITS else ():
        assert stage.difference(runs) == "", runs


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_program_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(CaptureError, match=REFUSED[name]):
        captured(name)
