"""The search over combinations of levers: what is profiled, what is computed from that, and what is solved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from planner.capacity.levers import Basis, Combination, Lever, Recipe, Result, rank, worst
from planner.capacity.optimizer_variants import replacements_for, with_optimizer
from planner.capacity.workload_variants import WorkloadVariants
from planner.plans.cost_model import chain_of
from planner.plans.offload_request import Offload
from planner.plans.plan import Plan
from planner.plans.solving import SEARCH_SECONDS, Infeasible, quick_plan, solve, why_no_offload
from profiler.records import Profile, states_bytes
from profiler.workload.steps import ProfileError
from solvers.chain.minimum_memory import shortage

PARTS = 8  # micro-batches of a batch that are looked at; more where nothing fits that leaves training as it is
_NO_OFFLOAD = Offload(mode="never")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the search came to: levers, combinations (those that fit first), and what a person should know."""

    levers: tuple[Lever, ...]
    combinations: tuple[Combination, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """A combination without its recipe, with the profile of one of its micro-batches."""

    precision: str
    parts: int
    optimizer: str
    profile: Profile

    @property
    def seconds(self) -> float:
        """Of an effective batch without a plan."""
        return self.whole(self.profile.unplanned_seconds)

    def whole(self, step_seconds: float) -> float:
        """Of an effective batch: a step's forward and backward for each micro-batch, and one optimizer's step."""
        own = self.profile.optimizer.seconds
        return self.parts * max(0.0, step_seconds - own) + own


class LeverSearch:
    """Works out combinations, profiling and solving only what can matter.

    Args:
        forms: of the workload.
        budget_bytes: the most bytes alive at once.
        offload: what may be sent to host memory.
    """

    def __init__(self, forms: WorkloadVariants, budget_bytes: int, offload: Offload) -> None:
        self._forms = forms
        self._budget_bytes = budget_bytes
        self._offload = offload
        self._base = forms.profile("", 1)
        self._no_link = why_no_offload(offload, self._base)
        forms.report("other optimizers")
        self._optimizers = replacements_for(forms.light(), self._base.resident.optimizer)
        self._micro_result: Result = _result_of_micro_batches(forms.workload.model, self._base)
        self._found: list[Combination] = []
        self._forms_of: dict[int, _Form] = {}
        self._notes: list[str] = []

    def run(self) -> Found:
        """Everything, the workload's own precision first: what fits there leaves less to be profiled."""
        precisions = list(self._precisions())
        chosen = next((lever for lever in precisions if lever.applies), None)
        self._rounds("")
        for number, lever in enumerate(precisions):
            if lever.applies and not self._rounds(_dtype(lever), further=lever is chosen):
                failed = self._notes.pop()
                precisions[number] = replace(lever, applies=False, reason=failed)
        if any(each.fits for each in self._found):
            self._better_best()
        else:
            self._time_nearest()
        levers = (*precisions, *(own.lever for own in self._optimizers), self._micro_batches(), *self._recipes())
        return Found(levers=levers, combinations=tuple(sorted(self._found, key=rank)), notes=tuple(self._said(levers)))

    def _precisions(self) -> Iterator[Lever]:
        """bfloat16, and on CUDA float16: the first one that the device computes in comes first."""
        why = self._forms.why_no_precision()
        names = ["bfloat16"]
        if self._forms.workload.device.type == "cuda":
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
            names = ["bfloat16", "float16"] if fast else ["float16", "bfloat16"]
        for name in names:
            scaled = ", scaler=torch.amp.GradScaler()" if name == "float16" else ""
            change = f'Workload(..., autocast="{name}"{scaled})'
            yield Lever(
                kind="precision", name=f"autocast {name}", applies=not why, reason=why, result="other", change=change
            )

    def _micro_batches(self) -> Lever:
        why = self._forms.no_batches
        return Lever(
            kind="micro-batches",
            name="micro-batches",
            applies=not why,
            reason=why,
            result=self._micro_result,
            change="Workload(..., accumulate=True) on a part of the batch, its loss divided by their number, and the "
            "optimizer's step after the last one",
        )

    def _recipes(self) -> Iterator[Lever]:
        why = "" if self._can_recompute() else "no stage can run again"
        yield Lever(
            kind="recompute",
            name="recompute",
            applies=not why,
            reason=why,
            result="same",
            change="planner.solve(profile, budget, offload='never'), planner.apply(model, plan)",
        )
        yield Lever(
            kind="offload",
            name="offload",
            applies=not self._no_link,
            reason=self._no_link,
            result="same",
            change="planner.solve(profile, budget), planner.apply(model, plan)",
        )

    def _can_recompute(self) -> bool:
        return any(s.recomputable for s in self._base.stages) or any(menu.options for menu in self._base.menus)

    def _rounds(self, precision: str, *, further: bool = True) -> bool:
        """All combinations of a precision, with more and more micro-batches; False where it cannot be profiled."""
        for parts in (1, *self._forms.parts()):
            if parts > 1 and (not further or self._enough(precision, parts)):
                break
            try:
                measured = self._forms.profile(precision, parts)
            except ProfileError as error:
                self._notes.append(f"{precision or 'the step'} in {parts} parts: {error}")
                return parts > 1
            for form in self._with_optimizers(precision, parts, measured):
                self._consider(form)
        return True

    def _with_optimizers(self, precision: str, parts: int, measured: Profile) -> Iterator[_Form]:
        yield _Form(precision=precision, parts=parts, optimizer="", profile=measured)
        for own in self._optimizers:
            if own.cost is not None:
                changed = with_optimizer(measured, own.cost)
                yield _Form(precision=precision, parts=parts, optimizer=own.lever.name, profile=changed)

    def _enough(self, precision: str, parts: int) -> bool:
        """Whether so many micro-batches can no longer matter."""
        unplanned = [each for each in self._found if each.precision == precision and each.recipe == "none"]
        whole = next(each for each in unplanned if each.micro_batches == 1 and not each.optimizer)
        if not precision and parts == 2:
            return False  # What this lever does alone is always shown.
        if any(each.fits and not each.optimizer for each in unplanned):
            return True  # More are only slower.
        if self._least_states() > self._budget_bytes:
            return True
        if precision and self._too_slow(whole.seconds or 0.0, "other"):
            return True
        exact = any(each.fits and each.keeps_result for each in self._found)
        hopeless = states_bytes(self._base) > self._budget_bytes and any(each.fits for each in self._found)
        return parts > PARTS and (exact or hopeless)

    def _least_states(self) -> int:
        """The smallest model states that any optimizer leaves."""
        own = states_bytes(self._base)
        costs = [each.cost.state_bytes for each in self._optimizers if each.cost is not None]
        return own - self._base.resident.optimizer + min([self._base.resident.optimizer, *costs])

    def _consider(self, form: _Form) -> None:
        """The form without a plan and, where that does not fit, with those plans that may be the fastest."""
        changed = bool(form.optimizer) or (form.precision, form.parts) in self._forms.foretold
        self._add(
            form,
            "none",
            peak_bytes=form.profile.unplanned_peak_bytes,
            seconds=form.seconds,
            bases=("computed" if changed else "measured", "computed" if changed or form.parts > 1 else "measured"),
        )
        if self._found[-1].fits:
            return
        alone = not (form.precision or form.optimizer) and form.parts == 1
        if not alone and self._too_slow(form.seconds, self._result(form)):
            return
        least_bytes = shortage(chain_of(form.profile)).minimum_budget_bytes
        if least_bytes > self._budget_bytes and self._can_recompute():
            self._add(form, "recompute", peak_bytes=least_bytes, seconds=None, bases=("solved", "solved"))
        for recipe in self._recipes_for(alone):
            hopeless = form.profile.optimizer.peak_bytes > self._budget_bytes
            if not hopeless and (recipe != "recompute" or least_bytes <= self._budget_bytes):
                self._add_planned(form, recipe)

    def _recipes_for(self, alone: bool) -> list[Recipe]:
        if not self._can_recompute():
            return ["offload"] if alone and not self._no_link else []
        if self._no_link:
            return ["recompute"]
        return ["recompute", "offload", "recompute and offload"] if alone else ["recompute", "recompute and offload"]

    def _too_slow(self, seconds: float, result: Result) -> bool:
        """Whether what takes at least so long cannot be the fastest of its kind."""
        rivals = [e.seconds for e in self._found if e.fits and (result == "other" or e.keeps_result)]
        return any(rival is not None and rival <= seconds for rival in rivals)

    def _add_planned(self, form: _Form, recipe: Recipe) -> None:
        self._forms.report(f"solve: {recipe}")
        try:
            plan = self._solved(form, recipe, self._budget_bytes)
        except Infeasible as refusal:
            bases: tuple[Basis, Basis] = ("solved", "solved")
            self._add(form, recipe, peak_bytes=refusal.minimum_budget_bytes, seconds=None, bases=bases)
            return
        self._add_plan(form, recipe, plan)

    def _add_plan(self, form: _Form, recipe: Recipe, plan: Plan) -> None:
        seconds = form.whole(plan.predicted_seconds)
        peak = plan.predicted_peak_bytes
        self._add(form, recipe, peak_bytes=peak, seconds=seconds, bases=("solved", "solved"), plan=plan)

    def _better_best(self) -> None:
        for wanted in (lambda each: each.keeps_result, lambda _: True):
            fitting = [k for k, each in enumerate(self._found) if each.fits and wanted(each)]
            if fitting:
                self._bettered(min(fitting, key=lambda k: rank(self._found[k])))

    def _bettered(self, k: int) -> None:
        """The plan of a combination that was chosen, by all methods."""
        own, form = self._found[k], self._forms_of[k]
        if own.plan is None:
            return
        plan = solve(
            form.profile, self._budget_bytes, time_limit_seconds=SEARCH_SECONDS, offload=self._wish(own.recipe)
        )
        seconds = form.whole(plan.predicted_seconds)
        if seconds < (own.seconds or 0.0):
            self._found[k] = replace(own, peak_bytes=plan.predicted_peak_bytes, seconds=seconds, plan=plan)

    def _solved(self, form: _Form, recipe: Recipe, budget_bytes: int) -> Plan:
        return quick_plan(form.profile, budget_bytes, self._wish(recipe))

    def _wish(self, recipe: Recipe) -> Offload:
        if recipe == "recompute":
            return _NO_OFFLOAD
        return replace(self._offload, mode="only" if recipe == "offload" else "auto")

    def _add(
        self,
        form: _Form,
        recipe: Recipe,
        *,
        peak_bytes: int,
        seconds: float | None,
        bases: tuple[Basis, Basis],
        plan: Plan | None = None,
    ) -> None:
        self._forms_of[len(self._found)] = form
        self._found.append(
            Combination(
                precision=form.precision,
                optimizer=form.optimizer,
                micro_batches=form.parts,
                recipe=recipe,
                budget_bytes=self._budget_bytes,
                peak_bytes=peak_bytes,
                seconds=seconds,
                peak_basis=bases[0],
                seconds_basis=bases[1],
                result=self._result(form),
                plan=plan,
            )
        )

    def _result(self, form: _Form) -> Result:
        changed: list[Result] = ["other"] if form.precision or form.optimizer else []
        if form.parts > 1:
            changed.append(self._micro_result)
        return worst(changed)

    def _time_nearest(self) -> None:
        """What the smallest peaks cost: of all combinations, and of single levers."""
        nearest = min(range(len(self._found)), key=lambda k: self._found[k].peak_bytes)
        for k in {nearest, *(k for k, each in enumerate(self._found) if len(each.kinds) == 1)}:
            own = self._found[k]
            if own.seconds is None:
                plan = self._solved(self._forms_of[k], own.recipe, own.peak_bytes)
                seconds = self._forms_of[k].whole(plan.predicted_seconds)
                self._found[k] = replace(own, peak_bytes=plan.predicted_peak_bytes, seconds=seconds, plan=plan)

    def _said(self, levers: tuple[Lever, ...]) -> Iterator[str]:
        yield from self._notes
        if ("", 1) in self._forms.foretold:
            yield "the device has no room for the step as it is: its numbers follow from profiles of smaller batches"
        if not any(each.micro_batches > 1 for each in self._found):
            return
        yield (
            "micro-batches: with each one's loss divided by their number the result is the same up to rounding, where "
            "the loss is a mean over equally many items"
        )
        if self._micro_result == "other":
            yield "micro-batches: BatchNorm, or another module with buffers, sees parts of the batch, so results differ"
        elif any(stage.draws_random for stage in self._base.stages):
            yield "micro-batches: dropout draws other masks than for the whole batch"


def _dtype(lever: Lever) -> str:
    return lever.name.removeprefix("autocast ")


def _result_of_micro_batches(model: nn.Module, profile: Profile) -> Result:
    """Gradients are sums over samples unless a module looks at the whole batch, or changes its buffers by it."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    # Without running statistics it takes the batch's own in evaluation, too.
    batch_wise = any(norm.training or norm.running_mean is None for norm in norms)
    return "other" if batch_wise or any(stage.mutated_buffers for stage in profile.stages) else "rounding"
