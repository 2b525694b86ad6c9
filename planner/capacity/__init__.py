"""Fits training into memory: the largest batch, advice on what would help, and profiles of other sizes.

May import the rooms up to ``explain``, ``profiler`` and ``solvers``. Begin with ``batch_search.py`` for the largest
batch and ``advice.py`` for levers (precision, optimizer, micro-batches); ``scaling.py`` predicts a profile at another
size.
"""
