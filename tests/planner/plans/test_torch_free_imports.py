"""Files are planned from without torch: no module that this takes imports it, nor pandas or matplotlib."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NEED_TORCH = {"profiling", "pipeline_profile", "estimating"}  # they run steps
PLANS = [path.stem for path in sorted((ROOT / "planner/plans").glob("[a-z]*.py")) if path.stem not in NEED_TORCH]
OTHERS = ["profiler", "planner.units", "profiler.json_files", "profiler.op_graph", "profiler.records", "solvers"]
IMPORT_EACH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if loaded := {"torch", "pandas", "matplotlib"} & set(sys.modules):
        sys.exit(f"{name} loads {sorted(loaded)}")
"""


def test_reading_and_planning_load_no_torch():
    names = [*OTHERS, *(f"planner.plans.{name}" for name in PLANS)]
    done = subprocess.run([sys.executable, "-c", IMPORT_EACH, *names], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
