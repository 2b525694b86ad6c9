"""From a profile to a plan: the cost model, solving, manual plans, and memory/time curves.

Also finds the programs of captured stages and lowers a schedule to what each stage does. May import ``distributed``,
the root of ``planner``, ``profiler`` and ``solvers``; only ``profiling.py``, ``pipeline_profile.py`` and
``estimating.py`` need torch. Begin with ``solving.py``, then ``cost_model.py``, ``plan.py`` and ``lowering.py``.
"""
