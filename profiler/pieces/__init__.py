"""Parts of a step that run a few rows at a time: a head together with its loss, and single modules.

Holds the stand-in for the output of a head that has not run, and functions and losses of its rows. May import the rooms
up to ``recomputation`` and the root of ``profiler``. Begin with ``heads.py``; ``module_pieces.py`` does the same for a
module.
"""
