"""A restricted chain costs what its schedules cost in the chain itself."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from solvers import Action, Chain, Problem, Schedule, replay, solve_chain
from solvers.chain import baselines
from solvers.chain.baselines import Segment, segmented_schedule
from solvers.chain.fixed_stages import expanded, restricted
from solvers.chain.lower_bound import bound_seconds
from solvers.problem.chain import Shared
from solvers.problem.examples import equal_stages
from tests.support.chains import random_chain
from tests.support.nightly import by_day


def random_spans(chain: Chain, random: Random, free: float) -> list[Segment]:
    """Every stage with something fixed that may be; what must run once is kept, segments only where links allow."""
    spans: list[Segment] = []
    k = 0
    while k < len(chain.stages):
        stage, end = chain.stages[k], k + 1
        if random.random() < free:
            spans.append(Segment(k, end, undecided=True))
        elif not stage.recomputable or random.random() < 0.4:
            spans.append(Segment(k, end, option=random.randrange(len(stage.options))))
        else:
            while end < len(chain.stages) and _joins(chain, end) and random.random() < 0.6:
                end += 1
            spans.append(Segment(k, end))
        k = end
    return spans


def _joins(chain: Chain, k: int) -> bool:
    return chain.stages[k].recomputable and chain.stages[k].linked


def everything_once(chain: Chain) -> Schedule:
    return baselines.keep_all(chain)[0]


def test_a_segment_of_two_by_hand():
    """Unit stages: boundary 1, kept 4, peaks: forward 6 kept, 2 not kept, recompute 4, backward 1."""
    chain = equal_stages(3)
    spans = [Segment(0, 2), Segment(2, 3, option=0)]
    actions = segmented_schedule(spans).to_list()
    assert actions == [
        ["forward", 0, None], ["forward", 1, None], ["free", 0, None], ["forward", 2, 0],
        ["free", 2, None], ["backward", 2, None],
        ["free", 1, None], ["forward", 0, 0], ["recompute", 1, 0], ["backward", 1, None],
        ["free", 0, None], ["backward", 0, None],
    ]  # fmt: skip
    segment = restricted(chain, spans).stages[0].options[0]
    assert (segment.forward_seconds, segment.backward_seconds) == (2, 6)
    assert (segment.forward_peak_bytes, segment.kept_bytes) == (3, 0)  # a boundary, and the second forward's 2
    assert segment.backward_peak_bytes == 10  # 5 kept of the first, 4 of the second, 1 in its backward


@pytest.mark.parametrize("seed", by_day(range(150), range(40)))
def test_what_is_fixed_costs_the_same_in_both_chains(seed):
    chain = random_chain(seed, most_stages=7)
    spans = random_spans(chain, Random(seed), free=0.0)
    restricted_chain = restricted(chain, spans)
    inside, outside = (
        replay(restricted_chain, everything_once(restricted_chain)),
        replay(chain, segmented_schedule(spans)),
    )
    assert expanded(everything_once(restricted_chain), spans) == segmented_schedule(spans)
    assert (inside.seconds, inside.peak_bytes) == (outside.seconds, outside.peak_bytes)


@pytest.mark.parametrize("seed", by_day(range(150), range(40)))
def test_solutions_of_the_rest_fit_the_chain(seed):
    chain = random_chain(seed, most_stages=7)
    spans = random_spans(chain, Random(seed), free=0.5)
    restricted_chain = restricted(chain, spans)
    most = replay(restricted_chain, everything_once(restricted_chain)).peak_bytes
    for budget in range(most, 0, -2):
        solution = solve_chain(Problem(chain=restricted_chain, budget_bytes=budget), solver="rotor")
        if solution.schedule is None:
            break
        replayed = replay(chain, expanded(solution.schedule, spans))
        assert (replayed.seconds, replayed.peak_bytes) == (solution.seconds, solution.peak_bytes)


@pytest.mark.parametrize("seed", by_day(range(300), range(60)))
def test_shared_tensors_are_never_counted_too_low(seed):
    chain = random_chain(seed, most_stages=6, shared=True)
    spans = random_spans(chain, Random(seed), free=0.3)
    restricted_chain = restricted(chain, spans)
    schedule = everything_once(restricted_chain)
    replayed = replay(chain, expanded(schedule, spans))
    assert replayed.seconds == replay(restricted_chain, schedule).seconds
    assert replayed.peak_bytes <= replay(restricted_chain, schedule).peak_bytes


def test_a_skip_over_a_segment_is_held_where_the_chain_holds_it():
    """The second stage's reader is in the segment and holds the tensor until it has run again."""
    tensor = Shared(size_bytes=7, born=0, forward_death=0, readers=(1,))
    chain = Chain(stages=equal_stages(4).stages, shared=(tensor,))
    restricted_chain = restricted(chain, [Segment(0, 1, option=0), Segment(1, 3), Segment(3, 4, undecided=True)])
    assert restricted_chain.shared == (Shared(size_bytes=7, born=0, forward_death=0, savers=(1,)),)


def test_a_tensor_that_only_the_forward_of_a_segment_holds_counts_there():
    tensor = Shared(size_bytes=50, born=0, forward_death=2, readers=())
    chain = Chain(stages=equal_stages(4).stages, shared=(tensor,))
    spans = [Segment(0, 3), Segment(3, 4, option=0)]
    restricted_chain = restricted(chain, spans)
    assert restricted_chain.stages[0].options[0].forward_peak_bytes == 53
    assert replay(chain, segmented_schedule(spans)).peak_bytes == 53


