"""Judges a program: planned at three budgets, its values held to the unplanned model's, its bytes to the plan's."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils import _pytree as pytree

import planner
from benchmarks.fuzz.verdicts import has_remedy
from benchmarks.graph_fuzz.programs import Program, drawn
from planner.plans.refusals import NoPlan
from profiler.capture.joint_graph import REMEDY

Values = Literal["eager", "compiled", "differ", "unknown"]
Bytes = Literal["equal", "below", "above", "over", "unknown"]
Verdict = Literal["passed", "refused", "wrong", "over", "above", "raw", "crash", "lost"]
BAD: tuple[Verdict, ...] = ("wrong", "over", "above", "raw", "crash", "lost")
SOLVE_SECONDS = 0.3
STEPS = 2
_SHARES = {"unplanned": 1.0, "middle": 0.5, "smallest": 0.0}
# What torch.compile captures, run as captured; its own "aot_eager" makes some values again, in another order of sums.
AS_CAPTURED = aot_autograd(fw_compiler=lambda module, _: make_boxed_func(module.forward))
_ROOT = Path(planner.__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutcome:
    """What came of one plan.

    Attributes:
        name: of its budget.
        values: which unplanned run they equal, bit for bit.
        bytes: whether the measured peak equals the predicted one, is below it, above it, or above the budget.
        detail: what differs.
    """

    name: str
    values: Values = "unknown"
    bytes: Bytes = "unknown"
    budget_bytes: int = 0
    predicted_bytes: int = 0
    measured_bytes: int = 0
    recomputed_ops: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a program.

    Attributes:
        verdict: ``passed``; ``refused``: an error in words that names the remedy; ``wrong``: other values than the
            unplanned model's, compiled or not; ``over``: above the budget; ``above``: above the prediction alone;
            ``raw``: an error of another kind; ``crash``: the end of the process; ``lost``: no plan at a budget that
            was said to be enough.
        detail: the message, or what differs.
    """

    seed: int
    verdict: Verdict
    kinds: tuple[str, ...] = ()
    plans: tuple[PlanOutcome, ...] = ()
    detail: str = ""
    source: str = ""


def judged(seed: int) -> Outcome:
    """The outcome of a seed's program."""
    with _quiet():
        expected: dict[str, Any] = {}

        def runs(program: Program) -> bool:
            torch._dynamo.reset()
            try:
                expected.clear()
                expected.update(left_by(program.workload()))
            except Exception:  # noqa: BLE001 - a drawn program may be illegal
                return False
            return all(torch.isfinite(t).all() for t in pytree.tree_leaves(expected) if isinstance(t, Tensor))

        program = drawn(seed, runs)
        try:
            verdict, detail, plans = _judged(program, expected)
        except Exception as error:  # noqa: BLE001 - that is what is judged
            verdict, detail, plans = _of_error(error), _said(error), ()
    return Outcome(
        seed=seed, verdict=verdict, kinds=program.kinds, plans=tuple(plans), detail=detail, source=program.source
    )


def _judged(program: Program, expected: dict[str, Any]) -> tuple[Verdict, str, list[PlanOutcome]]:
    profile = planner.profile(program.workload(), graph=True)
    least = smallest_budget(profile)
    room = profile.unplanned_peak_bytes - least
    compiled: dict[str, Any] = {}
    plans: list[PlanOutcome] = []
    for name, share in _SHARES.items():
        if share and room <= 0:
            continue
        try:
            plan = planner.solve(profile, least + int(share * room), time_limit_seconds=SOLVE_SECONDS)
        except NoPlan as none:
            return "lost", f"{name}: {none}", plans
        plans.append(_planned(program, name, plan, expected, compiled))
    kinds: list[tuple[str, Verdict]] = [("differ", "wrong"), ("over", "over"), ("above", "above")]
    for bad, verdict in kinds:
        for each in plans:
            if bad in (each.values, each.bytes):
                return verdict, f"{each.name}: {each.detail}", plans
    return "passed", "; ".join(f"{each.name}: {each.detail}" for each in plans if each.detail), plans


