"""Graph problems and answers: a graph with a budget in, a schedule with its certificate out."""

from __future__ import annotations

from dataclasses import dataclass

from solvers.problem.graph import Graph
from solvers.problem.solution import check_budget


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphProblem:
    """A graph and the most bytes that may be alive at once; ValueError for a budget that is no number of bytes."""

    graph: Graph
    budget_bytes: int

    def __post_init__(self) -> None:
        check_budget(self.budget_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCandidate:
    """What one method returns: an order of runs (or None) and a lower bound that it proved.

    Attributes:
        order: node indices in the order of their runs, repeated runs included.
        lower_bound_seconds: holds for every schedule of the graph within the budget, not only for those the method
            looks at; 0 where it proves nothing, infinite where it proves that no schedule fits.
    """

    order: tuple[int, ...] | None
    lower_bound_seconds: float = 0.0
