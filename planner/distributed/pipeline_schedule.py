"""The schedule of a pipeline that a training step runs: what it is, and when it goes forward and backward."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from profiler.tensors.tensor_parts import is_distributed
from profiler.tensors.tensor_trees import map_tensors, tensors_in
from profiler.workload.given_models import class_name, inner_model
from profiler.workload.reachable import reached_from
from profiler.workload.steps import ProfileError
from profiler.workload.workload import Workload

_SCHEDULES = "torch.distributed.pipelining.schedules"
_PLANNED = ("ScheduleGPipe", "Schedule1F1B")
Side = Literal["forward", "backward"]
OnMicroBatch = Callable[[Side, int], None]


def schedule_of(workload: Workload) -> Any:
    """The schedule of ``torch.distributed.pipelining`` that the user's step refers to; None where there is none.

    Raises:
        ProfileError: several, or one that no plan can be made for, or of another module than the workload's.
    """
    defined: Any = sys.modules.get(_SCHEDULES)
    if defined is None or workload.own is None:
        return None
    found = [each for each in reached_from(workload.own.function) if isinstance(each, defined._PipelineSchedule)]
    if not found:
        return None
    _check(found, workload)
    return found[0]


def _check(found: list[Any], workload: Workload) -> None:
    names = [type(schedule).__name__ for schedule in found]
    if names[0] not in _PLANNED or len(names) > 1:
        raise ProfileError(
            f"profile: expected a step of one {' or '.join(_PLANNED)}, got {', '.join(names)}; plans are for ranks "
            "that run one stage each: take one of these, or train this schedule without a plan"
        )
    stage = found[0]._stage
    if inner_model(stage.submod) is not inner_model(workload.model):
        raise ProfileError(
            f"profile: expected the module of this rank's stage as the model, got a {type(workload.model).__name__}; "
            "pass Workload(model=stage.submod, step=...)"
        )
    if stage.dw_builder is not None:
        raise ProfileError(
            "profile: expected a stage that goes backward at once, got one with a dw_builder; leave it out, or train "
            "without a plan"
        )
    if isinstance(stage.submod, DistributedDataParallel) or class_name(stage.submod) != type(stage.submod).__name__:
        raise ProfileError(
            "profile: expected a pipeline stage that one rank holds, got one in DistributedDataParallel or "
            "fully_shard; plan pipelines without data parallelism, or data parallel models without a pipeline"
        )
    if any(is_distributed(tensor) for tensor in (*stage.submod.parameters(), *stage.submod.buffers())):
        raise ProfileError(
            "profile: expected a pipeline stage of one rank, got one whose parameters are distributed (DTensor); plan "
            "tensor parallel models without a pipeline, or pipelines of whole modules"
        )


@dataclass(slots=True)
class MicroBatch:
    """What a stage got for one micro-batch, without its graph.

    Attributes:
        args, kwargs: of its module.
        target: for the loss; None but on the last stage.
        gradients: of what its module returned; empty on the last stage.
    """

    args: Any = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    gradients: tuple[Any, ...] = ()


@contextlib.contextmanager
def micro_batches_seen(schedule: Any, see: OnMicroBatch) -> Iterator[None]:
    """Inside, ``see`` is told as a micro-batch goes forward or backward, and with -1 once backwards are over."""
    stage = schedule._stage
    plain = {name: getattr(stage, name) for name in ("forward_one_chunk", "backward_one_chunk")}

    def forward(number: int, *args: Any, **kwargs: Any) -> Any:
        see("forward", number)
        return plain["forward_one_chunk"](number, *args, **kwargs)

    def backward(number: int, *args: Any, **kwargs: Any) -> Any:
        see("backward", number)
        result = plain["backward_one_chunk"](number, *args, **kwargs)
        if kwargs.get("last_backward"):
            see("backward", -1)
        return result

    stage.forward_one_chunk, stage.backward_one_chunk = forward, backward
    try:
        yield
    finally:
        del stage.forward_one_chunk, stage.backward_one_chunk


def captured_micro_batch(schedule: Any, step: Callable[[], Any]) -> MicroBatch:
    """Run a step, and copy what the stage gets for its first micro-batch."""
    stage, found = schedule._stage, MicroBatch()
    plain_call, plain_loss = stage.forward_maybe_with_nosync, schedule._compute_loss
    under_way: list[tuple[Side, int]] = []

    def see(side: Side, number: int) -> None:
        under_way[:] = [(side, number)]
        if (side, number) == ("backward", 0) and not stage.is_last:
            found.gradients = map_tensors(_copied, stage._retrieve_recv_grads(0))

    def call(*args: Any, **kwargs: Any) -> Any:
        if under_way == [("forward", 0)]:
            found.args, found.kwargs = map_tensors(_copied, args), map_tensors(_copied, kwargs)
        return plain_call(*args, **kwargs)

    def loss(output: Any, target: Any, *args: Any) -> Any:
        if under_way == [("forward", 0)]:
            found.target = map_tensors(_copied, target)
        return plain_loss(output, target, *args)

    stage.forward_maybe_with_nosync, schedule._compute_loss = call, loss
    try:
        with micro_batches_seen(schedule, see):
            step()
    finally:
        del stage.forward_maybe_with_nosync, schedule._compute_loss
    return found


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def outputs_with_gradients(output: Any) -> list[Tensor]:
    """The tensors that a stage's backward begins from, as pipelining takes them."""
    return [tensor for tensor in tensors_in(output) if tensor.requires_grad]
