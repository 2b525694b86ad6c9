"""The chain problem: what the stages of a training step cost in bytes and seconds, and the link to host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from solvers.problem.plain_data import check_number, from_document, is_whole, to_document

FORMAT = "planner-chain"
VERSION = 1
# Attributes that files of version 1 call otherwise.
KEYS = {"optimizer_peak_bytes": "other_peak_bytes", "offload_units": "parcels"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run a stage so that its backward can follow.

    Peaks are the most bytes above those alive when the phase starts (so they
    include what the phase itself keeps and returns).

    Attributes:
        name: what a person calls it, for example ``"keep"``.
        forward_seconds: the first forward, which keeps ``kept_bytes``.
        backward_seconds: its backward, inner recomputation included.
        kept_bytes: bytes alive from the end of the forward to the end of the
            backward, in addition to the boundaries before and after the stage. Negative
            where the stage frees more of its input than it keeps.
        kept_output_bytes: the part of the boundary after the stage that the
            stage itself holds, so that it outlives the next stage's backward.
        forward_peak_bytes: peak of the forward.
        backward_peak_bytes: peak of the backward.
        recompute_seconds: the forward when it is run again directly before its
            backward (may stop early: the output itself is not needed).
        recompute_peak_bytes: peak of that forward.
        offload_units: bytes of each part of what is kept that may be sent to host memory in the meantime, the stage's
            input as far as it keeps that included.
    """

    name: str = "keep"
    forward_seconds: float
    backward_seconds: float
    kept_bytes: int
    kept_output_bytes: int = 0
    forward_peak_bytes: int
    backward_peak_bytes: int
    recompute_seconds: float
    recompute_peak_bytes: int
    offload_units: tuple[int, ...] = ()

    @property
    def rerun_seconds(self) -> float:
        """The forward when it is run again to its end, as one that is not directly before its backward is."""
        return max(self.forward_seconds, self.recompute_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the chain, with its menu of options.

    Attributes:
        name: the stage's name in the model.
        options: the menu; option 0 keeps everything and is what the unplanned model does.
        boundary_bytes: bytes handed to the next stage that live only because
            the next stage needs them.
        forward_seconds: one forward that keeps nothing.
        forward_peak_bytes: its peak above the bytes alive at its start.
        residue_bytes: bytes that stay alive after a forward without keeping,
            in addition to the boundary, until the stage is run again or goes backward.
        parameter_gradient_bytes: gradients that appear in its backward and stay.
        gradient_bytes: bytes alive at the start of its backward beside
            everything kept and the parameter gradients: the boundary's gradient.
            Negative where later stages have freed for good what was counted as kept.
        recomputable: False where the forward must run once only (then option
            0 or another option has to keep it).
        linked: True where its input is the previous stage's output unchanged,
            so that the boundary between them may be dropped.
        offload_units: bytes of each part of its input that may be sent to host memory while it waits to run again.
    """

    name: str
    options: tuple[Option, ...]
    boundary_bytes: int
    forward_seconds: float
    forward_peak_bytes: int
    residue_bytes: int = 0
    parameter_gradient_bytes: int = 0
    gradient_bytes: int = 0
    recomputable: bool = True
    linked: bool = True
    offload_units: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A tensor that several stages read or keep (a skip connection, a mask): alive while any of them holds it.

    Its bytes are counted here once and in no stage.

    Attributes:
        size_bytes: of its storage.
        born: the stage whose first forward makes it.
        forward_death: the last stage of the first forward before whose end the
            model itself still holds it.
        readers: stages that hold it while they are dropped and not yet run again.
        linked_readers: stages whose boundary before them is this tensor: they
            hold it only while that boundary is alive.
        savers: stages that hold it while they are kept.
        held_until: something else holds it until this stage's backward has
            run; None where nothing else does.
        forward_death_is_early: the forward of ``forward_death`` lets go of it before its own peak, which is larger by
            its size where something holds it on; but not where that stage is a reader and keeps nothing: its peak is
            given with it.
        early_backward_death: the stage whose backward does the same; None where none does.
    """

    size_bytes: int
    born: int
    forward_death: int
    readers: tuple[int, ...] = ()
    linked_readers: tuple[int, ...] = ()
    savers: tuple[int, ...] = ()
    held_until: int | None = None
    forward_death_is_early: bool = False
    early_backward_death: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Stages in forward order, the bytes that are always there, and the optimizer's own peak.

    Attributes:
        stages: at least one stage.
        shared: tensors that several stages hold; empty in most chains.
        resident_bytes: parameters, buffers, optimizer state, batch, existing gradients.
        optimizer_peak_bytes: the most bytes alive at once outside forward and
            backward (the optimizer step); no plan changes it.
    """

    stages: tuple[Stage, ...]
    resident_bytes: int = 0
    optimizer_peak_bytes: int = 0
    shared: tuple[Shared, ...] = ()

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a chain: expected at least one stage, got none; add stages")
        for stage in self.stages:
            _check_stage(stage)
        for tensor in self.shared:
            _check_shared(tensor, len(self.stages))
        check_number("chain", "resident_bytes", self.resident_bytes)
        check_number("chain", "other_peak_bytes", self.optimizer_peak_bytes)

    @property
    def unplanned_seconds(self) -> float:
        """Seconds of the step that keeps everything (option 0 of every stage)."""
        return sum(s.options[0].forward_seconds + s.options[0].backward_seconds for s in self.stages)

    def without_menus(self) -> Chain:
        """This chain with option 0 of every stage alone."""
        return replace(self, stages=tuple(replace(stage, options=stage.options[:1]) for stage in self.stages))

    def folded(self) -> Chain:
        """This chain without shared tensors, each counted as held from its birth to its maker's backward.

        Whatever fits the budget here fits it in the chain itself: a solver
        that knows no shared tensors can plan with it.
        """
        if not self.shared:
            return self
        stages = list(self.stages)
        for tensor in self.shared:
            stages[tensor.born] = _with_kept(stages[tensor.born], tensor.size_bytes)
            if tensor.forward_death_is_early:
                last = tensor.forward_death
                stages[last] = _with_higher_peaks(stages[last], forward_bytes=tensor.size_bytes)
            if (last := tensor.early_backward_death) is not None:
                stages[last] = _with_higher_peaks(stages[last], backward_bytes=tensor.size_bytes)
        return replace(self, stages=tuple(stages), shared=())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a problem file (``"format": "planner-chain"``, version 1)."""
        return to_document(self, FORMAT, VERSION, KEYS)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Chain:
        """Read what ``to_dict`` wrote; raises ValueError with what is wrong and where."""
        return from_document(cls, data, FORMAT, VERSION, KEYS)


def _with_higher_peaks(stage: Stage, *, forward_bytes: int = 0, backward_bytes: int = 0) -> Stage:
    """The stage with so many bytes more at the peaks of its first forward and of its backward."""
    options = tuple(
        replace(
            option,
            forward_peak_bytes=option.forward_peak_bytes + forward_bytes,
            backward_peak_bytes=option.backward_peak_bytes + backward_bytes,
        )
        for option in stage.options
    )
    return replace(stage, options=options, forward_peak_bytes=stage.forward_peak_bytes + forward_bytes)


def _with_kept(stage: Stage, extra_bytes: int) -> Stage:
    options = tuple(replace(option, kept_bytes=option.kept_bytes + extra_bytes) for option in stage.options)
    return replace(stage, options=options, residue_bytes=stage.residue_bytes + extra_bytes)


def _check_shared(tensor: Shared, count: int) -> None:
    check_number("shared tensor", "size_bytes", tensor.size_bytes)
    last = [k for k in (tensor.held_until, tensor.early_backward_death) if k is not None]
    for k in (tensor.born, tensor.forward_death, *tensor.readers, *tensor.linked_readers, *tensor.savers, *last):
        if not is_whole(k) or not 0 <= k < count:
            raise ValueError(f"shared tensor: expected stage numbers from 0 to {count - 1}, got {k!r}; correct it")


_MAY_BE_NEGATIVE = {"kept_bytes", "gradient_bytes"}


def _check_stage(stage: Stage) -> None:
    if not isinstance(stage.name, str):
        raise ValueError(f"a stage: expected its name to be text, got {stage.name!r}; name it")
    if not stage.options:
        raise ValueError(f"stage {stage.name!r}: expected at least one option, got none; add one that keeps everything")
    where = f"stage {stage.name!r}"
    for item in (stage, *stage.options):
        for field in fields(item):
            if field.name.endswith(("_bytes", "_seconds")):
                negative = field.name in _MAY_BE_NEGATIVE
                check_number(where, field.name, getattr(item, field.name), negative=negative)
        if not isinstance(units := item.offload_units, tuple):
            raise ValueError(f"{where}: expected a list of offload units' bytes, got {units!r}; correct it")
        for size_bytes in units:
            check_number(where, "unit_bytes", size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A copy engine for each direction; both work at the same time, while the device computes.

    Attributes:
        to_host_bytes_per_second, to_device_bytes_per_second: of one device, its share where several use one link;
            0 where nothing can be sent, infinity where copies take no time.
        latency_seconds: that each copy takes in addition.
        host_bytes: the most bytes that this device may hold in host memory; None without a limit.

    >>> Link(to_host_bytes_per_second=1e9, to_device_bytes_per_second=2e9, latency_seconds=0.5).to_host_seconds(10**9)
    1.5
    """

    to_host_bytes_per_second: float
    to_device_bytes_per_second: float
    latency_seconds: float = 0.0
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("to_host_bytes_per_second", "to_device_bytes_per_second"):
            rate = getattr(self, name)
            if not isinstance(rate, (int, float)) or isinstance(rate, bool) or not rate >= 0:
                raise ValueError(f"a link: expected {name} to be a number, not negative, got {rate!r}; correct it")
        check_number("a link", "latency_seconds", self.latency_seconds)
        if self.host_bytes is not None:
            check_number("a link", "host_bytes", self.host_bytes)

    @property
    def usable(self) -> bool:
        """Whether anything can be copied to the host and back."""
        rates = (self.to_host_bytes_per_second, self.to_device_bytes_per_second)
        return min(rates) > 0 and self.host_bytes != 0

    def to_host_seconds(self, size_bytes: int) -> float:
        """Seconds of one copy to host memory."""
        return self.latency_seconds + size_bytes / self.to_host_bytes_per_second

    def to_device_seconds(self, size_bytes: int) -> float:
        """Seconds of one copy back."""
        return self.latency_seconds + size_bytes / self.to_device_bytes_per_second
