"""Chain and graph problems, links and schedules as plain data, and the simulators that replay schedules.

Nothing here comes from a solver, so the simulators can check every solver. May import no other room, and no torch.
Begin with ``chain.py``, then ``chain_simulator.py``; ``graph*.py`` has the same for graphs.
"""
