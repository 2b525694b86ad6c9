"""Training under a plan: running out of memory, shapes that change, and plans checked against their runs.

May import the rooms up to ``capacity``, ``profiler`` and ``solvers``. Begin with ``training.py`` for the loop and its
retries, ``checkpointing.py`` for ``auto_checkpoint``, and ``dynamic_shapes.py`` for plans by the shapes of the batch.
"""
