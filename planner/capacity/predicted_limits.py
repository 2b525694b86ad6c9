"""The largest size that is predicted to fit in each training mode, and its plan, from profiles at a few sizes."""

from __future__ import annotations

from collections import defaultdict

from planner.capacity.batch_limits import TrainingMode
from planner.capacity.scaling import ProfileScaling
from planner.capacity.size_bisection import MOST_STEPS, largest_fitting
from planner.capacity.size_profiles import NoProfile, PerSizeProfiles
from planner.plans.cost_model import chain_of
from planner.plans.offload_request import Offload
from planner.plans.plan import Plan
from planner.plans.refusals import Infeasible
from planner.plans.solving import SEARCH_SECONDS, quick_plan, solve, why_no_offload
from planner.units import format_bytes
from profiler.agreement import made_by_rank0
from profiler.records import Profile
from solvers.chain.baselines import keep_all_replay
from solvers.chain.minimum_memory import shortage


class PredictedLimits:
    """Predicts for every size from the profiles at a few.

    Attributes:
        margin_bytes: by how much a measured peak was above the predicted one, in each mode: plans leave so much free
            from then on.

    Args:
        profiles: at a few sizes with what follows for others, or a profile at every size.
        budget_bytes: the most bytes alive at once.
        offload: what may be sent to host memory.
    """

    def __init__(self, profiles: ProfileScaling | PerSizeProfiles, budget_bytes: int, offload: Offload) -> None:
        self.profiles = profiles
        self.budget_bytes = budget_bytes
        self.margin_bytes: defaultdict[TrainingMode, int] = defaultdict(int)
        self._offload = offload
        self._profile_at: dict[int, Profile] = {}
        self._plans: dict[tuple[TrainingMode, int, int], Plan] = {}

    def profile_at(self, size: int) -> Profile:
        """The profile to expect."""
        if size not in self._profile_at:
            self._profile_at[size] = self.profiles.at(size)
        return self._profile_at[size]

    def samples_at(self, size: int) -> int:
        """Samples of one step: the first dimension of the batch's first tensor, as far as it has one."""
        shapes = self.profile_at(size).input_shapes
        return next((shape[0] for shape in shapes if shape), size)

    def weight_at(self, size: int) -> int:
        """What one sample counts: 1, and its size where the key makes samples larger instead of more."""
        sizes = self.profiles.sizes
        return size if self.samples_at(sizes[0]) == self.samples_at(sizes[-1]) else 1

    def why_no_offload(self) -> str:
        """Why nothing can be sent to host memory; empty where it can."""
        return why_no_offload(self._offload, self.profiles.profiles[-1])

    def largest(self, mode: TrainingMode, *, floor: int, step: int, vary: str) -> int:
        """The largest size that is predicted to fit; ``floor`` where no larger one does.

        Raises:
            ValueError: everything fits, so memory does not grow with the size.
        """
        size = largest_fitting(lambda size: self._fits(mode, size), floor=floor, step=step)
        if size >= MOST_STEPS * step:
            raise ValueError(
                f"--vary: expected a setting that memory grows with, got {vary!r}, of which any value is predicted to "
                f"fit {format_bytes(self.budget_bytes)}; vary another one"
            )
        return size

    def _fits(self, mode: TrainingMode, size: int) -> bool:
        try:
            chain = chain_of(self.profile_at(size))
        except NoProfile:
            return False  # without a profile there is no plan
        if mode == "none":
            return keep_all_replay(chain).peak_bytes <= self.budget_bytes
        if mode == "recompute":
            return shortage(chain).minimum_budget_bytes <= self.budget_bytes
        return self.quick_plan(mode, size) is not None

    def quick_plan(self, mode: TrainingMode, size: int) -> Plan | None:
        """A plan by the method that weighs most in little time; None where none fits."""
        try:
            profile = self.profile_at(size)
            return made_by_rank0(lambda: quick_plan(profile, self.budget_bytes, self._offload_in(mode)))
        except (Infeasible, NoProfile):
            return None

    def plan_at(self, mode: TrainingMode, size: int) -> tuple[Plan | None, int]:
        """The plan for a size, the leanest where none is predicted to fit, and its predicted peak."""
        profile = self.profile_at(size)
        if mode == "none":
            return None, keep_all_replay(chain_of(profile)).peak_bytes
        key = (mode, size, self.margin_bytes[mode])
        if key not in self._plans:
            self._plans[key] = made_by_rank0(lambda: self._solved(profile, mode))
        return self._plans[key], self._plans[key].predicted_peak_bytes

    def _solved(self, profile: Profile, mode: TrainingMode) -> Plan:
        offload, budget_bytes = self._offload_in(mode), max(1, self.budget_bytes - self.margin_bytes[mode])
        try:
            quick_plan(profile, budget_bytes, offload)
        except Infeasible as refusal:
            return quick_plan(profile, refusal.minimum_budget_bytes, offload)
        return solve(profile, budget_bytes, time_limit_seconds=SEARCH_SECONDS, offload=offload)

    def _offload_in(self, mode: TrainingMode) -> Offload:
        return self._offload if mode == "offload" else Offload(mode="never")

    def seconds_at(self, size: int, plan: Plan | None) -> float:
        """Of a step."""
        return self.profile_at(size).unplanned_seconds if plan is None else plan.predicted_seconds

    def throughput_at(self, size: int, plan: Plan | None) -> float:
        """Samples per second, each counted with its weight."""
        seconds = self.seconds_at(size, plan)
        return self.samples_at(size) * self.weight_at(size) / seconds if seconds > 0 else 0.0
