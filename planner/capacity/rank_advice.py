"""Memory of one rank of many: a target wrapped for ranks that do not exist, measured here and planned for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType

from planner.capacity.advice_report import activation_tables, breakdown_document, memory_table
from planner.capacity.workload_variants import samples_of
from planner.distributed.sharding import Engine, check_engine, sharded
from planner.distributed.simulated_ranks import check_simulated, simulate_collectives, simulated_group
from planner.explain.memory_breakdown import MemoryBreakdown, memory_breakdowns
from planner.explain.tables import Facts, PlainTable, facts, plain_table
from planner.plans.cost_model import chain_of
from planner.plans.offload_request import Offload, OffloadMode, offload_from
from planner.plans.plan import Plan
from planner.plans.profiling import profile
from planner.plans.refusals import Infeasible
from planner.plans.solving import quick_plan
from planner.targets import build_target
from planner.units import check_size, counted, exact_bytes, format_bytes, format_seconds, parse_bytes
from profiler.measurement.measuring import Progress
from profiler.records import Profile
from profiler.workload.data_parallel import gathered_sizes
from profiler.workload.optimizers import optimizer_names
from profiler.workload.workload import Workload
from solvers.chain.persistent import shortage

_NO_OFFLOAD = Offload(mode="never")
NOTES = (
    "the batch is that of each rank, and the number of ranks changes neither it nor the activations",
    "seconds are those of one rank alone: no communication is in them",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAdvice:
    """Memory of the first rank of a process group; where parts are uneven, no rank has larger ones.

    Attributes:
        engine: that the model is wrapped by.
        world_size: ranks in the group.
        optimizer: of the workload; ``none`` without one.
        samples: of one step of this rank.
        profile: of its step without a plan, measured here: its bytes are those of a real rank, its seconds are without
            communication.
        kept_gathered_bytes: parameters of other ranks' parts too that stay from forward to backward: those outside of
            the blocks. 0 with ``"ddp"``, where each rank has all parameters anyway.
        gathered_bytes: the most that is gathered for one block while it runs, the buffer included.
        sent_bytes: that each rank sends in one step without a plan: gathered parameters, and gradients.
        memory: the unplanned step's highest moment, and the other one of forward and backward and optimizer's step.
        smallest: the plan with the smallest peak that recomputing alone can reach.
        budget_bytes: the most bytes alive at once on a rank; None where none was given.
        plan: within the budget; None where there is none, or nothing fits.
    """

    engine: Engine
    world_size: int
    optimizer: str
    samples: int
    profile: Profile
    kept_gathered_bytes: int
    gathered_bytes: int
    sent_bytes: int
    memory: tuple[MemoryBreakdown, ...]
    smallest: Plan
    budget_bytes: int | None
    plan: Plan | None

    @property
    def fits(self) -> bool:
        """Whether a plan is within the budget, or none was given."""
        return self.budget_bytes is None or self.plan is not None

    @property
    def minimum_budget_bytes(self) -> int:
        """The smallest budget that is known to do."""
        return self.smallest.predicted_peak_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients that this rank has after backward."""
        return self.profile.resident.gradients + self.profile.made_gradient_bytes


def advise_rank(
    target: str | Callable[..., Workload],
    *,
    world_size: int,
    shard: Engine,
    budget: str | int | None = None,
    settings: Mapping[str, Any] | None = None,
    device: str | None = None,
    offload: Offload | OffloadMode = "auto",
    menus: bool = True,
    progress: Progress | None = None,
) -> RankAdvice:
    """Predict the memory of each of ``world_size`` ranks, with and without a plan.

    The target's model is built in this process as a whole, then wrapped for a group of torch's own fake ranks: the
    first rank's part of it runs here for real, and is measured as any other step is.

    Args:
        target: as ``planner profile`` takes it, or a function that returns a Workload, its model not wrapped yet. Its
            batch is that of one rank.
        world_size: ranks in the group, at least 2.
        shard: ``"ddp"``: each rank has the whole model, in DistributedDataParallel; ``"fsdp2"``: ``fully_shard`` of
            each repeated block, then of the model.
        budget: of each rank: bytes, ``"32GB"``, or ``"70%"`` of its unplanned peak. None computes only the plan with
            the smallest peak.
        settings: arguments of the target's function.
        device: move the model there before it is wrapped.
        offload: as for ``solve``.
        menus: capture stages as graphs, and plan their ops.
        progress: called as ``progress(what, done, total)`` before each run.

    Raises:
        ProfileError: the step fails.
        ValueError: a target, a budget or a setting that cannot be, or a process group is there already.
    """
    check_engine(shard)
    check_simulated(world_size)
    if budget is not None:
        check_size(budget)  # refused before anything is measured
    with simulated_group(world_size):
        workload = sharded(build_target(target, settings, device), shard)
        traffic = simulate_collectives(workload.model)
        measured = profile(workload, menus=menus, progress=progress)
        traffic.sent_bytes = 0
        workload.step()
        sent_bytes = traffic.sent_bytes
        kept_gathered_bytes, gathered_bytes = gathered_sizes(workload.model)
        samples, optimizer = samples_of(workload), optimizer_names(workload.optimizers)
    least_bytes = shortage(chain_of(measured)).minimum_budget_bytes
    budget_bytes = None if budget is None else parse_bytes(budget, whole_bytes=measured.unplanned_peak_bytes)
    return RankAdvice(
        engine=shard,
        world_size=world_size,
        optimizer=optimizer,
        samples=samples,
        profile=measured,
        kept_gathered_bytes=kept_gathered_bytes,
        gathered_bytes=gathered_bytes,
        sent_bytes=sent_bytes,
        memory=memory_breakdowns(measured),
        smallest=quick_plan(measured, least_bytes, _NO_OFFLOAD),
        budget_bytes=budget_bytes,
        plan=None if budget_bytes is None else _plan(measured, budget_bytes, offload_from(offload)),
    )


