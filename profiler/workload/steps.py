"""Running training steps to be measured: the first one, those that the loss scale leaves out, what stays between."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from profiler.agreement import any_rank
from profiler.records import ResidentBytes
from profiler.workload.custom_step import StepError, kept_by_nodes
from profiler.workload.data_parallel import bucket_bytes, buckets_change, mesh_tensors, unsharded_tensors
from profiler.workload.optimizers import (
    COUNTS_ON_HOST,
    fill_history,
    optimizer_tensors,
    scaler_tensors,
    stepped_parameters,
    wants_closure,
)
from profiler.workload.reachable import reached_from, tensors_held, tensors_of
from profiler.workload.tensor_parts import distinct_bytes, parts_of, storage_key
from profiler.workload.workload import OnPhase, StepPhase, Workload

Result = TypeVar("Result")
# GradScaler's scale begins at 65536 and halves with every skipped step; below 1 it no longer serves its end.
SKIPPED_STEPS = 24
# ASGD begins to average after a million steps, RAdam to rectify after five.
_LATE = 100_000_000


class ProfileError(ValueError):
    """The workload cannot be profiled; the message says what failed and what to do."""


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it came from, each once: such a chain may lead back into itself."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__


def check_workload(workload: Any, who: str) -> None:
    """Refuse what is no workload; ``who`` begins the message. Raises ProfileError."""
    if not isinstance(workload, Workload):
        raise ProfileError(
            f"{who}: expected a planner.Workload, got a {type(workload).__name__}; "
            "say what a step is first: planner.Workload(model=..., inputs=..., loss=..., optimizer=...)"
        )


def first_step(workload: Workload, run: Callable[[OnPhase], object] | None = None) -> None:
    """Run a step to warm up, and bring the optimizers' states to the size that they stay at.

    Args:
        workload: the workload of the step.
        run: the function that runs the step, and tells of its phases; None for the workload's own way.

    Raises:
        ProfileError: as ``checked_step``, or an optimizer steps nothing of this model.
    """
    run = run or workload.step
    if workload.custom_step is not None:
        checked_step(workload, lambda: run(_ignore))
        if buckets_change(workload.model):
            checked_step(workload, lambda: run(_ignore))
        return
    watch = _UnknownOptimizers(workload)
    checked_step(workload, lambda: run(watch.note))
    watch.check()
    workload.nodes_keep = bool(held_by_nodes(workload))
    # The second step is the first that has a history, and the last that makes buckets anew.
    if any(map(wants_closure, workload.optimizers)) or buckets_change(workload.model):
        checked_step(workload, lambda: run(_ignore))
    fill_history(workload.optimizers)
    workload.zero_grad()


def _ignore(phase: StepPhase, loss: Tensor | None) -> None:
    """Ignores the beginning of a phase."""


class _UnknownOptimizers:
    """Watches optimizers all of whose parameters are neither the model's nor the loss's.

    Such parameters may be used by the loss, and have gradients then; or be copies, from which the step writes the
    model's. Where nothing of this is seen, they are those of another model.
    """

    def __init__(self, workload: Workload) -> None:
        self._model = workload.model
        modules = [workload.model, *([workload.loss] if isinstance(workload.loss, nn.Module) else [])]
        known = {id(parameter) for module in modules for parameter in module.parameters()}
        self._unknown = [each for each in workload.optimizers if known.isdisjoint(map(id, stepped_parameters([each])))]
        self._used: set[int] = set()
        self._alone = len(self._unknown) == len(workload.optimizers)  # Else others change the model anyway.
        self._before = self._values() if self._unknown and self._alone else []

    def note(self, phase: StepPhase, _: Tensor | None) -> None:
        """See which of them have gradients."""
        if phase in ("optimizer", "end"):
            for optimizer in self._unknown:
                if optimizer.state or any(p.grad is not None for p in stepped_parameters([optimizer])):
                    self._used.add(id(optimizer))

    def check(self) -> None:
        """Refuse those that nothing was seen of; raises ProfileError."""
        if not self._unknown:
            return
        if self._alone and any(not torch.equal(a, b) for a, b in zip(self._before, self._values(), strict=True)):
            return
        for optimizer in self._unknown:
            if id(optimizer) not in self._used:
                count = len(stepped_parameters([optimizer]))
                raise ProfileError(
                    f"optimizer: {_a(optimizer)} holds {count} parameters that are neither this model's nor its "
                    "loss's, and have no gradient after backward; make it from model.parameters()"
                )

    def _values(self) -> list[Tensor]:
        return [parameter.detach().to("cpu", copy=True) for parameter in self._model.parameters()]


def _a(optimizer: torch.optim.Optimizer) -> str:
    name = type(optimizer).__name__
    return f"an {name}" if name[:1] in "AEIOU" else f"a {name}"


def checked_step(workload: Workload, run: Callable[[], Result]) -> Result:
    """Call ``run``, a whole step, and again while the scaler leaves the optimizer out; what the last call returns.

    Raises:
        ProfileError: it fails, or no step has finite gradients.
    """
    try:
        return until_stepped(workload, run)
    except ProfileError:
        raise
    except StepError as error:
        raise ProfileError(f"profile: {str(error).removeprefix('Workload: ')}") from error
    except Exception as error:  # User code runs here; whatever it raises is reported as its failure.
        raise ProfileError(
            f"profile: the training step fails: {type(error).__name__}: {error}; "
            "correct the model, its inputs or the loss"
        ) from error


def until_stepped(workload: Workload, run: Callable[[], Result]) -> Result:
    """Calls ``run``, a whole step, until the optimizer's step is a part of it; returns the last result.

    Raises:
        ProfileError: the scaler leaves it out however small the scale becomes, or a custom step has none.
    """
    for _ in range(SKIPPED_STEPS):
        result = run()
        if not any_rank(not workload.stepped):
            return result
    if workload.custom_step is not None and _finite_gradients(workload):
        raise ProfileError(
            f"step: no optimizer's step in {SKIPPED_STEPS} calls, each from the same state; where every n-th call "
            "updates, let one call run the n micro-batches of an update; where a scaler leaves it out, correct the loss"
        )
    raise ProfileError(
        f"profile: no finite gradients in {SKIPPED_STEPS} steps in a row, however small the loss scale becomes; "
        "correct the loss, or use bfloat16"
    )


def _finite_gradients(workload: Workload) -> bool:
    gradients = [p.grad for p in workload.model.parameters() if p.grad is not None]
    return all(bool(torch.isfinite(part).all()) for gradient in gradients for part in parts_of(gradient))


def counts_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer keeps the number of steps, as torch's own do."""
    return any(isinstance(state, MutableMapping) and "step" in state for state in optimizer.state.values())