def test_a_segment_that_saves_a_tensor_holds_it_in_its_backward_alone():
    tensor = Shared(size_bytes=50, born=0, forward_death=0, savers=(1,))
    chain = Chain(stages=equal_stages(4).stages, shared=(tensor,))
    spans = [Segment(0, 1, option=0), Segment(1, 3), Segment(3, 4, option=0)]
    restricted_chain = restricted(chain, spans)
    assert restricted_chain.shared[0].savers == ()
    assert restricted_chain.stages[1].options[0].backward_peak_bytes == 60
    assert (
        replay(restricted_chain, everything_once(restricted_chain)).peak_bytes
        == replay(chain, segmented_schedule(spans)).peak_bytes
    )


def test_a_tensor_that_goes_before_a_peak_inside_a_segment_counts_there_only_if_another_stage_holds_it():
    """Made by stage 0, gone before the peaks of stage 2's forward and stage 1's backward."""
    tensor = Shared(size_bytes=50, born=0, forward_death=2, forward_death_is_early=True, early_backward_death=1)
    read, saved = (replace(tensor, **held) for held in ({"readers": (1,)}, {"savers": (0, 1)}))
    for held, forward, backward in ((tensor, 53, 15), (read, 103, 15), (saved, 53, 110)):
        chain = Chain(stages=equal_stages(4).stages, shared=(held,))
        spans = [Segment(0, 3), Segment(3, 4, option=0)]
        early = restricted(chain, spans)
        segment = early.stages[0].options[0]
        assert (segment.forward_peak_bytes, segment.backward_peak_bytes) == (forward, backward)
        assert not early.shared[0].forward_death_is_early and early.shared[0].early_backward_death is None
        assert replay(early, everything_once(early)).peak_bytes == replay(chain, segmented_schedule(spans)).peak_bytes
    chain = Chain(stages=equal_stages(4).stages, shared=(tensor,))
    assert restricted(chain, [Segment(k, k + 1, option=0) for k in range(4)]).shared == chain.shared


def test_a_tensor_of_an_earlier_stage_is_counted_once_where_a_segment_lets_go_of_it():
    tensor = Shared(size_bytes=50, born=0, forward_death=2)
    chain = Chain(stages=equal_stages(4).stages, shared=(tensor,))
    spans = [Segment(0, 1, option=0), Segment(1, 3), Segment(3, 4, option=0)]
    restricted_chain = restricted(chain, spans)
    assert restricted_chain.stages[1].options[0].forward_peak_bytes == 3
    assert (
        replay(restricted_chain, everything_once(restricted_chain)).peak_bytes
        == replay(chain, segmented_schedule(spans)).peak_bytes
    )


def test_the_gradient_of_the_loss_is_there_before_the_last_boundary_in_a_segment_is_freed():
    last = replace(equal_stages(1).stages[0], gradient_bytes=90)
    chain = Chain(stages=(*equal_stages(3).stages, last))
    spans = [Segment(0, 2, option=None), Segment(2, 4)]
    restricted_chain = restricted(chain, spans)
    assert restricted_chain.stages[1].options[0].forward_peak_bytes == 92  # and two boundaries
    assert (
        replay(restricted_chain, everything_once(restricted_chain)).peak_bytes
        == replay(chain, segmented_schedule(spans)).peak_bytes
    )


@pytest.mark.parametrize("seed", by_day(range(150), range(40)))
def test_with_shared_tensors_solutions_of_the_rest_fit_and_bounds_without_them_hold(seed):
    chain = random_chain(seed, most_stages=6, shared=True)
    spans = random_spans(chain, Random(seed), free=0.5)
    restricted_chain = restricted(chain, spans)
    fewest_bytes = restricted(replace(chain, shared=()), spans)
    most = replay(restricted_chain, everything_once(restricted_chain)).peak_bytes
    for budget in range(most, 0, -2):
        solution = solve_chain(Problem(chain=restricted_chain, budget_bytes=budget), solver="rotor")
        if solution.schedule is None or solution.peak_bytes is None:
            break
        replayed = replay(chain, expanded(solution.schedule, spans))
        assert replayed.seconds == solution.seconds and replayed.peak_bytes <= solution.peak_bytes
        assert bound_seconds(fewest_bytes, replayed.peak_bytes) <= replayed.seconds * (1 + 1e-9)


def test_a_boundary_inside_a_segment_is_not_held_by_it():
    tensor = Shared(size_bytes=50, born=1, forward_death=1, linked_readers=(2,))
    chain = Chain(stages=equal_stages(4).stages, shared=(tensor,))
    assert restricted(chain, [Segment(0, 1, option=0), Segment(1, 3), Segment(3, 4, option=0)]).shared[0].savers == ()
    assert restricted(chain, [Segment(0, 2), Segment(2, 3), Segment(3, 4, option=0)]).shared[0].savers == (1,)


def test_actions_of_free_stages_only_change_their_numbers():
    spans = [Segment(0, 2), Segment(2, 3, undecided=True), Segment(3, 4, undecided=True)]
    actions = (Action("forward", 1), Action("recompute", 2, 0), Action("backward", 2), Action("free", 0))
    expanded_actions = expanded(Schedule(actions=actions), spans).to_list()
    assert expanded_actions == [["forward", 2, None], ["recompute", 3, 0], ["backward", 3, None], ["free", 1, None]]
