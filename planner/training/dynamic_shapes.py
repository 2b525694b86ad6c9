"""Plans for shapes that change: a handle that picks, at every forward, the plan of the batch's signature."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from planner.capacity.scaling import same_programs
from planner.distributed.ranks import planning_among
from planner.plans.lowering import lower_schedule
from planner.plans.plan import Plan
from planner.plans.profiling import profile
from planner.runtime.applier import Handle, PlanSession, check_unplanned, install, register, split_name
from planner.runtime.plan_checks import PlanWarnings
from planner.training.plan_cache import CACHE_SIZE, Entry, PlanCache, PlanStatus, without_shapes
from planner.training.signatures import ReadsSignatures, Signature, SignatureReader
from planner.units import parse_bytes
from profiler.measurement import profiling
from profiler.messages import warn_caller
from profiler.records import Profile, is_of_whole_model
from profiler.trace.partition import Stages
from profiler.workload.compiled_forwards import Forward, is_compiled, unwrapped
from profiler.workload.forward_patches import ForwardPatches
from profiler.workload.tensor_trees import tensors_in
from profiler.workload.workload import Workload

# The arguments of a workload that describe how a model is trained, whatever the batch.
_TRAINING = ("loss", "optimizer", "autocast", "accumulate", "scaler", "clip_norm", "keeps_output")


class DynamicHandle(Handle):
    """Plans of a model whose batches change their shapes; ``remove()`` or leaving the ``with`` block takes them off.

    A forward keeps the plan that it began with until its backward is over,
    whatever runs in between. ``plan`` is that of the latest planned forward.

    A signature's status, in ``statuses``, names the basis of its plan:

    - ``profiled``: a profile of such a batch;
    - ``interpolated``: an interpolation between two profiled sizes;
    - ``extrapolated``: beyond them, where the profiled sizes themselves lie on one line or parabola;
    - ``covered``: a larger signature, in no dimension smaller: each tensor is at most as large as the plan counts;
    - ``safe``: until another is found, a covering plan that was there; without one, the one that needs least memory.

    ``promised`` says whether the plan is known to keep the budget there.
    """

    def __init__(self, switch: Switch, model: nn.Module, first: Signature) -> None:
        # The model owns the switch, through its patched forwards: what is registered must not keep the model alive.
        self._switch = weakref.ref(switch)
        self._book = switch.book
        self._reader = switch.reader
        super().__init__(model, self.plans[first], ForwardPatches())
        switch.handle = self
        self._install(switch, model)

    @property
    def plans(self) -> dict[Signature, Plan]:
        """The plan of each remembered signature."""
        return {entry.signature: entry.plan for entry in self._book.entries()}

    @property
    def statuses(self) -> dict[Signature, PlanStatus]:
        """The basis of each remembered plan."""
        return {entry.signature: entry.status for entry in self._book.entries()}

    @property
    def promised(self) -> dict[Signature, bool]:
        """Whether each plan is known to keep the budget."""
        return {entry.signature: entry.promised for entry in self._book.entries()}

    @property
    def signature_counts(self) -> dict[Signature, int]:
        """Planned forwards of each remembered signature."""
        return {entry.signature: entry.count for entry in self._book.entries()}

    @property
    def solves(self) -> int:
        """Plans solved for so far: at most one for each time that a signature was new."""
        return self._book.solves

    @property
    def choosing_seconds(self) -> float:
        """Time that training has waited for a plan to be chosen and set up, all forwards together."""
        switch = self._switch()
        return 0.0 if switch is None else switch.choosing_seconds

    def signature_of(self, *args: Any, **kwargs: Any) -> Signature:
        """The signature of a call of the model with these arguments."""
        return self._reader(args, kwargs)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until every signature seen so far has its plan. Returns whether that came in time."""
        return self._book.background.wait(timeout_seconds)

    def holds_for(self, inputs: Any) -> bool:
        """Whether the profiles determine the plan of such a batch, or show that none keeps the budget.

        Where it does and no plan covers the batch yet, this waits until its own is found.
        """
        signature = self._reader.of_batch(inputs)
        if not self._book.foretells(signature):
            return False
        if not self._book.remembered(signature).promised:
            self.wait()
        return True

    def profile_now(self, inputs: Any) -> Plan:
        """Measure steps on such a batch, between two training steps, and solve for it.

        Parameters, gradients, optimizer and random states are as before
        afterwards. Plans that were extrapolated, covered or safe are found
        again, with what is known now, when their signatures come again.

        Args:
            inputs: a batch, or a ``Workload`` of the model where the loss depends on the batch.

        Returns:
            The plan for such batches.

        Raises:
            ProfileError: a step fails.
            Infeasible: no plan fits, and the handle is strict.
            ValueError: the handle was removed, or the stages are others than at the sizes profiled before.
        """
        switch, model = self._switch(), self._model()
        if switch is None or model is None or not switch.installed:
            raise ValueError("profile_now: the handle was removed; plan the model again")
        workload = _step_on(model, inputs, switch.training)
        self._patches.remove()
        try:
            self._book.add(profiles_of([workload], self._reader, switch.stages, self._book.profiled))
        finally:
            self._install(switch, model)
        entry = self._book.entry(self._reader.of_batch(workload.inputs))
        switch.say(entry)
        return entry.plan

    def remove(self) -> None:
        """Take the plans off and end the thread that solves; calling it again does nothing."""
        switch = self._switch()
        if switch is not None:
            switch.installed = False
        super().remove()
        self._book.background.close()

    def _install(self, switch: Switch, model: nn.Module) -> None:
        self._patches = ForwardPatches()
        switch.installed = True
        stages = [stage.name for plan in self.plans.values() for stage in plan.stages if stage.kind == "stage"]
        install(model, switch, stages, self._patches)


