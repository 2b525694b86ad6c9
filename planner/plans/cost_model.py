"""The cost model: turns a measured Profile into the Chain problem that solvers take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from planner.plans.offloadable import input_offload_unit_bytes, kept_offload_unit_bytes
from profiler.op_graph import StageOps, StageStorage
from profiler.records import OptionRecord, Profile, SharedRecord
from solvers.chain.micro_batches import with_others_unplanned
from solvers.problem.chain import Chain, Option, Shared, Stage

Timed = TypeVar("Timed", Stage, Option)
# Torch's random state on the CPU is read into a tensor of so many bytes before a stage runs without keeping, and again
# before it runs the second time.
_RANDOM_STATE_BYTES = 5056


def chain_of(profile: Profile) -> Chain:
    """The chain problem of a profile; of a pipeline's stage that of one micro-batch, beside others that keep all."""
    return with_others_unplanned(lone_chain_of(profile), profile.beside)


def lone_chain_of(profile: Profile) -> Chain:
    """The chain problem of a profile without what there is beside one micro-batch.

    Every number is a difference of measured bytes, chosen so that replaying
    the schedule that keeps everything gives the measured timeline exactly, at
    the start and the peak of every phase; but forwards that may be second runs
    count with the random state that these read, as far as that is within the
    unplanned peak. Tensors that several stages hold are taken out of the stages
    and counted once. Where the end of a storage's life
    under a plan is not known, the later one is taken: predictions err upwards.

    Returns:
        One chain stage per profiled stage and per part outside of stages;
        the latter are kept always and no segment goes across them.
    """
    shared = tuple(_shared_tensor(record, len(profile.stages)) for record in profile.shared)
    timeline = _UnsharedTimeline(profile, shared)
    stages = tuple(_stage(timeline, k) for k in range(len(profile.stages)))
    start_bytes = profile.stages[0].forward.start_bytes
    return Chain(
        stages=stages if profile.evaluations == 1 else tuple(_repeated(stage, profile.evaluations) for stage in stages),
        shared=shared,
        # What an optimizer holds while it evaluates the loss again lies below such a forward and backward.
        resident_bytes=max(start_bytes, profile.evaluation.start_bytes)
        + profile.collective_bytes
        - timeline.cleared_bytes,
        optimizer_peak_bytes=profile.optimizer.peak_bytes,
    )


def _repeated(stage: Stage, times: int) -> Stage:
    """The stage with the seconds of so many runs, of which each has its bytes."""
    options = tuple(_times(option, times) for option in stage.options)
    return replace(_times(stage, times), options=options)


def _times(record: Timed, times: int) -> Timed:
    """A record of a chain whose seconds are so many times as long."""
    names = [field.name for field in dataclasses.fields(record) if field.name.endswith("_seconds")]
    return replace(record, **{name: getattr(record, name) * times for name in names})


def _shared_tensor(record: SharedRecord, count: int) -> Shared:
    """Who holds the tensor, so that keeping everything frees it when the unplanned step did."""
    savers = record.savers
    held_until: int | None = None
    forward_death = count - 1
    early_backward_death: int | None = None
    if record.death_phase == "forward":
        savers, forward_death = (), record.death
    elif record.death_phase == "never":
        held_until = 0
    else:
        savers = tuple(k for k in savers if k >= record.death)
        if record.death in savers:
            early_backward_death = record.death
        else:
            held_until = record.death  # Held by something that is no saved tensor.
    return Shared(
        size_bytes=record.size_bytes,
        born=record.born,
        forward_death=max(record.born, forward_death),
        readers=record.readers,
        linked_readers=record.linked_readers,
        savers=savers,
        held_until=held_until,
        forward_death_is_early=record.death_phase == "forward",
        early_backward_death=early_backward_death,
    )


