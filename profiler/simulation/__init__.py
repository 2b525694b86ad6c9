"""A device that exists on paper: a training step runs on it without memory for its tensors and without computing them.

May import ``workload``, ``recomputation`` and the root of ``profiler``. Begin with ``simulated_device.py``, which
counts bytes and seconds op by op; ``op_costs.py`` has what single ops take on a device.
"""
