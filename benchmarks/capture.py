"""Graph problem files: training steps of real models, captured op by op, and seeded random ones."""

from __future__ import annotations

import argparse
import datetime
import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.capture_models import SUBJECTS, Subject
from benchmarks.op_graph import capture
from benchmarks.random_graphs import random_training_graph
from benchmarks.reporting import machine
from profiler.json_files import write_whole
from solvers.graph.orders import IndexedGraph, peak_profile
from solvers.problem.graph import Graph

PROBLEMS = Path(__file__).parent / "problems"
RANDOM = {"random-100-seed1": (100, 1), "random-150-seed2": (150, 2), "random-400-seed3": (400, 3)}
RANDOM |= {"random-2000-seed4": (2000, 4)}
GIB = 2**30

HEAD = """# Graph problems

Training steps as graph problem files (`planner-graph`, version 1), for solvers to be compared on. This table and the
files are written by `python -m benchmarks.capture [NAME ...]`; without names it makes all of them.

A captured step is the joint forward and backward pass as torch traces it, one node per aten op. Bytes are exact at the
batch stated: every storage once, views none, workspaces inside ops none. Parameters, buffers and batch are resident.
Outputs are the loss and the gradients. Seconds are the median of 5 runs per op on one thread, each op by itself, at the
batch in brackets, scaled with the batch; in rows of 2026-11-21 those of 3 runs of the whole step, in processor time,
and the loss's gradient is a node of its own there. An op of which one part is needed longer than the rest is split
into two nodes where both exceed 64 KiB, the second (`..._end`: a gradient; `..._saved`: read by backward) without
work; else a small part that outlives a large one, such as the statistics of a BatchNorm, is counted as resident.

Peak: most bytes alive when every node runs once. Largest op: the most that one node needs with its inputs and output
and what is resident; no budget below it is feasible. Both in GiB.

| file | step | batch (timed) | nodes | edges | peak | largest op | resident | seconds | made |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A problem, its file's name, and the columns of the table that the graph does not tell."""

    file: str
    graph: Graph
    step: str
    batch: str
    made: str

    def row(self) -> str:
        """The line of the table."""
        indexed = IndexedGraph(self.graph)
        sizes = (peak_profile(indexed, range(indexed.count)).max(), indexed.working_bytes.max())
        columns = [
            f"`{self.file}`",
            self.step,
            self.batch,
            indexed.count,
            sum(map(len, indexed.inputs)),
            *[f"{size / GIB:.3f}" for size in (*sizes, self.graph.resident_bytes)],
            f"{self.graph.unplanned_seconds:.3g}",
            self.made,
        ]
        return f"| {' | '.join(map(str, columns))} |"


def captured(name: str, subject: Subject) -> Entry:
    """Capture a model's training step; weights and batch come from a fixed seed."""
    torch.manual_seed(0)
    graph = capture(subject.model, subject.batch, size=subject.size, timed_size=subject.timed_size)
    made = f"{datetime.date.today().isoformat()}, torch {torch.__version__}, {machine()}"
    batch = f"{subject.size} ({subject.timed_size})"
    return Entry(f"{name}-{len(graph.nodes)}.json", graph, subject.title, batch, made)


def drawn(name: str) -> Entry:
    """Make a random training step."""
    count, seed = RANDOM[name]
    graph = random_training_graph(count, seed)
    return Entry(f"{name}.json", graph, f"random training step, seed {seed}", "", "the same on every machine")


def compact(graph: Graph) -> str:
    """A problem file with one node per line."""
    document = graph.to_dict()
    lines = ",\n".join(json.dumps(node, separators=(",", ":"), allow_nan=False) for node in document.pop("nodes"))
    outputs = json.dumps(document.pop("outputs"), separators=(",", ":"))
    head = json.dumps(document, separators=(",", ":")).removesuffix("}")
    return f'{head},"nodes":[\n{lines}\n],\n"outputs":{outputs}}}\n'


def table(readme: str) -> dict[str, str]:
    """Rows of the table by file name."""
    return {match[1]: match[0] for match in re.finditer(r"^\| `([^`]+)` .*$", readme, re.MULTILINE)}


def save(folder: Path, name: str, entry: Entry) -> None:
    """Write a problem and its row, in place of an earlier capture of the same name; the other rows stay."""
    readme = folder / "README.md"
    rows = table(readme.read_text()) if readme.exists() else {}
    for file in [file for file in rows if name_of(file) == name]:
        del rows[file]
        (folder / file).unlink(missing_ok=True)
    write_whole(folder / entry.file, compact(entry.graph))
    rows[entry.file] = entry.row()
    listed = sorted(rows, key=lambda file: [*SUBJECTS, *RANDOM].index(name_of(file)))
    write_whole(readme, HEAD + "\n".join(rows[file] for file in listed) + "\n")


def name_of(file: str) -> str:
    """The name that a problem's file was captured under.

    >>> name_of("gpt48-2610.json"), name_of("random-100-seed1.json")
    ('gpt48', 'random-100-seed1')
    """
    stem = file.removesuffix(".json")
    return stem if stem in RANDOM else stem.rpartition("-")[0]


def main() -> None:
    """Capture, write and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join([*SUBJECTS, *RANDOM])}")
    parser.add_argument("--out", type=Path, default=PROBLEMS)
    options = parser.parse_args()
    unknown = sorted(set(options.names) - {*SUBJECTS, *RANDOM})
    if unknown:
        parser.error(f"expected names of {', '.join([*SUBJECTS, *RANDOM])}, got {', '.join(unknown)}; use those")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or [*SUBJECTS, *RANDOM]:
        entry = captured(name, SUBJECTS[name]) if name in SUBJECTS else drawn(name)
        save(options.out, name, entry)
        print(entry.row())


if __name__ == "__main__":
    main()
