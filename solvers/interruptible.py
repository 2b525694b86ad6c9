"""HiGHS on another thread, so that Ctrl-C is heard while it works, for PuLP's programs and our own."""

from __future__ import annotations

import highspy
import pulp

_LISTEN_SECONDS = 0.5  # a person who presses Ctrl-C does not wait longer


def run(highs: highspy.Highs) -> None:
    """Solve; after Ctrl-C HiGHS stops, keeps what it has found, and KeyboardInterrupt is raised."""
    highs.HandleUserInterrupt = True
    highs.startSolve()
    try:
        while not highs.wait(_LISTEN_SECONDS)[0]:
            pass
    except KeyboardInterrupt:
        highs.cancelSolve()
        highs.wait()
        raise


class InterruptibleHiGHS(pulp.HiGHS):
    """PuLP's HiGHS; Ctrl-C ends it like its time limit does, so that the best solution until then is read."""

    def callSolver(self, lp: pulp.LpProblem) -> None:
        """Solve the program that PuLP has built."""
        try:
            run(lp.solverModel)  # type: ignore[attr-defined]  # set by PuLP
        except KeyboardInterrupt:
            return