class _UnsharedTimeline:
    """The measured bytes without those of shared tensors, by stage.

    Attributes:
        random_state_bytes: the state is read into, before anything else.
        growth_bytes: what the unplanned forward adds, without what a later one lets go of before backward.
        late_release_bytes: the bytes of that, by the stage that saved it.
        unreleased_bytes: the bytes of that, by the stages in whose forward it is still there.
        dropped_growth_bytes: what a forward without keeping adds.
        backward_base_bytes: alive at the start of the backward beside everything kept (gradients).
        later_gradient_bytes: of that, parameter gradients of the stages behind.
        cleared_bytes: alive as the step begins, and gone for good before its first stage: the last step's gradients.
    """

    def __init__(self, profile: Profile, shared: tuple[Shared, ...]) -> None:
        self.profile = profile
        self.shared = shared
        self.random_state_bytes = _RANDOM_STATE_BYTES if profile.device.startswith("cpu") else 0
        last = len(profile.stages) - 1
        held_bytes = [self._held_after_forward(k, last) for k in range(-1, last + 1)]
        self.growth_bytes = [
            record.forward.end_bytes - record.forward.start_bytes - (held_bytes[k + 1] - held_bytes[k])
            for k, record in enumerate(profile.stages)
        ]
        self.dropped_growth_bytes = [
            record.dropped.end_bytes - record.dropped.start_bytes - sum(t.size_bytes for t in shared if t.born == k)
            for k, record in enumerate(profile.stages)
        ]
        self.dropped_growth_bytes[last] += _released_cast_bytes(profile)
        self.late_release_bytes, self.unreleased_bytes = [0] * (last + 1), [0] * (last + 1)
        for k, record in enumerate(profile.stages):
            for end, size_bytes in record.late_releases:
                self.growth_bytes[k] -= size_bytes
                self.growth_bytes[end] += size_bytes
                self.late_release_bytes[k] += size_bytes
                for between in range(k + 1, end + 1):
                    self.unreleased_bytes[between] += size_bytes
        self.backward_base_bytes = self._backward_base()
        self.later_gradient_bytes = self._later_gradients()
        self.cleared_bytes = self._cleared()

    def room_for_random_state(self, k: int) -> int:
        """Bytes that every forward of stage k counts with, as it may be a second one, which reads the random state.

        No more than the unplanned step has left there: keeping everything stays within its peak.
        """
        record = self.profile.stages[k]
        if record.kind == "outside" or not record.recomputable:
            return 0
        return max(0, min(self.random_state_bytes, self.profile.unplanned_peak_bytes - record.forward.start_bytes))

    def lacks_room(self, k: int) -> bool:
        """Whether that is not enough for a second run inside a segment."""
        record = self.profile.stages[k]
        runs_again = record.kind == "stage" and record.recomputable
        return runs_again and self.room_for_random_state(k) < self.random_state_bytes

    def _held_after_forward(self, k: int, last: int) -> int:
        """Shared bytes alive after the forward of stage k when everything is kept."""
        if k == last:
            return self._held_before_backward(last)
        return sum(
            t.size_bytes
            for t in self.shared
            if t.born <= k and (k < t.forward_death or any(saver <= k for saver in t.savers))
        )

    def _held_before_backward(self, k: int) -> int:
        """Shared bytes alive before the backward of stage k when everything is kept."""
        return sum(
            t.size_bytes
            for t in self.shared
            if any(saver <= k for saver in t.savers) or (t.held_until is not None and t.held_until <= k)
        )

    def _backward_base(self) -> list[int]:
        live_bytes = self.profile.stages[0].forward.start_bytes
        base = []
        for k, record in enumerate(self.profile.stages):
            live_bytes += self.growth_bytes[k]
            kept_bytes = live_bytes - record.boundary_bytes + record.kept_output_bytes + self._held_before_backward(k)
            base.append(record.backward.start_bytes - kept_bytes)
        return base

    def _later_gradients(self) -> list[int]:
        """By parameter sizes, which say how much appears where.

        A gradient that cannot have been there yet (a tied parameter's, counted twice) is bounded by what was measured.
        """
        base, total_bytes = self.backward_base_bytes, 0
        later = [0] * len(base)
        for k in range(len(base) - 1, -1, -1):
            later[k] = max(0, min(total_bytes, min(base[: k + 1])))
            total_bytes += self.profile.stages[k].parameter_gradient_bytes
        return later

    def _cleared(self) -> int:
        """What would be there beside the new gradients after the last backward, and was not."""
        first = self.profile.stages[0]
        if first.kind != "outside":
            return 0
        end_bytes = first.forward.start_bytes + self.later_gradient_bytes[0] + self.parameter_gradient(0)
        return min(max(0, end_bytes - first.backward.end_bytes), first.forward.start_bytes)

    def parameter_gradient(self, k: int) -> int:
        """Gradient bytes that appear in the backward of stage k and stay."""
        if k == 0:
            return self.profile.stages[0].parameter_gradient_bytes
        return self.later_gradient_bytes[k - 1] - self.later_gradient_bytes[k]

    def residue(self, k: int) -> int:
        """Bytes that stay after a forward of stage k without keeping, beside the boundary.

        What is outside the next stage lets go of because nothing was kept (an
        output that only its own stage saves, and its input) counts for the stage
        before it. It may let go of more there that stages further ahead have
        left; that stays with them.
        """
        stages = self.profile.stages
        if stages[k].kind == "outside":
            return 0
        input_bytes = stages[k - 1].boundary_bytes if k > 0 and stages[k].links else 0
        residue_bytes = self.dropped_growth_bytes[k] - stages[k].boundary_bytes + input_bytes
        if k + 1 < len(stages) and stages[k + 1].kind == "outside":
            released_bytes = self.growth_bytes[k + 1] - self.dropped_growth_bytes[k + 1]
            residue_bytes -= min(released_bytes, stages[k].own_output_bytes + input_bytes)
        return max(0, residue_bytes)

    def dropped_peak(self, k: int) -> int:
        """Most bytes beside those before it that a forward of stage k without keeping needs.

        What is outside behind it may let go of the stage's output late: while that is there, its peak is the stage's.
        The stage's input had gone by then where nothing was kept; where it is, it is there beside.
        """
        stages = self.profile.stages
        record = stages[k]
        peak_bytes = record.dropped.peak_bytes - record.dropped.start_bytes
        behind_bytes = record.dropped_behind_peak_bytes
        if record.kind == "stage" and k + 1 < len(stages) and stages[k + 1].kind == "outside":
            behind = stages[k + 1].dropped
            if behind.peak_bytes > behind.start_bytes:
                behind_bytes = behind.peak_bytes - record.dropped.start_bytes
        input_bytes = stages[k - 1].boundary_bytes if record.links else 0
        return max(peak_bytes, behind_bytes + input_bytes) if behind_bytes else peak_bytes

    def first_run_peak(self, k: int, measured_bytes: int) -> int:
        """Most bytes of a first run of stage k that keeps something, by those that were measured."""
        return self.unreleased_bytes[k] + max(measured_bytes, self.room_for_random_state(k))

    def second_run_peak(self, k: int, first_run_bytes: int) -> int:
        """Most bytes of a second run of stage k, by those of its first, beside which there is what that one left.

        That is its output, where the loop or another stage holds it, and what is hidden from saved-tensor hooks.
        """
        copied_bytes = self.profile.stages[k].copied_bytes
        return max(first_run_bytes, self.random_state_bytes) + self.residue(k) + copied_bytes


