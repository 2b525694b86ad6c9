"""Benchmarks at tiny sizes, one after the other in this process: to see that they work, not to measure."""

from __future__ import annotations

import importlib
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.evidence.listing import Benchmark
from planner import zoo
from profiler.measurement import calibration

_MOST = {"layers": 2, "hidden": 32, "heads": 2, "seq": 32, "vocab": 64, "batch": 2, "image": 32, "patch": 16}
_CALIBRATION = {"_SECONDS": 1e-3, "_WARM_BYTES": 2**20, "_COLD_BYTES": 2**20, "_STEPS": 1}


@contextmanager
def tiny_models() -> Iterator[None]:
    """Inside, models of the zoo have no larger sizes than a few, and calibrating an op takes a millisecond."""
    checked = zoo.checked_settings

    def tiny(name: str, builder: Any, settings: Any) -> dict[str, Any]:
        found = checked(name, builder, settings)
        return {key: min(value, _MOST[key]) if key in _MOST else value for key, value in found.items()}

    with patch.object(zoo, "checked_settings", tiny), patch.multiple(calibration, **_CALIBRATION):
        yield


def rehearse(parts: Iterable[Benchmark], folder: Path, say: Callable[[str], None] = print) -> list[str]:
    """Runs the quick form of each part; returns the names of those that failed, or wrote no table."""
    failed = []
    for part in parts:
        begin, written = time.perf_counter(), folder / part.name
        arguments = [*shlex.split(part.quick or ""), "--out", str(written)]
        written.mkdir(parents=True, exist_ok=True)
        try:
            with tiny_models(), patch.object(sys, "argv", [part.module, *arguments]):
                importlib.import_module(part.module).main()
            why = "" if any(written.glob("*.csv")) else "it wrote no table"
        except (Exception, SystemExit) as error:  # noqa: BLE001  (the other parts are tried all the same)
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}"
        if why:
            failed.append(part.name)
        say(f"{part.name}: {time.perf_counter() - begin:.0f} s{f'; failed: {why}' if why else ''}")
    return failed
