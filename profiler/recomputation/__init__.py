"""Recomputing a module call so that it gives the results of its first run; running one a few rows at a time.

Records the state that a call depends on (attributes, parameters, buffers, random states, torch's flags), reinstates it,
and compares the saved tensors; docs/recomputation.md has the rules. May import ``workload`` and the root of
``profiler``. Begin with ``CallState`` in ``module_rerun.py``; ``heads.py`` runs a head and its loss in pieces, and
``module_pieces.py`` a module.
"""
