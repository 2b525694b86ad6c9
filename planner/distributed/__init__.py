"""Planning on several ranks: each rank measures, one solves, and all apply the same plan.

Also wraps models for ranks, simulates ranks, and plans stages of a pipeline. May import the rooms up to ``runtime``,
``profiler`` and ``solvers``. Begin with ``collective.py``, which ``planner.profile`` and ``planner.apply`` enter first
also on one process; then ``ranks.py``.
"""
