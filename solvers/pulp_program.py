"""Integer programs written with PuLP and solved by HiGHS: what the published programs of chains and graphs share.

A sum is a list of terms, a variable times a factor each; the variable None stands for the number one. Bytes and seconds
are scaled, so that HiGHS's tolerance of 1e-6 stays below one byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import pulp

from solvers.highs import run
from solvers.problem.deadline import check_deadline, left_seconds

Term = tuple[pulp.LpVariable | None, float]
Terms = list[Term]

# PuLP keeps the errors of solver libraries that it did not find, and their tracebacks keep the local variables of
# whoever imported it first: the model and batch of a function that calls planner.profile.
for _solver in vars(pulp.apis).values():
    if isinstance(_missing := getattr(_solver, "err", None), BaseException):
        _missing.__traceback__ = None

_SECOND_SCALE = 1e3  # the unplanned seconds in the program's units
_FEASIBLE = 2  # HiGHS: kSolutionStatusFeasible


class PulpAnswer(NamedTuple):
    """The result of HiGHS; the values are in the program's variables.

    Attributes:
        found: whether it knows a solution.
        bound_seconds: no solution takes fewer; infinite where there is none.
        interrupted: Ctrl-C ended the search.
    """

    found: bool
    bound_seconds: float
    interrupted: bool = False


class PulpProgram:
    """A program that minimises seconds.

    Attributes:
        problem: PuLP's own.
        byte: one byte in the program's units.
        infeasible: whether a row that has no variables does not hold.

    >>> program = PulpProgram("example", budget_bytes=8, unplanned_seconds=3.0, byte_scale=1e4)
    >>> kept = [program.variable("kept", k) for k in range(3)]
    >>> program.minimise(zip(kept, (-1.0, -2.0, -3.0)))
    >>> program.fit(zip(kept, (4, 3, 5)), limit_bytes=8)
    >>> program.solve(time_limit_seconds=10.0).found, [chosen(x) for x in kept]
    (True, [False, True, True])
    """

    def __init__(self, name: str, budget_bytes: float, unplanned_seconds: float, *, byte_scale: float) -> None:
        """``byte_scale``: the budget in the program's units."""
        self.problem = pulp.LpProblem(name, pulp.LpMinimize)
        self.byte = byte_scale / max(1.0, budget_bytes)
        self.infeasible = False
        self._second = _SECOND_SCALE / (unplanned_seconds or 1.0)

    def variable(self, name: str, *index: int, most: float = 1.0, integral: bool = True) -> pulp.LpVariable:
        """A variable from 0 to ``most``. HiGHS sees variables in the order of their names."""
        check_deadline()
        category = pulp.LpInteger if integral else pulp.LpContinuous
        return self.problem.add_variable("_".join([name, *map(str, index)]), 0, most, category)

    def minimise(self, seconds: Iterable[Term]) -> None:
        """Take a sum of seconds as what is minimised; its constant part does not count."""
        total, _ = _merged(seconds)
        self.problem += pulp.LpAffineExpression({x: factor * self._second for x, factor in total.items()})

    def at_most(self, terms: Iterable[Term], limit: float = 0.0) -> None:
        """The sum is not above the limit."""
        check_deadline()
        total, constant = _merged(terms)
        self._add_at_most(total, limit - constant)

    def equal(self, terms: Iterable[Term], value: float = 0.0) -> None:
        """The sum has a value."""
        total, constant = _merged(terms)
        self.problem += pulp.LpAffineExpression(total) == value - constant

    def fit(self, size_bytes: Iterable[Term], limit_bytes: float) -> None:
        """``at_most`` for bytes; whole numbers are summed before they are scaled."""
        total, constant = _merged(size_bytes)
        self._add_at_most({x: size * self.byte for x, size in total.items()}, (limit_bytes - constant) * self.byte)

    def _add_at_most(self, total: dict[pulp.LpVariable, float], limit: float) -> None:
        if any(total.values()):
            self.problem += pulp.LpAffineExpression(total) <= limit
        elif limit < 0:
            self.infeasible = True

    def solve(self, time_limit_seconds: float, presolve: bool = False) -> PulpAnswer:
        """Run HiGHS; after Ctrl-C its best solution until then counts.

        The number of threads is left to HiGHS: its scheduler is one per process and refuses to run
        with another number than it was started with.
        """
        if self.infeasible:
            return PulpAnswer(False, math.inf)
        # Integer programs go without presolve: with it HiGHS 1.11 to 1.15.1 called answers to those of
        # ``solvers.chain.ilp`` optimal that CBC and the exhaustive search beat; at 12 stages it is as fast without.
        solver = _InterruptibleHiGHS(
            msg=False,
            timeLimit=max(0.01, min(time_limit_seconds, left_seconds())),
            gapRel=1e-9,
            gapAbs=1e-7,
            presolve="choose" if presolve else "off",
        )
        if self.problem.solve(solver) == pulp.LpStatusInfeasible:
            return PulpAnswer(False, math.inf)
        highs: Any = self.problem.solverModel
        info = highs.getInfo()  # PuLP's own status says "feasible" at any time limit
        found = info.primal_solution_status == _FEASIBLE
        return PulpAnswer(found, info.mip_dual_bound / self._second, solver.interrupted)


def times(variables: Iterable[pulp.LpVariable], factor: float) -> Terms:
    """Variables, each times the factor."""
    return [(x, factor) for x in variables]


def scaled(terms: Terms, factor: float) -> Terms:
    """A sum times a factor."""
    return [(x, c * factor) for x, c in terms]


def chosen(variable: pulp.LpVariable | None) -> bool:
    """Whether a binary is there and 1 in the solution."""
    return variable is not None and (variable.value() or 0.0) > 0.5


class _InterruptibleHiGHS(pulp.HiGHS):
    """PuLP's HiGHS; Ctrl-C ends it like its time limit does, so that the best solution until then is read."""

    interrupted = False

    def callSolver(self, lp: pulp.LpProblem) -> None:
        """Solve the program that PuLP has built."""
        try:
            run(lp.solverModel)  # type: ignore[attr-defined]  # set by PuLP
        except KeyboardInterrupt:
            self.interrupted = True


def _merged(terms: Iterable[Term]) -> tuple[dict[pulp.LpVariable, float], float]:
    """One factor per variable (an expression made from a list keeps only the last of two), and the constant."""
    total: dict[pulp.LpVariable | None, float] = {}
    for variable, factor in terms:
        total[variable] = total.get(variable, 0) + factor
    constant = total.pop(None, 0)
    return total, constant  # type: ignore[return-value]  # None is gone
