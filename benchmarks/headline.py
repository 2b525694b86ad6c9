"""The headline: how much larger a batch fits with a plan and how fast it trains, beside published numbers."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from benchmarks import headline_full, headline_resnet, headline_scaled
from benchmarks.headline_rows import SOURCE, Row, reached, reference, table
from benchmarks.long_run import long_run
from benchmarks.reporting import RESULTS, result_name, write_result

TITLE = "Headline: batch and speed in a fixed memory"
# glibc's malloc gives large tensors back to the system when they are freed, and every new one is then zeroed page by
# page: at 40 sequences that took a third of a planned step. Kept in the process and on large pages memory costs nothing
# to get again, as with torch's caching allocator on CUDA. It holds for all ways of training alike.
TUNABLES = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776:"
    "glibc.malloc.top_pad=268435456"
)


def main() -> int:
    """Run the form that this machine can run, or the one asked for."""
    options = _options()
    full = options.full or (torch.cuda.is_available() and not options.scaled)
    if full and not torch.cuda.is_available():
        print("benchmarks.headline: no CUDA device here; the full form was not run (--scaled runs on the CPU)")
        return 0
    if full:
        found = headline_full.full(options.budget)
    else:
        _keep_freed_memory(options.system_malloc)
        found = headline_scaled.scaled(options.rounds)
    _write(options, "cuda" if full else "cpu", found.rows, [*found.notes, *([] if full else [_malloc_note()])])
    headline_resnet.write(options.out, "cuda" if full else "cpu", options.rounds)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--full", action="store_true", help="BERT-Large on a CUDA device (where there is one: default)")
    form.add_argument("--scaled", action="store_true", help="a small BERT on the CPU (otherwise: default)")
    parser.add_argument("--budget", default="32GB", help="memory of the device, full form")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of every way, in turns")
    parser.add_argument("--system-malloc", action="store_true", help="scaled form: leave glibc's malloc as it is")
    return parser.parse_args()


def _keep_freed_memory(leave: bool) -> None:
    """Start anew with malloc told to keep what is freed; it reads that when a process starts."""
    if leave or "GLIBC_TUNABLES" in os.environ:
        return
    os.execve(sys.executable, sys.orig_argv, {**os.environ, "GLIBC_TUNABLES": TUNABLES})


def _malloc_note() -> str:
    return f"malloc, in all ways alike: {os.environ.get('GLIBC_TUNABLES', 'as the system has it')}"


def _write(options: argparse.Namespace, device: str, rows: tuple[Row, ...], notes: list[str]) -> None:
    every = [*notes, *reached(rows), long_run().note, SOURCE]
    write_result(options.out, result_name("headline", device), TITLE, table([*rows, *reference()]), every)


if __name__ == "__main__":
    sys.exit(main())
