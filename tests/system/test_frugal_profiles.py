"""Profiles by steps in which a few stages are kept at a time: the bytes are those of a plain profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import planner
from planner import zoo
from planner.cli.arguments import NO_PLAN
from planner.errors import ProfileError
from profiler.measurement.frugal_probe import FrugalProbe
from profiler.workload.workload import Workload
from tests.support.command_line import run
from tests.support.nightly import at_night, by_day
from tests.support.odd_models import workload
from tests.support.step_peaks import noted_peaks

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 4, "hidden": 32, "seq": 16, "vocab": 200},
    "bert": {"layers": 3, "hidden": 32, "seq": 16, "vocab": 200},
    "llama": {"layers": 3, "hidden": 32, "seq": 16, "vocab": 200},
    "t5": {"layers": 3, "hidden": 32, "seq": 16, "vocab": 200},
    "vit": {"layers": 3, "hidden": 32, "image": 16, "patch": 4},
    "resnet50": {"batch": 4, "hidden": 8, "image": 32},
    "unet": {"batch": 2, "hidden": 8, "image": 32},
    "mlp": {"layers": 6, "hidden": 16, "batch": 64},
    "mindspore_blocks": {"batch": 2, "blocks": 3, "hidden": 64, "heads": 4, "seq": 16},
}
EVERYTHING = "1TiB"  # a limit that never binds, so that all of it is about how things are measured


def without_seconds(record: Any) -> Any:
    if dataclasses.is_dataclass(record):
        fields = [f.name for f in dataclasses.fields(record) if "seconds" not in f.name]
        return {name: without_seconds(getattr(record, name)) for name in fields}
    if isinstance(record, tuple) and hasattr(record, "_fields"):
        fields = [name for name in getattr(record, "_fields", ()) if "seconds" not in name]
        return tuple(without_seconds(getattr(record, name)) for name in fields)
    return [without_seconds(item) for item in record] if isinstance(record, (tuple, list)) else record


def differences(plain: Any, frugal: Any, where: str = "") -> Iterator[str]:
    if isinstance(plain, dict):
        for name in plain:
            yield from differences(plain[name], frugal[name], f"{where}.{name}")
    elif isinstance(plain, list) and len(plain) == len(frugal):
        for number, pair in enumerate(zip(plain, frugal, strict=True)):
            yield from differences(*pair, f"{where}[{number}]")
    elif plain != frugal:
        yield f"{where}: {plain} and {frugal}"


def between(first: planner.Profile, second: planner.Profile) -> list[str]:
    """What differs besides seconds and how it was measured."""
    alike = {"frugal": False, "link": None}
    pair = (dataclasses.replace(each, **alike) for each in (first, second))
    return list(differences(*map(without_seconds, pair)))


@pytest.mark.parametrize(
    "case",
    by_day(
        [*((name, "float32") for name in SMALL), ("gpt2", "amp-bf16"), ("vit", "amp-bf16")],
        [("gpt2", "float32"), ("resnet50", "float32"), ("vit", "amp-bf16")],
    ),
)
def test_every_byte_of_a_model_of_the_zoo_is_that_of_the_plain_profile(case: tuple[str, str]) -> None:
    name, precision = case
    plain, frugal = (
        planner.profile(zoo.build(name, **SMALL[name], precision=precision), menus=False, limit=limit)
        for limit in (None, EVERYTHING)
    )
    assert (plain.frugal, frugal.frugal) == (False, True)
    assert between(plain, frugal) == []
    for share in (40, 55, 70, 85, 100):
        peaks = [peak_at(profile, share) for profile in (plain, frugal)]
        assert peaks[0] == peaks[1]


def peak_at(profile: planner.Profile, share: int) -> int:
    """Of the plan that needs the least memory, or of the smallest budget."""
    try:
        return planner.solve(profile, f"{share}%", solver="recompute_all").predicted_peak_bytes
    except planner.Infeasible as refusal:
        return refusal.minimum_budget_bytes


# What others share and hold, gradients that are added to, stages that cannot run again, state in modules.
ODD = ("batchnorm", "tuple", "shared", "skip", "eats_input", "cache", "growing_list", "remembers")
ODD += ("changed_after", "shared_activation", "tied", "notes")


@pytest.mark.parametrize("name", ODD)
def test_every_byte_of_a_model_with_odd_habits_is_that_of_the_plain_profile(name: str) -> None:
    plain, frugal = (planner.profile(workload(name), menus=False, limit=limit) for limit in (None, EVERYTHING))
    assert between(plain, frugal) == []


@pytest.fixture
def windows_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stages hand on is held around two of them only, as where there is room for no more."""

    def divided(probe: FrugalProbe, _: object) -> list[range]:
        count = len(probe.stages)
        return [range(k, min(k + 2, count)) for k in range(0, count, 2)]

    monkeypatch.setattr(FrugalProbe, "_held_anyway", lambda _: frozenset())
    monkeypatch.setattr(FrugalProbe, "_divided", divided)


@pytest.mark.usefixtures("windows_of_two")
@pytest.mark.parametrize("name", by_day(["gpt2", "bert", "llama", "vit", *ODD], ["gpt2", "shared", "skip", "tied"]))
def test_stages_run_again_for_what_they_hand_on_where_that_is_too_much_as_well(name: str) -> None:
    def made() -> Workload:
        return zoo.build(name, **SMALL[name]) if name in SMALL else workload(name)

    plain, frugal = (planner.profile(made(), menus=False, limit=limit) for limit in (None, EVERYTHING))
    assert between(plain, frugal) == []


