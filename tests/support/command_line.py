"""What tests of the command line share: running commands in this process, targets, and a small chain."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from planner.cli.commands import app

SMALL = ["--set", "layers=8", "hidden=32", "batch=1024"]

SOLVE_KEYS = {
    "solver", "status", "budget_bytes", "predicted_peak_bytes", "predicted_seconds", "unplanned_peak_bytes",
    "unplanned_seconds", "resident_bytes", "lower_bound_seconds", "gap", "solve_seconds", "recomputed_seconds",
    "stages",
}  # fmt: skip

TARGETS = """
import torch
from profiler.workload.workload import Workload

class Broken(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        print("about to fail")
        raise RuntimeError("these shapes clash")

def broken():
    return Workload(model=Broken(), inputs=torch.ones(2, 4))

def number():
    return 3

def talks():
    print("hello from the target")
    blocks = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(3)]
    return Workload(model=torch.nn.Sequential(*blocks), inputs=torch.ones(256, 32), loss=lambda y: y.sum())

def not_a_number():
    return Workload(model=torch.nn.Linear(4, 4), inputs=torch.full((2, 4), float("nan")), loss=lambda y: y.sum())
"""


def run(*args: str | Path):
    return CliRunner().invoke(app, [str(arg) for arg in args], prog_name="planner")


def done(*args: str | Path):
    result = run(*args)
    assert result.exit_code == 0, result.output
    return result


def refused(*args: str | Path) -> str:
    """What stderr says of wrong input; nothing on stdout, exit code 2, no traceback."""
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "error: " in result.stderr
    return result.stderr.split("error: ", 1)[1]
