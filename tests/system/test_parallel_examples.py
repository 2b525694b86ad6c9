"""The examples of training on several ranks, run by torchrun as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["ddp.py", "fsdp2.py", "tensor_parallel.py", "pipeline_parallel.py"])
def test_an_example_trains_within_its_budget(name: str) -> None:
    source = (EXAMPLES / name).read_text(encoding="utf-8")
    assert f"torchrun --nproc-per-node 2 examples/{name}" in source
    assert len(source.splitlines()) < 60
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", f"examples/{name}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99", "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(
        command, cwd=EXAMPLES.parent, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    said = re.findall(r"budget (\d+) bytes, measured[^\d]*([\d, ]+)", ran.stdout)
    measured = [(int(budget), int(peak)) for budget, peaks in said for peak in re.findall(r"\d+", peaks)]
    assert len(measured) == 2
    assert all(0 < peak <= budget for budget, peak in measured)
