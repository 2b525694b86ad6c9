"""Installing a plan on a model and carrying it out: dropped stages, programs, transfers, copy engines.

May import ``plans``, the rooms before it, ``profiler`` and the data of ``solvers/problem``; it never solves. Begin with
``apply`` in ``applier.py``, then ``planned_step.py``, ``schedule_runner.py`` and ``dropped_stage.py``; ``transfers.py``
sends tensors to host memory.
"""
