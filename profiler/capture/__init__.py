"""Calls of modules captured as one graph of ops, forward and backward, and run as two programs.

AOTAutograd traces the call without Dynamo; a guard checks at each call that the capture still holds. May import the
rooms up to ``trace`` and the root of ``profiler``. Begin with ``capture_call`` in ``captured_call.py``, then
``programs.py`` and ``call_program.py``.
"""
