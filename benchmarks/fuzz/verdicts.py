"""Runs cases and judges them: exact, refused in words, wrong, crashed, above the budget, or no case at all."""

from __future__ import annotations

import gc
import linecache
import random
import re
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import planner
from benchmarks.budgets import smallest_budget
from benchmarks.fuzz.cases import Case, Model
from benchmarks.fuzz.observed import differences, left_by
from benchmarks.fuzz.script import promised, source

Verdict = Literal[
    "exact", "said", "refused", "infeasible", "no case", "wrong", "crash", "over", "speechless", "unrestored"
]
BAD: tuple[Verdict, ...] = ("wrong", "crash", "over", "speechless", "unrestored")
SOLVE_SECONDS = 0.02  # chains of ten stages need no more
_RUNS_AGAIN = 4
_PACKAGES = ("planner", "profiler", "solvers")
_ROOT = Path(planner.__file__).parents[1]
# Messages of the project say what went wrong and, after a semicolon, the remedy, which begins with a verb.
_IN_WORDS = re.compile(r"expected .+(, got|; it) .+|.+; .+", re.DOTALL)
_VERBS = [
    "add",
    "allocate",
    "allow",
    "apply",
    "ask",
    "bind",
    "build",
    "call",
    "compile",
    "compute",
    "correct",
    "do",
    "give",
    "hand",
    "install",
    "keep",
    "leave",
    "let",
    "load",
    "make",
    "move",
    "name",
    "pass",
    "profile",
    "put",
    "raise",
    "register",
    "remove",
    "replace",
    "run",
    "save",
    "say",
    "send",
    "set",
    "solve",
    "state",
    "switch",
    "take",
    "train",
    "try",
    "turn",
    "unfreeze",
    "use",
    "wrap",
    "write",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a case.

    Attributes:
        verdict: ``exact``; ``said``: exact or above the budget, with a warning; ``refused``: an error in words that
            names the remedy; ``speechless``: one that names none; ``infeasible``: below the smallest budget, and told
            so; ``no case``: it fails, or differs from run to run, without a plan as well; ``wrong``: other results;
            ``over``: above the budget, and nothing was said; ``crash``: a raw error or the end of the process;
            ``unrestored``: profiling left something of the workload changed.
        detail: what differs, the message, or by how much the peak is above the budget.
        warned: what was said in warnings.
    """

    case: Case
    verdict: Verdict
    detail: str = ""
    warned: tuple[str, ...] = ()
    peak_bytes: int = 0
    budget_bytes: int = 0


@dataclass(slots=True)
class _Prepared:
    """The profile of a model and its smallest budget; or why there is none."""

    profile: planner.Profile | None = None
    smallest_bytes: int = 0
    left: list[str] = field(default_factory=list)  # what profiling has changed of the workload
    refusal: tuple[Verdict, str] | None = None


def judged(cases: Sequence[Case], begin: Callable[[Case], None] = lambda case: None) -> Iterator[Outcome]:
    """Outcomes of cases in turn; cases of one model that follow each other share its profile.

    Args:
        begin: called before each case.
    """
    model: Model | None = None
    prepared = _Prepared()
    for case in cases:
        begin(case)
        if case.model != model:
            prepared = _prepared(case)
            model = case.model
        outcome = _judged(case, prepared)
        if prepared.left and outcome.verdict in ("exact", "said"):
            outcome = replace(outcome, verdict="unrestored", detail=f"after profiling: {', '.join(prepared.left[:4])}")
            prepared.left = []  # once a model
        yield outcome


def _prepared(case: Case) -> _Prepared:
    with _warnings():
        try:
            module = loaded(source(replace(case, habits=())))
            module.run(None, metered=False)
        except Exception as error:  # noqa: BLE001 - generated code may raise anything
            return _Prepared(refusal=("no case", _said(error)))
        work = module.workload()
        seed_all()
        before = left_by(work)
        try:
            profile = planner.profile(work)
            left = differences(before, left_by(work))
            return _Prepared(profile=profile, smallest_bytes=smallest_budget(profile, solver="rotor"), left=left)
        except Exception as error:  # noqa: BLE001 - that is what is judged
            return _Prepared(refusal=(_of_error(error, profiling=True), f"profile: {_said(error)}"))


def _judged(case: Case, prepared: _Prepared) -> Outcome:
    if prepared.refusal is not None:
        verdict, detail = prepared.refusal
        return Outcome(case=case, verdict=verdict, detail=detail)
    assert prepared.profile is not None
    module = loaded(source(case))
    with _warnings():
        expected = _unplanned(module)
    if isinstance(expected, str):
        return Outcome(case=case, verdict="no case", detail=expected)
    room = prepared.profile.unplanned_peak_bytes - prepared.smallest_bytes
    budget_bytes = max(1, prepared.smallest_bytes + int(case.share * room))
    with _warnings() as warned:
        try:
            plan = planner.solve(prepared.profile, budget_bytes, solver=case.solver, time_limit_seconds=SOLVE_SECONDS)
            got, peak_bytes = module.run(plan)
        except planner.Infeasible as error:
            fair = case.share < 0 or case.solver not in ("auto", "rotor")
            return Outcome(case=case, verdict="infeasible" if fair else "crash", detail=_said(error))
        except Exception as error:  # noqa: BLE001 - that is what is judged
            return _failed(case, module, _of_error(error), _said(error), tuple(_words(warned)))
    said = tuple(_words(warned))
    outcome = Outcome(case=case, verdict="exact", warned=said, peak_bytes=peak_bytes, budget_bytes=budget_bytes)
    if different := differences(expected, got):
        if any(isinstance(again, str) or differences(expected, again) for again in _unplanned_again(module)):
            return replace(outcome, verdict="no case", detail="differs from run to run without a plan")
        return replace(outcome, verdict="wrong", detail=", ".join(different[:4]))
    if peak_bytes > budget_bytes and promised(case):
        above = f"{peak_bytes - budget_bytes} bytes, {100 * (peak_bytes / budget_bytes - 1):.2f} % above {budget_bytes}"
        return replace(outcome, verdict="said" if said else "over", detail=above)
    return replace(outcome, verdict="said" if said else "exact")


def _failed(case: Case, module: types.ModuleType, verdict: Verdict, text: str, warned: tuple[str, ...]) -> Outcome:
    if isinstance(_unplanned(module), str):
        return Outcome(case=case, verdict="no case", detail=text)
    return Outcome(case=case, verdict=verdict, detail=text, warned=warned)


def _unplanned_again(module: types.ModuleType) -> Iterator[dict[str, Any] | str]:
    """Several more runs: what reads memory that nothing filled finds the same there now and then."""
    for _ in range(_RUNS_AGAIN):
        yield _unplanned(module)


def _unplanned(module: types.ModuleType) -> dict[str, Any] | str:
    """What the unplanned run leaves; the error where it fails."""
    try:
        return module.run(None, metered=False)[0]
    except Exception as error:  # noqa: BLE001 - a habit may be illegal
        return _said(error)


def loaded(text: str) -> types.ModuleType:
    """The module of a case's source, which tracebacks and pickle find."""
    name = "fuzz_case"
    module = types.ModuleType(name)
    sys.modules[name] = module
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec", dont_inherit=True), module.__dict__)
    return module


def seed_all() -> None:
    """The same random numbers from here on."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def quiet_process() -> None:
    """One thread, and what is imported by now is no garbage to look through."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


@contextmanager
def _warnings() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def _words(caught: Sequence[warnings.WarningMessage]) -> Iterator[str]:
    """What the project said; torch's own warnings are others' words."""
    for warning in caught:
        if issubclass(warning.category, RuntimeWarning):
            yield str(warning.message)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _of_error(error: Exception, *, profiling: bool = False) -> Verdict:
    """Whether an error is a refusal in words, one without a remedy, or a raw one."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = Path(frames[-1].filename).is_relative_to(_ROOT) and frames[-1].filename.split("/")[-2:]
    raised_by_us = bool(ours) and any(Path(frames[-1].filename).is_relative_to(_ROOT / name) for name in _PACKAGES)
    text = str(error)
    if not raised_by_us or not _IN_WORDS.search(text):
        return "crash"
    if profiling and "the training step fails" in text:
        return "crash"  # It does run.
    return "refused" if has_remedy(text) else "speechless"


def has_remedy(text: str) -> bool:
    """Whether the last part of a message says what to do."""
    clauses = re.split(r"; |\. |, (?:or )?", text.split("expected", 1)[-1])
    return any(clause.split(" ", 1)[0].lower() in _VERBS for clause in clauses[1:])
