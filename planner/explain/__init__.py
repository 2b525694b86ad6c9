"""Explains a plan and its reasons: timelines, peaks, decisions about ops, memory by owner, and their plots.

Makes tables and figures of a plan, of a profile or of measured steps. May import the rooms up to ``runtime``,
``profiler`` and ``solvers``. Begin with ``timeline.py`` and ``peak.py``; files that end in ``_plot`` draw what others
compute.
"""
