"""Recomputing a module call so that it gives what its first run gave.

Records what a call depends on (attributes, parameters, buffers, random states, torch's flags), reinstates it, and
compares what is saved; docs/recomputation.md has the rules. May import ``tensors``, ``workload`` and the root of
``profiler``. Begin with ``CallState`` in ``module_rerun.py``.
"""
