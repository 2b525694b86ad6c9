"""The choices for a stage that methods with copies compare: kept with an option, or dropped alone or in a run.

Dropped runs are single-level: they run again from their first stage, all but the last kept with option 0, directly
before their backward. Each choice comes with the seconds, bytes and offload units that move a method's state.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from solvers.chain.persistent import ChainBytes, PersistentChoice, persistent_schedule
from solvers.problem.schedule import Schedule

LONGEST = 8  # stages of a dropped run


class ChoiceStep(NamedTuple):
    """A choice for the stages up to ``stop``.

    Attributes:
        choice: ``keep``, ``drop``, or ``recompute`` for a single dropped stage with the option of its second run.
        stop: the first stage after it.
        forward_bytes, backward_bytes: needed at most in either phase, in addition to what earlier stages hold.
        held_bytes: held from its forward to its backward.
        offload_units: bytes of each part of that which may be offloaded.
    """

    choice: PersistentChoice
    stop: int
    forward_seconds: float
    backward_seconds: float
    forward_bytes: float
    backward_bytes: float
    held_bytes: float
    offload_units: tuple[int, ...] = ()


def steps_from(sizes: ChainBytes, k: int) -> list[ChoiceStep]:
    """All choices that begin with stage k of the first pass."""
    end, options = sizes.run_end[k], range(len(sizes.stages[k].options))
    kept = [_kept(sizes, k, o) for o in options]
    alone = [_dropped_alone(sizes, k, o) for o in options] if end > k else []
    runs = [_dropped_run(sizes, k, q) for q in range(k + 2, min(end, k + LONGEST) + 1)]
    return [_with_loss(sizes, step) for step in kept + alone + runs]


def schedule_of(count: int, chosen: dict[int, PersistentChoice]) -> Schedule:
    """The actions, without copies, of the choices by their first stage."""
    return persistent_schedule(count, lambda start, end, _: (_choose(count, chosen, start, end), 0, 0))


def _choose(count: int, chosen: dict[int, PersistentChoice], start: int, end: int) -> PersistentChoice:
    if end == count:
        choice = chosen[start]
        return PersistentChoice("drop", start + 1) if choice.kind == "recompute" else choice
    if start < end:
        return PersistentChoice("keep", 0)
    choice = chosen.get(start)
    return choice if choice is not None and choice.kind == "recompute" else PersistentChoice("recompute", 0)


def _with_loss(sizes: ChainBytes, step: ChoiceStep) -> ChoiceStep:
    """The last choice's forward ends with the gradient of the loss in addition to all that is held."""
    if step.stop < (count := sizes.stage_count):
        return step
    loss_bytes = step.held_bytes + sizes.entry(count, count) - sizes.residues_before[count]
    return step._replace(forward_bytes=max(step.forward_bytes, loss_bytes))


def _kept(sizes: ChainBytes, k: int, o: int) -> ChoiceStep:
    stage, option = sizes.stages[k], sizes.stages[k].options[o]
    residues = sizes.residues_before[k]  # held by the stages before
    return ChoiceStep(
        choice=PersistentChoice("keep", o),
        stop=k + 1,
        forward_seconds=option.forward_seconds,
        backward_seconds=option.backward_seconds,
        forward_bytes=sizes.entry(k, sizes.stage_count) + option.forward_peak_bytes - residues,
        backward_bytes=sizes.backward(k, o) - residues,
        held_bytes=sizes.keep(k, sizes.stage_count, o)[1] + stage.residue_bytes,
        offload_units=option.offload_units,
    )


def _dropped_alone(sizes: ChainBytes, k: int, o: int) -> ChoiceStep:
    """Drop one stage and run it again with an option directly before its backward."""
    stage, option = sizes.stages[k], sizes.stages[k].options[o]
    residues = sizes.residues_before[k]
    return ChoiceStep(
        choice=PersistentChoice("recompute", o),
        stop=k + 1,
        forward_seconds=stage.forward_seconds,
        backward_seconds=option.recompute_seconds + option.backward_seconds,
        forward_bytes=int(sizes.drop(k, sizes.stage_count)[0]) - residues,
        backward_bytes=sizes.recompute(k, o) - residues,
        held_bytes=stage.boundary_bytes + stage.residue_bytes,
        offload_units=stage.offload_units,
    )


def _dropped_run(sizes: ChainBytes, k: int, q: int) -> ChoiceStep:
    """Drop stages k to q - 1 and run them again, all but the last kept with option 0."""
    stages, residues = sizes.stages[k:q], sizes.residues_before[k]
    keeps = [sizes.keep(j, q - 1, 0) for j in range(k, q - 1)]
    shifts = [0, *accumulate(shift for _, shift in keeps)]
    level_needs = [need + shift for (need, _), shift in zip(keeps, shifts, strict=False)]
    level_needs.append(sizes.recompute(q - 1, 0) + shifts[-1])
    options = [stage.options[0] for stage in stages]
    again = sum(option.rerun_seconds for option in options[:-1]) + options[-1].recompute_seconds
    return ChoiceStep(
        choice=PersistentChoice("drop", q),
        stop=q,
        forward_seconds=sum(stage.forward_seconds for stage in stages),
        backward_seconds=again + sum(option.backward_seconds for option in options),
        forward_bytes=int(sizes.drop(k, sizes.stage_count)[q - k - 1]) - residues,
        backward_bytes=max(level_needs) - residues,
        held_bytes=stages[-1].boundary_bytes + sum(stage.residue_bytes for stage in stages),
        offload_units=stages[0].offload_units,
    )