def _released_cast_bytes(profile: Profile) -> int:
    """Casts of parameters that go at the end of a forward in which no stage keeps anything."""
    kinds = [record.kind for record in profile.stages]
    return sum(t.size_bytes for t in profile.shared if t.cast and all(kinds[k] == "stage" for k in t.savers))


def _recast_bytes(profile: Profile, k: int) -> int:
    """Casts of parameters that a stage finds made by others, and makes itself when it runs again."""
    return sum(t.size_bytes for t in profile.shared if k in t.recast_in)


def _with_recasts(option: Option, profile: Profile, k: int) -> Option:
    """The option, with room for such casts in its second run, and in the backward that follows with them there.

    Second runs are forwards to the schedule, too: predictions of first ones err upwards by as much.
    """
    recast_bytes = _recast_bytes(profile, k)
    if not recast_bytes:
        return option
    saved_cast_bytes = sum(t.size_bytes for t in profile.shared if t.cast and k in t.savers)
    backward_bytes = option.kept_bytes + option.kept_output_bytes + saved_cast_bytes + option.backward_peak_bytes
    return replace(
        option,
        forward_peak_bytes=max(option.forward_peak_bytes, backward_bytes) + recast_bytes,
        recompute_peak_bytes=max(option.recompute_peak_bytes, backward_bytes) + recast_bytes,
    )


def _stage(timeline: _UnsharedTimeline, k: int) -> Stage:
    profile, record = timeline.profile, timeline.profile.stages[k]
    recast_bytes = _recast_bytes(profile, k)
    return Stage(
        name=record.name,
        options=tuple(_with_recasts(option, profile, k) for option in _options(timeline, k)),
        boundary_bytes=record.boundary_bytes,
        # Not keeping cannot be faster than keeping: where it was measured so, that was noise.
        forward_seconds=_dropped_seconds(profile, k),
        forward_peak_bytes=max(timeline.dropped_peak(k), timeline.random_state_bytes)
        + timeline.unreleased_bytes[k]
        + recast_bytes,
        residue_bytes=timeline.residue(k),
        parameter_gradient_bytes=timeline.parameter_gradient(k),
        gradient_bytes=timeline.backward_base_bytes[k] - timeline.later_gradient_bytes[k],
        recomputable=record.recomputable,
        # In a segment it would be kept by a second run while others are, each with casts of its own.
        linked=bool(record.links)
        and not (recast_bytes or _recast_bytes(profile, k - 1))
        and not (timeline.lacks_room(k) or timeline.lacks_room(k - 1)),
        offload_units=input_offload_unit_bytes(profile, k),
    )