def smallest_budget(profile: planner.GraphProfile) -> int:
    """The least that is known to be enough: the first answer may be corrected where it is tried."""
    least_bytes = 1
    while True:
        try:
            planner.solve(profile, least_bytes, time_limit_seconds=SOLVE_SECONDS)
            return least_bytes
        except NoPlan as none:
            if none.minimum_budget_bytes <= least_bytes:
                return least_bytes
            least_bytes = none.minimum_budget_bytes


def _planned(
    program: Program, name: str, plan: planner.GraphPlan, expected: dict[str, Any], compiled: dict[str, Any]
) -> PlanOutcome:
    torch._dynamo.reset()
    values, detail = "eager", ""
    work = program.workload()
    planner.apply(work.model, plan)
    got = left_by(work)
    measured = planner.measure(work, repeats=1).peak_bytes
    if different := differences(expected, got):
        if not compiled:
            torch._dynamo.reset()
            plain = program.workload()
            plain.model.forward = torch.compile(plain.model.forward, backend=AS_CAPTURED, dynamic=False)
            compiled.update(left_by(plain))
        values = "compiled"
        if still := sorted({*differences(compiled, got)} & {*different}):
            values, detail = "differ", f"neither as eager nor as compiled: {', '.join(still[:5])}"
    off = measured - plan.predicted_peak_bytes
    found: Bytes = "equal" if off == 0 else "below" if off < 0 else "above"
    if measured > plan.budget_bytes:
        found = "over"
    if off or found == "over":
        detail += f"{'; ' if detail else ''}measured {off:+d} bytes, budget {measured - plan.budget_bytes:+d}"
    return PlanOutcome(
        name=name,
        values=values,
        bytes=found,
        budget_bytes=plan.budget_bytes,
        predicted_bytes=plan.predicted_peak_bytes,
        measured_bytes=measured,
        recomputed_ops=plan.recomputed_ops,
        detail=detail,
    )


def left_by(work: planner.Workload) -> dict[str, Any]:
    """Copies of losses, outputs, gradients, state and random numbers of some steps."""
    outputs: list[Any] = []
    hook = work.model.register_forward_hook(lambda module, given, output: outputs.append(_copied(output)))
    torch.manual_seed(1)
    losses: list[Any] = [work.step() for _ in range(STEPS)]
    hook.remove()
    left = {
        "losses": losses,
        "outputs": outputs,
        "gradients": [(name, p.grad) for name, p in work.model.named_parameters()],
        "input gradients": [t.grad for t in work.inputs],
        "inputs": work.inputs,
        "parameters": list(work.model.named_parameters()),
        "buffers": list(work.model.named_buffers()),
        "states": [optimizer.state_dict()["state"] for optimizer in work.optimizers],
        "random": torch.get_rng_state(),
    }
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), left)


def _copied(output: Any) -> Any:
    """Copies of an output's tensors, with what else is seen of them: strides, gradients, and which share a storage."""
    leaves, spec = pytree.tree_flatten(output)
    storages = [leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, Tensor)]
    seen = [(leaf.requires_grad, leaf.is_leaf, leaf.stride()) for leaf in leaves if isinstance(leaf, Tensor)]
    copies = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return {"kind": str(spec), "shared": [storages.index(each) for each in storages], "seen": seen, "tensors": copies}


def differences(expected: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """Where two runs differ, in bits."""
    left, right = (dict(pytree.tree_flatten_with_path(each)[0]) for each in (expected, got))
    names = [*left, *(path for path in right if path not in left)]
    return [
        pytree.keystr(path)
        for path in names
        if path not in left or path not in right or not _same(left[path], right[path])
    ]


def _same(left: Any, right: Any) -> bool:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return type(left) is type(right) and left == right
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return torch.equal(*(each.detach().reshape(-1).contiguous().view(torch.uint8) for each in (left, right)))


def _of_error(error: Exception) -> Verdict:
    """Whether an error is ours and says what to do."""
    raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    ours = any(raised.is_relative_to(_ROOT / package) for package in ("planner", "profiler", "solvers"))
    return "refused" if ours and (has_remedy(str(error)) or REMEDY in str(error)) else "raw"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
