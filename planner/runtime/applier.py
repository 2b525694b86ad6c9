"""Installs a plan on the real model, takes it off, and measures steps with and without one."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch
from torch import nn

from planner.distributed.alike_steps import check_alike, merged_measurement
from planner.distributed.ranks import Ranks, current_ranks, together
from planner.plans.lowering import LoweredSchedule, lower_schedule
from planner.plans.pipeline_profile import schedule_of
from planner.plans.plan import Plan
from planner.runtime.copy_engines import CopyEngine, CudaCopyEngine, EstimatedCopyEngine, SimulatedCopyEngine
from planner.runtime.loop_watch import LoopWatch, is_metered
from planner.runtime.plan_checks import (
    BatchChecks,
    CheckTurns,
    Deviations,
    ParameterChecks,
    PlanMismatch,
    PlanWarnings,
    check_model,
    check_not_captured,
    check_precision,
    check_types,
    given_model,
    given_plan,
    running_backward,
    transformed,
    warn_about_outer_hooks,
    warn_of_compiled_autograd,
)
from planner.runtime.planned_step import PlannedStep
from planner.runtime.stage_places import StagePlaces, made_compiled, module_named, split_name
from planner.runtime.stage_programs import StagePrograms
from profiler.current_device import active_device
from profiler.measurement.device_memory import take_workspaces
from profiler.measurement.step_measurement import Measurement, measure as measured_step
from profiler.messages import warn_caller
from profiler.recomputation.held_inputs import BatchCopies
from profiler.recomputation.saved_tensors import in_checkpoint
from profiler.recomputation.steps_in_pieces import run_in_pieces
from profiler.records import PiecesRecord
from profiler.trace.call_program import Compiled
from profiler.workload.compiled_forwards import check_no_cuda_graphs
from profiler.workload.data_parallel import keep_gathered
from profiler.workload.forward_patches import Forward, ForwardPatches, is_patched
from profiler.workload.given_models import (
    ModelCaches,
    autocast_now,
    autocast_part,
    autocasts_inside,
    casts_of_parameters,
    check_no_checkpointing,
    inner_model,
)
from profiler.workload.steps import check_workload
from profiler.workload.torch_state import stacks_kept
from profiler.workload.workload import Workload
from solvers.problem.chain import Link

Backend = Literal["eager", "inductor"]
_PLANNED: weakref.WeakKeyDictionary[nn.Module, Handle] = weakref.WeakKeyDictionary()


class Handle:
    """An applied plan. ``remove()``, or leaving the ``with`` block, restores the model.

    Attributes:
        plan: the applied plan.
    """

    def __init__(self, model: nn.Module, plan: Plan, patches: ForwardPatches, watch: LoopWatch | None = None) -> None:
        self.plan = plan
        self._model = weakref.ref(model)
        self._patches = patches
        self._watch = watch

    @property
    def measured_peak_bytes(self) -> int | None:
        """Most bytes at once in the first steps of the loop, where ``apply`` was to watch them and they are over."""
        return None if self._watch is None else self._watch.peak_bytes

    @property
    def model(self) -> nn.Module | None:
        """The model that the plan is applied to; None once it is gone."""
        return self._model()

    def keep_gathered(self, model: nn.Module, plan: Plan) -> None:
        """Have the plan's units of ``fully_shard`` keep their parameters, until it is taken off.

        Raises:
            PlanMismatch: one of them is none, or keeps them anyway; nothing is changed then.
        """
        try:
            for stage in (stage for stage in plan.stages if stage.keeps_gathered):
                self._patches.undo_with(keep_gathered(module_named(model, split_name(stage.name)[0])))
        except ValueError as error:
            self.remove()
            raise PlanMismatch(
                f"apply: {error} as {stage.name!r}, got another module there; shard the model before apply as it was "
                'profiled, or solve without reshard="solve"'
            ) from error

    def outside_loop(self) -> contextlib.AbstractContextManager[None]:
        """Steps within it are none of the loop that ``apply`` watches."""
        return contextlib.nullcontext() if self._watch is None else self._watch.outside_loop()

    def remove(self) -> None:
        """Take the plan off; calling it again does nothing."""
        if self._watch is not None:
            self._watch.end()
        self._patches.remove()
        model = self._model()
        if model is not None and _PLANNED.get(model) is self:
            del _PLANNED[model]

    @property
    def is_undone(self) -> bool:
        """Whether somebody else has put the model's forward of before the plan back."""
        return self._patches.is_undone

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def apply(
    model: nn.Module,
    plan: Plan | str | Path,
    *,
    watch: bool | None = None,
    backend: Backend = "eager",
) -> Handle:
    """Install ``plan`` on ``model``, in place and reversibly.

    Only ``forward`` is wrapped, of the model and of recomputed stages: the module tree, names, state_dict and hooks
    stay as they are. The plan acts in training mode with gradients enabled; under ``no_grad`` and in eval mode the
    model runs as without it.

    Where ``torch.distributed`` is initialised for several ranks, all of them call this, with one plan; in a pipeline
    with the plan of the rank's own stage.

    Args:
        model: the model that was profiled, or one with the same stages; also where it was compiled, or wrapped by
            DistributedDataParallel or fully_shard since.
        plan: from ``planner.solve`` or ``Plan.load``, or the path of its file.
        watch: measure the peak of the first steps, from one update to the next, and warn once if it is above the
            budget. None does so only on CUDA, where it is free; on the CPU, torch's profiler runs for two steps.
            Gradients or outputs that the loop holds and the plan does not count are reported in any case.
        backend: how the programs of captured stages run: ``"eager"`` runs the ops as they are; ``"inductor"`` has
            Inductor compile them, with its numbers, and a peak near the predicted one. It needs a C++ compiler on the
            CPU.

    Returns:
        A handle with ``remove()``; also a context manager.

    Raises:
        PlanMismatch: stage names, parameter shapes, types or ops differ. Also raised by the model's forward under
            another autocast, with other shapes, or after its parameters were replaced.
        RankError: ranks apply different plans (of another ``fingerprint``), or it failed on one of them.
        UnsupportedPlan: the plan's schedule cannot be carried out.
        ValueError: another plan is applied already, an argument is of another kind, the file is no plan,
            checkpointing of the model's own is switched on, it is compiled with CUDA graphs, or there is no such
            backend.
    """
    ranks = current_ranks()
    with contextlib.ExitStack() as undo:
        with together("apply"):
            check_backend(backend)
            model, plan = inner_model(given_model(model)), given_plan(plan)
            if ranks is not None and not plan.in_flight:  # Those of a pipeline's ranks are for different stages.
                ranks.check_same("apply", {"plan": plan.fingerprint})
            handle = _installed(model, plan, watch, backend)
            undo.callback(handle.remove)  # It may have failed on another rank.
        undo.pop_all()
    return handle


