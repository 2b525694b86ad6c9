"""The choices that methods with copies weigh for each stage: kept with an option, or dropped alone or in a run.

Dropped runs are single-level: they run again from their first stage, all but the last kept with option 0, directly
before their backward. Each choice comes with the seconds, bytes and offload units that move a method's state.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from solvers.chain.persistent import ChainBytes, PersistentChoice, persistent_schedule
from solvers.problem.chain_schedule import Schedule

LONGEST = 8  # stages of a dropped run


class ChoiceStep(NamedTuple):
    """A choice for the stages up to ``stop``.

    Attributes:
        choice: ``keep``, ``drop``, or ``recompute`` for a single dropped stage with the option of its second run.
        stop: the first stage after it.
        forward_bytes, backward_bytes: needed at most in either phase, beside what earlier stages hold.
        held_bytes: held from its forward to its backward.
        offload_units: bytes of each part of that which may travel.
    """

    choice: PersistentChoice
    stop: int
    forward_seconds: float
    backward_seconds: float
    forward_bytes: float
    backward_bytes: float
    held_bytes: float
    offload_units: tuple[int, ...] = ()


def steps_from(chain_bytes: ChainBytes, k: int) -> list[ChoiceStep]:
    """All choices that begin with stage k of the first pass."""
    end, options = chain_bytes.run_end[k], range(len(chain_bytes.stages[k].options))
    kept = [_kept(chain_bytes, k, option) for option in options]
    alone = [_again(chain_bytes, k, option) for option in options] if end > k else []
    runs = [_dropped(chain_bytes, k, q) for q in range(k + 2, min(end, k + LONGEST) + 1)]
    return [_with_turn(chain_bytes, step) for step in kept + alone + runs]


def schedule_of(count: int, chosen: dict[int, PersistentChoice]) -> Schedule:
    """The actions, without copies, of the choices by their first stage."""
    return persistent_schedule(count, lambda start, end, _: (_choose(count, chosen, start, end), 0, 0))


def _choose(count: int, chosen: dict[int, PersistentChoice], start: int, end: int) -> PersistentChoice:
    if end == count:
        found = chosen[start]
        return PersistentChoice("drop", start + 1) if found.kind == "recompute" else found
    if start < end:
        return PersistentChoice("keep", 0)
    found = chosen.get(start)
    return found if found is not None and found.kind == "recompute" else PersistentChoice("recompute", 0)


def _with_turn(b: ChainBytes, step: ChoiceStep) -> ChoiceStep:
    """The last choice's forward ends with the loss's gradient beside all that is held."""
    if step.stop < b.stage_count:
        return step
    turn_bytes = step.held_bytes + b.entry(b.stage_count, b.stage_count) - b.residues_before[b.stage_count]
    return step._replace(forward_bytes=max(step.forward_bytes, turn_bytes))


def _kept(b: ChainBytes, k: int, option: int) -> ChoiceStep:
    stage, way = b.stages[k], b.stages[k].options[option]
    residues = b.residues_before[k]  # held by the stages before
    return ChoiceStep(
        choice=PersistentChoice("keep", option),
        stop=k + 1,
        forward_seconds=way.forward_seconds,
        backward_seconds=way.backward_seconds,
        forward_bytes=b.entry(k, b.stage_count) + way.forward_peak_bytes - residues,
        backward_bytes=b.backward(k, option) - residues,
        held_bytes=b.keep(k, b.stage_count, option)[1] + stage.residue_bytes,
        offload_units=way.offload_units,
    )


def _again(b: ChainBytes, k: int, option: int) -> ChoiceStep:
    """Drop one stage and run it again with an option directly before its backward."""
    stage, way = b.stages[k], b.stages[k].options[option]
    residues = b.residues_before[k]
    return ChoiceStep(
        choice=PersistentChoice("recompute", option),
        stop=k + 1,
        forward_seconds=stage.forward_seconds,
        backward_seconds=way.recompute_seconds + way.backward_seconds,
        forward_bytes=int(b.drop(k, b.stage_count)[0]) - residues,
        backward_bytes=b.recompute(k, option) - residues,
        held_bytes=stage.boundary_bytes + stage.residue_bytes,
        offload_units=stage.offload_units,
    )


def _dropped(b: ChainBytes, k: int, q: int) -> ChoiceStep:
    """Drop stages k to q - 1 and run them again, all but the last kept with option 0."""
    stages, residues = b.stages[k:q], b.residues_before[k]
    shifts = [0, *accumulate(b.keep(j, q - 1, 0)[1] for j in range(k, q - 1))]
    needs = [b.keep(j, q - 1, 0)[0] + shift for j, shift in zip(range(k, q - 1), shifts, strict=False)]
    needs.append(b.recompute(q - 1, 0) + shifts[-1])
    ways = [stage.options[0] for stage in stages]
    again = sum(way.forward_seconds for way in ways[:-1]) + ways[-1].recompute_seconds
    return ChoiceStep(
        choice=PersistentChoice("drop", q),
        stop=q,
        forward_seconds=sum(stage.forward_seconds for stage in stages),
        backward_seconds=again + sum(way.backward_seconds for way in ways),
        forward_bytes=int(b.drop(k, b.stage_count)[q - k - 1]) - residues,
        backward_bytes=max(needs) - residues,
        held_bytes=stages[-1].boundary_bytes + sum(stage.residue_bytes for stage in stages),
        offload_units=stages[0].offload_units,
    )
