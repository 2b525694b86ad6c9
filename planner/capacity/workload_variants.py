"""Forms of a workload: in other precisions and split into micro-batches, each profiled once, when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from planner.capacity.scaling import IncompatibleProfiles, ProfileScaling
from planner.plans.cost_model import chain_of
from planner.plans.profiling import profile
from planner.runtime.step_trial import ran_out, release
from planner.targets import call_target, load_target, on_device
from profiler.measurement.profiling import Progress
from profiler.records import Profile
from profiler.workload.precision import type_name, types_part
from profiler.workload.steps import ProfileError
from profiler.workload.tensor_trees import tensors_in
from profiler.workload.workload import LossFunction, Workload, own_loss, varied
from solvers.chain.baselines import keep_all_replay

Target = str | Callable[..., Workload] | Workload
Report = Callable[[str], None]
SIZES = 3  # of smaller batches, from which a larger one is foretold
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class WorkloadVariants:
    """A workload, and what it is built from.

    Args:
        target: as ``planner profile`` takes it, a function that returns a Workload, or a Workload.
        settings: arguments of the target's function.
        batch_key: the one of them that says how many samples a step has.
        device: move the model there first.
        menus: measure options inside stages.
        progress: called as ``progress(what, done, total)`` before each run.
    """

    def __init__(
        self,
        target: Target,
        settings: Mapping[str, Any],
        batch_key: str,
        device: str | None,
        menus: bool,
        progress: Progress | None,
    ) -> None:
        self._target = target
        self._settings = dict(settings)
        self._batch_key = batch_key
        self._device = device
        self._menus = menus
        self._progress = progress
        self._done = 0
        self._profiles: dict[tuple[str, int], Profile] = {}
        self.foretold: set[tuple[str, int]] = set()  # forms whose profiles follow from those of smaller batches
        if isinstance(target, Workload) and settings:
            raise ValueError(
                "advise: expected settings beside a target that takes them, got a Workload; pass the function that "
                "builds it"
            )
        self.workload = self._build()
        self.samples = _samples_of(self.workload)
        self.no_batches = self._why_no_batches()

    def _build(self, **changes: Any) -> Workload:
        target, settings = self._target, {**self._settings, **changes}
        if isinstance(target, Workload):
            return target
        if isinstance(target, str):
            return on_device(load_target(target, settings), self._device)
        return on_device(call_target(getattr(target, "__name__", repr(target)), target, settings), self._device)

    def _why_no_batches(self) -> str:
        """Why the workload cannot be built with a smaller batch; empty where it can."""
        key = self._batch_key
        if isinstance(self._target, Workload):
            return "a workload was given, not the function that builds it with fewer samples"
        if self.workload.accumulate:
            return "the workload accumulates gradients already"
        if self.samples < 2 or self.samples % 2:
            return f"a batch of {self.samples} cannot be halved"
        try:
            half = _samples_of(self._build(**{key: self.samples // 2}))
        except ValueError as error:  # a target's own messages say what it takes
            return f"the target gives no workload with {key}={self.samples // 2}: {str(error).splitlines()[0]}"
        if half != self.samples // 2:
            return f"{key}={self.samples // 2} gives {half} samples in place of {self.samples // 2}"
        return ""

    def parts(self) -> list[int]:
        """Into how many micro-batches of the same size the batch can be split, by doubling: 2, 4, 8, ..."""
        found, parts = [], 2
        while not self.no_batches and self.samples % parts == 0:
            found.append(parts)
            parts *= 2
        return found

    def why_no_precision(self) -> str:
        """Why autocast would change nothing; empty where it would."""
        own = types_part(self.profile("", 1).precision)
        if self.workload.autocast is not None:
            return f"autocast casts to {type_name(self.workload.autocast)} already"
        return "" if "float32" in own else f"the parameters are {own}"

    def report(self, what: str) -> None:
        """Tell whoever wants to know what comes next; how much there will be is not known before."""
        self._done += 1
        if self._progress is not None:
            self._progress(what, self._done, self._done + 1)

    def profile(self, precision: str, parts: int) -> Profile:
        """The profile of one micro-batch of ``1 / parts`` of the batch, with gradients of earlier ones where there are.

        Where the device has no room for its step, it is foretold by profiles of smaller batches.

        Args:
            precision: what autocast casts to; empty for the workload's own precision.
            parts: how many micro-batches make a batch.

        Raises:
            ProfileError: the step fails in this form.
        """
        key = (precision, parts)
        if key not in self._profiles:
            try:
                self._profiles[key] = self._measured(precision, parts, parts)
            except ProfileError as error:
                if not ran_out(error):
                    raise
                release()
                self._profiles[key] = self._foretold(precision, parts, error)
                self.foretold.add(key)
        return self._profiles[key]

    def _measured(self, precision: str, parts: int, of_parts: int) -> Profile:
        """A profile with the batch of one of ``parts``, as one of ``of_parts`` micro-batches."""
        name = ", ".join([precision or "as it is", *([f"1/{parts} batch"] if parts > 1 else [])])
        return profile(
            self.built(precision, parts, of_parts=of_parts),
            menus=self._menus,
            progress=lambda what, done, total: self.report(f"{name}: {what}"),
        )

    def _foretold(self, precision: str, parts: int, failure: ProfileError) -> Profile:
        """The profile to expect of a form that the device has no room for, by the growth over smaller batches."""
        found: dict[int, Profile] = {}
        for smaller in (each for each in self.parts() if each > parts):
            try:
                found[self.samples // smaller] = self._measured(precision, smaller, parts)
            except ProfileError as error:
                if not ran_out(error):
                    raise
                release()
            if len(found) == SIZES:
                break
        if len(found) < 2:
            raise failure
        sizes = tuple(sorted(found))
        try:
            grown = ProfileScaling(sizes=sizes, profiles=tuple(found[size] for size in sizes)).at(self.samples // parts)
        except IncompatibleProfiles as error:
            raise ProfileError(f"{failure}; nor does it follow from smaller batches: {error}") from failure
        whole = keep_all_replay(chain_of(grown))  # The peak may stand elsewhere than at a smaller batch.
        return replace(grown, unplanned_peak_bytes=whole.peak_bytes)

    def light(self) -> Workload:
        """The workload in the form with the largest batch that a step was run with."""
        parts = next((k for k in (1, *self.parts()) if ("", k) not in self.foretold), 1)
        return self.built("", parts)

    def built(self, precision: str, parts: int, *, of_parts: int | None = None) -> Workload:
        """The workload in a form: in a precision, with the batch of one of ``parts``.

        ``of_parts`` says as how many micro-batches it is to count, where these are not as many.
        """
        of_parts = parts if of_parts is None else of_parts
        base = self.workload if parts == 1 else self._build(**{self._batch_key: self.samples // parts})
        changes: dict[str, Any] = {}
        if of_parts > 1:
            changes |= {"accumulate": True, "loss": PartLoss(base.loss, of_parts)}
        if precision:
            changes["autocast"] = _DTYPES[precision]
            if precision == "float16" and base.optimizer is not None:
                changes["scaler"] = torch.amp.GradScaler(base.device.type)
        return varied(base, **changes) if changes else base


class PartLoss(nn.Module):
    """The loss of one of several micro-batches: their gradients add up to those of the mean over all of them.

    Args:
        loss: of a whole batch, a mean; None for the one that the model's output carries.
        parts: how many micro-batches there are.
    """

    def __init__(self, loss: LossFunction | None, parts: int) -> None:
        super().__init__()
        self.loss = loss
        self.parts = parts

    def forward(self, output: Any) -> torch.Tensor:
        """The loss of an output of the model."""
        return (own_loss(output) if self.loss is None else self.loss(output)) / self.parts


def _samples_of(workload: Workload) -> int:
    """Samples of one step: the first dimension of the batch's first tensor; 1 where it has none."""
    return next((tensor.shape[0] for tensor in tensors_in(workload.inputs) if tensor.dim()), 1)