class Switch:
    """The wrappers in front of the model's forwards: they lead to those of the plan that the batch calls for."""

    handle: DynamicHandle

    def __init__(
        self,
        model: nn.Module,
        book: PlanCache,
        reader: ReadsSignatures,
        training: Mapping[str, Any],
        stages: Stages = None,
        strict: bool = False,
    ) -> None:
        self.book = book
        self.reader = reader
        self.training = training
        self.stages = stages
        self.installed = False
        self.choosing_seconds = 0.0
        self._strict = strict
        self._model = weakref.ref(model)
        self._calls: weakref.WeakKeyDictionary[Entry, tuple[Plan, PlanSession]] = weakref.WeakKeyDictionary()
        self._now: PlanSession | None = None

    def whole(self, forward: Forward) -> Forward:
        """The model's own forward: chooses the plan and runs under it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            model = self._model()
            if self._now is not None or model is None or not (model.training and torch.is_grad_enabled()):
                return forward(*args, **kwargs)
            try:
                self._now = self._choose(model, self.reader(args, kwargs))
                return self._now.whole(forward)(*args, **kwargs)
            finally:
                self._now = None

        return run

    def stage(self, forward: Forward, name: str, module: nn.Module) -> Forward:
        """A stage's forward: as the plan chosen for this forward of the model has it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            calls = self._now
            return forward(*args, **kwargs) if calls is None else calls.stage(forward, name, module)(*args, **kwargs)

        return run

    def _choose(self, model: nn.Module, signature: Signature) -> PlanSession:
        begin = time.perf_counter()
        entry = self.book.choose(signature)
        self.say(entry)
        plan, status = entry.plan, entry.status
        made = self._calls.get(entry)
        if made is None or made[0] is not plan:
            # Only where such a batch was profiled are the shapes inside known: elsewhere they are not compared.
            acting = plan if status == "profiled" else without_shapes(plan)
            lowered = lower_schedule(plan.stages, plan.schedule)
            made = self._calls[entry] = plan, PlanSession(acting, lowered, model, PlanWarnings())
        self.handle.plan = plan
        self.choosing_seconds += time.perf_counter() - begin
        return made[1]

    def say(self, entry: Entry) -> None:
        """Warn of what has come up; raises where the handle is strict and no plan meets the budget."""
        for note in self.book.notes():
            warn_caller(f"auto_checkpoint: {note}")
        if self._strict and entry.refusal is not None:
            raise entry.refusal


