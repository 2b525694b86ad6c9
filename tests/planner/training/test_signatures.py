"""Signatures tell calls apart that need different plans, and size lines place new ones between those profiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from planner.capacity.scaling import IncompatibleProfiles
from planner.training.signatures import Signature, SignatureReader, expected, lines_of
from profiler.records import Phase, Profile, ResidentBytes, StageRecord


class Reads(torch.nn.Module):
    def forward(self, x: Any, scale: Any = None, *rest: Any, **more: Any) -> Any:
        return x


READ = SignatureReader(Reads())


def test_an_argument_by_position_is_the_same_as_by_name():
    x = torch.zeros(2, 3)
    assert (
        READ((x, None), {}) == READ((), {"x": x}) == READ.of_batch({"x": x}) == READ.of_batch(x) == READ.of_batch((x,))
    )


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(2, 4)},
        {"x": torch.zeros(2, 3, dtype=torch.float64)},
        {"x": torch.zeros(2, 3, requires_grad=True)},
        {"x": torch.zeros(6)},
        {"x": torch.zeros(2, 3), "scale": torch.zeros(())},
        {"x": torch.zeros(2, 3), "cached": True},
        {"x": torch.zeros(2, 3), "layers": 2},
        {"x": [torch.zeros(2, 3)]},
    ],
)
def test_calls_that_need_different_plans_have_different_signatures(other):
    assert READ((), other) != READ((), {"x": torch.zeros(2, 3)})


@pytest.mark.parametrize(("one", "another"), [(2, 3), (True, False), ("a", "b")])
def test_whole_numbers_truths_and_words_count_by_their_value(one, another):
    assert READ((), {"layers": one}) != READ((), {"layers": another})


def test_values_floats_and_what_is_left_out_do_not_count():
    assert READ((torch.ones(2),), {"scale": 0.5, "mask": None}) == READ((torch.zeros(2),), {"scale": 0.7})


def test_a_signature_covers_those_that_are_larger_in_no_dimension():
    def of(*shape: int) -> Signature:
        return READ((torch.zeros(*shape),), {})

    assert of(4, 8).covers(of(4, 7)) and of(4, 8).covers(of(4, 8))
    assert not of(4, 8).covers(of(5, 7)) and not of(4, 8).covers(
        of(
            4,
        )
    )
    assert str(of(4, 8)) == "x: float32[4, 8]"


def sized(*dims: int) -> Signature:
    return Signature((("x", "float32", len(dims)),), dims)


def grown(held_bytes: int, name: str = "only") -> Profile:
    """A profile of one stage that keeps so many bytes."""
    forward = Phase(peak_bytes=held_bytes, end_bytes=held_bytes, seconds=1.0)
    stage = StageRecord(name=name, kind="stage", forward=forward, backward=replace(forward, end_bytes=0))
    return Profile(
        model_class="M",
        input_shapes=(),
        device="cpu",
        device_name="",
        torch_version="",
        precision="float32",
        stages=(stage,),
        shared=(),
        resident=ResidentBytes(parameters=0, buffers=0, optimizer=0, inputs=0),
        optimizer=Phase(),
        unplanned_peak_bytes=held_bytes,
        unplanned_seconds=1.0,
        step_seconds=(),
        op_records=(),
    )


def found(profiled: dict[Signature, int], at: Signature) -> tuple[str, tuple[int, ...], int] | None:
    profiles = {signature: grown(held_bytes) for signature, held_bytes in profiled.items()}
    answer = expected(lines_of(profiles), profiles, at)
    return None if answer is None else (answer.basis, answer.at.dims, answer.profile.unplanned_peak_bytes)


LINEAR = {sized(2, 10): 1000, sized(2, 20): 2000, sized(2, 40): 4000}
SQUARE = {sized(2, 10): 100, sized(2, 20): 400, sized(2, 40): 1600, sized(2, 50): 2500}


def test_between_two_sizes_bytes_are_interpolated():
    assert found(LINEAR, sized(2, 33)) == ("interpolated", (2, 33), 3300)
    assert found({s: LINEAR[s] for s in (sized(2, 10), sized(2, 40))}, sized(2, 11)) == ("interpolated", (2, 11), 1100)
    assert found(SQUARE, sized(2, 30)) == ("interpolated", (2, 30), 900)


def test_beyond_the_sizes_only_a_checked_fit_goes_on():
    assert found(LINEAR, sized(2, 80)) == ("extrapolated", (2, 80), 8000)
    assert found(LINEAR, sized(2, 5)) == ("extrapolated", (2, 5), 500)
    assert found(SQUARE, sized(2, 100)) == ("extrapolated", (2, 100), 10_000)
    two = {s: LINEAR[s] for s in (sized(2, 10), sized(2, 40))}
    assert found(two, sized(2, 41)) is None
    # Three points always lie on some parabola: nothing has checked that it goes on.
    three = {s: SQUARE[s] for s in (sized(2, 10), sized(2, 20), sized(2, 40))}
    assert found(three, sized(2, 41)) is None
    assert found({**SQUARE, sized(2, 50): 3000}, sized(2, 51)) is None
    # Below the smallest a chord would promise too little: its own bytes are enough.
    assert found(two, sized(2, 5)) == ("covered", (2, 10), 1000)


def test_off_the_line_the_smallest_covering_signature_counts():
    assert found(LINEAR, sized(1, 33)) == ("covered", (2, 33), 3300)
    assert found(LINEAR, sized(3, 33)) is None
    images = {sized(2, 8, 8): 128, sized(2, 16, 16): 512, sized(2, 24, 24): 1152}
    assert found(images, sized(2, 12, 12)) == ("interpolated", (2, 12, 12), 288)
    assert found(images, sized(2, 9, 20)) == ("covered", (2, 20, 20), 800)
    assert found({sized(4, 4): 64}, sized(3, 4)) == ("covered", (4, 4), 64)
    # Neither size covers the other: there is no line between them.
    assert lines_of({sized(1, 9): grown(9), sized(9, 1): grown(9)}) == ()


def test_dimensions_that_grow_at_different_rates_are_on_one_line_and_rounded_up_between():
    both = {sized(10, 5): 100, sized(20, 10): 200}
    assert found(both, sized(14, 7)) == ("interpolated", (14, 7), 140)
    assert found(both, sized(13, 6)) == ("covered", (13, 7), 130)
    assert found(both, sized(11, 7)) == ("covered", (14, 7), 140)
    steep = {sized(10, 10): 100, sized(20, 30): 200}
    assert found(steep, sized(10, 11)) == ("covered", (11, 12), 110)  # the line goes from (10, 10) to (11, 12)


def test_what_the_fit_may_be_off_by_is_left_free():
    profiles = {signature: grown(held_bytes) for signature, held_bytes in LINEAR.items()}
    spare = [expected(lines_of(profiles), profiles, sized(2, size)) for size in (15, 40, 80)]
    assert [own and own.spare_bytes for own in spare] == [3, 3, 7]  # a thousandth of 3000 and 7000 bytes
    alone = {sized(2, 10): profiles[sized(2, 10)]}
    cover = expected((), alone, sized(2, 9))
    assert cover is not None and cover.spare_bytes == 0


def test_several_lines_cross_and_the_smaller_cover_is_taken():
    grid = {sized(4, 64): 256, sized(4, 128): 512, sized(8, 64): 512, sized(8, 128): 1024}
    assert found(grid, sized(8, 96)) == ("interpolated", (8, 96), 768)
    assert found(grid, sized(6, 64)) == ("interpolated", (6, 64), 384)
    assert found(grid, sized(5, 66)) == ("covered", (5, 80), 448)  # on the diagonal; (8, 66) would be 528


def test_sizes_with_other_stages_are_refused():
    profiles = {sized(1): grown(1), sized(2): grown(2, "another")}
    with pytest.raises(IncompatibleProfiles, match="same stages"):
        expected(lines_of(profiles), profiles, sized(1))
