"""Targets: every form loads, and everything that can be wrong with one is told apart."""

from __future__ import annotations

import sys

import pytest

from planner.targets import TargetError, load_target, parse_settings
from profiler.workload.workload import Workload

GOOD = """
from dataclasses import dataclass
import torch
from planner_test_neighbour import WIDTH
from profiler.workload.workload import Workload

@dataclass
class Sizes:
    width: int = WIDTH

def build(*, width: int = WIDTH, bias: bool = True):
    model = torch.nn.Linear(Sizes(width).width, 1, bias=bias)
    return Workload(model=model, inputs=torch.ones(2, width), loss=lambda y: y.sum())

def needs(width):
    return build(width=width)

def breaks():
    raise RuntimeError("no such data set")

def leaves():
    raise SystemExit(3)

def anything(**settings):
    return settings

def positional(width, /):
    return build(width=width)

number = 5
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a good target and a module beside it that it imports; the import state is put back."""
    (tmp_path / "planner_test_target.py").write_text(GOOD)
    (tmp_path / "planner_test_neighbour.py").write_text("WIDTH = 3\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if "planner_test" in name or "planner_target" in name:
            del sys.modules[name]


def width(workload: Workload) -> int:
    return next(workload.model.parameters()).shape[-1]


class TestForms:
    def test_zoo(self):
        workload = load_target("zoo:mlp", {"layers": 2, "hidden": 8, "batch": 4})
        assert isinstance(workload, Workload)
        assert width(workload) == 8

    @pytest.mark.parametrize("where", ["planner_test_target", "planner_test_target.py", "./planner_test_target.py"])
    def test_module_and_file(self, folder, where):
        assert width(load_target(f"{where}:build")) == 3
        assert width(load_target(f"{where}:build", {"width": 5, "bias": False})) == 5

    def test_a_file_anywhere(self, folder, monkeypatch):
        monkeypatch.chdir("/")
        assert width(load_target(f"{folder}/planner_test_target.py:needs", {"width": 7})) == 7


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("gpt2", {}, r"expected zoo:NAME, .*, got 'gpt2'; did you mean zoo:gpt2"),
        (":build", {}, "write both sides of the colon"),
        ("zoo:", {}, "write both sides of the colon"),
        ("", {}, "write both sides of the colon"),
        ("zoo:gpt7", {}, "expected one of gpt2, .*, got 'gpt7'; did you mean gpt2"),
        ("zoo:mlp", {"colour": 1}, "expected the settings batch=.*, got 'colour'; use one of them"),
        ("zoo:mlp", {"batch": 10**18}, "expected sizes that this machine can hold, got .*; make them smaller"),
        ("absent.py:build", {}, "there is no file 'absent.py'; check the path"),
        (".:build", {}, "end the file's name with .py"),
        ("some/file.txt:build", {}, "end the file's name with .py"),
        ("planner_test_absent:build", {}, "got ModuleNotFoundError: .*planner_test_absent.*; check its name"),
        ("planner_test_target:absent", {}, "expected a function 'absent', got nothing of that name; .*build.*needs"),
        ("planner_test_target:number", {}, "expected a function 'number', got a int; use one of those"),
        ("planner_test_target:build", {"colour": 1}, r"settings \(width: int = 3, bias: .*\), got \(colour=1\)"),
        ("planner_test_target:needs", {}, r"settings \(width\), got \(\): missing .*'width'; give those with --set"),
        ("planner_test_target:positional", {"width": 2}, r"expected the settings \(\), got \(width=2\)"),
        ("planner_test_target:breaks", {}, "got RuntimeError: no such data set from inside it; call it"),
        ("planner_test_target:leaves", {}, "got SystemExit: 3 from inside it; call it"),
        ("planner_test_target:anything", {"x": 1}, "expected a Workload, got dict; return planner.Workload"),
    ],
)
def test_what_is_wrong_is_said(folder, text, settings, message):
    with pytest.raises(TargetError, match=message) as caught:
        load_target(text, settings)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("where", ["planner_test_broken", "planner_test_broken.py"])
@pytest.mark.parametrize("source", ["1 / 0\n", "def build(:\n", "import sys\nsys.exit(4)\n", "import absent_thing\n"])
def test_a_module_that_does_not_import_is_chained_and_forgotten(folder, where, source):
    (folder / "planner_test_broken.py").write_text(source)
    with pytest.raises(TargetError, match="expected a module that imports, got .*; check its name") as caught:
        load_target(f"{where}:build")
    assert caught.value.__cause__ is not None
    assert not any("planner_test_broken" in name for name in sys.modules)


class TestSettings:
    def test_values_get_the_type_that_they_look_like(self):
        pairs = ["a=12", "b=-3", "c=0.5", "d=1e-3", "e=true", "f=False", "g=cuda:0", "h=a=b", "i=", "j=nan", "k = 4 "]
        values = [12, -3, 0.5, 0.001, True, False, "cuda:0", "a=b", "", "nan", 4]
        assert parse_settings(pairs) == dict(zip("abcdefghijk", values, strict=True))
        assert parse_settings([]) == {}

    def test_types_are_exact(self):
        assert [type(v) for v in parse_settings(["a=1", "b=1.0", "c=true", "d=1x"]).values()] == [int, float, bool, str]

    @pytest.mark.parametrize("pair", ["batch", "=8", "two words=8", "", "8=batch"])
    def test_what_is_no_pair_is_refused(self, pair):
        with pytest.raises(TargetError, match="expected key=value, got .*; write for example batch=8"):
            parse_settings([pair])

    def test_a_key_twice_is_refused(self):
        with pytest.raises(TargetError, match="got 'batch' twice; remove one"):
            parse_settings(["batch=8", "batch=9"])