def apply_dynamic(
    workload: Workload,
    *,
    sizes: Sequence[Any],
    budget: str | int,
    stages: Stages,
    solver: str,
    headroom: str | int,
    cache_size: int,
    strict: bool,
) -> DynamicHandle:
    """Profile the batch and those of other sizes, solve for each, and install a handle that switches between plans.

    Raises:
        Infeasible: no plan fits one of the profiled batches.
        ProfileError: a step fails.
        ValueError: the model is compiled or planned, or has other stages at one of the sizes than at another.
    """
    if is_compiled(workload.model):
        raise ValueError(
            "auto_checkpoint: dynamic=True needs an uncompiled model, because the code of a compiled one differs from "
            "size to size; leave out torch.compile, or dynamic"
        )
    model = unwrapped(workload.model)
    # Neither the model nor the batch: the handle must not keep them alive.
    training = {name: getattr(workload, name) for name in _TRAINING}
    check_unplanned(model)
    workloads = [_step_on(model, batch, training) for batch in (workload.inputs, *sizes)]
    reader = SignatureReader(model)
    profiles = profiles_of(workloads, reader, stages, {})
    first = reader.of_batch(workloads[0].inputs)
    budget_bytes = parse_bytes(budget, whole_bytes=profiles[first].unplanned_peak_bytes)
    book = PlanCache(budget_bytes=budget_bytes, solver=solver, headroom=headroom, cache_size=cache_size)
    book.add(profiles)
    refusals = [entry.refusal for entry in book.entries() if entry.refusal is not None]
    if refusals:
        raise max(refusals, key=lambda refusal: refusal.minimum_budget_bytes)
    handle = DynamicHandle(Switch(model, book, reader, training, stages, strict), model, first)
    register(model, handle)
    return handle


def apply_profiled(
    model: nn.Module,
    profiles: Mapping[Signature, Profile],
    *,
    reader: ReadsSignatures,
    budget_bytes: int,
    solver: str = "auto",
    headroom: str | int = 0,
) -> DynamicHandle:
    """Install a handle that switches between plans, from profiles that there are: the first is that of the next call.

    Args:
        model: without a plan, not compiled.
        profiles: of its step, by the signatures that ``reader`` gives such batches.
        reader: says which plan a call is run under.
        budget_bytes: the most bytes alive at once.
        solver, headroom: as for ``solve``.
    """
    book = PlanCache(budget_bytes=budget_bytes, solver=solver, headroom=headroom, cache_size=CACHE_SIZE)
    book.add(profiles)
    handle = DynamicHandle(Switch(model, book, reader, {}), model, next(iter(profiles)))
    register(model, handle)
    return handle


def _step_on(model: nn.Module, inputs: Any, training: Mapping[str, Any]) -> Workload:
    """The training step on this batch with these arguments; a ``Workload`` of the model is taken as it is.

    Raises:
        ValueError: a workload of another model.
    """
    if not isinstance(inputs, Workload):
        return Workload(model=model, inputs=inputs, **training)
    if inputs.model is not model:
        raise ValueError("sizes: a workload is of another model than the planned one; pass workloads of the same model")
    return inputs


def profiles_of(
    workloads: Sequence[Workload],
    reader: ReadsSignatures,
    stages: Stages,
    known: Mapping[Signature, Profile],
) -> dict[Signature, Profile]:
    """Profile each workload whose signature is new, the largest of each kind first.

    The first profile of a kind, or a ``known`` one, determines the stages and their programs; the others are cut and
    measured in the same way.

    Raises:
        ProfileError: a step fails.
        StagesError: a stage did not run on another batch.
    """
    measured = dict(known)
    for workload in sorted(workloads, key=_elements, reverse=True):
        signature = reader.of_batch(workload.inputs)
        alike = next((p for s, p in measured.items() if s.kind == signature.kind), None)
        if signature in measured:
            continue
        with planning_among(None):  # Batches of other ranks have other shapes.
            measured[signature] = (
                profile(workload, stages=stages) if alike is None else _profile_like(alike, workload, stages)
            )
    return {signature: p for signature, p in measured.items() if signature not in known}


def _profile_like(alike: Profile, workload: Workload, stages: Stages) -> Profile:
    names = list(dict.fromkeys(split_name(s.name)[0] for s in alike.stages if s.kind == "stage"))
    like = "whole" if is_of_whole_model(alike.stages) else names or None
    return profiling.profile(workload, stages=stages or like, programs=same_programs(alike))


def _elements(workload: Workload) -> int:
    return sum(tensor.numel() for tensor in tensors_in(workload.inputs))