def _installed(model: nn.Module, plan: Plan, watch: bool | None, backend: Backend) -> Handle:
    check_unplanned(model)
    check_no_checkpointing(model, "apply")
    check_no_cuda_graphs(model, model_device(model), "apply")
    check_model(model, plan)
    check_types(model, plan)
    take_workspaces(model_device(model))
    lowered = lower_schedule(plan.stages, plan.schedule)
    patches, warn = ForwardPatches(), PlanWarnings()
    if plan.pieces is not None:
        _take_apart(model, plan.pieces, patches, warn)
    session = PlanSession(plan, lowered, model, warn, watch=watch, compiler=_compiler(backend, model))
    install(model, session, session.wrapped, patches)
    handle = Handle(model, plan, patches, session.watch)
    handle.keep_gathered(model, plan)
    register(model, handle)
    return handle


def _take_apart(model: nn.Module, pieces: PiecesRecord, patches: ForwardPatches, warn: PlanWarnings) -> None:
    """Have parts of a model run in pieces; says so where the head cannot."""

    def say_whole() -> None:
        warn.of_stage(
            pieces.head,
            "all that it returns is made at once, as something besides its loss needs it; the peak is not promised",
        )

    run_in_pieces(model, pieces, patches, say_whole)


def check_backend(backend: str) -> None:
    """Refuse what is no name of a backend; raises ValueError."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend: expected one of {', '.join(get_args(Backend))}, got {backend!r}")


def _compiler(backend: Backend, model: nn.Module) -> Compiled | None:
    if backend == "eager":
        return None
    from planner.runtime.inductor_programs import check_compiler, compiled_program  # It loads all of Inductor.

    check_compiler(model_device(model))
    return compiled_program


def _say_what_is_unsteady(plan: Plan) -> None:
    if plan.unsteady:
        more = f" (and {len(plan.unsteady) - 3} more)" if len(plan.unsteady) > 3 else ""
        warn_caller(
            f"apply: the memory of this {plan.model_class} differs from step to step, so its peak is not promised: "
            f"{'; '.join(plan.unsteady[:3])}{more}. Solve with headroom for it",
        )


def check_unplanned(model: nn.Module) -> None:
    """Refuse a model that has a plan, or forwards that are patched otherwise; raises ValueError."""
    if model in _PLANNED or is_patched(model):
        raise ValueError("apply: the model has a plan already; call remove() of its handle first")


def register(model: nn.Module, handle: Handle) -> None:
    """From now on ``handle_of(model)`` is this one."""
    _PLANNED[model] = handle


def handle_of(model: nn.Module) -> Handle | None:
    """Return the handle of the plan applied to ``model``, or None."""
    return _PLANNED.get(inner_model(model))


def measure(workload: Workload, *, repeats: int = 3) -> Measurement:
    """Measure one training step, with the plan that is currently applied, if any.

    The workload is left as it was found. Runs one step to warm up, one under
    the memory meter and ``repeats`` timed ones.

    Where ``torch.distributed`` is initialised for several ranks, all of them call this: the peak and the seconds are
    those of the worst rank, and ``rank_peak_bytes`` has the peak of each.

    Raises:
        ProfileError: the step fails.
        RankError: it failed on one rank, a rank did not answer, or ranks have different models or shapes of batches.
        ValueError: ``repeats`` is below one.
    """
    check_workload(workload, "measure")
    ranks, handle = current_ranks(), handle_of(workload.model)
    with contextlib.nullcontext() if handle is None else handle.outside_loop():
        return _measured(workload, repeats, ranks)


def _measured(workload: Workload, repeats: int, ranks: Ranks | None) -> Measurement:
    if ranks is None:
        return measured_step(workload, repeats=repeats)
    with ranks.together("measure"):
        if schedule_of(workload) is None:
            check_alike(ranks, "measure", workload)
        ranks.check_same("measure", {"repeats": repeats})
        return merged_measurement(ranks.gathered(measured_step(workload, repeats=repeats)), ranks.rank)


class Wrappers(Protocol):
    """Makes the forwards that run in place of the model's own and of its stages'."""

    def whole(self, forward: Forward) -> Forward:
        """Returns the forward that replaces the model's."""
        ...

    def stage(self, forward: Forward, name: str, module: nn.Module) -> Forward:
        """Returns the forward that replaces a stage's, whose module has this name."""
        ...


