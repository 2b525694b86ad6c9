"""Tensors in nested arguments and outputs, their storages, and tensors of other layouts or processes.

Finds and replaces tensors in containers and objects, gives each storage a number, and copies a tensor to host memory
bit for bit. May import only modules at the root of ``profiler``. Begin with ``tensor_trees.py``, then ``storages.py``.
"""
