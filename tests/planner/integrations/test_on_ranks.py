"""Frameworks' loops on two ranks of torchrun: losses as without a budget, one plan, and peaks within it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trainer", "lightning-ddp", "lightning-fsdp2"])
def test_losses_stay_and_all_ranks_have_one_plan(kind: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99", "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(
        [*torchrun, "-m", "tests.support.framework_ranks", kind],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    said = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"losses"')]
    assert len(said) == 2 and said[0]["fingerprint"] == said[1]["fingerprint"]
    assert all(each["equal"] and each["losses"] == 5 for each in said)
    assert all(0 < each["measured_peak_bytes"] <= each["budget_bytes"] for each in said)