def install(model: nn.Module, planned: Wrappers, stages: Iterable[str], patches: ForwardPatches) -> None:
    """Wrap the forward of the model, and of the modules of these names, or that stages of these names are calls of."""
    names = dict.fromkeys(split_name(stage)[0] for stage in stages)
    if "" not in names:
        patches.wrap(model, planned.whole)
    for name in names:
        module = module_named(model, name)
        what = f"planner.apply: stage {name!r} is run by its plan, not inside one graph; leave out fullgraph=True"
        patches.wrap(module, lambda forward, n=name, m=module: planned.stage(forward, n, m), what)
    if "" in names:  # As a stage of itself it runs inside of its planned step.
        patches.wrap(model, planned.whole)


@dataclass(slots=True)
class _Forward:
    """A planned forward that is under way.

    Attributes:
        step: its step; None where its graph is gone, which alone holds the step of a forward past the model.
        in_model: the model's own forward is under way; else stages were called past it (``self.net(x)``).
        casts_inside: autocast is entered within it.
        in_stage: a stage is under way, whose calls of other stages are its own.
    """

    step: Callable[[], PlannedStep | None]
    in_model: bool
    casts_inside: bool
    in_stage: bool = False


class PlanSession:
    """One applied plan: what runs in place of the forwards of the model and its stages, and the forward under way.

    Args:
        plan: the applied plan.
        lowered: what its schedule does at each stage.
        model: the model that it is applied to.
        warn: gives the warnings of the plan.
        watch: as for ``planner.apply``.
        compiler: as for ``CallProgram``.

    Attributes:
        watch: looks at the first steps of the loop.
        wrapped: names of the modules whose forwards are replaced.
    """

    def __init__(
        self,
        plan: Plan,
        lowered: LoweredSchedule,
        model: nn.Module,
        warn: PlanWarnings,
        *,
        watch: bool | None = None,
        compiler: Compiled | None = None,
    ) -> None:
        _say_what_is_unsteady(plan)
        self._plan, self._lowered, self._warn = plan, lowered, warn
        self._model = weakref.ref(model)
        self._device = model_device(model)
        self._engine = engine_for(plan, lowered, self._device)
        self.watch = LoopWatch(plan, model, self._device, warn, metered=is_metered(watch, self._device))
        self._autocast = autocast_part(plan.precision)
        stages = {k for k, stage in enumerate(plan.stages) if stage.kind == "stage"}
        # Where something is sent, the end of every stage and the begin of its backward are moments to know.
        planned = stages if lowered.transfers else {*lowered.dropped, *lowered.selective}
        self._places = StagePlaces(plan, model, planned)
        # In a compiled model all stages were compiled one by one while they were measured.
        compiled = [split_name(plan.stages[k].name)[0] for k in sorted(stages)] if made_compiled(plan) else []
        self.wrapped = tuple(dict.fromkeys([*compiled, *self._places.names]))
        self._programs = StagePrograms(plan, lowered, model, warn, compiler)
        self._deviations = Deviations(turns=CheckTurns({*lowered.dropped, *lowered.selective}))
        self._batch = BatchChecks(plan, warn)
        self._parameters = ParameterChecks(model, plan.precision, warn)
        self._caches = ModelCaches(model)
        self._forward: _Forward | None = None
        # Of the forward before: the casts of parameters that autocast keeps, and the batch.
        self._before: tuple[object | None, weakref.ref[BatchCopies]] | None = None

    def whole(self, forward: Forward) -> Forward:
        """The model's own forward: begins and ends a planned step."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if (self._forward is not None and self._forward.in_model) or not self._acts():
                return forward(*args, **kwargs)
            self._programs.check_model(forward)
            self._deviations.other_batch = self._batch.check((args, kwargs))
            self.watch.forward_begins()
            step = self._begin(BatchCopies((args, kwargs)), in_model=True)
            with stacks_kept():
                try:
                    with self.watch.forward(forward), self._caches.off(kwargs):
                        output = forward(*args, **kwargs)
                    step.leave(output)
                    self.watch.forward_ends(output)
                    return output
                finally:
                    self._forward = None
                    step.finish()

        return run

    def _begin(self, batch: BatchCopies, *, in_model: bool) -> PlannedStep:
        """Another forward begins."""
        model = self._model()
        assert model is not None
        check_not_captured(self._device)
        self._forward = None  # Whatever an interrupt has left of the one before.
        self._deviations.turns.forward_begins((self._batch.shapes, model.training))
        differs = autocast_now(self._device) != self._autocast
        casts_inside = differs and autocasts_inside(model)
        if (differs and not casts_inside) or self._parameters.differ():
            check_precision(model, self._plan.precision, autocast_now(self._device))
        self._parameters.check_trained()
        if (device := model_device(model)) != self._device:
            self._device = device
            self._engine = engine_for(self._plan, self._lowered, device)
        warn_about_outer_hooks(self._warn)
        self._places.begin()
        self._check_casts(batch)
        step = PlannedStep(self._plan, self._lowered, self._deviations, batch, self._programs, self._warn, self._engine)
        self._forward = _Forward((lambda: step) if in_model else weakref.ref(step), in_model, casts_inside)
        return step

    def _check_casts(self, batch: BatchCopies) -> None:
        """Refuse a second forward whose parameters autocast would not cast anew: the casts of programs are their own.

        Raises:
            PlanMismatch: the backward of the one before is yet to come, which adds up in the cast then.
        """
        casts = casts_of_parameters(self._device) if self._programs.has_programs else None
        if casts is not None and self._before is not None and casts is self._before[0]:
            before = self._before[1]()
            if before is not None and not before.backward_begun:
                raise PlanMismatch(
                    "forward: the model was called twice before backward within one autocast context, and the plan is "
                    "for one call for each backward; enter autocast for each call, or put both calls into one module "
                    "and profile that"
                )
        self._before = casts, weakref.ref(batch)

    def _step_of(self, name: str) -> PlannedStep | None:
        """The step of the forward that a stage is called in: the model's own, or one past it (``self.net(x)``).

        Such a forward has no end of its own. It goes on until backward begins, or a stage comes again.
        """
        forward = self._forward
        if forward is not None and forward.in_model:
            return forward.step()
        if running_backward() or not self._acts():
            return None
        step = None if forward is None else forward.step()
        if forward is not None and step is not None and forward.in_stage:
            return step
        if self._is_undone():
            return None
        if self._lowered.transfers:
            what = "it is called past the model's forward; nothing is sent to host memory, all is kept"
            self._warn.of_stage(name, what)
            return None
        if step is None or step.backward_begun or self._places.has_run(name):
            step = self._begin(BatchCopies(None), in_model=False)
        return step

    def _is_undone(self) -> bool:
        """Whether the model's forward of before stands in the place of the planned one; the plan is taken off then."""
        model = self._model()
        handle = None if model is None else _PLANNED.get(model)
        if handle is None or not handle.is_undone:
            return False
        handle.remove()
        warn_caller(
            "planner.apply: the planned forward was replaced by the model's own (accelerate's unwrap_model with "
            "keep_fp32_wrapper=False does that): the plan is taken off, everything is kept, and the peak is not "
            "promised. Unwrap with keep_fp32_wrapper=True, or apply the plan after it",
        )
        return True

    def _acts(self) -> bool:
        """Whether a forward that begins now is one of training, which the plan is for."""
        model = self._model()
        if model is None or not model.training or not torch.is_grad_enabled() or transformed(self._warn):
            return False
        warn_of_compiled_autograd(self._warn)
        return True

    def stage(self, forward: Forward, name: str, module: nn.Module) -> Forward:
        """A stage's forward: keeps what the plan says while a planned step is under way."""

        def run(*args: Any, **kwargs: Any) -> Any:
            step = self._step_of(name) if torch.is_grad_enabled() else None
            now = None if step is None else self._forward
            place = None if now is None else self._places.next_of(name, inside=now.in_stage)
            if step is None or now is None or place is None:
                return forward(*args, **kwargs)
            if now.casts_inside and autocast_now(self._device) != self._autocast:
                check_precision(self._model() or module, self._plan.precision, autocast_now(self._device))
            try:
                now.in_stage = True
                if in_checkpoint():
                    what = "torch.utils.checkpoint around it recomputes it; the plan does not act in it"
                    self._warn.of_stage(name, what)
                    return forward(*args, **kwargs)
                if place.unseen:
                    return step.run_unseen(place.position, name, module, forward, args, kwargs)
                return step.run(place.position, module, forward, args, kwargs)
            finally:
                now.in_stage = False

        return run


def model_device(model: nn.Module) -> torch.device:
    """The device that a model computes on."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def engine_for(plan: Plan, lowered: LoweredSchedule, device: torch.device) -> CopyEngine | None:
    """The engine with its host memory, allocated here once; None where nothing is sent.

    On a device on which nothing can be sent, it warns.
    """
    return engine_on(device, plan.link, plan.host_bytes) if lowered.transfers else None


def engine_on(device: torch.device, link: Link | None, host_bytes: int) -> CopyEngine | None:
    """The engine of a device with so much host memory; None, with a warning, where nothing can be sent."""
    if (simulated := active_device()) is not None and link is not None:
        return EstimatedCopyEngine(simulated, link, host_bytes)
    if device.type == "cuda":
        return CudaCopyEngine(device, host_bytes)
    if device.type == "cpu" and link is not None:
        return SimulatedCopyEngine(link, host_bytes)
    warn_caller(
        f"apply: {device} cannot copy beside its computation; nothing is sent to host memory, "
        "and the peak is not promised. Solve without offloading",
    )
    return None
