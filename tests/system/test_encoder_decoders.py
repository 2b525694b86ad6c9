"""Peaks of encoder-decoders are right at every budget, also where decoder layers fill a cache and so run only once."""

from __future__ import annotations

import pytest
import torch

import planner
from planner.plans.cost_model import chain_of
from profiler.workload.workload import Workload
from solvers.chain.baselines import Segment, segmented_schedule
from tests.support.encoder_decoder import FRAMES, EncoderDecoder
from tests.support.exactness import assert_same, budgets, following, state_after
from tests.support.nightly import by_day

STAGES = ["encoder.*", "middle", "decoder.?", "norm", "head"]


def workload(*, cached: bool, keeps_output: bool = True) -> Workload:
    torch.manual_seed(0)
    model = EncoderDecoder(cached=cached).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model=model, inputs=torch.randn(16, FRAMES), optimizer=optimizer, keeps_output=keeps_output)


@pytest.mark.parametrize("cached", by_day([False, True], [True]))
def test_an_encoder_decoder_is_exact_and_takes_the_predicted_bytes(cached: bool) -> None:
    profile = planner.profile(workload(cached=cached), stages=STAGES)
    expected = state_after(workload(cached=cached))
    for budget in budgets(profile):
        work = workload(cached=cached)
        plan = planner.solve(profile, budget, solver="rotor")
        with planner.apply(work.model, plan):
            assert_same(state_after(work), expected)
            assert planner.measure(work, repeats=1).peak_bytes <= plan.predicted_peak_bytes <= budget


@pytest.mark.parametrize("cached", [False, True])
def test_what_others_leave_until_the_output_goes_is_not_released_by_the_last_stage(cached: bool) -> None:
    work = workload(cached=cached, keeps_output=False)
    profile = planner.profile(work, stages=STAGES, menus=False)
    chain = chain_of(profile)
    names = [stage.name for stage in chain.stages]
    assert chain.stages[names.index("decoder.1")].recomputable is not cached
    for k in (k for k, stage in enumerate(chain.stages) if stage.recomputable):
        alone = [Segment(j, j + 1, None if j == k else 0) for j in range(len(names))]
        plan = following(profile, segmented_schedule(alone))
        with planner.apply(work.model, plan):
            assert planner.measure(work, repeats=1).peak_bytes == plan.predicted_peak_bytes, names[k]


def test_what_an_object_in_the_output_holds_is_held_by_the_loop_and_peaks_are_the_same_in_every_step() -> None:
    plain, cached = (planner.profile(workload(cached=each), stages=STAGES, menus=False) for each in (False, True))
    work = workload(cached=True)
    past = work.model(work.inputs)["cache"].past
    held = cached.resident.loop - plain.resident.loop
    assert held == sum(tensor.untyped_storage().nbytes() for tensor in past)
    assert {planner.measure(work, repeats=1).peak_bytes for _ in range(3)} == {cached.unplanned_peak_bytes}


def test_what_an_object_in_the_result_of_an_own_step_holds_is_held_by_the_loop() -> None:
    def own(cached: bool) -> Workload:
        built = workload(cached=cached)
        optimizer = torch.optim.SGD(built.model.parameters(), lr=0.1)

        def step() -> dict[str, object]:
            output = built.model(built.inputs)
            output["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            return output

        return Workload(model=built.model, step=step, optimizer=optimizer)

    plain, cached = (planner.profile(own(each), stages=STAGES, menus=False) for each in (False, True))
    model = workload(cached=True).model
    held = sum(tensor.untyped_storage().nbytes() for tensor in model(torch.randn(16, FRAMES))["cache"].past)
    assert cached.resident.loop - plain.resident.loop == held
