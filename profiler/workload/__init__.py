"""The training step as the user runs it, its tensors, and the snapshot that profiling restores.

Holds the model with its inputs, loss and optimizers, patches of ``forward``, torch's flags, and the tensors in nested
values with their storages. May import only modules at the root of ``profiler``. Begin with ``workload.py``, then
``snapshot.py``, ``forward_patches.py`` and ``tensor_trees.py``.
"""