def _plan(measured: Profile, budget_bytes: int, offload: Offload) -> Plan | None:
    try:
        return quick_plan(measured, budget_bytes, offload)
    except Infeasible:
        return None


_WRAPPED = {"ddp": "DistributedDataParallel", "fsdp2": "fully_shard"}


def rank_document_of(advice: RankAdvice) -> dict[str, Any]:
    """The document of ``advise --world-size --json``."""
    profile = advice.profile
    return {
        "model_class": profile.model_class,
        "device": profile.device,
        "precision": profile.precision,
        "optimizer": advice.optimizer,
        "shard": advice.engine,
        "world_size": advice.world_size,
        "samples": advice.samples,
        "predicted": True,
        "resident": {**dataclasses.asdict(profile.resident), "together": profile.resident.total},
        "gradient_bytes": advice.gradient_bytes,
        "kept_gathered_bytes": advice.kept_gathered_bytes,
        "gathered_bytes": advice.gathered_bytes,
        "sent_bytes": advice.sent_bytes,
        "unplanned_peak_bytes": profile.unplanned_peak_bytes,
        "unplanned_seconds": profile.unplanned_seconds,
        "minimum_budget_bytes": advice.minimum_budget_bytes,
        "smallest": _plan_document(advice.smallest),
        "budget_bytes": advice.budget_bytes,
        "fits": advice.fits,
        "plan": None if advice.plan is None else _plan_document(advice.plan),
        "memory": [breakdown_document(breakdown) for breakdown in advice.memory],
        "notes": list(NOTES),
    }


def _plan_document(plan: Plan) -> dict[str, Any]:
    return {
        "solver": plan.solver,
        "status": plan.status,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_seconds": plan.predicted_seconds,
        "stages": [{"name": stage.name, "decision": stage.decision} for stage in plan.stages],
    }


def rank_report_of(advice: RankAdvice) -> RenderableType:
    """Everything, for 100 columns."""
    profile = advice.profile
    title = f"Where the memory of a rank goes, unplanned ({profile.precision}, {advice.optimizer})"
    return Group(
        _held_table(advice),
        memory_table(title, advice.memory),
        *activation_tables(advice.memory),
        _peaks_table(advice),
        _facts(advice),
    )


def _held_table(advice: RankAdvice) -> PlainTable:
    wrapped = f"in {_WRAPPED[advice.engine]} on {advice.world_size} ranks"
    resident = advice.profile.resident
    sharded = ", its part" if advice.engine == "fsdp2" else ""
    rows = {
        f"parameters{sharded}": resident.parameters + resident.other_parameters,
        f"gradients{sharded}": advice.gradient_bytes,
        f"optimizer states{sharded}": resident.optimizer,
        "buffers, those of the wrapper included": resident.buffers,
        "batch": resident.inputs,
        "of the last step, as long as its loop holds it": resident.loop + resident.scaler,
        "parameters gathered from forward to backward": advice.kept_gathered_bytes,
        "parameters gathered while the largest block runs, and the buffer": advice.gathered_bytes,
    }
    table = plain_table(f"What a rank of {advice.profile.model_class} holds, predicted, {wrapped}", ["what"], ["size"])
    for what, size in rows.items():
        if size:
            table.add_row(what, format_bytes(size))
    return table


def _peaks_table(advice: RankAdvice) -> PlainTable:
    profile = advice.profile
    rows = [("unplanned", profile.unplanned_peak_bytes, profile.unplanned_seconds)]
    plans = {"planned for the budget": advice.plan, "smallest that recomputes": advice.smallest}
    rows += [(what, p.predicted_peak_bytes, p.predicted_seconds) for what, p in plans.items() if p is not None]
    table = plain_table("Peak of a rank, predicted", ["step"], ["peak", "of unplanned", "time, no communication"])
    for what, peak_bytes, seconds in rows:
        share = f"{peak_bytes / profile.unplanned_peak_bytes:.0%}"
        table.add_row(what, exact_bytes(peak_bytes), share, format_seconds(seconds))
    return table


def _facts(advice: RankAdvice) -> Facts:
    budget_bytes = advice.budget_bytes
    rows = [
        *([] if budget_bytes is None else [("budget", f"{exact_bytes(budget_bytes)} on each rank")]),
        ("batch", f"{counted(advice.samples, 'sample')} on each rank, {advice.samples * advice.world_size} together"),
        ("sent", f"{format_bytes(advice.sent_bytes)} by each rank in a step without a plan"),
        *(("note", each) for each in NOTES),
    ]
    return facts(rows)
