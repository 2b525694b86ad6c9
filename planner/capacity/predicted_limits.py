"""The forecast: which size is the largest in each way of training, and with which plan, as the growth has it."""

from __future__ import annotations

from collections import defaultdict

from planner.capacity.batch_limits import TrainingMode
from planner.capacity.scaling import ProfileScaling
from planner.capacity.size_bisection import MOST, largest
from planner.capacity.size_profiles import NoProfile, PerSizeProfiles
from planner.plans.cost_model import chain_of
from planner.plans.offload_request import Offload
from planner.plans.plan import Plan
from planner.plans.solving import SEARCH_SECONDS, Infeasible, quick_plan, solve, why_no_offload
from planner.units import format_bytes
from profiler.records import Profile
from solvers.chain.baselines import keep_all_replay
from solvers.chain.minimum_memory import shortage


class PredictedLimits:
    """Predicts for every size from the profiles at a few.

    Args:
        growth: of the profiles, or a profile at every size.
        budget_bytes: the most bytes alive at once.
        offload: what may be sent to host memory.
    """

    def __init__(self, growth: ProfileScaling | PerSizeProfiles, budget_bytes: int, offload: Offload) -> None:
        self.growth = growth
        self.budget_bytes = budget_bytes
        self._offload = offload
        self._profiles: dict[int, Profile] = {}
        self._plans: dict[tuple[TrainingMode, int, int], Plan] = {}
        # By how much a measured peak was above the predicted one: plans leave so much free from then on.
        self.margin_bytes: defaultdict[TrainingMode, int] = defaultdict(int)

    def profile_at(self, size: int) -> Profile:
        """The profile to expect."""
        if size not in self._profiles:
            self._profiles[size] = self.growth.at(size)
        return self._profiles[size]

    def samples_at(self, size: int) -> int:
        """Samples of one step: the first dimension of the batch's first tensor, as far as it has one."""
        shapes = self.profile_at(size).input_shapes
        return next((shape[0] for shape in shapes if shape), size)

    def weight_at(self, size: int) -> int:
        """What one sample counts: 1, and its size where the key makes samples larger instead of more."""
        sizes = self.growth.sizes
        return size if self.samples_at(sizes[0]) == self.samples_at(sizes[-1]) else 1

    def why_no_offload(self) -> str:
        """Why nothing can be sent to host memory; empty where it can."""
        return why_no_offload(self._offload, self.growth.profiles[-1])

    def largest(self, way: TrainingMode, *, floor: int, step: int, vary: str) -> int:
        """The largest size that is predicted to fit; ``floor`` where no larger one does.

        Raises:
            ValueError: everything fits, so memory does not grow with the size.
        """
        found = largest(lambda size: self._fits(way, size), floor=floor, step=step)
        if found >= MOST * step:
            raise ValueError(
                f"--vary: expected a setting that memory grows with, got {vary!r}, of which any value is predicted to "
                f"fit {format_bytes(self.budget_bytes)}; vary another one"
            )
        return found

    def _fits(self, way: TrainingMode, size: int) -> bool:
        try:
            chain = chain_of(self.profile_at(size))
        except NoProfile:
            return False  # without a profile there is no plan
        if way == "none":
            return keep_all_replay(chain).peak_bytes <= self.budget_bytes
        if way == "recompute":
            return shortage(chain).minimum_budget_bytes <= self.budget_bytes
        return self.quick(way, size) is not None

    def quick(self, way: TrainingMode, size: int) -> Plan | None:
        """A plan by the method that weighs most in little time; None where none fits."""
        try:
            return quick_plan(self.profile_at(size), self.budget_bytes, self._wish(way))
        except (Infeasible, NoProfile):
            return None

    def plan_at(self, way: TrainingMode, size: int) -> tuple[Plan | None, int]:
        """The plan for a size, the leanest where none is predicted to fit, and its predicted peak."""
        own = self.profile_at(size)
        if way == "none":
            return None, keep_all_replay(chain_of(own)).peak_bytes
        key = (way, size, self.margin_bytes[way])
        if key not in self._plans:
            self._plans[key] = self._planned(own, way)
        return self._plans[key], self._plans[key].predicted_peak_bytes

    def _planned(self, own: Profile, way: TrainingMode) -> Plan:
        offload_request, budget_bytes = self._wish(way), max(1, self.budget_bytes - self.margin_bytes[way])
        try:
            quick_plan(own, budget_bytes, offload_request)
        except Infeasible as refusal:
            return quick_plan(own, refusal.minimum_budget_bytes, offload_request)
        return solve(own, budget_bytes, time_limit_seconds=SEARCH_SECONDS, offload=offload_request)

    def _wish(self, way: TrainingMode) -> Offload:
        return self._offload if way == "offload" else Offload(mode="never")

    def seconds_at(self, size: int, plan: Plan | None) -> float:
        """Of a step."""
        return self.profile_at(size).unplanned_seconds if plan is None else plan.predicted_seconds

    def throughput_at(self, size: int, plan: Plan | None) -> float:
        """Samples per second, each counted with its weight."""
        seconds = self.seconds_at(size, plan)
        return self.samples_at(size) * self.weight_at(size) / seconds if seconds > 0 else 0.0
