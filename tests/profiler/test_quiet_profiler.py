"""The log lines that torch's profiler writes to stderr do not show, unless somebody has asked for them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import profiler


@pytest.mark.skipif(os.environ.get("KINETO_LOG_LEVEL") != "99", reason="KINETO_LOG_LEVEL is set otherwise")
def test_metering_writes_nothing_to_stderr(capfd):
    from planner import zoo

    profiler.measure(zoo.build("mlp", layers=1, hidden=4, batch=2))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("given", "level"), [({}, "99"), ({"KINETO_LOG_LEVEL": "0"}, "0")])
@pytest.mark.parametrize("package", ["profiler", "planner"])
def test_importing_sets_the_level_where_nobody_has(package, given, level):
    environment = {key: value for key, value in os.environ.items() if key != "KINETO_LOG_LEVEL"} | given
    code = f"import os, {package}; print(os.environ['KINETO_LOG_LEVEL'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == level
