"""Advice: combinations do what was predicted, say what they change, and what cannot be says why."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from matplotlib.text import Text
from torch import nn

import planner.capacity.workload_variants
from benchmarks.advise import measured
from benchmarks.estimates import A_CPU
from planner import zoo
from planner.capacity.advice import SearchOutcome, StepVariant, _notes, enough, least_states_bytes, too_slow
from planner.capacity.advice_report import advice_figure, document_of, draw_advice, foremost, report_of, shortened
from planner.capacity.levers import Combination, lever_options, rank, result_of_micro_batches, worst
from planner.capacity.workload_variants import MicroBatchLoss, WorkloadVariants
from planner.cli.output import Output
from planner.plans.offload_request import Offload
from planner.plans.solving import quick_plan
from profiler.workload.steps import ProfileError
from profiler.workload.workload import Workload, varied
from tests.support.command_line import done, refused, run

WIDTH = 64


def build(batch=64, layers=4, norm=False, optimizer="adamw"):
    def block():
        middle = [nn.BatchNorm1d(WIDTH)] if norm else []
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *middle, nn.GELU(), nn.Linear(WIDTH, WIDTH))

    torch.manual_seed(0)
    model = nn.Sequential(*[block() for _ in range(layers)])
    own = torch.optim.AdamW(model.parameters()) if optimizer == "adamw" else None
    inputs = torch.randn(batch, WIDTH)
    return planner.Workload(model=model, inputs=inputs, loss=lambda y: y.square().mean(), optimizer=own)


def variants(**settings):
    return WorkloadVariants(build, settings, "batch", None, True, None)


@pytest.fixture(scope="module")
def tight():
    """Activations are most of it, and half of the unplanned peak is to do; over an artificial link."""
    return planner.advise(build, "55%", settings={"batch": 512}, offload=Offload(link_gbps=1), menus=False)


@pytest.mark.slow
@pytest.mark.nightly
def test_every_prediction_is_what_a_real_step_takes(tight):
    own = variants(batch=512)
    kinds = set()
    for each in tight.combinations:
        if each.seconds is None or each.kinds in kinds:
            continue
        kinds.add(each.kinds)
        real = measured(own, each)
        assert real.peak_bytes == each.peak_bytes, each.title
        assert real.first_peak_bytes <= max(each.peak_bytes, tight.budget_bytes)
    assert ("recompute",) in kinds and ("micro-batches",) in kinds and len(kinds) > 6


@pytest.mark.slow
def test_the_advised_ones_fit_and_are_the_fastest_that_do(tight):
    assert tight.fits and not tight.unplanned.fits
    fitting = [each for each in tight.combinations if each.fits]
    assert tight.cheapest.seconds == min(each.seconds for each in fitting)
    assert tight.exact.seconds == min(each.seconds for each in fitting if each.result != "other")
    assert list(tight.combinations) == sorted(tight.combinations, key=rank)


@pytest.mark.slow
def test_results_are_as_bad_as_the_worst_lever(tight):
    for each in tight.combinations:
        if each.precision or each.optimizer:
            assert each.result == "other"
        else:
            rounded = each.micro_batches > 1 or "in pieces" in each.kinds
            assert each.result == ("rounding" if rounded else "same")


@pytest.mark.slow
def test_a_large_head_is_advised_to_run_in_pieces():
    words = torch.randint(0, 2000, (2, 128))
    model = nn.Sequential(nn.Embedding(2000, 16), nn.Linear(16, 2000))
    work = Workload(
        model=model, inputs=words, loss=lambda y: nn.functional.cross_entropy(y.flatten(0, 1), words[0, 0].expand(256))
    )
    found = planner.advise(work, "60%", menus=False)
    pieces = next(each for each in found.combinations if each.kinds == ("in pieces",))
    assert found.exact is pieces and pieces.fits and pieces.result == "rounding"
    assert pieces.plan is not None and pieces.plan.pieces is not None and pieces.plan.pieces.head == "1"
    lever = next(lever for lever in found.levers if lever.kind == "in pieces")
    assert lever.applies and "numerics='rounding'" in lever.change
    with planner.apply(model, pieces.plan):
        assert planner.measure(work, repeats=1).peak_bytes == pieces.peak_bytes


def test_gradients_of_micro_batches_add_up_to_those_of_the_batch():
    inputs = torch.randn(64, WIDTH)
    whole, summed = build(), build()
    assert whole.loss is not None
    whole.loss(whole.model(inputs)).backward()
    loss = MicroBatchLoss(summed.loss, 4)
    for part in inputs.chunk(4):
        loss(summed.model(part)).backward()
    for a, b in zip(whole.model.parameters(), summed.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.slow
def test_states_alone_above_the_budget():
    states = 16 * sum(p.numel() for p in build().model.parameters())
    advice = planner.advise(build, int(0.8 * states), settings={"batch": 8}, menus=False)
    assert advice.states_short_bytes == advice.states_bytes - advice.budget_bytes > 0
    assert abs(advice.states_bytes - states) <= 4 * len(list(build().model.parameters()))  # the numbers of steps
    assert advice.exact is None and advice.cheapest is not None and advice.cheapest.optimizer
    assert f"above the budget: what fits is {advice.cheapest.title}" in advice.notes[0]
    assert document_of(advice)["states_short_bytes"] == advice.states_short_bytes


@pytest.mark.slow
def test_nothing_fits():
    advice = planner.advise(build, 1000, settings={"batch": 8}, menus=False)
    assert not advice.fits and advice.exact is None and advice.cheapest is None
    assert advice.nearest.peak_bytes == min(each.peak_bytes for each in advice.combinations)
    assert advice.nearest.seconds is not None
    assert "no lever brings the step down" in advice.notes[0]
    Output().show(report_of(advice))


def test_what_fits_is_left_alone(monkeypatch):
    """A step of any size takes a second here: measured ones are noise where they are this small."""
    measure = planner.capacity.workload_variants.profile

    def timed(work, **settings):
        found = measure(work, **settings)
        return replace(found, unplanned_seconds=1.0, optimizer=replace(found.optimizer, seconds=0.0))

    monkeypatch.setattr(planner.capacity.workload_variants, "profile", timed)
    advice = planner.advise(build, "200%", settings={"batch": 8}, menus=False)
    assert {each.seconds for each in advice.combinations if each.keeps_result} == {1.0, 2.0}
    assert advice.exact is not None and not advice.exact.kinds and advice.exact.plan is None


@pytest.mark.slow
def test_a_step_that_the_device_has_no_room_for(tight, monkeypatch):
    """What it would take follows from smaller batches, and equals what it takes where there is room."""
    measure = planner.capacity.workload_variants.profile

    def short(work, **settings):
        if work.inputs.shape[0] > 256:
            raise ProfileError("no room") from MemoryError()
        return measure(work, **settings)

    monkeypatch.setattr(planner.capacity.workload_variants, "profile", short)
    found = planner.advise(build, tight.budget_bytes, settings={"batch": 512}, menus=False)
    assert found.unplanned.peak_bytes == tight.unplanned.peak_bytes
    assert found.unplanned.peak_basis == "computed" and tight.unplanned.peak_basis == "measured"
    assert found.states_bytes == tight.states_bytes and found.exact is not None
    assert any("no room for the step as it is" in note for note in found.notes)
    monkeypatch.setattr(planner.capacity.workload_variants, "profile", lambda work, **_: fail())
    with pytest.raises(ProfileError, match="no room"):
        planner.advise(build, "60%", settings={"batch": 512}, menus=False)


def fail():
    raise ProfileError("no room") from MemoryError()


@pytest.mark.slow
def test_batch_norm_sees_micro_batches():
    advice = planner.advise(build, "60%", settings={"batch": 64, "norm": True}, menus=False)
    assert {each.result for each in advice.combinations if each.micro_batches > 1} == {"other"}
    assert any("BatchNorm" in note for note in advice.notes)


class Counting(nn.Module):
    """Changes a buffer by the batch that it sees."""

    mean: torch.Tensor

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.mean.add_(x.detach().mean(0))
        return self.linear(x)


@pytest.mark.parametrize(
    ("module", "result"),
    [
        (nn.BatchNorm1d(WIDTH), "other"),
        (nn.BatchNorm1d(WIDTH).eval(), "rounding"),
        (nn.BatchNorm1d(WIDTH, track_running_stats=False), "other"),
        (nn.BatchNorm1d(WIDTH, track_running_stats=False).eval(), "other"),  # always the batch's own statistics
        (nn.LayerNorm(WIDTH), "rounding"),
        (Counting(), "other"),
    ],
)
def test_what_looks_at_the_whole_batch_or_changes_buffers_by_it_changes_results(module, result):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), module, nn.Linear(WIDTH, WIDTH))
    work = planner.Workload(model=model, inputs=torch.randn(8, WIDTH), loss=lambda y: y.square().mean())
    assert result_of_micro_batches(model, planner.profile(work, menus=False)) == result


@pytest.mark.slow
def test_the_advised_plan_is_found_by_all_methods(monkeypatch):
    """All methods together find a plan of no seconds here; a step takes one, as those measured may be noise."""
    measure = planner.capacity.workload_variants.profile

    def timed(work, **settings):
        found = measure(work, **settings)
        return replace(found, unplanned_seconds=1.0, optimizer=replace(found.optimizer, seconds=0.0))

    def ideal(profile, budget_bytes, **settings):
        return replace(quick_plan(profile, budget_bytes, Offload(mode="never")), predicted_seconds=0.0)

    monkeypatch.setattr(planner.capacity.workload_variants, "profile", timed)
    monkeypatch.setattr("planner.capacity.advice.find_plan", ideal)
    advice = planner.advise(build(batch=512), "55%", offload="never", menus=False)
    assert advice.exact is not None and advice.exact.plan is not None
    assert advice.exact.plan.predicted_seconds == 0.0


def reasons(advice):
    return {lever.name: lever.reason for lever in advice.levers if not lever.applies}


@pytest.mark.slow
def test_levers_that_do_not_apply_say_why():
    work = build(optimizer="none")
    work.autocast = torch.bfloat16
    found = reasons(planner.advise(work, "90%", menus=False))
    assert found["Adafactor"] == found["SGD with momentum"] == "the workload has no optimizer"
    assert found["autocast bfloat16"] == "autocast casts to bfloat16 already"
    assert "not the function that builds it" in found["micro-batches"]
    assert "no link to host memory" in found["offload"]
    half = varied(build(), inputs=torch.randn(64, WIDTH, dtype=torch.bfloat16))
    half.model.bfloat16()
    assert reasons(planner.advise(half, "90%", menus=False))["autocast bfloat16"] == "the parameters are bfloat16"


@pytest.mark.slow
def test_of_a_step_of_the_user_s_own_nothing_is_changed_but_what_is_kept(tmp_path):
    A_CPU.save(tmp_path / "cpu.json")  # Its seconds, and so the fastest combination, are always the same.

    def build():
        work = zoo.build("gpt2", layers=2, hidden=32, seq=16, vocab=100, batch=2)

        def step():
            work.optimizer.zero_grad()
            work.model(**work.inputs).loss.backward()
            work.optimizer.step()

        return Workload(model=work.model, step=step)

    found = planner.advise(build, "90%", menus=False, device=str(tmp_path / "cpu.json"))
    reasons = {lever.kind: lever.reason for lever in found.levers if not lever.applies}
    assert all("a function of your own" in reasons[kind] for kind in ("precision", "optimizer", "micro-batches"))
    assert found.exact is not None and found.exact.kinds == ("recompute",)


@pytest.mark.slow
def test_targets_without_a_batch_argument():
    found = reasons(planner.advise(lambda rows=32: build(rows), "90%", menus=False))
    assert "no workload with batch=16" in found["micro-batches"]
    other = planner.advise(lambda rows=32: build(rows), "90%", batch_key="rows", menus=False)
    assert "micro-batches" not in reasons(other)
    assert (
        "cannot be halved" in reasons(planner.advise(build, "90%", settings={"batch": 3}, menus=False))["micro-batches"]
    )


def test_a_batch_key_that_the_target_does_not_take_is_refused():
    with pytest.raises(ValueError, match="batch_key: expected an argument of the target's function, got 'rows'"):
        planner.advise("zoo:mlp", "90%", settings={"layers": 2, "hidden": 8}, batch_key="rows", menus=False)


def test_nothing_to_run_again():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    work = planner.Workload(model=model, inputs=torch.randn(64, WIDTH), loss=lambda y: y.square().mean())
    found = planner.advise(work, "99%", menus=False)
    assert reasons(found)["recompute"] == "no stage can run again"
    assert not any("recompute" in each.kinds for each in found.combinations)


@pytest.mark.slow
def test_the_document_is_plain_data(tight):
    document = json.loads(json.dumps(document_of(tight), allow_nan=False))
    assert document["budget_bytes"] == tight.budget_bytes
    assert document["unplanned_peak_bytes"] == document["memory"][0]["peak_bytes"] == tight.unplanned.peak_bytes
    groups = document["memory"][0]["groups"]
    assert sum(group["bytes"] for group in groups.values()) == document["unplanned_peak_bytes"]
    assert document["exact"]["fits"] and document["cheapest"]["fits"]
    assert len(document["combinations"]) == len(tight.combinations)


@pytest.mark.slow
def test_tables_and_picture_show_what_is_advised(tight, tmp_path, capsys):
    Output().show(report_of(tight))
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "advice" in text and "optimizer states" in text and "up to rounding" in text
    shown = foremost(tight, 2)
    assert all(e in shown for e in (tight.exact, tight.cheapest) if len(e.kinds) > 1)
    draw_advice(tight, tmp_path / "advice.png")
    assert (tmp_path / "advice.png").stat().st_size > 10_000
    labels = [text.get_text() for text in advice_figure(tight).findobj(Text) if isinstance(text, Text)]
    assert any("advice" in label for label in labels)


def test_small_laws():
    assert worst([]) == "same" and worst(["rounding", "same"]) == "rounding" and worst(["other", "same"]) == "other"
    assert shortened({"a": 3, "b": 2, "c": 1}, 2) == {"a": 3, "2 others": 3}
    plain = {
        "budget_bytes": 10,
        "seconds": 1.0,
        "peak_basis": "measured",
        "seconds_basis": "measured",
        "result": "same",
    }
    fits, misses = Combination(peak_bytes=10, **plain), Combination(peak_bytes=13, **plain)
    slow, far = Combination(peak_bytes=9, **{**plain, "seconds": 2.0}), Combination(peak_bytes=14, **plain)
    assert fits.fits and fits.short_bytes == 0 and misses.short_bytes == 3 and not misses.fits
    assert sorted([far, misses, slow, fits], key=rank) == [fits, slow, misses, far]
    assert Combination(peak_bytes=1, optimizer="Adafactor", micro_batches=4, recipe="recompute", **plain).title == (
        "Adafactor + 4 micro-batches + recompute"
    )


def test_where_states_are_too_large_three_that_fit_are_named_and_the_others_counted():
    plain: Any = {"budget_bytes": 10, "seconds": 1.0, "peak_basis": "computed", "seconds_basis": "computed"}
    fitting = [Combination(peak_bytes=9, optimizer=name, result="other", **plain) for name in "abcde"]
    misses = Combination(peak_bytes=11, optimizer="f", result="other", **plain)
    said = _notes(SearchOutcome(levers=(), combinations=(*fitting, misses), notes=("more",)), 12, 10)
    assert said == (
        "the model states alone (12 B) are 2 B above the budget: what fits is a, or b, or c, or one of 2 more",
        "more",
    )


SMALL = ["--set", "layers=4", "hidden=32", "batch=256"]


@pytest.mark.slow
def test_the_command(tmp_path):
    result = done("advise", "zoo:mlp", *SMALL, "--budget", "80%", "--json", "-o", tmp_path / "a.svg")
    assert json.loads(result.stdout)["fits"] and (tmp_path / "a.svg").stat().st_size


@pytest.mark.slow
def test_the_command_where_nothing_fits():
    result = run("advise", "zoo:mlp", *SMALL, "--budget", "1KB", "--json")
    assert result.exit_code == 3 and "comes nearest" in result.stderr
    document = json.loads(result.stdout)
    assert document["minimum_budget_bytes"] == document["nearest"]["peak_bytes"] > 1000


@pytest.mark.parametrize("wrong", [["--budget", "many"], ["--budget", "80%", "-o", "a.doc"], ["--budget", "0"]])
def test_the_command_refuses(wrong):
    assert "expected" in refused("advise", "zoo:mlp", *SMALL, *wrong)


def test_the_optimizer_steps_once_for_all_micro_batches():
    profile = variants(batch=8).profile("", 1)
    timed = replace(profile, unplanned_seconds=3.0, optimizer=replace(profile.optimizer, seconds=1.0))
    assert StepVariant(precision="", micro_batches=4, optimizer="", profile=timed).seconds == 4 * (3.0 - 1.0) + 1.0


def test_the_least_states_are_those_of_the_leanest_optimizer():
    """Two matrices with a bias each, and 4 bytes: factors of the matrices, all of the biases, and a step count each."""
    options = lever_options(variants(batch=8, layers=1), 10**6, Offload(mode="never"))
    adafactor = 2 * 4 * ((WIDTH + WIDTH) + WIDTH + 2)
    assert least_states_bytes(options) == 2 * (2 * 4 * (WIDTH * WIDTH + WIDTH)) + adafactor


def test_only_what_keeps_the_result_ends_the_search_for_it():
    """Neither a faster step nor fewer parts with another optimizer spare a look at what leaves training as it is."""

    def of(peak_bytes, seconds, **levers):
        bases: Any = {"peak_basis": "measured", "seconds_basis": "measured"}
        result = "other" if "optimizer" in levers else "rounding"
        return Combination(budget_bytes=10, peak_bytes=peak_bytes, seconds=seconds, result=result, **bases, **levers)

    options = lever_options(variants(batch=8, layers=1), 10**6, Offload(mode="never"))
    known = [of(12, 1.0), of(9, 1.0, optimizer="SGD with momentum"), of(11, 2.0, micro_batches=2)]
    assert not enough(options, known, "", 4)
    assert too_slow(known, 1.5, "other") and not too_slow(known, 1.5, "rounding")
    known.append(of(9, 3.0, micro_batches=4))
    assert enough(options, known, "", 8)
    assert too_slow(known, 3.5, "rounding") and not too_slow(known, 2.5, "rounding")


@pytest.mark.slow
def test_where_only_offloading_is_looked_at_nothing_runs_again():
    advice = planner.advise(build(batch=512), "70%", offload=Offload(link_gbps=1e-6), menus=False)
    for each in advice.combinations:
        assert each.plan is None or each.recipe != "offload" or not each.plan.recomputed_ops
    assert any(each.recipe == "offload" for each in advice.combinations)
