"""The built package: installed beside what it requires, and nothing else, it plans and trains a model of one's own.

``make release-check`` runs it. Nothing is downloaded: what the wheel says it requires is linked from this environment,
so a requirement that is missing there, or the zoo's transformers, is missing in the new one, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import planner
from docs.hooks.dependencies_page import in_turn

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.release

MODEL = """
import torch
import planner

def step(width=64):
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(8)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    return planner.Workload(model=model, inputs=torch.randn(512, width), loss=lambda y: y.square().mean(),
                            optimizer=optimizer)
"""


def run(*command, cwd, code=0):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(each) for each in command], cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == code, f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist of the last commit, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
    source = folder / "source"
    run("git", "clone", "--quiet", "--no-hardlinks", ROOT, source, cwd=folder)
    run(sys.executable, "-c", build, "build_sdist", folder, cwd=source)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    run(sys.executable, "-c", build, "build_wheel", folder, cwd=unpacked)
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def metadata_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The folder of programs of an environment with the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("alone") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    texts = metadata_of(built[1]).get_all("Requires-Dist") or []
    required = [each for each in map(Requirement, texts) if each.marker is None or each.marker.evaluate({"extra": ""})]
    for each in [*required, *(each for each, _ in in_turn(required))]:
        link(each.name, packages)
    run(sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-deps",
        "--no-index", built[1], cwd=folder)  # fmt: skip
    return folder / "bin"


def link(name, packages):
    """Make what a distribution installed into site-packages appear there as well."""
    found = distribution(name)
    for top in {path.parts[0] for path in found.files or () if path.parts[0] not in ("..", "__pycache__")}:
        target = packages / top
        if not target.exists():
            target.symlink_to(Path(str(found.locate_file(top))).resolve())


def test_the_wheel_holds_the_packages_alone_and_says_what_it_is(built):
    sdist, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    version = planner.__version__
    assert tops == {"planner", "profiler", "solvers", f"sublinear_planner-{version}.dist-info"}
    assert sdist.name == f"sublinear_planner-{version}.tar.gz"
    metadata = metadata_of(wheel)
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    assert "Programming Language :: Python :: 3.11" in (metadata.get_all("Classifier") or [])
    assert "# " in metadata.get_payload()


def test_it_profiles_solves_and_trains_alone(installed, tmp_path):
    command = installed / "planner"
    assert run(command, "--version", cwd=tmp_path) == f"planner {planner.__version__}\n"
    run(installed / "python", "-c", "import transformers", cwd=tmp_path, code=1)
    (tmp_path / "own.py").write_text(MODEL)
    run(command, "profile", "own.py:step", "-o", "profile.json", cwd=tmp_path)
    run(command, "solve", "profile.json", "--budget", "80%", "-o", "plan.json", cwd=tmp_path)
    run(command, "train", "own.py:step", "--plan", "plan.json", "--steps", "2", cwd=tmp_path)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert planner.Plan.load(tmp_path / "plan.json").predicted_peak_bytes <= plan["budget_bytes"]


def test_models_of_transformers_are_refused_in_words_and_others_are_there(installed, tmp_path):
    command = installed / "planner"
    said = run(command, "profile", "zoo:gpt2", "-o", "profile.json", cwd=tmp_path, code=2)
    assert "needs the package transformers, which is not installed" in said
    assert "pip install transformers" in said and "Traceback" not in said
    run(command, "profile", "zoo:mlp", "--set", "layers=2", "hidden=16", "batch=8", "-o", "mlp.json", cwd=tmp_path)
