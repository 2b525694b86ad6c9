"""The package's public names, and what importing the package and its records loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import profiler
from profiler.records import Profile
from profiler.workload.workload import Workload

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("module", ["profiler", "profiler.json_files", "profiler.op_graph", "profiler.records"])
def test_what_reads_profiles_loads_neither_torch_nor_pandas(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'pandas'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_are_those_of_the_rooms() -> None:
    assert all(callable(getattr(profiler, name)) for name in profiler.__all__)
    assert profiler.Workload is Workload and profiler.Profile is Profile
    assert set(profiler.__all__) <= set(dir(profiler))


def test_another_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="'profiler' has no attribute 'Plan'"):
        getattr(profiler, "Plan")  # noqa: B009 - type checkers would refuse the attribute, too
