"""Solvers for checkpointing plans: chain and graph problems in, replayed schedules with certificates out. No torch."""

from solvers import revolve
from solvers.chain import Chain, Option, Stage
from solvers.copy_engines import Copy
from solvers.graph import Graph, Node
from solvers.graph_problem import GraphProblem
from solvers.graph_schedule import GraphAction, GraphSchedule
from solvers.graph_simulator import GraphReplay, GraphReplayError, replay_graph
from solvers.graph_suite import graph_frontier, graph_solver_names, solve_graph
from solvers.link import Link
from solvers.problem import Problem, Shortage, Solution
from solvers.schedule import Action, Schedule
from solvers.simulator import Replay, ReplayError, replay
from solvers.suite import frontier, solve_chain, solver_names

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
