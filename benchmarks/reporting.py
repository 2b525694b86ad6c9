"""Result files: a table with the command, hardware, versions and date that produced it."""

from __future__ import annotations

import datetime
import functools
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import pandas as pd
import psutil
import pulp
import torch

from benchmarks.evidence.fingerprints import fingerprint
from profiler.json_files import write_whole

RESULTS = Path(__file__).parent / "results"
MIB = 2**20  # bytes; tables have them in MiB


def machine() -> str:
    """One line on the hardware."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    line = f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB memory"
    if torch.cuda.is_available():
        line += f", {torch.cuda.get_device_name()}"
    return line


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def versions() -> str:
    """One line on the software."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "pulp": pulp.__version__,
    }
    return ", ".join(f"{name} {version}" for name, version in found.items())


def result_name(base: str, device: str) -> str:
    """The file's name: results of another device than the CPU carry its name."""
    return base if device == "cpu" else f"{base}-{device.replace(':', '-')}"


UNFINISHED = "not all rows: the command had not come to its end"


def write_result(folder: Path, name: str, title: str, frame: pd.DataFrame, notes: list[str]) -> None:
    """Write ``name.csv`` and ``name.md`` and print the latter."""
    print(_written(folder, name, title, frame, notes))


def write_rows(
    folder: Path,
    name: str,
    title: str,
    rows: Iterable[dict[str, Any]],
    notes: Callable[[list[dict[str, Any]]], list[str]],
    columns: list[str] | None = None,
) -> None:
    """The same of rows as they come: after each the files are written anew, so that what ends the command loses none.

    Args:
        folder, name, title: as for ``write_result``.
        rows: made one by one.
        notes: on the rows that there are.
        columns: of the table, where not all rows have them.
    """
    found: list[dict[str, Any]] = []
    for row in rows:
        print(row, file=sys.stderr, flush=True)
        found.append(row)
        _written(folder, name, title, pd.DataFrame(found, columns=columns), [UNFINISHED, *notes(found)])
    write_result(folder, name, title, pd.DataFrame(found, columns=columns), notes(found))


def _written(folder: Path, name: str, title: str, frame: pd.DataFrame, notes: list[str]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    command = "python -m " + shlex.join([_module(), *_settings(sys.argv[1:])])
    head = [
        f"# {title}",
        "",
        f"- command: `{command}`",
        f"- hardware: {machine()}; torch threads: {torch.get_num_threads()}",
        f"- versions: {versions()}",
        f"- date: {datetime.date.today().isoformat()}; this command had taken {time.time() - _started():.0f} s",
        *_code(),
        *[f"- {note}" for note in notes],
        "",
    ]
    text = "\n".join([*head, _markdown(frame), ""])
    write_whole(folder / f"{name}.csv", frame.to_csv(index=False))
    write_whole(folder / f"{name}.md", text)
    return text


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).name


def _settings(arguments: list[str]) -> list[str]:
    """The arguments without the folder of the files: it changes nothing in them.

    >>> _settings(["--rounds", "9", "--out", "build"])
    ['--rounds', '9']
    """
    places = {k for k, each in enumerate(arguments) if "--out" in (each, arguments[max(k - 1, 0)])}
    return [each for k, each in enumerate(arguments) if k not in places and not each.startswith("--out=")]


def _started() -> float:
    return psutil.Process().create_time()


@functools.cache
def _code() -> list[str]:
    """What the code is that was measured; nothing where the table is not a benchmark's."""
    module = _module()
    return [f"- code: {fingerprint(module)}"] if module.startswith("benchmarks.") else []


def _markdown(frame: pd.DataFrame) -> str:
    rows = [[_cell(value) for value in row] for row in frame.itertuples(index=False)]
    lines = ["| " + " | ".join(frame.columns) + " |", "|" + "---|" * len(frame.columns)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
