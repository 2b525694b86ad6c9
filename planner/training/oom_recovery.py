"""A workload put back to before a step that failed, and the plan to try next."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from planner.explain.timeline import PhaseName
from planner.plans.plan import Plan
from planner.plans.refusals import Infeasible
from planner.plans.solving import SEARCH_SECONDS, replan
from planner.training.oom_report import FailureReport
from profiler.workload.random_states import RandomState
from profiler.workload.remembered_values import Restoring
from profiler.workload.snapshot import captured, modules_of, remember_modules
from profiler.workload.tensor_trees import tensors_in
from profiler.workload.workload import StepPhase, Workload

# The most steps that are trained again after a half done update. Such a copy takes 2 to 3 % of one step of the zoo's
# gpt2, resnet50 and mlp on a CPU, and what is remembered before every step 0.3 to 0.5 % of it (process time).
COPY_EVERY_STEPS = 100
LEAST_CUT = 0.05  # of the budget: what a retry takes off at least


class StepRollback:
    """Runs training steps, and can undo the one that failed.

    Until the optimizer's step begins only buffers, attributes of modules and random states have changed: they are
    copied to host memory before every step. An optimizer's step that fails may have changed some of the parameters and
    states. With ``copies`` these lie in host memory, too, from every 100th step; undoing then goes back to there, and
    the steps since are to be trained again, which gives the same where kernels are deterministic.
    """

    def __init__(self, workload: Workload, *, copies: bool) -> None:
        self._workload = workload
        self._copies = copies
        self._copied_at = 0
        self._restore: Callable[[], None] | None = None
        self._before: _BeforeStep | None = None
        self._step = 0
        self.phase: PhaseName | None = None

    def run(self, step: int) -> float:
        """One whole training step, as ``Workload.step``; its loss.

        Args:
            step: how many come before; this one may also be one that was undone.
        """
        self.phase, self._before, self._step = None, None, step  # Nothing is to be undone before forward begins.
        loss = self._workload.step(self._begin)
        self.phase = None
        return loss

    def _begin(self, phase: StepPhase, _: Tensor | None) -> None:
        if phase == "forward":
            self._remember(self._step)
        if phase not in ("evaluation", "end"):  # An evaluation is a part of the optimizer's step.
            self.phase = phase

    def _remember(self, step: int) -> None:
        if self._copies and (self._restore is None or step >= self._copied_at + COPY_EVERY_STEPS):
            self._restore, self._copied_at = _copied(self._workload), step
        self._before = _BeforeStep(self._workload)

    def undo(self) -> int | None:
        """Put the workload back; how many steps are done then. None: half a step is, and cannot be undone."""
        self._workload.zero_grad()
        before, self._before = self._before, None
        if before is None:
            return self._step
        if self.phase != "optimizer" and not before.updated():
            before.restore()
            return self._step
        if self._restore is None:
            return None
        self._restore()
        self._workload.zero_grad()
        return self._copied_at


class _BeforeStep:
    """What forward and backward change: buffers, what modules keep on themselves, random states.

    By versions, whether parameters were changed, too.
    """

    def __init__(self, workload: Workload) -> None:
        self._back = Restoring()
        self._back.add("random states", RandomState().restore)
        remember_modules(modules_of(workload), self._back)
        fixed: list[Tensor] = [*workload.model.parameters(), *workload.parameters_beside()]
        self._versions = [(tensor, tensor._version) for tensor in [*fixed, *tensors_in(workload.inputs)]]

    def updated(self) -> bool:
        """Whether a parameter or the batch has changed: by an optimizer that steps during backward, say."""
        return any(tensor._version != version for tensor, version in self._versions)

    def restore(self) -> None:
        self._back.restore()


def _copied(workload: Workload) -> Callable[[], None]:
    """Everything but gradients, which a step begins without."""
    gradients = [(parameter, parameter.grad) for parameter in workload.with_gradients()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        return captured(workload)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def wanted_bytes(plan: Plan, report: FailureReport) -> int:
    """What the plan after a failure may use: what the device did give, and at least 5 % less than this one uses."""
    wanted = max(1, int(_used_bytes(plan) * (1 - LEAST_CUT)))
    if report.actual_bytes and report.repeated and report.phase != "optimizer":
        return min(wanted, report.actual_bytes)
    return wanted


def smaller_plan(plan: Plan, report: FailureReport) -> Plan:
    """The plan to try after a failure: within ``wanted_bytes``; where none fits into that, the one that needs least.

    Raises:
        ValueError: the plan cannot be solved again, or none needs less.
    """
    try:
        return _solved_again(plan, wanted_bytes(plan, report))
    except Infeasible as refusal:
        least_bytes, reason = refusal.minimum_budget_bytes, refusal.reason
    if least_bytes >= _used_bytes(plan):
        raise ValueError(f"no plan needs less: {reason}; planner advise TARGET --budget B names other ways to save")
    return _solved_again(plan, least_bytes)


def _solved_again(plan: Plan, budget_bytes: int) -> Plan:
    """Without integer programs: on a CPU they take their memory from what is short, and training waits for them."""
    return replan(plan, budget_bytes, time_limit_seconds=SEARCH_SECONDS)


def _used_bytes(plan: Plan) -> int:
    return min(plan.budget_bytes - plan.headroom_bytes, plan.predicted_peak_bytes)
