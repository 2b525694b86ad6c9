"""Reports: a plan explained in one HTML file to somebody who has not run it.

Holds the sections of the page, its charts, its template and script, and memory snapshots. May import the rooms up to
``training``, ``profiler`` and ``solvers``. Begin with ``write_report`` in ``page.py``, then ``plan_report.py``.
"""
