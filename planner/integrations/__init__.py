"""Callbacks for training frameworks, each of which plans for the framework's own step.

A framework is imported by its own module alone, and only when that is used. May import the rooms up to ``report``,
``profiler`` and ``solvers``. Begin with ``budgeted_training.py``, which the callbacks share, then ``transformers.py``
or ``lightning.py``.
"""
