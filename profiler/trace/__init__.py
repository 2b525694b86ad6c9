"""One traced training step: its module calls and ops, its dataflow, and its cut into stages.

Says which calls may be stages, and why others cannot be recomputed. May import the rooms up to ``pieces`` and the root
of ``profiler``. Begin with ``step_record.py`` for the data, then ``partition.py`` for the cut and the reasons.
"""
