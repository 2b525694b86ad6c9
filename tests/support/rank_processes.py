"""Functions on several gloo ranks, a process each, for tests: those that benchmarks run them with."""

from benchmarks.rank_processes import RankResult, run_on_ranks, values_of_ranks

__all__ = ["RankResult", "run_on_ranks", "values_of_ranks"]
