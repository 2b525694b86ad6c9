"""The cost model: a measured Profile in, a Chain problem out."""

from __future__ import annotations

from dataclasses import dataclass

from profiler.records import Profile, StageRecord
from solvers.chain import Chain, Option, Stage


def chain_of(profile: Profile) -> Chain:
    """The chain problem of a profile.

    Every number is a difference of measured bytes, chosen so that replaying
    the schedule that keeps everything gives the measured timeline exactly, at
    the start and the peak of every phase. Where a storage's end of life under
    a plan is not known, the later one is taken, so predictions err upwards.

    Returns:
        One chain stage per profiled stage and per piece outside of stages;
        the latter are kept always and no segment goes across them.
    """
    base = _backward_base(profile)
    gradients = _gradient_growth(profile, base)
    residues = _residues(profile)
    stages = []
    for k, record in enumerate(profile.stages):
        stages.append(_stage(record, base[k], gradients, k, residues[k]))
    return Chain(
        stages=tuple(stages),
        resident_bytes=profile.stages[0].forward.start_bytes,
        other_peak_bytes=profile.optimizer.peak_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Parameter gradients: of each stage, and of all stages behind it."""

    own: list[int]
    behind: list[int]


def _growth(record: StageRecord) -> int:
    """Bytes that the unplanned forward adds."""
    return record.forward.end_bytes - record.forward.start_bytes


def _backward_base(profile: Profile) -> list[int]:
    """Per stage: bytes alive at the start of its backward beside everything kept (gradients)."""
    live = profile.stages[0].forward.start_bytes
    base = []
    for record in profile.stages:
        live += _growth(record)
        kept = live - record.boundary_bytes + record.kept_output_bytes
        base.append(max(0, record.backward.start_bytes - kept))
    return base


def _gradient_growth(profile: Profile, base: list[int]) -> _Gradients:
    """Split the base into parameter gradients, which stay, and the boundary's gradient.

    Parameter sizes say how much appears where; a gradient that cannot have been
    there yet (a tied parameter's, counted twice) is bounded by what was measured.
    """
    behind = [0] * len(base)
    total = 0
    for k in range(len(base) - 1, -1, -1):
        behind[k] = min(total, min(base[: k + 1]))
        total += profile.stages[k].parameter_gradient_bytes
    own = [behind[0] if k < 0 else 0 for k in range(len(base))]
    for k in range(1, len(base)):
        own[k] = behind[k - 1] - behind[k]
    own[0] = profile.stages[0].parameter_gradient_bytes
    return _Gradients(own, behind)


def _residues(profile: Profile) -> list[int]:
    """Bytes that stay after a forward without keeping, beside the boundary.

    What is outside the next stage lets go of because nothing was kept (an
    output that only its own stage saves) counts for the stage before it.
    """
    found = []
    for k, record in enumerate(profile.stages):
        if record.kind == "outside":
            found.append(0)
            continue
        stays = record.dropped.end_bytes - record.dropped.start_bytes - record.boundary_bytes
        if k > 0 and record.links:
            stays += profile.stages[k - 1].boundary_bytes
        following = profile.stages[k + 1] if k + 1 < len(profile.stages) else None
        if following is not None and following.kind == "outside":
            stays += following.dropped.end_bytes - following.dropped.start_bytes - _growth(following)
        found.append(max(0, stays))
    return found


def _stage(record: StageRecord, base: int, gradients: _Gradients, k: int, residue_bytes: int) -> Stage:
    # Bytes that no saved-tensor hook can drop: the first run's and the second run's live side by side.
    hidden = max(0, residue_bytes - max(0, record.output_bytes - record.boundary_bytes))
    keep = Option(
        name="keep",
        forward_seconds=record.forward.seconds,
        backward_seconds=record.backward.seconds,
        kept_bytes=_growth(record) - record.boundary_bytes,
        kept_output_bytes=record.kept_output_bytes,
        forward_peak_bytes=record.forward.peak_bytes - record.forward.start_bytes,
        backward_peak_bytes=record.backward.peak_bytes - record.backward.start_bytes,
        recompute_seconds=record.recompute_seconds,
        recompute_peak_bytes=record.recompute_peak_bytes + hidden,
    )
    return Stage(
        name=record.name,
        options=(keep,),
        boundary_bytes=record.boundary_bytes,
        forward_seconds=record.dropped.seconds,
        forward_peak_bytes=record.dropped.peak_bytes - record.dropped.start_bytes,
        residue_bytes=residue_bytes,
        parameter_gradient_bytes=gradients.own[k],
        gradient_bytes=base - gradients.behind[k],
        recomputable=record.recomputable,
        linked=bool(record.links),
    )
