"""The headline: how much larger a batch fits with a plan and how fast it trains, beside published numbers."""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import sys
from pathlib import Path

import torch

from benchmarks import headline_full, headline_resnet, headline_scaled
from benchmarks.headline_rows import SOURCE, Row, reached, reference, table
from benchmarks.long_run import long_run
from benchmarks.reporting import RESULTS, result_name, write_result
from planner.training.allocator_advice import KEEPING, SEGMENTS
from planner.units import format_bytes

TITLE = "Headline: batch and speed in a fixed memory"


def main() -> int:
    """Run the form that this machine can run, or the one asked for."""
    options = _options()
    full = options.full or (torch.cuda.is_available() and not options.scaled)
    if full and not torch.cuda.is_available():
        print("benchmarks.headline: no CUDA device here; the full form was not run (--scaled runs on the CPU)")
        return 0
    # As planner train advises. On CUDA the cap is on what the allocator holds, so what it wastes counts; on the CPU
    # memory that had to be got again took a third of a planned step at 40 sequences.
    name, wanted = SEGMENTS if full else KEEPING
    if not options.system_allocator and (full or _is_installed(wanted)):
        _restart_with(name, wanted)
    found = headline_full.full(options.budget) if full else headline_scaled.scaled(options.rounds)
    device = "cuda" if full else "cpu"
    allocator = f"allocator, of all ways alike: {os.environ.get(name, 'as it is')}"
    _write(options, device, found.rows, [*found.notes, allocator, *_held_by_process(device)])
    headline_resnet.write(options.out, device, options.rounds)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--full", action="store_true", help="BERT-Large on a CUDA device (where there is one: default)")
    form.add_argument("--scaled", action="store_true", help="a small BERT on the CPU (otherwise: default)")
    parser.add_argument("--budget", default="32GB", help="memory of the device, full form")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of every way, in turns")
    parser.add_argument("--system-allocator", action="store_true", help="leave the allocator's settings as they are")
    return parser.parse_args()


def _is_installed(library: str) -> bool:
    """Whether the loader finds it: it goes on without what it does not find."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _held_by_process(device: str) -> list[str]:
    """The most memory that this process had, tensors and all else; on a GPU it says nothing of the device."""
    if device != "cpu" or sys.platform != "linux":
        return []
    held_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return [
        f"the whole process held at most {format_bytes(held_bytes)}, with the models of all batches beside each other"
    ]


def _restart_with(name: str, value: str) -> None:
    """Start anew with a setting that allocators read when a process starts; one that is there already stays."""
    if name not in os.environ:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, name: value})


def _write(options: argparse.Namespace, device: str, rows: tuple[Row, ...], notes: list[str]) -> None:
    every = [*notes, *reached(rows), long_run().note, SOURCE]
    write_result(options.out, result_name("headline", device), TITLE, table([*rows, *reference()]), every)


if __name__ == "__main__":
    sys.exit(main())
