"""Scaling of profiles: hand-computed lines and parabolas, and profiles predicted at sizes that are then profiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import planner
from planner import zoo
from planner.capacity.scaling import IncompatibleProfiles, ProfileScaling, scaling_over, seconds_at, whole_at
from planner.plans.cost_model import chain_of
from solvers import replay
from solvers.chain.baselines import keep_all
from solvers.chain.persistent import smallest_schedule

SIZES = (2, 3, 4)


def _quiet(size):
    return lambda what, done, total: None


def build(size):
    return zoo.build("gpt2", layers=2, hidden=32, seq=16, vocab=50, batch=size)


@pytest.fixture(scope="module")
def scaling():
    return scaling_over(build, SIZES, menus=True, progress=_quiet)


@pytest.fixture(scope="module")
def real():
    return planner.profile(build(9), menus=False)


def test_a_line_goes_through_the_two_nearest_sizes():
    values = (10, 12, 20)  # slopes 1 and 2
    found = [whole_at((2, 4, 8), values, size, curved=False) for size in (1, 2, 3, 4, 6, 8, 16)]
    assert found == [9, 10, 11, 12, 16, 20, 36]


def test_bytes_are_rounded_up():
    assert [whole_at((1, 4), (0, 1), size, curved=False) for size in (2, 3, 5, 7, 8)] == [1, 1, 2, 2, 3]


def test_a_parabola_goes_through_three_sizes():
    def square(size):
        return 3 * size * size + 5 * size + 7

    values = tuple(square(size) for size in (4, 6, 8))
    assert [whole_at((4, 6, 8), values, size, curved=True) for size in (8, 20, 100)] == [
        square(s) for s in (8, 20, 100)
    ]
    assert whole_at((4, 6, 8), values, 100, curved=False) < square(100)


def test_what_grows_slower_than_linearly_is_overestimated_not_underestimated():
    assert whole_at((1, 2, 4), (0, 10, 20), 8, curved=True) == 40


def test_numbers_that_were_never_negative_stay_so():
    assert whole_at((1, 2), (10, 4), 9, curved=False) == 0
    assert whole_at((1, 2), (-10, -14), 9, curved=False) == -42


def test_seconds_never_fall():
    assert seconds_at((1, 2, 4), (5.0, 4.0, 3.0), 100, curved=False) == pytest.approx(4.0)
    assert seconds_at((2, 3, 4), (1.0, 2.0, 4.0), 40, curved=False) > 4.0
    assert seconds_at((2, 4, 8), (0.5, 1.0, 2.0), 40, curved=False) == pytest.approx(10.0)
    assert seconds_at((2, 4, 8), (4.0, 16.0, 64.0), 16, curved=True) == pytest.approx(256.0)


@pytest.mark.slow
def test_a_profile_is_predicted_as_it_is_measured(scaling, real):
    predicted = scaling.at(9)
    assert predicted.fingerprint == real.fingerprint
    assert predicted.input_shapes == real.input_shapes
    assert predicted.resident == real.resident
    assert scaling.is_linear and not scaling.notes()
    own, chain = chain_of(predicted), chain_of(real)
    assert replay(own, keep_all(own)[0]).peak_bytes == real.unplanned_peak_bytes
    bare = chain_of(predicted.stage_level())
    assert replay(bare, smallest_schedule(bare)).peak_bytes == replay(chain, smallest_schedule(chain)).peak_bytes


@pytest.mark.slow
def test_every_size_has_the_options_of_the_largest(scaling):
    counts = [[len(menu.options) for menu in profile.menus] for profile in scaling.profiles]
    assert sum(counts[-1]) > 0
    predicted = scaling.at(7)
    assert sum(len(menu.options) for menu in predicted.menus) == sum(counts[-1])


@pytest.mark.slow
def test_options_are_the_same_whatever_they_are_called(scaling):
    first = scaling.profiles[0]
    menus = tuple(
        replace(menu, options=tuple(replace(option, name=f"other {option.name}") for option in menu.options))
        for menu in first.menus
    )
    renamed = replace(scaling, profiles=(replace(first, menus=menus), *scaling.profiles[1:]))
    assert renamed.at(7) == scaling.at(7)


@pytest.mark.slow
def test_options_are_predicted_as_they_are_measured(scaling):
    predicted = ProfileScaling(sizes=SIZES[1:], profiles=scaling.profiles[1:]).at(SIZES[0])
    found, measured = (
        {
            (record.name, option.rerun): (option.freed_bytes, option.forward_peak_bytes, option.backward_peak_bytes)
            for record in profile.stages
            if record.name.startswith("transformer.h.")  # not the embeddings' dropout, whose peak has a floor
            for option in profile.menus[record.menu].options
        }
        for profile in (predicted, scaling.profiles[0])
    )
    assert found and found == measured


def test_what_grows_as_a_square_is_said_to_and_predicted():
    def wider(size):
        model = torch.nn.Sequential(*[torch.nn.PReLU() for _ in range(3)])
        return planner.Workload(model=model, inputs=torch.randn(size, size), loss=lambda y: y.square().mean())

    scaling = scaling_over(wider, (40, 60, 80), menus=False, progress=_quiet)
    assert not scaling.is_linear and scaling.bend > 0
    assert any("faster than linearly" in note for note in scaling.notes())
    assert scaling.at(200).unplanned_peak_bytes == planner.measure(wider(200), repeats=1).peak_bytes


@pytest.mark.parametrize(
    ("held", "says"), [((100, 180, 220), "16.7% off"), ((100, 160, 220), ""), ((100, 140, 220), "16.7% off")]
)
@pytest.mark.slow
def test_how_far_off_the_line_bytes_are_is_said_of_both_sides(scaling, held, says):
    """The line from 100 to 220 is at 160 halfway; 20 are a sixth of the 120 that they grow by."""

    def holding(profile, size):
        last = profile.stages[-1]
        return replace(
            profile, stages=(*profile.stages[:-1], replace(last, forward=replace(last.forward, end_bytes=size)))
        )

    bent = replace(scaling, profiles=tuple(holding(p, size) for p, size in zip(scaling.profiles, held, strict=True)))
    kind = "slower" if held[1] > 160 else "faster"
    assert bent.is_linear == (not says) == (not bent.notes())
    assert all(f"{kind} than linearly" in note and says in note for note in bent.notes())


@pytest.mark.slow
def test_two_sizes_are_a_line(scaling):
    pair = ProfileScaling(sizes=SIZES[1:], profiles=scaling.profiles[1:])
    assert pair.bend == 0 and pair.is_linear and "two sizes cannot tell" in pair.notes()[0]
    assert pair.at(9).unplanned_peak_bytes == scaling.at(9).unplanned_peak_bytes


@pytest.mark.slow
def test_profiles_of_other_stages_are_refused(scaling):
    short = replace(scaling.profiles[0], stages=scaling.profiles[0].stages[:-1])
    with pytest.raises(
        IncompatibleProfiles, match=r"same stages.*got \d+, (\d+) and \1 stages from the smallest size to the largest"
    ):
        replace(scaling, profiles=(short, *scaling.profiles[1:])).at(5)
    other = replace(scaling.profiles[0].stages[1], name="another")
    stages = (scaling.profiles[0].stages[0], other, *scaling.profiles[0].stages[2:])
    with pytest.raises(IncompatibleProfiles, match="got the name another, .* and .* from the smallest size"):
        replace(scaling, profiles=(replace(scaling.profiles[0], stages=stages), *scaling.profiles[1:])).at(5)


@pytest.mark.slow
def test_one_size_or_falling_ones_are_refused(scaling):
    for sizes in ((2,), (3, 2), (2, 2)):
        with pytest.raises(ValueError, match="two or more rising ones"):
            ProfileScaling(sizes=sizes, profiles=scaling.profiles[: len(sizes)])


@pytest.mark.slow
def test_a_stage_can_run_again_only_where_it_can_at_every_size_and_draws_random_numbers_where_it_does_at_any(scaling):
    first = scaling.profiles[0]
    stages = tuple(replace(stage, reason="it has changed", draws_random=True) for stage in first.stages)
    changed = replace(scaling, profiles=(replace(first, stages=stages), *scaling.profiles[1:])).at(7)
    assert not any(stage.recomputable for stage in changed.stages)
    assert all(stage.draws_random for stage in changed.stages)


@pytest.mark.slow
def test_stages_that_run_other_ops_at_one_size_have_no_options(scaling):
    first = scaling.profiles[0]
    other = replace(first.menus[0], ops=replace(first.menus[0].ops, modules=("another", *first.menus[0].ops.modules)))
    menus = (other, *first.menus[1:])
    changed = replace(scaling, profiles=(replace(first, menus=menus), *scaling.profiles[1:])).at(7)
    for record, before in zip(changed.stages, first.stages, strict=True):
        assert (record.menu >= 0) == (before.menu > 0)


@pytest.mark.slow
def test_no_phase_is_predicted_to_peak_below_its_end(scaling):
    """Ends grow by 100 a size and peaks by 95: the lines cross, at 300 with four samples."""
    profiles = []
    for profile, end_bytes, peak_bytes in zip(scaling.profiles, (100, 200, 300), (110, 205, 300), strict=True):
        last = profile.stages[-1]
        forward = replace(last.forward, start_bytes=0, end_bytes=end_bytes, peak_bytes=peak_bytes)
        profiles.append(replace(profile, stages=(*profile.stages[:-1], replace(last, forward=forward))))
    forward = replace(scaling, profiles=tuple(profiles)).at(9).stages[-1].forward
    assert (forward.end_bytes, forward.peak_bytes) == (800, 800)


class _Narrow(torch.nn.Module):
    """Gradients of weights make the peak of its backward on few rows, and rows do on many."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)).softmax(-1))


@pytest.mark.slow
def test_programs_peak_elsewhere_at_other_sizes():
    def build(size):
        model = torch.nn.Sequential(*[_Narrow() for _ in range(3)])
        return planner.Workload(model=model, inputs=torch.randn(size, 16), loss=lambda y: y.square().mean())

    predicted = scaling_over(build, (2, 3, 4), menus=True, progress=_quiet).at(400)
    measured = planner.profile(build(400))
    for found, expected in zip(predicted.stages, measured.stages, strict=True):
        if expected.menu < 0:
            continue
        once, known = predicted.menus[found.menu].once, measured.menus[expected.menu].once
        assert once is not None and known is not None
        assert once.forward_peak_bytes == known.forward_peak_bytes
        assert once.backward_peak_bytes == known.backward_peak_bytes
