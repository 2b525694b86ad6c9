"""Ranks of a process group that plan together: messages between them, failures that all hear of, one profile of all.

Also wraps models for ranks, and simulates ranks. May import modules at the root of ``planner``, and ``profiler``. Begin
with ``together`` in ``ranks.py``, which ``planner.profile`` and ``planner.apply`` enter also on one process; then
``alike_steps.py``.
"""
