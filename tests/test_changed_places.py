"""What ``tests.support.changed_places`` changes, on a small file."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from tests.support import reached_places
from tests.support.changed_places import ROOT, Place, drawn, folders_of_tests, places_of, with_notes

TEXT = '''
def first(a: "list[int]", b: int = 1) -> bool:
    """A text."""
    note(a)
    return not min(a) + b < 2


def second(a: int) -> str:
    return f"{a + 3}"
'''


def test_every_kind_of_change() -> None:
    changes = {(p.before, p.after) for p in places_of("a.py", TEXT)}
    assert changes == {
        ("1", "2"),
        ("2", "3"),
        ("note(a)", "pass"),
        ("not min(a) + b < 2", "(min(a) + b < 2)"),
        ("min(a) + b < 2", "(min(a) + b <= 2)"),
        ("min(a) + b", "(min(a) - b)"),
        ("min", "max"),
    }


def test_each_change_is_a_program_of_its_own() -> None:
    texts = [place.changed(TEXT) for place in places_of("a.py", TEXT)]
    assert len({ast.dump(ast.parse(text)) for text in [TEXT, *texts]}) == len(texts) + 1


def test_a_place_that_is_gone_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not stand there"):
        Place("a.py", 2, 0, "1", "2").changed(TEXT)


def test_calls_that_note_a_place_leave_what_is_computed_and_name_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "reached.tsv"
    monkeypatch.setenv(reached_places.FILE, str(file))
    places = dict(enumerate(places_of("a.py", TEXT)))
    names: dict[str, Any] = {"note": print}
    exec(with_notes(TEXT, places), names)
    assert names["first"]([0]) is False
    noted = [line.partition("\t") for line in file.read_text().splitlines()]
    test = "test_calls_that_note_a_place_leave_what_is_computed_and_name_the_test"
    assert {int(number) for number, _, _ in noted} == set(places)
    default = next(number for number, place in places.items() if place.before == "1")
    assert all(name.endswith(test) if int(number) != default else name == "" for number, _, name in noted)


@pytest.mark.nightly
def test_drawn_places_are_the_same_for_a_seed_and_have_tests() -> None:
    places = drawn(3, seed=1)
    assert places == drawn(3, seed=1) != drawn(3, seed=2)
    assert all((ROOT / folder).is_dir() for place in places for folder in folders_of_tests(place.path))
