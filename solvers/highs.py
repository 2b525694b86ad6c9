"""Mixed integer programs as sparse rows, handed to HiGHS directly: the programs that are built many times.

PuLP builds a model object by object, which takes longer than HiGHS needs to solve the programs of the local search;
here a row goes straight into the arrays that HiGHS reads, a start solution can be given, and Ctrl-C ends the search.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Literal, NamedTuple

import highspy
import numpy as np

from solvers.arrays import Floats
from solvers.problem.deadline import check_deadline, left_seconds

INFINITE = highspy.kHighsInf


class ProgramAnswer(NamedTuple):
    """The answer of HiGHS to a program.

    Attributes:
        status: ``optimal`` (within the gap asked for), ``infeasible`` or ``stopped`` (the time limit).
        values: one per variable; None where no solution is known.
        bound: no solution is better; infinite when infeasible.
    """

    status: Literal["optimal", "infeasible", "stopped"]
    values: Floats | None
    bound: float


class Program:
    """Variables and rows of a program to minimise.

    >>> program = Program()
    >>> a, b = program.variable(cost=-3.0), program.variable(cost=-2.0)
    >>> program.row([(a, 2.0), (b, 2.0)], upper=3.0)
    >>> answer = program.solve(time_limit_seconds=10.0)
    >>> answer.status, [round(float(value), 6) for value in answer.values]
    ('optimal', [1.0, 0.0])
    """

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.lowers: list[float] = []
        self.uppers: list[float] = []
        self.integral: list[bool] = []
        self._row_lowers: list[float] = []
        self._row_uppers: list[float] = []
        self._starts: list[int] = [0]
        self._columns: list[int] = []
        self._coefficients: list[float] = []
        self.offset = 0.0

    def variable(self, *, cost: float = 0.0, lower: float = 0.0, upper: float = 1.0, integral: bool = True) -> int:
        """A new variable's number."""
        self.costs.append(cost)
        self.lowers.append(lower)
        self.uppers.append(upper)
        self.integral.append(integral)
        return len(self.costs) - 1

    def fix(self, variable: int, value: float) -> None:
        """Give a variable its value."""
        self.lowers[variable] = self.uppers[variable] = value

    def row(self, terms: Iterable[tuple[int, float]], *, lower: float = -INFINITE, upper: float = INFINITE) -> None:
        """``lower <= sum of coefficient * variable <= upper``."""
        check_deadline()
        for column, coefficient in terms:
            self._columns.append(column)
            self._coefficients.append(coefficient)
        self._starts.append(len(self._columns))
        self._row_lowers.append(lower)
        self._row_uppers.append(upper)

    def solve(
        self, *, time_limit_seconds: float, relative_gap: float = 1e-6, start: Floats | None = None
    ) -> ProgramAnswer:
        """The best solution found in the time; ``start`` is a solution to begin with.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; HiGHS has stopped.
        """
        if not self.costs:
            return self._empty_answer()
        highs = highspy.Highs()
        highs.setOptionValue("output_flag", False)
        limit_seconds = max(0.01, min(time_limit_seconds, left_seconds()))
        highs.setOptionValue("time_limit", limit_seconds)
        highs.setOptionValue("mip_rel_gap", relative_gap)
        highs.passModel(self._model())
        if start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = [float(value) for value in start]
            highs.setSolution(solution)
        run(highs, limit_seconds)
        return _answer_of(highs)

    def _empty_answer(self) -> ProgramAnswer:
        """HiGHS has no answer for a program without variables."""
        if all(low <= 0.0 <= high for low, high in zip(self._row_lowers, self._row_uppers, strict=True)):
            return ProgramAnswer("optimal", np.zeros(0), self.offset)
        return ProgramAnswer("infeasible", None, INFINITE)

    def _model(self) -> highspy.HighsLp:
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.costs), len(self._row_lowers)
        model.col_cost_ = np.array(self.costs, dtype=np.float64)
        model.col_lower_ = np.array(self.lowers, dtype=np.float64)
        model.col_upper_ = np.array(self.uppers, dtype=np.float64)
        model.row_lower_ = np.array(self._row_lowers, dtype=np.float64)
        model.row_upper_ = np.array(self._row_uppers, dtype=np.float64)
        model.offset_ = self.offset
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.num_col_, matrix.num_row_ = model.num_col_, model.num_row_
        matrix.start_ = np.array(self._starts, dtype=np.int32)
        matrix.index_ = np.array(self._columns, dtype=np.int32)
        matrix.value_ = np.array(self._coefficients, dtype=np.float64)
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        model.integrality_ = [kinds[whole] for whole in self.integral]
        return model


def _answer_of(highs: highspy.Highs) -> ProgramAnswer:
    model_status, info = highs.getModelStatus(), highs.getInfo()
    if model_status == highspy.HighsModelStatus.kInfeasible:
        return ProgramAnswer("infeasible", None, INFINITE)
    known = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = np.array(highs.getSolution().col_value) if known else None
    objective = float(info.objective_function_value) if known else INFINITE
    status = "optimal" if model_status == highspy.HighsModelStatus.kOptimal else "stopped"
    return ProgramAnswer(status, values, min(float(info.mip_dual_bound), objective))


_LISTEN_SECONDS = 0.5  # a person who presses Ctrl-C does not wait longer


def run(highs: highspy.Highs, limit_seconds: float = INFINITE) -> None:
    """Solve; after Ctrl-C HiGHS stops, keeps what it has found, and KeyboardInterrupt is raised.

    ``limit_seconds``: it is stopped then too, where it does not keep the limit that it was given.
    """
    highs.HandleUserInterrupt = True
    end = time.perf_counter() + limit_seconds
    highs.startSolve()
    try:
        while not highs.wait(min(_LISTEN_SECONDS, max(0.01, end - time.perf_counter())))[0]:
            if time.perf_counter() > end:
                highs.cancelSolve()
    except KeyboardInterrupt:
        highs.cancelSolve()
        highs.wait()
        raise
