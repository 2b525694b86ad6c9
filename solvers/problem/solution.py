"""Problems with a budget, and solutions: a schedule with its peak, seconds, status and bound, or what is missing."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from solvers.problem.chain import Chain, Link
from solvers.problem.plain_data import check_budget
from solvers.problem.schedule import Schedule

Status = Literal["optimal", "feasible", "infeasible", "unknown"]
OF_A_NODE = "run"  # the moment of a graph's shortage
Accepts = Callable[[Schedule], bool]  # whether a schedule can be carried out


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A chain and the most bytes that may be alive at once; ValueError for a budget that is no number of bytes.

    Attributes:
        link: to host memory; None where nothing can be offloaded.
        accepts: whether a schedule can be carried out where the problem comes from; None where all can. Bounds hold
            for all the same.
    """

    chain: Chain
    budget_bytes: int
    link: Link | None = None
    accepts: Accepts | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_budget(self.budget_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Why a budget is too small.

    Attributes:
        minimum_budget_bytes: the smallest budget for which a schedule is known.
        stage: name of the stage, or of a graph's node, that forces it.
        moment: ``"forward"``, ``"recompute"``, ``"backward"`` or ``"optimizer"``; ``"run"`` of a graph's node.
    """

    minimum_budget_bytes: int
    stage: str
    moment: str

    @property
    def reason(self) -> str:
        """One sentence for a person."""
        if self.moment == "optimizer":
            return f"the optimizer step alone needs {self.minimum_budget_bytes} bytes"
        if self.moment == OF_A_NODE:
            return f"running node {self.stage!r} needs {self.minimum_budget_bytes} bytes in the smallest schedule known"
        return f"the {self.moment} of stage {self.stage!r} needs {self.minimum_budget_bytes} bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A solver's answer, replayed in exact bytes before anyone sees it.

    Attributes:
        solver: the method that made the schedule.
        status: ``optimal`` (no schedule is faster within the budget), ``feasible``
            (within the budget, with a bound), ``infeasible`` (it is proven that none
            fits), or ``unknown``: the method found none, and it is not proven that there
            is none.
        schedule: None when infeasible or unknown.
        peak_bytes: the replay's peak, the optimizer's included; None without a schedule.
        seconds: the replay's seconds; None without a schedule.
        lower_bound_seconds: no schedule within the budget is faster than this.
        solve_seconds: wall-clock seconds spent.
        shortage: without a schedule, the smallest budget known to be feasible and what forces it.
        interrupted: Ctrl-C ended the search; the schedule is the best until then.
    """

    solver: str
    status: Status
    schedule: Schedule | None = None
    peak_bytes: int | None = None
    seconds: float | None = None
    lower_bound_seconds: float
    solve_seconds: float
    shortage: Shortage | None = None
    interrupted: bool = False

    @property
    def gap(self) -> float | None:
        """Relative distance of ``seconds`` from the lower bound; None without a schedule."""
        if self.seconds is None:
            return None
        if self.seconds <= 0:
            return 0.0
        return max(0.0, (self.seconds - self.lower_bound_seconds) / self.seconds)


class _Costs(Protocol):
    @property
    def peak_bytes(self) -> int | None: ...
    @property
    def seconds(self) -> float | None: ...


Costed = TypeVar("Costed", bound=_Costs)


def undominated(answers: Iterable[Costed], tolerance: float = 0.0) -> list[Costed]:
    """Answers with a schedule, by rising peak, each faster than all before it by more than a relative tolerance."""
    best: list[Costed] = []
    for answer in sorted(answers, key=lambda answer: (answer.peak_bytes or 0, answer.seconds or 0.0)):
        if not best or (answer.seconds or 0.0) < (best[-1].seconds or 0.0) * (1 - tolerance):
            best.append(answer)
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The result of one method: a schedule (or None) and a lower bound that it proved.

    ``lower_bound_seconds`` holds for every schedule of the chain within the
    budget, not only for those the method looks at; 0 where it proves nothing.
    ``interrupted``: Ctrl-C ended its search.
    """

    schedule: Schedule | None
    lower_bound_seconds: float = 0.0
    interrupted: bool = False


def check_solver(what: str, solver: str, names: Iterable[str], remedy: str = "choose one of them") -> None:
    """Raises ValueError for a method that is not among ``names``, with the nearest of them or else the remedy."""
    known = list(names)
    if solver not in known:
        near = difflib.get_close_matches(solver, known, n=1)
        meant = f"did you mean {near[0]}?" if near else remedy
        raise ValueError(f"{what}: expected one of {', '.join(known)}, got {solver!r}; {meant}")
