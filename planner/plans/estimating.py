"""Estimates what a training step takes on a device that is not there: a profile of a run on fake tensors."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from planner.distributed.sharding import Engine, check_engine, sharded
from planner.distributed.simulated_ranks import simulate_collectives, simulated_group
from planner.plans.profiling import profile
from planner.plans.solving import Numerics
from profiler.current_device import active_device
from profiler.device_record import DeviceRecord, is_card
from profiler.measurement.device_memory import held_beside_result
from profiler.measurement.measuring import Progress
from profiler.records import Profile
from profiler.simulation.cuda_rules import as_on_cuda
from profiler.simulation.op_costs import DeviceCosts
from profiler.simulation.simulated_device import is_whole, simulating
from profiler.trace.partition import Stages
from profiler.workload.optimizers import optimizer_tensors
from profiler.workload.reachable import reached_from, tensors_of
from profiler.workload.steps import ProfileError, causes_of
from profiler.workload.tensor_parts import is_distributed
from profiler.workload.workload import Workload, varied


def estimate(
    workload: Workload | Callable[[], Workload],
    *,
    device: str | Path | DeviceRecord,
    ranks: int | None = None,
    shard: Engine | None = None,
    stages: Stages = None,
    menus: bool = True,
    numerics: Numerics = "eager",
    progress: Progress | None = None,
) -> Profile:
    """Estimate one training step on a device that need not be there.

    The step runs on fake tensors, which have a shape and no memory: bytes are counted as the device's allocator would,
    and seconds are added up from what is known of the device. Plans, tables and pages are made from such a profile as
    from a measured one, and say that it is estimated.

    Args:
        workload: a function that builds the training step: it is called where no tensor takes memory, so a model may
            be larger than this machine. A ``Workload`` that is there already is copied, its own ``step`` excepted.
        device: the name of a card (``"h100"``, ``"a100-80gb"``, ...), or the path of a device file, as
            ``planner calibrate`` writes it.
        ranks: estimate the first of so many ranks, each with a batch as the workload has it; None for one device.
        shard: how they share a model that is not wrapped yet: ``"ddp"``, in DistributedDataParallel; ``"fsdp2"``, by
            ``fully_shard`` of each repeated block and of the model; None where ``workload`` builds a mesh of all ranks
            and wraps its model itself, as with tensor parallelism.
        stages, menus, numerics, progress: as for ``profile``.

    Returns:
        The profile, with ``estimated`` True.

    Raises:
        ProfileError: the step fails on fake tensors; the message names the op, and what to do.
        ValueError: there is no such device, or the workload cannot be copied.
    """
    with simulated_workload(workload, device, ranks=ranks, shard=shard) as fake:
        return profile(fake, stages=stages, menus=menus, numerics=numerics, progress=progress)


@contextmanager
def simulated_workload(
    workload: Workload | Callable[[], Workload],
    device: str | Path | DeviceRecord,
    *,
    ranks: int | None = None,
    shard: Engine | None = None,
) -> Iterator[Workload]:
    """Inside, a device is simulated, and the workload lies on it; arguments and errors as for ``estimate``."""
    if ranks is None and shard is not None:
        raise ValueError("estimate: shard is for several ranks; add ranks=8, or leave shard out for one device")
    if shard is not None:
        check_engine(shard)
    known = device if isinstance(device, DeviceRecord) else DeviceRecord.named(str(device))
    with on_card(known), nullcontext() if ranks is None else _ranks(ranks):
        fake = on_fake_tensors(workload) if isinstance(workload, Workload) else workload()
        if shard is not None:
            fake = sharded(fake, shard)
        if ranks is not None:
            _check_wrapped(fake, ranks)
            simulate_collectives(fake.model)
        yield fake


def _check_wrapped(workload: Workload, ranks: int) -> None:
    """Refuse a model that every rank would train by itself; raises ValueError."""
    wrapped = any(isinstance(module, DistributedDataParallel) for module in workload.model.modules())
    wrapped = wrapped or any(map(is_distributed, workload.model.parameters()))
    if not wrapped and workload.custom_step is None:
        raise ValueError(
            f"estimate: each of {ranks} ranks would have the whole model, and nothing is exchanged; give "
            "shard='ddp' or 'fsdp2' (--shard), or wrap the model where it is built"
        )


@contextmanager
def on_card(device: DeviceRecord) -> Iterator[None]:
    """Tensors that are made inside are fake, and lie on a device that need not be there; profiles are estimates."""
    cuda = device.kind == "cuda"
    costs = DeviceCosts(device, None if cuda else held_beside_result)
    with simulating(costs), as_on_cuda() if cuda else nullcontext():
        try:
            yield
        except (ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
            if why := _why_not(error):
                raise ProfileError(f"estimate: {why}") from error
            raise


def _why_not(error: BaseException) -> str:
    """Why a step cannot run without values, and what to do; empty where something else failed."""
    for cause in causes_of(error):
        if any("/distributed/pipelining/" in frame.filename for frame in traceback.extract_tb(cause.__traceback__)):
            return (
                "pipelines cannot be estimated as a whole; estimate each rank's part as a model of its own, whose "
                "batch is a micro-batch, or profile on the ranks"
            )
        if "env:// rendezvous" in str(cause):
            return (
                "the target makes a group or a mesh of ranks, and an estimate is for one device unless ranks are "
                "given; add ranks=8 (--ranks 8), as many as its mesh has, and make no process group where there is one"
            )
        if "no fake impl registered" in str(cause):  # An op made by torch.library.custom_op says so itself.
            return (
                f"{str(cause).splitlines()[0].partition(' This is necessary')[0]} Add its shapes with "
                "torch.library.register_fake, or profile on the device itself"
            )
        if isinstance(cause, (DynamicOutputShapeException, DataDependentOutputException)):
            return (
                f"what {cause.func} returns depends on values, which an estimate does not have; profile on the device "
                "itself, or estimate a variant of the model whose sizes do not depend on its data"
            )
        if isinstance(cause, UnsupportedOperatorException):
            return (
                f"{cause.func} does not say of what shape its result is; add that with torch.library.register_fake, or "
                "profile on the device itself"
            )
    device = active_device()
    if device is not None and device.guessed_at:
        failed = str(error).removeprefix("profile: ")
        return (
            f"{failed}. {device.guessed_at} reads a value that is computed from floating-point numbers; an estimate "
            "does not have it, and takes 1. If that is why, profile on the device itself, or estimate a variant of the "
            "model whose sizes do not depend on its data"
        )
    return ""


def estimate_note(found: Profile) -> tuple[str, ...]:
    """The note that a profile was not measured; none where it was."""
    return () if found.estimate is None else (f"estimated {found.estimate.in_words()}; nothing was measured",)


@contextmanager
def on_named_device(device: str | None) -> Iterator[str | None]:
    """Inside, a device that is named by its card or by a device file is simulated.

    Args:
        device: such a name, or that of a device of torch's, or None.

    Yields:
        The device of torch's that models are moved to; None for those that stay where they are made.
    """
    if not is_card(device):
        yield device
        return
    with on_card(DeviceRecord.named(str(device))):
        yield None


@contextmanager
def _ranks(count: int) -> Iterator[None]:
    """Inside, this process is the first of so many ranks; optimizers wait for the gradients of the others."""
    device = active_device()
    assert device is not None
    waiting = register_optimizer_step_pre_hook(lambda *_: device.wait_for_collectives())
    try:
        with simulated_group(count):
            yield
    finally:
        waiting.remove()


def on_fake_tensors(workload: Workload) -> Workload:
    """Returns a copy of a workload whose tensors are fake, and count on the simulated device; whole numbers stay real.

    Raises:
        ProfileError: it has a step of its own, or holds what cannot be copied.
    """
    if workload.custom_step is not None:
        raise ProfileError(
            "estimate: a workload with a step of its own refers to tensors that are there; give the function that "
            "builds the workload instead: planner.estimate(build, device=...)"
        )
    roots = [workload.model, workload.inputs, workload.loss, *workload.optimizers]
    held = [*workload.model.parameters(), *workload.model.buffers(), *tensors_of(reached_from(*roots))]
    held += [tensor for *_, tensor in optimizer_tensors(workload.optimizers)]
    memo: dict[int, Any] = {}
    for tensor in held:
        if id(tensor) not in memo:
            memo[id(tensor)] = _faked(tensor)
    try:
        return copy.deepcopy(varied(workload), memo)  # Without the output of its last step.
    except Exception as error:  # Models are user code: whatever stands in the way of a copy is named.
        raise ProfileError(
            f"estimate: the workload cannot be copied ({type(error).__name__}: {error}); give the function that builds "
            "it instead: planner.estimate(build, device=...)"
        ) from error


def _faked(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same layout on the simulated device."""
    device = active_device()
    assert device is not None
    if is_whole(tensor) and not isinstance(tensor, FakeTensor):
        with _disable_current_modes():  # Else the original would count as well.
            made = tensor.detach().to("cpu", copy=True)
    else:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    device.hold(made)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad) if tensor.is_leaf else made
