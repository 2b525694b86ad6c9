"""Methods for graph problems, one in a file, with their bounds and the registry that calls them.

May import ``chain``, ``problem`` and modules at the root of ``solvers``; no torch, no input or output, and no method
imports another one (the registry calls them). Begin with ``solve_graph`` in ``registry.py``, then ``orders.py``,
which the methods share.
"""
