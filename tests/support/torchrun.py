"""Programs on ranks of torchrun, each on one thread."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def output_of_ranks(*arguments: str, ranks: int = 2, timeout_seconds: float = 240.0) -> str:
    """What a program's ranks print to stdout; fails where it does not end well.

    Args:
        arguments: of torchrun after its number of ranks, as ``-m``, a module and what that takes.
        ranks: their number.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99", "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_seconds, check=False
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"  # What was printed says how far it came.
    return ran.stdout