def test_what_nodes_keep_until_the_output_goes_is_said_as_stages_that_run_again_show_none_of_it() -> None:
    plain, frugal = (
        planner.profile(workload("hidden_tensor"), menus=False, limit=limit) for limit in (None, EVERYTHING)
    )
    assert not plain.unsteady
    assert any("save_for_backward" in line for line in frugal.unsteady)


def test_programs_have_the_bytes_of_the_plain_profile() -> None:
    settings = SMALL["gpt2"]
    plain = planner.profile(zoo.build("gpt2", **settings), stages=["transformer.h.*"])
    frugal = planner.profile(zoo.build("gpt2", **settings), stages=["transformer.h.*"], limit=EVERYTHING)
    assert len(frugal.menus) == len(plain.menus) and sum(len(menu.options) for menu in plain.menus) >= 3
    for one, other in zip(plain.menus, frugal.menus, strict=True):
        # Which programs are worth having depends on seconds, and so does what they are called.
        orders = [option.runs for option in one.options]
        known, found = ([without_seconds(o) for o in menu.with_programs(orders).options] for menu in (one, other))
        assert [{**option, "name": ""} for option in found] == [{**option, "name": ""} for option in known]


def test_a_step_of_the_user_s_own_is_profiled_within_a_limit() -> None:
    def made() -> Workload:
        work = zoo.build("gpt2", **SMALL["gpt2"])
        batches = [work.inputs, work.inputs]

        def step() -> float:
            total = 0.0
            work.optimizer.zero_grad()
            for batch in batches:
                loss = work.model(**batch).loss
                loss.backward()
                total += loss.item()
            work.optimizer.step()
            return total

        return Workload(model=work.model, step=step)

    plain, frugal = (planner.profile(made(), menus=False, limit=limit) for limit in (None, EVERYTHING))
    # The micro-batch that is not measured keeps nothing either; it takes less than the measured one anyway.
    assert [text.split(":")[0] for text in between(plain, frugal)] == [".evaluation.peak_bytes"]


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The peaks of all steps under the memory meter."""
    return noted_peaks(monkeypatch)


@pytest.mark.parametrize(
    ("name", "sizes", "share"),
    [
        ("gpt2", {"layers": 8, "hidden": 32, "seq": 32, "vocab": 200}, 50),
        at_night("mlp", {"layers": 16, "hidden": 64, "batch": 1024}, 65),  # of which most is what stages hand on
    ],
)
def test_no_step_takes_more_than_the_limit(name: str, sizes: dict[str, int], share: int, peaks: list[int]) -> None:
    plain = planner.profile(zoo.build(name, **sizes), menus=False)
    peaks.clear()
    limit = plain.unplanned_peak_bytes * share // 100
    frugal = planner.profile(zoo.build(name, **sizes), menus=False, limit=limit)
    assert between(plain, frugal) == []
    assert max(peaks) <= limit


def test_too_low_a_limit_is_refused_with_what_is_short_and_what_would_help(peaks: list[int]) -> None:
    build = lambda: zoo.build("gpt2", layers=8, hidden=32, seq=32, vocab=200)  # noqa: E731
    limit = planner.profile(build(), menus=False).unplanned_peak_bytes // 8
    peaks.clear()
    with pytest.raises(ProfileError) as refused:
        planner.profile(build(), limit=limit)
    said = str(refused.value)
    needed = int(said.split("it takes ")[1].split()[0])
    assert needed == max(peaks)
    assert f"{needed - limit} more than the limit of {limit} (" in said
    assert "in the backward of stage 'transformer.h.0', in aten::" in said
    assert "SGD without momentum (" in said and "half the batch (" in said


def test_a_forward_that_goes_backward_is_refused_in_words() -> None:
    with pytest.raises(ProfileError, match="goes backward through itself"):
        planner.profile(workload("forces"), menus=False, limit=EVERYTHING)


def test_what_is_computed_says_so(tmp_path: Path) -> None:
    files = tmp_path / "profile.json", tmp_path / "plan.json"
    target = ["zoo:gpt2", "--set", "layers=4", "hidden=32", "seq=16", "vocab=200"]
    said = run("profile", *target, "--no-menus", "--limit", EVERYTHING, "-o", files[0])
    assert "computed: a few stages were kept at a time" in " ".join(said.stdout.split())
    solved = run("solve", files[0], "--budget", "80%", "-o", files[1])
    assert "of the unplanned, computed" in " ".join(solved.stdout.split())
    assert '"frugal": true' in run("solve", files[0], "--budget", "80%", "--json").stdout
    assert planner.Plan.load(files[1]).frugal
    run("pareto", files[0], "-o", tmp_path / "curve.svg", "--csv", tmp_path / "curve.csv")
    assert "none," in (table := (tmp_path / "curve.csv").read_text()) and ",computed," in table
    assert "<!-- unplanned, computed -->" in (tmp_path / "curve.svg").read_text()
    run("show", files[1], "-o", tmp_path / "timeline.svg")
    assert "the step without the plan is computed" in (tmp_path / "timeline.svg").read_text()
    assert run("profile", *target, "--limit", "much").exit_code not in (0, NO_PLAN)
