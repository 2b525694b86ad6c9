"""What ``tests.support.changed_places`` changes, on a small file."""

from __future__ import annotations

import ast

import pytest

from tests.support.changed_places import ROOT, Place, drawn, folders_of_tests, places_of

TEXT = '''
def first(a: "list[int]", b: int = 1) -> bool:
    """A text."""
    note(a)
    return not min(a) + b < 2
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


@pytest.mark.nightly
def test_drawn_places_are_the_same_for_a_seed_and_have_tests() -> None:
    places = drawn(3, seed=1)
    assert places == drawn(3, seed=1) != drawn(3, seed=2)
    assert all((ROOT / folder).is_dir() for place in places for folder in folders_of_tests(place.path))
