"""Solvers for checkpointing plans: chain and graph problems in, replayed schedules with certificates out. No torch."""

import sys

from solvers.chain import revolve
from solvers.chain.registry import frontier, solve_chain, solver_names
from solvers.graph.registry import graph_frontier, graph_solver_names, solve_graph
from solvers.problem.chain import Action, Chain, Option, Schedule, Stage
from solvers.problem.chain_simulator import Replay, ReplayError, replay
from solvers.problem.copy_engines import Copy
from solvers.problem.graph import Graph, GraphAction, GraphSchedule, Node
from solvers.problem.graph_simulator import GraphReplay, GraphReplayError, replay_graph
from solvers.problem.link import Link
from solvers.problem.solution import GraphProblem, Problem, Shortage, Solution

__all__ = [
    "Chain",
    "Stage",
    "Option",
    "Graph",
    "Node",
    "Link",
    "Copy",
    "Problem",
    "GraphProblem",
    "Solution",
    "Shortage",
    "Schedule",
    "Action",
    "GraphSchedule",
    "GraphAction",
    "Replay",
    "replay",
    "ReplayError",
    "GraphReplay",
    "replay_graph",
    "GraphReplayError",
    "solve_chain",
    "frontier",
    "solver_names",
    "solve_graph",
    "graph_frontier",
    "graph_solver_names",
    "revolve",
]

sys.modules["solvers.revolve"] = revolve  # For ``from solvers.revolve import forward_runs``, too.
