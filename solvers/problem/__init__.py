"""Chain and graph problems, links and schedules as plain data, and the simulators that replay schedules.

Nothing here comes from a solver, so the simulators can check every solver. May import no other room, and no torch.
Begin with ``chain.py`` and ``graph.py``, then ``schedule.py`` and ``simulator.py``, which serve both.
"""
