"""The GPU run: the tests marked ``gpu`` and the fidelity, overhead, nesting and headline tables, in one command."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


def main() -> int:
    """Run everything on the CUDA device; without one say so and succeed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the result files")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu: no CUDA device here; nothing was run")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    out = str(options.out.resolve())
    commands = [
        ["-m", "pytest", "-m", "gpu", "-q", "tests", f"--junitxml={out}/gpu-tests.xml"],
        ["-m", "benchmarks.fidelity", "--device", "cuda", "--out", out],
        ["-m", "benchmarks.overhead", "--device", "cuda", "--out", out],
        ["-m", "benchmarks.nested", "--device", "cuda", "--out", out],
        ["-m", "benchmarks.headline", "--full", "--out", out],
    ]
    failed = [command for command in commands if subprocess.run([sys.executable, *command], cwd=ROOT).returncode]
    for command in failed:
        print("failed:", " ".join(command))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
