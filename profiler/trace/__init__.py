"""One traced training step and its cut into stages; the calls of its modules, captured as graphs of ops.

Says which calls may be stages, and why others cannot be recomputed. AOTAutograd traces a call without Dynamo, and the
call runs as two programs; a guard checks at each call that the capture still holds. May import ``workload``,
``recomputation`` and the root of ``profiler``. Begin with ``step_record.py`` for the data and ``partition.py`` for the
cut, then with ``capture_call`` in ``captured_call.py`` and ``programs.py``.
"""
