"""The largest batch: limits hold against real steps, and what does not fit, or cannot be tried, is said."""

from __future__ import annotations

import json
import re

import pytest
import torch

import planner
import planner.capacity.scaling
from planner import zoo
from planner.capacity.batch_search import max_batch
from planner.capacity.step_trial import has_room, measured_states_bytes
from tests.support.command_line import done, refused, run

SETTINGS = {"layers": 4, "hidden": 32}
STEP = 64
LIMIT = 6 * STEP  # of the unplanned model within the budget that most tests take


def build(batch):
    return zoo.build("mlp", **SETTINGS, batch=batch)


def search(target, budget, **options):
    return max_batch(target, budget, **{"menus": False, "step": STEP, "offload": "never", **options})


def unplanned_peak(batch):
    return planner.measure(build(batch), repeats=1).peak_bytes


@pytest.fixture(scope="module")
def budget():
    return unplanned_peak(LIMIT) + 1000


@pytest.fixture(scope="module")
def found(budget):
    return search(build, budget, offload=planner.Offload(link_gbps=50))


@pytest.mark.slow
def test_the_unplanned_limit_is_the_true_one(found, budget):
    assert found.none.size == found.none.predicted_size == LIMIT
    assert found.none.peak_bytes == unplanned_peak(LIMIT) <= budget < unplanned_peak(LIMIT + STEP)
    assert found.none.confirmed and found.none.next_fails


@pytest.mark.slow
def test_the_planned_limits_are_confirmed_by_real_steps(found, budget):
    for limit in (found.recompute, found.offload):
        assert limit.confirmed and limit.next_fails
        assert abs(limit.size - limit.predicted_size) <= STEP
        workload = build(limit.size)
        with planner.apply(workload.model, limit.plan):
            assert planner.measure(workload, repeats=1).peak_bytes == limit.peak_bytes <= budget
    assert found.none.size < found.recompute.size <= found.offload.size


@pytest.mark.slow
def test_no_plan_fits_one_more(found, budget):
    workload = build(found.recompute.size + STEP)
    with pytest.raises(planner.Infeasible):
        planner.solve(planner.profile(workload, menus=False), budget, offload="never")


@pytest.mark.slow
def test_throughput_is_of_the_batch(found):
    for limit in (found.none, found.recompute, found.offload):
        assert limit.samples_per_second == limit.throughput > 0
        assert limit.relative == pytest.approx(limit.throughput / found.none.throughput)
    assert found.best.throughput == max(
        limit.throughput for limit in (found.none, found.recompute, found.offload, found.best)
    )


@pytest.mark.slow
def test_running_out_of_memory_counts_as_not_fitting(budget):
    def small(batch):
        if batch > 4 * STEP:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return build(batch)

    found = search(small, budget)
    assert (found.none.size, found.recompute.size) == (4 * STEP, 4 * STEP)
    assert found.none.confirmed and found.none.next_fails


@pytest.mark.slow
def test_no_step_is_run_where_the_device_has_no_room(budget, monkeypatch):
    ran = []

    def watched(batch):
        ran.append(batch)
        return build(batch)

    room = unplanned_peak(LIMIT) + 300_000
    monkeypatch.setattr("planner.capacity.step_trial.room_bytes", lambda device: room)
    monkeypatch.setattr("planner.capacity.limit_search.room_bytes", lambda device: room)
    most = room - measured_states_bytes(build(STEP))
    found = search(watched, 10 * most)
    assert not found.none.confirmed and not found.none.next_fails
    assert f"batch={found.none.size} was not tried" in found.none.reason
    assert max(ran) < found.none.size
    assert all(unplanned_peak(batch) <= most for batch in {*ran})


def test_on_a_cpu_there_is_room_for_what_the_host_may_still_hold(monkeypatch):
    monkeypatch.setattr("profiler.measurement.device_memory.available_host_bytes", lambda: 5000)
    cpu = torch.device("cpu")
    assert has_room(cpu, 3000, 2000) and not has_room(cpu, 3000, 2001)  # the peak, and the copy by which it is undone


