"""Results stay of today's code where what changed was read, and for exactly that change."""

from __future__ import annotations

import json

import pytest

from benchmarks import all as every_benchmark
from benchmarks.evidence import states
from benchmarks.evidence.benchmark_list import BENCHMARKS
from benchmarks.evidence.reviews import REVIEWS, add_review, is_reviewed, reviews
from benchmarks.evidence.states import OLDER, REVIEWED, state_of


def test_reviews_lead_from_todays_code_back_to_the_measured_one(tmp_path):
    file = tmp_path / "reviews.json"
    assert reviews(file) == [] and not is_reviewed("a", "b", file)
    add_review("1234567", "a message", {"b": "a"}, file)
    add_review("89abcde", "another message", {"c": "b"}, file)
    assert is_reviewed("a", "b", file) and is_reviewed("b", "c", file) and is_reviewed("a", "c", file)
    assert not is_reviewed("c", "b", file) and not is_reviewed("a", "d", file) and not is_reviewed("a", "a", file)
    assert [review["why"] for review in reviews(file)] == ["a message", "another message"]


def test_code_that_comes_back_ends_the_search(tmp_path):
    file = tmp_path / "reviews.json"
    add_review("1234567", "there", {"b": "a"}, file)
    add_review("89abcde", "and back", {"a": "b"}, file)
    assert is_reviewed("a", "b", file) and not is_reviewed("c", "b", file)


def test_a_result_says_that_changes_were_read(tmp_path, monkeypatch):
    benchmark = BENCHMARKS["overhead"]
    (tmp_path / "overhead.md").write_text("# T\n\n- date: 2026-01-02\n- code: aaaaaaaaaaaa\n", encoding="utf-8")
    (tmp_path / "overhead.csv").write_text("model\ngpt2\n", encoding="utf-8")
    monkeypatch.setattr(states, "code_today", lambda module: "bbbbbbbbbbbb")
    assert state_of(benchmark, benchmark.tables[0], tmp_path) == OLDER
    monkeypatch.setattr(states, "is_reviewed", lambda measured, today: (measured, today) == ("a" * 12, "b" * 12))
    assert state_of(benchmark, benchmark.tables[0], tmp_path) == REVIEWED


def test_a_review_has_all_benchmarks_but_those_that_the_change_alters(monkeypatch):
    added = []
    monkeypatch.setattr(states, "code_today", lambda module: f"now {module}")
    monkeypatch.setattr(states, "_fingerprint_at", lambda commit, module: f"{commit} {module}")
    monkeypatch.setattr(states, "_git", lambda *arguments: arguments[-1])
    monkeypatch.setattr(states, "add_review", lambda *given: added.append(given))
    assert (
        every_benchmark.main(["--review", "1234567", "--why", "a message", "--but", "overhead", "estimates-peaks"]) == 0
    )
    ((commit, why, pairs),) = added
    assert (commit, why) == ("1234567", "a message")
    assert pairs["now benchmarks.fidelity"] == "1234567 benchmarks.fidelity"
    assert "now benchmarks.overhead" not in pairs
    assert "now benchmarks.estimates" not in pairs  # though other benchmarks of that module are not named


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--review", "HEAD"], "--why: expected a sentence with --review"),
        (["--list", "--why", "x"], "--why: expected a sentence with --review"),
        (["--review", "HEAD", "--why", "x", "--but", "gone"], "--but: expected names of --list, got gone"),
    ],
)
def test_a_review_needs_its_reason(capsys, given, said):
    with pytest.raises(SystemExit):
        every_benchmark.main(given)
    assert said in capsys.readouterr().err


def test_every_review_says_why():
    text = json.loads(REVIEWS.read_text(encoding="utf-8")) if REVIEWS.exists() else []
    assert all(review["before"] and review["why"] and review["before_by_after"] for review in text)
