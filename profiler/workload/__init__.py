"""The training step as the user runs it, and what is put back after running it.

Holds the model with its inputs, loss and optimizers, patches of ``forward``, torch's flags, and the snapshot that
profiling restores. May import ``tensors`` and modules at the root of ``profiler``. Begin with ``workload.py``, then
``snapshot.py`` and ``forward_patches.py``.
"""
