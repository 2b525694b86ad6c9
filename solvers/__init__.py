"""Solvers for checkpointing plans: chain and graph problems in, replayed schedules with certificates out. No torch."""

import sys

from solvers.chain import revolve
from solvers.chain.registry import frontier, solve_chain, solver_names
from solvers.graph.registry import graph_frontier, graph_solver_names, solve_graph
from solvers.problem.chain import Chain, Link, Option, Stage
from solvers.problem.graph import Graph, Node
from solvers.problem.schedule import Action, Schedule
from solvers.problem.simulator import Copy, Replay, ReplayError, replay
from solvers.problem.solution import Problem, Shortage, Solution

__all__ = [
    "Chain",
    "Stage",
    "Option",
    "Graph",
    "Node",
    "Link",
    "Copy",
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
    "solve_graph",
    "graph_frontier",
    "graph_solver_names",
    "revolve",
]

sys.modules["solvers.revolve"] = revolve  # For ``from solvers.revolve import forward_runs``, too.