@pytest.mark.slow
def test_states_alone_above_the_budget_are_named():
    states = measured_states_bytes(build(STEP))
    parameters = sum(p.numel() * 4 for p in build(STEP).model.parameters())
    steps = 4 * sum(1 for _ in build(STEP).model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in build(STEP).model.buffers())
    assert states == 4 * parameters + steps + buffers  # values, gradients and two moments; a step count each
    with pytest.raises(planner.errors.NoBatch, match="states alone") as refused_with:
        search(build, states - 1000)
    refusal = refused_with.value
    assert refusal.states_bytes == states and refusal.size == STEP
    assert "1000 B above it" in str(refusal)
    assert refusal.short_bytes == refusal.minimum_budget_bytes - (states - 1000)
    plan = planner.solve(planner.profile(build(STEP), menus=False), refusal.minimum_budget_bytes)
    assert plan.predicted_peak_bytes <= refusal.minimum_budget_bytes


@pytest.mark.slow
def test_a_length_counts_by_its_samples_times_its_size():
    def wider(width):
        if width % 4:
            raise ValueError("expected a width of whole fours")
        model = torch.nn.Sequential(*[torch.nn.PReLU() for _ in range(3)])
        return planner.Workload(model=model, inputs=torch.randn(16, width, 8), loss=lambda y: y.square().mean())

    peak = planner.measure(wider(40), repeats=1).peak_bytes
    found = search(wider, 2 * peak, vary="width", step=1, headroom="50%")
    assert (found.budget_bytes, found.headroom_bytes) == (2 * peak, peak)
    assert found.recompute.peak_bytes is not None and found.recompute.peak_bytes <= peak
    assert (found.none.size, found.step) == (40, 4)
    assert found.none.samples_per_second is not None
    assert found.none.throughput == pytest.approx(40 * found.none.samples_per_second)


@pytest.mark.slow
def test_sizes_that_the_target_refuses_are_left_out():
    def picture(image, channels=3):
        if image % 16:
            raise ValueError("expected whole sixteens")
        model = torch.nn.Sequential(*[torch.nn.PReLU() for _ in range(3)])
        inputs = torch.randn(channels, image, image)
        return planner.Workload(model=model, inputs=inputs, loss=lambda y: y.square().mean())

    peak = planner.measure(picture(48, 2), repeats=1).peak_bytes
    found = search(picture, peak, vary="image", settings={"channels": 2, "image": 96}, step=1)
    assert found.step == 16 and found.none.size == 48
    assert any("multiples of 16" in note for note in found.notes)
    assert any("not used" in note for note in found.notes)


def plain(layers, batch, take=lambda size: True):
    """A chain of as many layers; its forward refuses what ``take`` does."""

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(layers)])

        def forward(self, x):
            if not take(x.shape[0]):
                raise IndexError("index out of range in self")
            return self.layers(x)

    return planner.Workload(model=Plain(), inputs=torch.randn(batch, 100), loss=lambda y: y.square().mean())


@pytest.mark.slow
def test_models_of_other_stages_are_profiled_size_by_size():
    peak = planner.measure(plain(5, 32), repeats=1).peak_bytes
    found = search(lambda layers: plain(layers, 32), peak, vary="layers", step=1)
    assert found.none.size == found.none.predicted_size == 5
    assert found.none.confirmed and found.none.next_fails and not found.linear
    assert {5, 6} <= {*found.profiled}
    why = "stages from the smallest size to the largest), so every size in question was profiled"
    assert any(note.startswith("models of other sizes have other stages (") and why in note for note in found.notes)


@pytest.mark.slow
def test_a_third_size_is_profiled_where_the_smallest_differs():
    """Two sizes would not tell that the bytes grow as a square."""

    def wider(size):
        layers = [torch.nn.PReLU() for _ in range(3 if size > 20 else 2)]
        inputs = torch.randn(size, size)
        return planner.Workload(model=torch.nn.Sequential(*layers), inputs=inputs, loss=lambda y: y.square().mean())

    peak = planner.measure(wider(70), repeats=1).peak_bytes
    found = search(wider, peak, vary="size", step=10)
    assert found.profiled == (30, 40, 50) and not found.linear
    assert found.none.size == found.none.predicted_size == 70


