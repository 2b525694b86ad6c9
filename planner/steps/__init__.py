"""From the graph of a captured call to a problem for the graph solvers.

Decides which ops run together and in which order their first runs come. May import ``solvers``, the plain records at
the root of ``profiler`` and the root of ``planner``; no torch. Begin with ``step_problem`` in ``graph_problem.py``.
"""
