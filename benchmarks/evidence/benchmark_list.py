"""All benchmarks, by topic, in the order of docs/results.md."""

from __future__ import annotations

from benchmarks.evidence.capacity_benchmarks import ADVICE, ESTIMATES, LARGEST_BATCH, RANKS, SHAPES
from benchmarks.evidence.listing import Benchmark
from benchmarks.evidence.solver_benchmarks import PEERS, SOLVERS
from benchmarks.evidence.training_benchmarks import HEADLINE, OFFLOAD, PREDICTED

TOPICS = (PREDICTED, HEADLINE, PEERS, OFFLOAD, RANKS, LARGEST_BATCH, ADVICE, ESTIMATES, SHAPES, SOLVERS)
BENCHMARKS: dict[str, Benchmark] = {each.name: each for topic in TOPICS for each in topic.benchmarks}
