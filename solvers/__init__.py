"""Solvers for checkpointing plans: chain problems in, replayed schedules with certificates out. Needs no torch."""

from solvers.chain import Chain, Option, Stage
from solvers.problem import Problem, Shortage, Solution
from solvers.schedule import Action, Schedule
from solvers.simulator import Replay, ReplayError, replay
from solvers.suite import frontier, solve_chain, solver_names

__all__ = [
    "Chain",
    "Stage",
    "Option",
    "Problem",
    "Solution",
    "Shortage",
    "Schedule",
    "Action",
    "Replay",
    "replay",
    "ReplayError",
    "solve_chain",
    "frontier",
    "solver_names",
]
