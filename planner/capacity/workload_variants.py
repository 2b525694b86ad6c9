"""A workload in other precisions and split into micro-batches; each variant is profiled once, when it is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from planner.capacity.scaling import IncompatibleProfiles, ProfileScaling
from planner.capacity.step_trial import release
from planner.plans.cost_model import chain_of
from planner.plans.profiling import profile, with_pieces
from planner.targets import NoTarget, build_target
from profiler.measurement.device_memory import ran_out
from profiler.measurement.measuring import Progress
from profiler.messages import told_by
from profiler.records import Profile
from profiler.workload.given_models import type_name, types_part
from profiler.workload.steps import ProfileError
from profiler.workload.tensor_trees import tensors_in
from profiler.workload.workload import LossFunction, Workload, own_loss, varied
from solvers.chain.baselines import keep_all_replay

Target = str | Callable[..., Workload] | Workload
BATCH_KEY = "batch"  # where no other one is named
SIZES = 3  # of smaller batches, from which a larger one is extrapolated
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class WorkloadVariants:
    """A workload, what it is built from, and profiles of its variants.

    Attributes:
        workload: as it is.
        samples: of one of its steps.
        no_micro_batches: why it cannot be built with a smaller batch; empty where it can.
        extrapolated: variants (precision and micro-batches) whose profiles follow from those of smaller batches.

    Args:
        target: as ``planner profile`` takes it, a function that returns a Workload, or a Workload.
        settings: arguments of the target's function.
        batch_key: the one of them that says how many samples a step has.
        device: move the model there first.
        menus: capture stages as graphs, and plan their ops.
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
        self._progress = progress or told_by("planner", "advise")
        self._done = 0
        self._profiles: dict[tuple[str, int], Profile] = {}
        self.extrapolated: set[tuple[str, int]] = set()
        if isinstance(target, Workload) and settings:
            raise ValueError(
                "advise: expected settings beside a target that takes them, got a Workload; pass the function that "
                "builds it"
            )
        self.workload = self._build()
        self.samples = samples_of(self.workload)
        self.no_micro_batches = self._why_no_micro_batches()

    def _build(self, **changes: Any) -> Workload:
        target, settings = self._target, {**self._settings, **changes}
        if isinstance(target, Workload):
            return target
        return build_target(target, settings, self._device)

    def _why_no_micro_batches(self) -> str:
        key = self._batch_key
        if isinstance(self._target, Workload):
            return "a workload was given, not the function that builds it with fewer samples"
        if self.workload.custom_step is not None:
            return "the step is a function of your own, which makes its micro-batches itself"
        if self.workload.accumulate:
            return "the workload accumulates gradients already"
        if self.samples < 2 or self.samples % 2:
            return f"a batch of {self.samples} cannot be halved"
        try:
            half = samples_of(self._build(**{key: self.samples // 2}))
        except ValueError as error:  # a target's own messages say what it takes
            if isinstance(error, NoTarget) and key != BATCH_KEY:
                raise ValueError(
                    f"batch_key: expected an argument of the target's function, got {key!r}: {error}"
                ) from error
            return f"the target gives no workload with {key}={self.samples // 2}: {str(error).splitlines()[0]}"
        if half != self.samples // 2:
            return f"{key}={self.samples // 2} gives {half} samples in place of {self.samples // 2}"
        return ""

    def splits(self) -> list[int]:
        """Into how many micro-batches of the same size the batch can be split, by doubling: 2, 4, 8, ..."""
        counts, count = [], 2
        while not self.no_micro_batches and self.samples % count == 0:
            counts.append(count)
            count *= 2
        return counts

    def why_no_precision(self) -> str:
        """Why autocast would change nothing; empty where it would."""
        if self.workload.custom_step is not None:
            return "the step is a function of your own: put torch.autocast around its forward, and ask again"
        dtypes = types_part(self.profile("", 1).precision)
        if self.workload.autocast is not None:
            return f"autocast casts to {type_name(self.workload.autocast)} already"
        return "" if "float32" in dtypes else f"the parameters are {dtypes}"

    def report(self, what: str) -> None:
        """Tell whoever wants to know what comes next; how much there will be is not known before."""
        self._done += 1
        self._progress(what, self._done, 0)  # How many parts there will be is not known.

    def profile(self, precision: str, micro_batches: int) -> Profile:
        """The profile of one of some micro-batches, with gradients of earlier ones where there are.

        Where the device has no room for its step, it is extrapolated from profiles of smaller batches.

        Args:
            precision: what autocast casts to; empty for the workload's own precision.
            micro_batches: how many make a batch.

        Raises:
            ProfileError: the step fails in this variant.
        """
        key = (precision, micro_batches)
        if key not in self._profiles:
            try:
                self._profiles[key] = self._measured(precision, micro_batches, micro_batches)
            except ProfileError as error:
                if not ran_out(error):
                    raise
                release()
                self._profiles[key] = self._extrapolated(precision, micro_batches, error)
                self.extrapolated.add(key)
        return self._profiles[key]

    @functools.cached_property
    def in_pieces(self) -> tuple[Profile, ...]:
        """Profiles of the step as it is, with parts of the model in pieces; empty where none can be, or is measured."""
        whole = self.profile("", 1)
        if ("", 1) in self.extrapolated:
            return ()

        def progress(what: str, done: int, total: int) -> None:
            self.report(f"in pieces: {what}")

        return with_pieces(self.workload, whole, menus=self._menus, progress=progress).in_pieces

    def _measured(self, precision: str, micro_batches: int, batch_parts: int) -> Profile:
        """A profile with the batch of one of ``batch_parts``, as one of ``micro_batches``."""
        name = ", ".join([precision or "as it is", *([f"1/{batch_parts} batch"] if batch_parts > 1 else [])])
        return profile(
            self.built(precision, micro_batches, batch_parts=batch_parts),
            menus=self._menus,
            progress=lambda what, done, total: self.report(f"{name}: {what}"),
        )

    def _extrapolated(self, precision: str, micro_batches: int, failure: ProfileError) -> Profile:
        """The profile to expect of a variant that the device has no room for, by those with smaller batches."""
        profiles: dict[int, Profile] = {}
        for batch_parts in (count for count in self.splits() if count > micro_batches):
            try:
                profiles[self.samples // batch_parts] = self._measured(precision, micro_batches, batch_parts)
            except ProfileError as error:
                if not ran_out(error):
                    raise
                release()
            if len(profiles) == SIZES:
                break
        if len(profiles) < 2:
            raise failure
        sizes = tuple(sorted(profiles))
        scaling = ProfileScaling(sizes=sizes, profiles=tuple(profiles[size] for size in sizes))
        try:
            expected = scaling.at(self.samples // micro_batches)
        except IncompatibleProfiles as error:
            raise ProfileError(f"{failure}; nor does it follow from smaller batches: {error}") from failure
        unplanned = keep_all_replay(chain_of(expected))  # The peak may stand elsewhere than at a smaller batch.
        return replace(expected, unplanned_peak_bytes=unplanned.peak_bytes)

    def runnable(self) -> Workload:
        """The workload with the largest batch that a step was run with."""
        return self.built("", next((k for k in (1, *self.splits()) if ("", k) not in self.extrapolated), 1))

    def built(self, precision: str, micro_batches: int, *, batch_parts: int | None = None) -> Workload:
        """The workload of one of some micro-batches, in a precision.

        ``batch_parts`` says what part of the batch it gets, where that is a smaller one.
        """
        parts = micro_batches if batch_parts is None else batch_parts
        base = self.workload if parts == 1 else self._build(**{self._batch_key: self.samples // parts})
        changes: dict[str, Any] = {}
        if micro_batches > 1:
            changes |= {"accumulate": True, "loss": MicroBatchLoss(base.loss, micro_batches)}
        if precision:
            changes["autocast"] = _DTYPES[precision]
            if precision == "float16" and base.optimizers:
                changes["scaler"] = torch.amp.GradScaler(base.device.type)
        return varied(base, **changes) if changes else base


class MicroBatchLoss(nn.Module):
    """The loss of one of several micro-batches: their gradients add up to those of the mean over all of them.

    Args:
        loss: of a whole batch, a mean; None for the one that the model's output carries.
        micro_batches: how many there are.
    """

    def __init__(self, loss: LossFunction | None, micro_batches: int) -> None:
        super().__init__()
        self.loss = loss
        self.micro_batches = micro_batches

    def forward(self, output: Any) -> torch.Tensor:
        """The loss of an output of the model."""
        return (own_loss(output) if self.loss is None else self.loss(output)) / self.micro_batches


def samples_of(workload: Workload) -> int:
    """Samples of one step: the first dimension of the batch's first tensor; 1 where it has none."""
    return next((tensor.size(0) for tensor in tensors_in(workload.inputs) if tensor.dim()), 1)
