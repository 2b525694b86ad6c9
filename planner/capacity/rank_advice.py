"""What one rank of many would hold: a target wrapped for ranks that do not exist, measured here and planned for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from planner.capacity.workload_variants import samples_of
from planner.distributed.collective import profile
from planner.distributed.sharding import Engine, check_engine, sharded
from planner.distributed.simulated_ranks import check_simulated, simulate_collectives, simulated_group
from planner.explain.memory_breakdown import MemoryBreakdown, memory_breakdowns
from planner.plans.cost_model import chain_of
from planner.plans.offload_request import Offload, OffloadMode, offload_from
from planner.plans.plan import Plan
from planner.plans.refusals import Infeasible
from planner.plans.solving import quick_plan
from planner.targets import build_target
from planner.units import check_size, parse_bytes
from profiler.measurement.measuring import Progress
from profiler.records import Profile
from profiler.state_bytes import made_gradient_bytes
from profiler.workload.data_parallel import gathered_sizes
from profiler.workload.optimizers import optimizer_names
from profiler.workload.workload import Workload
from solvers.chain.minimum_memory import shortage

_NO_OFFLOAD = Offload(mode="never")
NOTES = (
    "the batch is that of each rank, and the number of ranks changes neither it nor the activations",
    "seconds are those of one rank alone: no communication is in them",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAdvice:
    """What the first rank of a process group would hold; where parts are uneven, no rank has larger ones.

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
        """Of all gradients that this rank has after backward."""
        return self.profile.resident.gradients + made_gradient_bytes(self.profile)


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
    """Say what each of so many ranks would hold, with and without a plan.

    The target's model is built in this process as a whole, then wrapped for a group of torch's own fake ranks: the
    first rank's part of it runs here for real, and is measured as any other step is.

    Args:
        target: as ``planner profile`` takes it, or a function that returns a Workload, its model not wrapped yet. Its
            batch is that of one rank.
        world_size: ranks in the group, at least 2.
        shard: ``"ddp"``: each rank has the whole model, in DistributedDataParallel; ``"fsdp2"``: ``fully_shard`` of
            each repeated block, then of the model.
        budget: of each rank: bytes, ``"32GB"``, or ``"70%"`` of its unplanned peak. None for no plan but the one with
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
