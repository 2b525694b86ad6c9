"""From a profile to a plan: the cost model, solving, manual plans, and memory/time curves.

Also finds the programs of captured stages and lowers a schedule to what each stage does. May import ``steps``, the root
of ``planner``, ``profiler`` and ``solvers``; only ``profiling.py`` needs torch. Begin with ``solving.py``, then
``cost_model.py``, ``plan.py`` and ``lowering.py``.
"""
