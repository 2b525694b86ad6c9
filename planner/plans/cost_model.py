"""The cost model: turns a measured Profile into the Chain problem that solvers take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from planner.plans.offload_request import input_offload_unit_bytes, kept_offload_unit_bytes
from profiler.op_graph import StageOps, StageStorage
from profiler.records import MenuRecord, OptionRecord, Profile, SharedRecord, StageRecord
from solvers.chain.micro_batches import with_others_unplanned
from solvers.problem.chain import Chain, Option, Shared, Stage

if TYPE_CHECKING:
    import pandas as pd

Timed = TypeVar("Timed", Stage, Option)
# Torch's random state on the CPU is read into a tensor of so many bytes before a stage runs without keeping, and again
# before it runs the second time.
_RANDOM_STATE_BYTES = 5056


def chain_of(profile: Profile) -> Chain:
    """The chain problem of a profile; of a pipeline's stage that of one micro-batch, beside others that keep all."""
    return with_others_unplanned(lone_chain_of(profile), profile.in_flight)


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
    terms = stage_terms(profile)
    stages = tuple(_stage(profile, terms, k) for k in range(len(terms)))
    start_bytes = profile.stages[0].forward.start_bytes
    return Chain(
        stages=stages if profile.evaluations == 1 else tuple(_repeated(stage, profile.evaluations) for stage in stages),
        shared=tuple(_shared_tensor(record, len(profile.stages)) for record in profile.shared),
        # What an optimizer holds while it evaluates the loss again lies below such a forward and backward.
        resident_bytes=max(start_bytes, profile.evaluation.start_bytes)
        + profile.collective_bytes
        - terms[0].cleared_bytes,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTerms:
    """The bytes of one stage as named terms that add up; tensors that several stages hold are counted by ``Shared``.

    Attributes:
        record: the stage in the profile.
        forward_growth_bytes: what its forward adds where all is kept, as measured.
        shared_growth_bytes: of that, shared tensors.
        late_release_bytes: of what it saves, what goes in the forward of a later stage.
        late_arrival_bytes: of what earlier stages saved, what goes in its own forward.
        late_held_bytes: of what earlier stages saved, what is there in its forward and goes before backward.
        cleared_bytes: there as the step begins, and gone for good before its forward: the last step's gradients.
        dropped_forward_growth_bytes: what its forward adds where nothing is kept, as measured.
        dropped_shared_bytes: of that, shared tensors that it makes.
        released_cast_bytes: casts of parameters that go at the end of such a forward.
        input_bytes: of the boundary before it, which lives for it alone.
        released_after_bytes: what the part outside of stages behind it lets go of where nothing is kept.
        other_live_bytes: alive at the start of its backward beside all that is kept: gradients.
        later_gradient_bytes: of that, gradients of the parameters of later stages.
        parameter_gradient_bytes: of gradients that appear in its backward and stay.
        trailing_bytes: the peak of what runs outside of stages after a forward that keeps nothing, and may hold its
            output still; above the bytes at its start.
        random_state_bytes: that a recomputation reads the random state into, before anything else.
        random_state_room_bytes: that every forward of it counts with for that, as it may be a recomputation: no more
            than the unplanned step has left there, so that keeping everything stays within its peak.
        recast_bytes: casts of parameters that it finds made by others, and makes itself when it is recomputed.
    """

    record: StageRecord
    forward_growth_bytes: int
    shared_growth_bytes: int
    late_release_bytes: int
    late_arrival_bytes: int
    late_held_bytes: int
    dropped_forward_growth_bytes: int
    dropped_shared_bytes: int
    released_cast_bytes: int
    input_bytes: int
    trailing_bytes: int
    random_state_bytes: int
    random_state_room_bytes: int
    recast_bytes: int
    cleared_bytes: int = 0
    released_after_bytes: int = 0
    other_live_bytes: int = 0
    later_gradient_bytes: int = 0
    parameter_gradient_bytes: int = 0

    @property
    def growth_bytes(self) -> int:
        """Bytes that its forward adds until backward where all is kept."""
        lasting_bytes = self.forward_growth_bytes - self.late_release_bytes + self.late_arrival_bytes
        return lasting_bytes - self.shared_growth_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes that it keeps beside the boundary where all is kept."""
        return self.growth_bytes - self.record.boundary_bytes + self.cleared_bytes

    @property
    def dropped_growth_bytes(self) -> int:
        """Bytes that its forward adds where nothing is kept."""
        return self.dropped_forward_growth_bytes - self.dropped_shared_bytes + self.released_cast_bytes

    @property
    def residue_bytes(self) -> int:
        """Bytes that stay after a forward that keeps nothing, beside the boundary; 0 outside of stages.

        What is outside behind it lets go of because nothing was kept (an output that only the stage itself saves, and
        its input) counts for the stage. It may let go of more there that stages further ahead have left; that stays
        with them.
        """
        if self.record.kind == "outside":
            return 0
        left_bytes = self.dropped_growth_bytes - self.record.boundary_bytes + self.input_bytes
        return max(0, left_bytes - min(self.released_after_bytes, self.record.own_output_bytes + self.input_bytes))

    @property
    def gradient_bytes(self) -> int:
        """Gradients at the start of its backward that are of no parameter of a later stage."""
        return self.other_live_bytes - self.later_gradient_bytes

    @property
    def dropped_peak_bytes(self) -> int:
        """Most bytes beside those before it that a forward that keeps nothing needs.

        The stage's input had gone where what is outside behind the stage had its peak; under a plan it may be there.
        """
        dropped = self.record.dropped
        peak_bytes = max(dropped.peak_bytes - dropped.start_bytes, self.random_state_bytes)
        if self.trailing_bytes:
            peak_bytes = max(peak_bytes, self.trailing_bytes + self.input_bytes)
        return peak_bytes + self.late_held_bytes + self.recast_bytes

    @property
    def may_lack_room(self) -> bool:
        """Whether the room for the random state is not enough for a recomputation inside a segment."""
        return self.record.recomputable and self.random_state_room_bytes < self.random_state_bytes

    def first_run_peak(self, measured_bytes: int) -> int:
        """Most bytes of a first run that keeps something, by those that were measured."""
        return self.late_held_bytes + max(measured_bytes, self.random_state_room_bytes)

    def recomputation_peak(self, measured_bytes: int) -> int:
        """Most bytes of a recomputation, by those of a first run, beside which there is what that one left.

        That is its output, where the loop or another stage holds it, and what is hidden from saved-tensor hooks.
        """
        return max(measured_bytes, self.random_state_bytes) + self.residue_bytes + self.record.copied_bytes


_SUMS = ("growth_bytes", "kept_bytes", "dropped_growth_bytes", "residue_bytes", "gradient_bytes", "dropped_peak_bytes")


def memory_table(profile: Profile) -> pd.DataFrame:
    """The terms of each stage, and what they add up to: a row for each stage and for each part outside of stages."""
    import pandas as pd

    terms = stage_terms(profile)
    names = [field.name for field in dataclasses.fields(StageTerms) if field.name != "record"]
    of_records = ("boundary_bytes", "kept_output_bytes", "own_output_bytes", "copied_bytes")
    rows = [
        {name: getattr(each.record, name) for name in ("name", "kind", *of_records)}
        | {name: getattr(each, name) for name in (*names, *_SUMS)}
        for each in terms
    ]
    return pd.DataFrame(rows)


def stage_terms(profile: Profile) -> tuple[StageTerms, ...]:
    """The terms of each stage of a profile, by the differences of its measured bytes."""
    shared = tuple(_shared_tensor(record, len(profile.stages)) for record in profile.shared)
    terms = [_forward_terms(profile, shared, k) for k in range(len(profile.stages))]
    other_live = _other_live(profile, shared, terms)
    later = _later_gradients(profile, other_live)
    made = [profile.stages[0].parameter_gradient_bytes, *(before - after for before, after in pairwise(later))]
    released = [0] * len(terms)
    for k, (each, behind) in enumerate(pairwise(terms)):
        if each.record.kind == "stage" and behind.record.kind == "outside":
            released[k] = behind.growth_bytes - behind.dropped_growth_bytes
    return tuple(
        replace(
            each,
            cleared_bytes=_cleared(profile, later[0] + made[0]) if k == 0 else 0,
            released_after_bytes=released[k],
            other_live_bytes=other_live[k],
            later_gradient_bytes=later[k],
            parameter_gradient_bytes=made[k],
        )
        for k, each in enumerate(terms)
    )


def _forward_terms(profile: Profile, shared: Sequence[Shared], k: int) -> StageTerms:
    records, last = profile.stages, len(profile.stages) - 1
    record = records[k]
    arrivals = [(j, end, size) for j, each in enumerate(records[:k]) for end, size in each.late_releases]
    state_bytes = _RANDOM_STATE_BYTES if profile.device.startswith("cpu") else 0
    room_bytes = min(state_bytes, profile.unplanned_peak_bytes - record.forward.start_bytes)
    return StageTerms(
        record=record,
        forward_growth_bytes=record.forward.end_bytes - record.forward.start_bytes,
        shared_growth_bytes=_held_after_forward(shared, k, last) - _held_after_forward(shared, k - 1, last),
        late_release_bytes=sum(size for _, size in record.late_releases),
        late_arrival_bytes=sum(size for _, end, size in arrivals if end == k),
        late_held_bytes=sum(size for _, end, size in arrivals if end >= k),
        dropped_forward_growth_bytes=record.dropped.end_bytes - record.dropped.start_bytes,
        dropped_shared_bytes=sum(t.size_bytes for t in shared if t.born == k),
        released_cast_bytes=_released_cast_bytes(profile) if k == last else 0,
        input_bytes=records[k - 1].boundary_bytes if k > 0 and record.links else 0,
        trailing_bytes=_trailing_bytes(records, k),
        random_state_bytes=state_bytes,
        random_state_room_bytes=max(0, room_bytes) if record.recomputable else 0,
        recast_bytes=sum(t.size_bytes for t in profile.shared if k in t.recast_in),
    )


def _held_after_forward(shared: Sequence[Shared], k: int, last: int) -> int:
    """Shared bytes alive after the forward of stage k when everything is kept."""
    if k == last:
        return _held_before_backward(shared, last)
    return sum(
        t.size_bytes for t in shared if t.born <= k and (k < t.forward_death or any(saver <= k for saver in t.savers))
    )


def _held_before_backward(shared: Sequence[Shared], k: int) -> int:
    """Shared bytes alive before the backward of stage k when everything is kept."""
    return sum(
        t.size_bytes
        for t in shared
        if any(saver <= k for saver in t.savers) or (t.held_until is not None and t.held_until <= k)
    )


def _trailing_bytes(records: Sequence[StageRecord], k: int) -> int:
    """The peak of what is outside behind stage k: it may let go of the stage's output late."""
    record = records[k]
    if record.kind == "stage" and k + 1 < len(records) and records[k + 1].kind == "outside":
        behind = records[k + 1].dropped
        if behind.peak_bytes > behind.start_bytes:
            return behind.peak_bytes - record.dropped.start_bytes
    return record.dropped_trailing_peak_bytes


def _other_live(profile: Profile, shared: Sequence[Shared], terms: Sequence[StageTerms]) -> list[int]:
    """Bytes alive at the start of each backward beside everything kept."""
    live_bytes = profile.stages[0].forward.start_bytes
    other = []
    for k, each in enumerate(terms):
        live_bytes += each.growth_bytes
        boundary_bytes = each.record.boundary_bytes - each.record.kept_output_bytes
        kept_bytes = live_bytes - boundary_bytes + _held_before_backward(shared, k)
        other.append(each.record.backward.start_bytes - kept_bytes)
    return other


def _later_gradients(profile: Profile, other_live: Sequence[int]) -> list[int]:
    """By parameter sizes, which say how much appears where.

    A gradient that cannot have been there yet (a tied parameter's, counted twice) is bounded by what was measured.
    """
    later, total_bytes = [0] * len(other_live), 0
    for k in range(len(other_live) - 1, -1, -1):
        later[k] = max(0, min(total_bytes, min(other_live[: k + 1])))
        total_bytes += profile.stages[k].parameter_gradient_bytes
    return later


def _cleared(profile: Profile, gradient_bytes: int) -> int:
    """Expected bytes beside the new gradients after the last backward that were not there."""
    first = profile.stages[0]
    if first.kind != "outside":
        return 0
    end_bytes = first.forward.start_bytes + gradient_bytes
    return min(max(0, end_bytes - first.backward.end_bytes), first.forward.start_bytes)


def _released_cast_bytes(profile: Profile) -> int:
    """Casts of parameters that go at the end of a forward in which no stage keeps anything."""
    kinds = [record.kind for record in profile.stages]
    return sum(t.size_bytes for t in profile.shared if t.cast and all(kinds[k] == "stage" for k in t.savers))


def _with_recasts(option: Option, profile: Profile, k: int, recast_bytes: int) -> Option:
    """The option, with room for casts in its recomputation, and in the backward that follows with them there.

    Recomputations are forwards to the schedule, too: predictions of first ones err upwards by as much.
    """
    if not recast_bytes:
        return option
    saved_cast_bytes = sum(t.size_bytes for t in profile.shared if t.cast and k in t.savers)
    backward_bytes = option.kept_bytes + option.kept_output_bytes + saved_cast_bytes + option.backward_peak_bytes
    return replace(
        option,
        forward_peak_bytes=max(option.forward_peak_bytes, backward_bytes) + recast_bytes,
        recompute_peak_bytes=max(option.recompute_peak_bytes, backward_bytes) + recast_bytes,
    )


def _stage(profile: Profile, terms: Sequence[StageTerms], k: int) -> Stage:
    here, record = terms[k], terms[k].record
    # In a segment a stage would be kept by a recomputation while others are, each with casts of its own.
    unlinked = any(each.recast_bytes or each.may_lack_room for each in terms[max(0, k - 1) : k + 1])
    return Stage(
        name=record.name,
        options=tuple(_with_recasts(option, profile, k, here.recast_bytes) for option in _options(profile, terms, k)),
        boundary_bytes=record.boundary_bytes,
        # Not keeping cannot be faster than keeping: where it was measured so, that was noise.
        forward_seconds=_dropped_seconds(profile, k),
        forward_peak_bytes=here.dropped_peak_bytes,
        residue_bytes=here.residue_bytes,
        parameter_gradient_bytes=here.parameter_gradient_bytes,
        gradient_bytes=here.gradient_bytes,
        recomputable=record.recomputable,
        linked=bool(record.links) and not unlinked,
        offload_units=input_offload_unit_bytes(profile, k),
    )


def _dropped_seconds(profile: Profile, k: int) -> float:
    """Seconds of a forward of stage k that keeps nothing; a captured stage runs it as a program."""
    record = profile.stages[k]
    menu = profile.menus[record.menu] if record.menu >= 0 else None
    if menu is not None and menu.graph is not None and menu.options and record.recomputable:
        return record.forward.seconds + menu.extra_seconds(menu.options[0])[0]
    return max(record.dropped.seconds, record.forward.seconds)


def _options(profile: Profile, terms: Sequence[StageTerms], k: int) -> Iterator[Option]:
    """Keeping everything first, then the programs."""
    here, record = terms[k], terms[k].record
    keep = Option(
        name="keep",
        forward_seconds=record.forward.seconds,
        backward_seconds=record.backward.seconds,
        kept_bytes=here.kept_bytes,
        kept_output_bytes=record.kept_output_bytes,
        # What is cleared counts as long as the first forward goes on.
        forward_peak_bytes=here.first_run_peak(record.forward.peak_bytes - record.forward.start_bytes)
        + here.cleared_bytes,
        backward_peak_bytes=record.backward.peak_bytes - record.backward.start_bytes,
        # The forward that drops is the stage's own code as well then, where those of programs are faster.
        recompute_seconds=record.recompute_seconds + max(0.0, record.dropped.seconds - _dropped_seconds(profile, k)),
        recompute_peak_bytes=here.recomputation_peak(record.recompute_peak_bytes),
        offload_units=kept_offload_unit_bytes(profile, k),
    )
    yield keep
    if record.menu >= 0:
        released_bytes = _released_bytes(profile, terms, k)
        menu = profile.menus[record.menu]
        yield from (_program_option(here, keep, menu, program, released_bytes) for program in menu.options)


def _program_option(
    here: StageTerms, keep: Option, menu: MenuRecord, program: OptionRecord, released_bytes: int
) -> Option:
    """A program of a captured stage, in forward as in a recomputation.

    Args:
        here: the terms of the stage.
        keep: its first option.
        menu, program: the program, of the stage's menu.
        released_bytes: of the input, what may go after the forward unless the stage keeps it.
    """
    record = here.record
    inputs = [storage for number in program.kept if not (storage := menu.ops.storages[number]).always_live]
    exclusive_bytes = sum(storage.size_bytes for storage in inputs if storage.dies_after_stage)
    other_bytes = sum(storage.size_bytes for storage in inputs if not storage.dies_after_stage)
    # What of its output it keeps and the stage's own code does not is alive when the stage is left all the same.
    output_bytes = max(0, program.kept_output_bytes - record.kept_output_bytes - record.lasting_output_bytes)
    # Casts that autocast holds until the forward ends: what is outside lets go of them, and a program has made none.
    cast_bytes = sum(s.size_bytes for s in menu.ops.storages if s.op >= 0 and _is_unsaved_cast(s, menu.ops))
    extra_bytes = other_bytes + min(exclusive_bytes, released_bytes) + output_bytes + cast_bytes
    extra_forward_seconds, extra_backward_seconds = menu.extra_seconds(program)
    trailing_bytes = record.trailing_peak_bytes - program.freed_bytes + extra_bytes if record.trailing_peak_bytes else 0
    return Option(
        name=program.name,
        forward_seconds=keep.forward_seconds + extra_forward_seconds,
        backward_seconds=keep.backward_seconds + extra_backward_seconds,
        kept_bytes=keep.kept_bytes + here.late_release_bytes - program.freed_bytes + extra_bytes,
        kept_output_bytes=min(record.kept_output_bytes, program.kept_output_bytes),
        forward_peak_bytes=here.first_run_peak(max(program.forward_peak_bytes, trailing_bytes)),
        backward_peak_bytes=program.backward_peak_bytes,
        recompute_seconds=keep.forward_seconds + extra_forward_seconds,
        recompute_peak_bytes=here.recomputation_peak(program.forward_peak_bytes - record.gathered_bytes),
        offload_units=(),
    )


def _released_bytes(profile: Profile, terms: Sequence[StageTerms], k: int) -> int:
    """Bytes of the input that may go after the forward of stage k, unless the stage itself keeps them.

    What others hold as well may be let go of by all of them.
    """
    if not terms[k].record.links:
        return 0
    before = terms[k - 1].record
    shared = (_shared_tensor(record, len(terms)) for record in profile.shared)
    shared_bytes = sum(t.size_bytes for t in shared if k in t.linked_readers and k not in t.savers)
    return before.boundary_bytes - before.kept_output_bytes + shared_bytes


def _is_unsaved_cast(storage: StageStorage, ops: StageOps) -> bool:
    """Whether it may be a cast of a parameter that only ops that run again hold: autocast lets it go."""
    if storage.saved or storage.returned:
        return False
    maker = ops.ops[storage.op]
    return maker.kind == "_to_copy" and all(
        ops.storages[n].op < 0 and ops.storages[n].always_live for n, _ in maker.reads
    )