@pytest.mark.slow
def test_a_size_that_only_the_forward_refuses_ends_the_search_and_is_named():
    budget = planner.measure(plain(3, 64), repeats=1).peak_bytes
    found = search(lambda batch: plain(3, batch, lambda size: size <= 40), budget, step=8)
    assert found.none.size == 40 and found.none.confirmed and not found.none.next_fails
    assert "batch=48 is refused" in found.none.reason and "index out of range" in found.none.reason


@pytest.mark.slow
def test_a_step_between_sizes_that_only_the_forward_knows_of_is_found():
    budget = planner.measure(plain(3, 64), repeats=1).peak_bytes
    found = search(lambda batch: plain(3, batch, lambda size: size % 16 == 0), budget, step=8)
    assert (found.step, found.none.size) == (16, 64)


@pytest.mark.slow
def test_a_target_that_takes_no_double_of_the_step_is_told_of_the_step():
    with pytest.raises(ValueError, match=r"batch=2 and its doubles.*--vary"):
        search(lambda batch: plain(3, batch, lambda size: size % 3 == 0), 10**6, step=2)


@pytest.mark.slow
def test_a_device_that_holds_few_samples_is_profiled_below_them(monkeypatch):
    """Unplanned steps of more than two samples run out of memory, which also ends the profile at them."""
    real = planner.capacity.scaling.profile
    profiled = []

    def tight(workload, **options):
        size = workload.inputs.shape[0] // STEP
        profiled.append(size)
        if size > 2:
            raise planner.errors.ProfileError("no room") from torch.OutOfMemoryError("CUDA out of memory.")
        return real(workload, **options)

    monkeypatch.setattr("planner.capacity.scaling.profile", tight)
    found = search(build, unplanned_peak(STEP) + 1000)
    assert found.none.size == STEP and found.profiled == (STEP, 2 * STEP)
    assert profiled == [4, 3, 2]
    assert found.recompute.confirmed


@pytest.mark.slow
def test_refusals_say_what_would_fit():
    smallest = build(STEP)
    with pytest.raises(planner.errors.NoBatch) as refused_with:
        search(build, 1000)
    refusal = refused_with.value
    moments = sum(value.nbytes for value in _stepped(smallest))
    assert refusal.levers == {
        "SGD without momentum": refusal.minimum_budget_bytes - moments,
        "bf16 throughout": refusal.minimum_budget_bytes // 2,
        "both": (refusal.minimum_budget_bytes - moments) // 2,
    }
    assert "not even these would fit" in str(refusal)
    with pytest.raises(planner.errors.NoBatch, match="is headroom") as refused_with:
        search(build, refusal.minimum_budget_bytes, headroom=1000)
    assert refused_with.value.minimum_budget_bytes == refusal.minimum_budget_bytes + 1000
    with pytest.raises(planner.errors.NoBatch, match="would about fit: both$"):
        search(build, refusal.levers["both"])


def _stepped(workload):
    workload.step()
    return [value for state in workload.optimizer.state.values() for value in state.values()]


@pytest.mark.slow
def test_the_command_says_what_the_contract_wants_and_writes_a_plan_that_trains_and_a_picture(tmp_path):
    pairs = [f"{key}={value}" for key, value in SETTINGS.items()]
    plan, picture = tmp_path / "plan.json", tmp_path / "limits.svg"
    search = ("max-batch", "zoo:mlp", "--set", *pairs, "--vary", f"batch:{STEP}", "--budget", "1MB")
    result = done(*search, "--json", "-o", plan, "-o", picture)
    document = json.loads(result.stdout)
    for way in ("none", "recompute"):
        assert document[way]["batch"] > 0
        assert 0 < document[way]["peak_bytes"] <= 1_000_000
        assert document[way]["samples_per_second"] > 0
    assert {"batch", "peak_bytes", "samples_per_second"} <= document["offload"].keys()
    assert document["offload"]["batch"] is None and "no link" in document["offload"]["reason"]
    assert document["best"]["way"] in ("none", "recompute")
    assert document["recompute"]["batch"] > document["none"]["batch"]
    size = document["recompute"]["batch"]
    target = planner.Plan.load(plan).target
    assert target is not None and target.settings[-1] == f"batch={size}"
    trained = json.loads(done("train", "--plan", plan, "--steps", "1", "--json").stdout)
    assert trained["measured_peak_bytes"] <= 1_000_000
    assert f"{size}: " in picture.read_text() and "best throughput:" in picture.read_text()


