"""One training step of a model, its inputs, loss and optimizer, as everything else here runs it."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from profiler.workload.custom_step import CustomStep, StepError
from profiler.workload.data_parallel import end_of_step
from profiler.workload.given_models import check_ready
from profiler.workload.optimizers import (
    Optimizers,
    given_optimizers,
    optimizer_names,
    optimizers_of,
    scaler_tensors,
    stepped_parameters,
    wants_closure,
    with_inner,
)
from profiler.workload.reachable import reached_from, tensors_held, tensors_of
from profiler.workload.tensor_parts import sizes_of
from profiler.workload.tensor_trees import map_tensors, tensors_in

LossFunction = Callable[[Any], Tensor]
StepPhase = Literal["forward", "backward", "optimizer", "evaluation", "end"]
# Called as a phase of a step begins: with its name, and at the begin of backward with the loss, else None.
OnPhase = Callable[[StepPhase, Tensor | None], None]


class Workload:
    """One training step: forward, loss, backward and, with an optimizer, its step.

    Args:
        model: the module to train; planned in place.
        inputs: one batch: a tensor, a tuple of positional arguments, or a dict
            of keyword arguments.
        loss: a callable on the model's output that returns a scalar tensor;
            None takes the output's own ``.loss`` (or ``["loss"]``), else the one
            scalar in it that requires grad (``return logits, loss``).
        optimizer: stepped after backward, or several of them in a list, stepped in its order; None leaves parameters
            alone. One that evaluates the loss itself (LBFGS) gets a closure: it clears gradients, runs forward and
            backward and clips; the first time it gives what the step has computed already.
        autocast: None, a dtype (``torch.bfloat16``) or its name; the forward
            and the loss then run under ``torch.autocast``.
        accumulate: True if gradients exist before the step begins and are
            added to (gradient accumulation, ``zero_grad(set_to_none=False)``);
            they are then resident.
        scaler: scales the loss before backward, as float16 needs; where gradients
            come out inf or NaN the optimizer's step is left out, and the scale falls.
        clip_norm: the norm to which the unscaled gradients of all optimizers are clipped together.
        step: the function that runs one whole training step as it is written in a loop: forward, backward, the
            optimizer's step and clearing gradients, wherever they stand, with any number of micro-batches. What it
            refers to (its closure, globals, the object of a method) is left as it was after measuring, and counts where
            it holds tensors. Then there are no ``loss``, ``autocast``, ``accumulate``, ``scaler`` and ``clip_norm``,
            and ``inputs`` and ``optimizer`` need not be named.
        keeps_output: True where output and loss stay bound until those of the next step take their place, as in most
            loops (``outputs = model(batch)``, ``loss = outputs.loss``); False where they go as soon as nothing needs
            them.

    Attributes:
        custom_step: the runner of the user's ``step``; None where the built-in step runs.
        stepped: whether every optimizer's step was run by the last ``update``.
        nodes_keep: whether nodes of its graph keep tensors beyond backward, as a first step showed.

    Raises:
        ValueError: an argument has the wrong type.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Tensor | tuple[Any, ...] | Mapping[str, Any] | None = None,
        *,
        loss: LossFunction | None = None,
        optimizer: Optimizers = None,
        autocast: torch.dtype | str | None = None,
        accumulate: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        clip_norm: float | None = None,
        keeps_output: bool = True,
        step: Callable[[], Any] | None = None,
    ) -> None:
        if step is not None:
            check_custom_step(step, loss, autocast, accumulate, scaler, clip_norm)
            inputs = () if inputs is None else inputs
        check_kinds(model, inputs, loss)
        self.model = model
        self.inputs: Any = inputs
        self.custom_step = None if step is None else CustomStep(step, model)
        self.loss = loss
        self.optimizer: Any = optimizer if step is None else optimizers_of(step, optimizer)
        self.autocast = autocast_dtype(autocast)
        self.accumulate = accumulate
        check_update(self.optimizers, scaler, clip_norm)
        self.scaler, self.clip_norm = scaler, clip_norm
        self.keeps_output = keeps_output
        self.stepped, self.nodes_keep = True, False
        self._output: Any = None
        self._loss: Tensor | None = None

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers, none, one or several, in the order in which they step."""
        return given_optimizers(self.optimizer)

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters, or of the inputs where it has none."""
        own = next(itertools.chain(self.model.parameters(), self.model.buffers()), None)
        held = [own] if own is not None else tensors_held(self.inputs)
        return held[0].device if held else torch.device("cpu")

    def to(self, device: torch.device | str) -> Workload:
        """Move the model (in place) and the inputs; returns self.

        Raises:
            ValueError: the device does not exist here, the optimizer or the scaler already holds states on
                another device, or the model has nothing to move yet (lazy modules, meta device).
        """
        try:
            target = torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"device: expected cpu or cuda, got {str(device)!r}; use one of them") from error
        check_ready(self.model, "device")
        if target == self.device or (target.index is None and target.type == self.device.type):
            return self
        if target.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device: expected one that this machine has, got {str(device)!r}; use cpu")
        if any(optimizer.state for optimizer in with_inner(self.optimizers)):
            raise ValueError("device: expected an optimizer without states, got a used one; move the model first")
        if scaler_tensors(self.scaler):
            raise ValueError("device: expected a scaler that has not been used, got a used one; move the model first")
        self.model.to(target)
        # Moved without its graph: an input that takes a gradient stays a leaf.
        self.inputs = map_tensors(lambda t: t.detach().to(target).requires_grad_(t.requires_grad), self.inputs)
        return self

    def forward(self) -> Tensor:
        """Run the forward and return the loss; ``keeps_output`` says whether the output stays bound.

        Raises:
            ValueError: the output carries no usable loss.
        """
        if self.custom_step is not None:
            raise ValueError("Workload: the forward of a custom step does not run by itself; call step()")
        if not self.keeps_output:
            return self._evaluated()
        with self._autocast_context():
            self._output = self._call_model()
            self._loss = self._loss_of(self._output)
            return self._loss

    def _evaluated(self) -> Tensor:
        """The loss; nothing else stays bound."""
        with self._autocast_context():
            return self._loss_of(self._call_model())

    @property
    def held_by_loop(self) -> list[Tensor]:
        """The tensors that the loop refers to until the next step: the last output and loss, or a custom step's."""
        if self.custom_step is None:
            return tensors_of(reached_from(self._output, self._loss))
        return tensors_of(reached_from(self.custom_step.function, self.custom_step.result))

    @property
    def held_loss(self) -> list[Tensor]:
        """The last loss, where it is still bound."""
        return tensors_in(self._loss)

    def release(self) -> None:
        """Let go of the last output and loss."""
        self._output = self._loss = None
        if self.custom_step is not None:
            self.custom_step.result = None

    @property
    def held_by_loss(self) -> list[Tensor]:
        """The tensors that a loss function refers to: the targets of the batch, a teacher's weights."""
        return tensors_of(reached_from(self.loss))

    @property
    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tensors of the batch; those that the model gets for a custom step that has run."""
        if self.custom_step is not None and self.custom_step.input_shapes:
            return self.custom_step.input_shapes
        return tuple(map(sizes_of, tensors_held(self.inputs)))

    def zero_grad(self) -> None:
        """Set every gradient to None, or with ``accumulate`` to zeros; a custom step does so itself."""
        if self.custom_step is not None:
            return
        for parameter in self.with_gradients():
            if not self.accumulate:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()
            elif parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def parameters_beside(self) -> Iterator[Tensor]:
        """Yields parameters of the loss, and the optimizers' own (master copies, say); some may be the model's."""
        if isinstance(self.loss, nn.Module):
            yield from self.loss.parameters()
        yield from stepped_parameters(self.optimizers)

    def with_gradients(self) -> Iterator[Tensor]:
        """All parameters, and inputs that want a gradient."""
        yield from self.model.parameters()
        yield from self.parameters_beside()
        yield from (tensor for tensor in tensors_held(self.inputs) if tensor.is_leaf and tensor.requires_grad)

    def step(self, on_phase: OnPhase | None = None, until: StepPhase | None = None) -> float:
        """One whole training step; returns the loss as a number.

        Args:
            on_phase: called at the begin of each phase: of ``forward`` once gradients are cleared, of ``backward``,
                of ``optimizer`` (also where there is none), and of ``end``, when nothing is left but what the loop
                holds. Where an optimizer evaluates the loss again, or an own step has several forwards, also of each
                ``evaluation``, and of ``optimizer`` after it.
            until: stop as this phase begins; the number is then none.
        """

        def begin(phase: StepPhase, loss: Tensor | None) -> None:
            if on_phase is not None:
                on_phase(phase, loss)
            if phase == until:
                raise _Stopped

        before = [(parameter.grad is not None, parameter.requires_grad) for parameter in self.with_gradients()]
        try:
            return self._whole(begin) if self.custom_step is None else self._custom(self.custom_step, begin)
        except BaseException as error:
            end_of_step(self.model)
            if isinstance(error, _Stopped):
                self._stop(before)
                return float("nan")
            self.release()  # The graph of a step that failed would be there in the next.
            raise

    def _whole(self, begin: OnPhase) -> float:
        self.zero_grad()
        begin("forward", None)
        loss = self.forward()
        begin("backward", loss)
        self.backward(loss)
        value = loss.detach()  # Its number outlives its graph, which goes here.
        del loss
        begin("optimizer", None)
        self.update(value, begin)
        begin("end", None)
        return float(value)

    def _custom(self, custom: CustomStep, begin: OnPhase) -> float:
        value = custom.run(begin, self._check_known)
        self.autocast = custom.autocast
        self.stepped = bool(custom.stepped) or not self.optimizers
        return value

    def _check_known(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step of an optimizer whose states nobody would put back; raises StepError."""
        if not any(optimizer is known for known in with_inner(self.optimizers)):
            raise StepError(
                f"Workload: a {type(optimizer).__name__} steps that the step function does not refer to; pass "
                "optimizer=, or a list of them"
            )

    def _stop(self, before: Sequence[tuple[bool, bool]]) -> None:
        """A step was left in the middle: what is there between two steps is there again, of the same sizes."""
        self._output, self._loss = map_tensors(Tensor.detach, (self._output, self._loss))  # Their graph goes.
        if self.custom_step is None:
            return
        for parameter, (had, trains) in zip(self.with_gradients(), before, strict=True):
            parameter.requires_grad = trains  # A part of the step may freeze some, as a GAN's does.
            if not had:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def backward(self, loss: Tensor) -> None:
        """Run the backward of what ``forward`` returned, scaled where there is a scaler."""
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward()

    def update(self, loss: Tensor | None = None, on_phase: OnPhase | None = None) -> None:
        """Runs what follows backward: unscale, clip, the optimizers' steps, the next scale.

        Args:
            loss: the loss of the gradients, for a closure to return; without, a closure evaluates it first.
            on_phase: the same as for ``step``.
        """
        if not self.optimizers:
            return
        self._clip()
        if self.scaler is None:
            for optimizer in self.optimizers:
                if wants_closure(optimizer):
                    optimizer.step(self._closure(loss, on_phase or (lambda phase, loss: None)))  # type: ignore[arg-type]
                else:
                    optimizer.step()
            return
        stepped: set[int] = set()
        # One that stands around another may not call hooks, where the other does.
        hook = register_optimizer_step_post_hook(lambda own, *_: stepped.add(id(own)))
        try:
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
        finally:
            hook.remove()
        self.stepped = all(stepped & {id(held) for held in with_inner([each])} for each in self.optimizers)
        self.scaler.update()

    def _clip(self) -> None:
        if self.clip_norm is None:
            return
        for optimizer in self.optimizers if self.scaler is not None else ():
            self.scaler.unscale_(optimizer)  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(stepped_parameters(self.optimizers), self.clip_norm)

    def _closure(self, loss: Tensor | None, begin: OnPhase) -> Callable[[], Tensor]:
        """Evaluates the loss and its gradients; as long as no parameter has changed they are those that are there."""
        known, versions = loss, self._versions()

        def evaluate() -> Tensor:
            nonlocal known
            if known is not None and versions == self._versions():
                known, value = None, known
                return value
            known = None
            self.zero_grad()
            begin("evaluation", None)
            with torch.enable_grad():
                again = self._evaluated()
                self.backward(again)
            self._clip()
            value = again.detach()
            del again
            begin("optimizer", None)
            return value

        return evaluate

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self.with_gradients()]

    def _call_model(self) -> Any:
        if isinstance(self.inputs, Mapping):
            return self.model(**self.inputs)
        if isinstance(self.inputs, (tuple, list)):
            return self.model(*self.inputs)
        return self.model(self.inputs)

    def _autocast_context(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def _loss_of(self, output: Any) -> Tensor:
        loss = self.loss(output) if self.loss is not None else own_loss(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            if not torch.is_grad_enabled():
                raise StepError("Workload: gradients are off (no_grad or inference_mode); leave that context")
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            remedy = "pass loss=, a callable on the model's output, or labels in the inputs"
            if isinstance(loss, Tensor) and loss.numel() == 1:
                got, remedy = "one that nothing trained goes into", "unfreeze what is to be trained, or detach less"
            raise StepError(f"Workload: expected a scalar loss that requires grad, got {got}; {remedy}")
        return loss


class _Stopped(BaseException):
    """Raised as a phase begins that the step is not to enter; no user code should catch it."""


def own_loss(output: Any) -> Any:
    """The loss that a model's output carries itself; None where it has none, as where labels are left out.

    Raises:
        StepError: several scalars that require grad, and none of them called loss.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    named: Any = output
    if hasattr(named, "loss"):
        return named.loss
    scalars = [tensor for tensor in tensors_in(output) if tensor.numel() == 1 and tensor.requires_grad]
    if len(scalars) > 1:
        example = "sum(output.values())" if isinstance(output, Mapping) else "output[0]"
        raise StepError(
            f"Workload: the output has {len(scalars)} scalars that require grad, and it is not known which is the loss "
            f"or whether they are added up; pass loss=, for example loss=lambda output: {example}"
        )
    return scalars[0] if scalars else None


_ARGUMENTS = ("model", "inputs", "loss", "optimizer", "autocast", "accumulate", "scaler", "clip_norm", "keeps_output")


def varied(workload: Workload, **changes: Any) -> Workload:
    """A workload with some arguments changed; model, batch, step and the rest are shared with the original.

    Raises:
        TypeError: an argument that Workload does not take.
        ValueError: as Workload.
    """
    names = _ARGUMENTS if workload.custom_step is None else ("model", "inputs", "optimizer")
    step = {} if workload.custom_step is None else {"step": workload.custom_step.function}
    return Workload(**{**{name: getattr(workload, name) for name in names}, **step, **changes})


_AUTOCAST_DTYPES = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float16": torch.float16, "fp16": torch.float16}


def check_kinds(model: Any, inputs: Any, loss: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"Workload: expected model to be a torch.nn.Module, got {type(model).__name__}; pass one")
    # A pipeline's part, a scripted module and the like have their forward elsewhere.
    if inspect.getattr_static(type(model), "forward") is nn.Module.forward and "forward" not in vars(model):
        parts = ", ".join(repr(name) for name, _ in model.named_children()) or "none"
        raise ValueError(
            f"Workload: a {type(model).__name__} has no forward that a step could call, so there is nothing to plan in "
            f"it; its modules are {parts}. Plan each that is large by itself, one after the other: profile and apply "
            "the first one with step=, the whole step of your loop, then the next one with the same step and budget"
        )
    if inputs is None:
        raise ValueError("Workload: it has no inputs; pass inputs=batch, one batch as the model takes it")
    if not isinstance(inputs, (Tensor, tuple, list, Mapping)):
        raise ValueError(
            "Workload: expected inputs to be a tensor, a tuple of arguments or a dict of keyword arguments, "
            f"got {type(inputs).__name__}; {_remedy(inputs)}"
        )
    if loss is None:
        return
    if not callable(loss):
        raise ValueError(f"Workload: expected loss to be callable or None, got {type(loss).__name__}; pass one")
    if others := _more_arguments(loss):
        raise ValueError(
            f"Workload: the loss takes {' and '.join(others)}, and it is called with the model's output alone; bind "
            "the rest: loss=lambda output: loss(output, target)"
        )


def _more_arguments(loss: Any) -> list[str]:
    """The names of all arguments where a call with one of them is none; empty where that is not known."""
    called = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        signature = inspect.signature(called)
        signature.bind(None)
    except ValueError:
        return []
    except TypeError:
        return list(signature.parameters)
    return []


def _remedy(inputs: Any) -> str:
    return "pass one batch of it" if isinstance(inputs, Iterable) else "wrap it in a tuple"


def check_custom_step(step: Any, *others: Any) -> None:
    if not callable(step):
        raise ValueError(f"Workload: expected step to be a function of no arguments, got {type(step).__name__}")
    names = ("loss", "autocast", "accumulate", "scaler", "clip_norm")
    given = [name for name, value in zip(names, others, strict=True) if value not in (None, False)]
    if given:
        raise ValueError(
            f"Workload: expected no {', '.join(given)} beside step, got some; let the step function do that itself"
        )


def check_update(optimizers: Sequence[torch.optim.Optimizer], scaler: Any, clip_norm: Any) -> None:
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ValueError(
            f"Workload: expected scaler to be a torch.amp.GradScaler or None, got {type(scaler).__name__}; pass one"
        )
    number = isinstance(clip_norm, (int, float)) and not isinstance(clip_norm, bool) and clip_norm > 0
    if clip_norm is not None and not number:
        raise ValueError(f"Workload: expected clip_norm to be a number above zero or None, got {clip_norm!r}; pass one")
    if scaler is not None and (closed := [each for each in optimizers if wants_closure(each)]):
        raise ValueError(
            f"Workload: torch.amp.GradScaler does not step {optimizer_names(closed)}, whose step takes a closure; "
            "leave the scaler out"
        )
    if not optimizers and not (scaler is None and clip_norm is None):
        raise ValueError("Workload: expected an optimizer beside scaler and clip_norm, got none; pass optimizer=")


def autocast_dtype(autocast: torch.dtype | str | None) -> torch.dtype | None:
    if autocast is None or autocast in (torch.bfloat16, torch.float16):
        return autocast  # type: ignore[return-value]
    if isinstance(autocast, str) and autocast in _AUTOCAST_DTYPES:
        return _AUTOCAST_DTYPES[autocast]
    raise ValueError(f"Workload: expected autocast to be None, bfloat16 or float16, got {autocast!r}; use one of them")
