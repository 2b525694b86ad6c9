"""Measuring training steps: bytes, seconds, what is alive, and the Profile made of it.

Runs the steps of a profile with meters, recomputes stages once, captures them, and measures them as programs. May
import every other room of ``profiler``. Begin with ``measuring.py``, which has the order of the runs; ``profiling.py``
is the entry, and ``assembly.py`` puts the profile together.
"""