def _dropped_seconds(profile: Profile, k: int) -> float:
    """Of a forward of stage k that keeps nothing, which of a captured stage is a program's."""
    record = profile.stages[k]
    menu = profile.menus[record.menu] if record.menu >= 0 else None
    if menu is not None and menu.graph is not None and menu.options and record.recomputable:
        return record.forward.seconds + menu.extra_seconds(menu.options[0])[0]
    return max(record.dropped.seconds, record.forward.seconds)


def _options(timeline: _UnsharedTimeline, k: int) -> Iterator[Option]:
    """Keeping everything first, then the programs."""
    profile, record = timeline.profile, timeline.profile.stages[k]
    cleared_bytes = timeline.cleared_bytes if k == 0 else 0  # counted as long as the first forward goes on
    keep = Option(
        name="keep",
        forward_seconds=record.forward.seconds,
        backward_seconds=record.backward.seconds,
        kept_bytes=timeline.growth_bytes[k] - record.boundary_bytes + cleared_bytes,
        kept_output_bytes=record.kept_output_bytes,
        forward_peak_bytes=timeline.first_run_peak(k, record.forward.peak_bytes - record.forward.start_bytes)
        + cleared_bytes,
        backward_peak_bytes=record.backward.peak_bytes - record.backward.start_bytes,
        # The forward that drops is the stage's own code as well then, where those of programs are faster.
        recompute_seconds=record.recompute_seconds + max(0.0, record.dropped.seconds - _dropped_seconds(profile, k)),
        recompute_peak_bytes=timeline.second_run_peak(k, record.recompute_peak_bytes),
        offload_units=kept_offload_unit_bytes(profile, k),
    )
    yield keep
    if record.menu >= 0:
        for program in profile.menus[record.menu].options:
            yield _program_option(timeline, k, keep, program)


def _program_option(timeline: _UnsharedTimeline, k: int, keep: Option, program: OptionRecord) -> Option:
    """A program of a captured stage, in forward as in a second run."""
    profile, record = timeline.profile, timeline.profile.stages[k]
    menu = profile.menus[record.menu]
    inputs = [storage for number in program.kept if not (storage := menu.ops.storages[number]).always_live]
    own_bytes = sum(storage.size_bytes for storage in inputs if storage.dies_after_stage)
    other_bytes = sum(storage.size_bytes for storage in inputs if not storage.dies_after_stage)
    # What of its output it keeps and the stage's own code does not is alive when the stage is left all the same.
    output_bytes = max(0, program.kept_output_bytes - record.kept_output_bytes - record.lasting_output_bytes)
    # Casts that autocast holds until the forward ends: what is outside lets go of them, and a program has made none.
    cast_bytes = sum(s.size_bytes for s in menu.ops.storages if s.op >= 0 and _is_unsaved_cast(s, menu.ops))
    extra_bytes = other_bytes + min(own_bytes, _released_bytes(timeline, k)) + output_bytes + cast_bytes
    extra_forward_seconds, extra_backward_seconds = menu.extra_seconds(program)
    behind_peak_bytes = record.behind_peak_bytes - program.freed_bytes + extra_bytes if record.behind_peak_bytes else 0
    return Option(
        name=program.name,
        forward_seconds=keep.forward_seconds + extra_forward_seconds,
        backward_seconds=keep.backward_seconds + extra_backward_seconds,
        kept_bytes=keep.kept_bytes + timeline.late_release_bytes[k] - program.freed_bytes + extra_bytes,
        kept_output_bytes=min(record.kept_output_bytes, program.kept_output_bytes),
        forward_peak_bytes=timeline.first_run_peak(k, max(program.forward_peak_bytes, behind_peak_bytes)),
        backward_peak_bytes=program.backward_peak_bytes,
        recompute_seconds=keep.forward_seconds + extra_forward_seconds,
        recompute_peak_bytes=timeline.second_run_peak(k, program.forward_peak_bytes - record.gathered_bytes),
        offload_units=(),
    )


def _released_bytes(timeline: _UnsharedTimeline, k: int) -> int:
    """Bytes of the input that may go after the forward of stage k, unless the stage itself keeps them.

    What others hold as well may be let go of by all of them.
    """
    if not timeline.profile.stages[k].links:
        return 0
    before = timeline.profile.stages[k - 1]
    shared_bytes = sum(t.size_bytes for t in timeline.shared if k in t.linked_readers and k not in t.savers)
    return before.boundary_bytes - before.kept_output_bytes + shared_bytes


def _is_unsaved_cast(storage: StageStorage, ops: StageOps) -> bool:
    """Whether it may be a cast of a parameter that only ops that run again hold: autocast lets it go."""
    if storage.saved or storage.returned:
        return False
    maker = ops.ops[storage.op]
    return maker.kind == "_to_copy" and all(
        ops.storages[n].op < 0 and ops.storages[n].always_live for n, _ in maker.reads
    )