def count_many_steps(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer believe that training has gone on for long."""
    for state in optimizer.state.values():
        step = state.get("step") if isinstance(state, MutableMapping) else None
        if isinstance(step, Tensor):
            step.fill_(min(_LATE, torch.finfo(step.dtype).max) if step.is_floating_point() else _LATE)
        elif isinstance(step, (int, float)):
            state["step"] = type(step)(_LATE)


def resident_bytes_of(workload: Workload) -> ResidentBytes:
    """Bytes that are there between two steps, each storage once."""
    model = workload.model
    of_model = {id(parameter) for parameter in model.parameters()}
    meshes = [tensor for tensor in mesh_tensors(model) if tensor.device.type == workload.device.type]
    buffers = distinct_bytes([*_buffers(workload), *meshes]) + distinct_bytes(kept_in_attributes(workload))
    buffers += bucket_bytes(workload.model)
    return ResidentBytes(
        parameters=distinct_bytes(model.parameters()),
        buffers=buffers,
        optimizer=optimizer_state_bytes(workload),
        inputs=distinct_bytes([*tensors_held(workload.inputs), *beside_the_inputs(workload)]),
        gradients=gradient_bytes(workload),
        other_parameters=distinct_bytes(p for p in workload.parameters_beside() if id(p) not in of_model),
        scaler=distinct_bytes(scaler_tensors(workload.scaler)),
        loop=distinct_bytes(held_by_loop(workload)),
    )


def gradient_bytes(workload: Workload) -> int:
    """Bytes of the gradients that are there."""
    return distinct_bytes(p.grad for p in workload.with_gradients() if p.grad is not None)


def states_bytes(workload: Workload, resident: ResidentBytes) -> int:
    """Returns the bytes between steps that do not depend on the batch, with a gradient for each trained parameter."""
    trained_bytes = distinct_bytes(p for p in workload.model.parameters() if p.requires_grad)
    return resident.total - resident.inputs - resident.loop - resident.gradients + trained_bytes


def optimizer_state_bytes(workload: Workload) -> int:
    """Bytes of the optimizers' states on the workload's device, each storage once."""
    kind, counts_on_host = workload.device.type, COUNTS_ON_HOST.get()
    return distinct_bytes(
        tensor
        for _, name, tensor in optimizer_tensors(workload.optimizers)
        if tensor.device.type == kind and not (counts_on_host and name == "step" and tensor.dim() == 0)
    )


def kept_in_attributes(workload: Workload) -> list[Tensor]:
    """Tensors that modules keep besides parameters and buffers, but for those that are counted as something else."""
    return _not_counted(workload, tensors_of(reached_from(*_roots(workload))))


def held_by_loop(workload: Workload) -> list[Tensor]:
    """Returns the tensors of the last step that loop and graphs hold, but for those counted as something else."""
    counted = {storage_key(tensor) for tensor in [*kept_in_attributes(workload), *beside_the_inputs(workload)]}
    held = [*_not_counted(workload, workload.held_by_loop), *held_by_nodes(workload)]
    return [t for t in held if storage_key(t) not in counted]


def held_by_nodes(workload: Workload) -> list[Tensor]:
    """Returns the tensors that the graph of the last step still keeps, but for those counted as something else.

    The graph is held by what the loop refers to, and by what modules keep as plain attributes.
    """
    return _not_counted(workload, kept_by_nodes([*workload.held_by_loop, *kept_in_attributes(workload)]))


def beside_the_inputs(workload: Workload) -> list[Tensor]:
    """Returns the tensors of the batch that are not given to the model: targets that the loss refers to."""
    counted = {storage_key(tensor) for tensor in kept_in_attributes(workload)}
    return [t for t in _not_counted(workload, workload.held_by_loss) if storage_key(t) not in counted]


def _not_counted(workload: Workload, tensors: list[Tensor]) -> list[Tensor]:
    """Returns the tensors on the workload's device that are counted neither as states nor as inputs."""
    counted = [*workload.with_gradients(), *tensors_held(workload.inputs)]
    counted += [parameter.grad for parameter in counted if parameter.is_leaf and parameter.grad is not None]
    counted += [*_buffers(workload), *unsharded_tensors(workload.model)]
    counted += [tensor for *_, tensor in optimizer_tensors(workload.optimizers)]
    known = {storage_key(tensor) for tensor in counted}
    device = workload.device.type
    return [tensor for tensor in tensors if tensor.device.type == device and storage_key(tensor) not in known]


def _roots(workload: Workload) -> list[nn.Module]:
    return [root for root in (workload.model, workload.loss) if isinstance(root, nn.Module)]


def _buffers(workload: Workload) -> list[Tensor]:
    return [buffer for root in _roots(workload) for buffer in root.buffers()]


class TensorsOfState:
    """Tensors that are there from step to step, and which a step may put others in the place of.

    They are the plain attributes of modules, those buffers that are others by now than when this was made, before the
    workload's first step, what optimizers keep that are given a closure (LBFGS makes its vectors anew), and what the
    loop holds.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._first_buffers = [weakref.ref(buffer) for buffer in _buffers(workload)]

    def now(self) -> list[Tensor]:
        """Returns the tensors that are there now."""
        first = {id(reference()) for reference in self._first_buffers}
        buffers = _buffers(self._workload)
        closed = [optimizer for optimizer in self._workload.optimizers if wants_closure(optimizer)]
        vectors = [t for *_, t in optimizer_tensors(closed) if t.device.type == self._workload.device.type]
        others = [b for b in buffers if id(b) not in first]
        return [*kept_in_attributes(self._workload), *others, *vectors, *held_by_loop(self._workload)]