def test_a_budget_for_nothing_ends_with_exit_code_3():
    pairs = [f"{key}={value}" for key, value in SETTINGS.items()]
    result = run("max-batch", "zoo:mlp", "--set", *pairs, "--vary", f"batch:{STEP}", "--budget", "60KB", "--json")
    assert result.exit_code == 3
    document = json.loads(result.stdout)
    assert document["status"] == "infeasible" and document["none"]["batch"] == 0
    assert document["short_bytes"] == document["minimum_budget_bytes"] - 60_000
    assert "states alone" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--vary", "wings"], "expected the settings batch="),
        (["--vary", "optimizer"], "expected optimizer to be"),
        (["--vary", "seed", "--set", "layers=1", "hidden=16", "batch=64"], "a setting that memory grows with"),
        (["--budget", "70%"], "grows with the size"),
        (["--headroom", "2GB"], "bytes leave nothing of the budget"),
        (["--device", "abacus"], "expected one that this machine has"),
        (["--offload", "no,gbps=-1"], "not negative"),
        (["--vary", "batch:0"], "--vary: expected a whole number above zero after the colon"),
    ],
)
def test_wrong_input_is_refused(args, says):
    assert says in refused("max-batch", "zoo:mlp", "--budget", "1GB", *args)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (lambda layers=2: build(layers), "expected the settings (layers=2)"),
        ("zoo:mlp", "expected the settings batch="),
        ("zoo:nothing", "expected one of gpt2"),
        ("planner.zoo:nothing", "expected a function 'nothing'"),
        ("not/there.py:build", "there is no file"),
    ],
)
def test_what_no_size_helps_is_refused_without_trying_others(target, says):
    vary = "wings" if target == "zoo:mlp" else "batch"
    with pytest.raises(ValueError, match=re.escape(says)) as refusal:
        search(target, "1GB", vary=vary)
    assert "doubles" not in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "cuda:99"}, "expected one that this machine has"),
        ({"settings": {"device": "cuda"}}, "is not there without CUDA"),
    ],
)
def test_a_device_that_is_not_there_is_refused_without_trying_other_sizes(options, says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=says) as refusal:
        search("zoo:mlp", "1GB", **options)
    assert "doubles" not in str(refusal.value)


class Repeated(torch.nn.Module):
    """Activations of 64 KiB for each repetition, and a parameter whose step in the optimizer is the peak at first."""

    def __init__(self, repeats):
        super().__init__()
        self.repeats = repeats
        self.weight = torch.nn.Parameter(torch.zeros(2**17))

    def forward(self, x):
        x = x * self.weight[0]
        for _ in range(self.repeats):
            x = torch.tanh(x)
        return x.mean()


def build_repeated(repeats):
    model = Repeated(repeats)
    inputs = torch.randn(256, 64)
    return planner.Workload(model=model, inputs=inputs, optimizer=torch.optim.AdamW(model.parameters()))


@pytest.mark.slow
def test_growth_below_the_peak_of_the_optimizers_step_is_growth():
    peaks = [planner.measure(build_repeated(repeats), repeats=1).peak_bytes for repeats in (1, 4, 60, 61)]
    assert peaks[0] == peaks[1] < peaks[2] < peaks[3]
    found = search(build_repeated, peaks[2], vary="repeats", step=1)
    assert found.none.size == 60 and abs((found.none.predicted_size or 0) - 60) <= 1


@pytest.mark.slow
def test_sizes_far_above_those_that_the_target_takes_cost_no_tries():
    def table(batch):
        if batch > 20:
            raise IndexError("the table has 20 rows")
        return build(batch)

    found = search(table, "1GB", step=1)
    assert found.none.size == found.recompute.size == 20 and not found.none.next_fails
    assert "20 rows" in found.none.reason
