"""Methods for chain problems, one in a file, with their bounds and the registry that calls them.

May import ``problem`` and modules at the root of ``solvers``; no torch, no input or output, and no method imports
another one (the registry and ``candidates.py`` call them). Begin with ``solve_chain`` in ``registry.py``, then
``rotor.py``.
"""
