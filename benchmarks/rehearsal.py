"""Runs a benchmark with tiny models of the zoo, to see that it works: ``python -m benchmarks.rehearsal MODULE ...``."""

from __future__ import annotations

import inspect
import runpy
import sys
from typing import Any

from planner import Workload, zoo

_MOST = {"layers": 2, "hidden": 32, "heads": 2, "seq": 32, "vocab": 64, "batch": 2, "image": 32, "patch": 16}
_build = zoo.build


def tiny(name: str, **settings: Any) -> Workload:
    """The training step of a model with what was asked for, but for its sizes."""
    takes = inspect.signature(zoo._BUILDERS[name]).parameters
    sizes = {key: min(most, settings.get(key, most)) for key, most in _MOST.items() if key in takes}
    return _build(name, **{**settings, **sizes})


def main() -> None:
    """Run the module with its arguments."""
    zoo.build = tiny
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
