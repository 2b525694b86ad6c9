"""The bytes of orders of a step's ops, by hand."""

from __future__ import annotations

from dataclasses import replace

from profiler.step_graph import StepGraph, StepOp, StepRuns, StepStorage, replay_step, runs_once, without_unread_runs

A, B, OUT, TANGENT, GRAD_B, GRAD = range(6)
SIZES = (10, 20, 40, 80, 160, 320)
STATE = 7


def step() -> StepGraph:
    """a -> b -> out, and back: the gradient of b needs b, the one of a needs a; a is drawn at random."""
    return StepGraph(
        ops=(
            StepOp(name="a", op="aten.rand.default", makes=(A,), state_bytes=STATE),
            StepOp(name="b", op="aten.exp.default", reads=(A,), makes=(B,), transient_bytes=1000),
            StepOp(name="out", op="aten.exp.default", reads=(B,), makes=(OUT,)),
            StepOp(name="grad_b", op="aten.mul.Tensor", side="backward", reads=(TANGENT, B), makes=(GRAD_B,)),
            StepOp(name="grad", op="aten.mul.Tensor", side="backward", reads=(GRAD_B, A), makes=(GRAD,)),
        ),
        storages=tuple(
            StepStorage(size_bytes=size, returned=s == OUT, of_loss=s == TANGENT, gradient=s == GRAD)
            for s, size in enumerate(SIZES)
        ),
        resident_bytes=0,
    )


def test_each_op_once() -> None:
    replay = replay_step(step(), runs_once(step()))
    assert replay.forward.peaks == (10, 1030, 70)
    assert replay.forward.alive == (10, 30, 70)
    assert (replay.backward.start_bytes, replay.backward.peaks) == (110, (270, 490))
    assert replay.backward.alive == (170, 320)  # b and the loss's gradient go first, then a and the gradient of b
    assert (replay.backward.peak_bytes, replay.backward.end_bytes) == (490, 320)


def test_what_runs_again_is_not_handed_over_but_the_state_of_its_random_numbers_is() -> None:
    replay = replay_step(step(), StepRuns((0, 1, 2), (0, 1, 3, 4)))
    assert replay.forward.peaks == (17, 1037, 67)  # a goes after b, b after out
    assert replay.forward.end_bytes == 40 + STATE
    assert replay.backward.start_bytes == 80 + STATE
    assert replay.backward.peaks == (97 + STATE, 1110, 270, 490)  # the state goes with a's last run
    assert replay.backward.end_bytes == 320


def test_what_runs_again_is_counted_beyond_the_first_run() -> None:
    assert StepRuns((0, 1, 2, 1), (0, 1, 3, 4)).again == {0: 1, 1: 2}
    assert not runs_once(step()).again


def test_what_is_made_twice_is_two_storages_one_after_the_other() -> None:
    again = StepRuns((0, 1, 2, 1), (3, 4))
    replay = replay_step(step(), again)
    assert replay.forward.alive == (10, 30, 50, 70)  # the first b goes after out, the second is handed over
    assert replay.backward == replay_step(step(), runs_once(step())).backward


def test_a_second_run_makes_no_statistics_so_those_of_the_first_are_handed_over() -> None:
    plain = step()
    ops = (replace(plain.ops[0], makes=(A, B), once_makes=(B,), state_bytes=0), *plain.ops[2:])
    statistics = replace(plain, ops=ops)
    replay = replay_step(statistics, StepRuns((0, 1), (0, 2, 3)))
    assert replay.forward.end_bytes == SIZES[B] + SIZES[OUT]
    assert replay.backward.start_bytes == SIZES[TANGENT] + SIZES[B]
    assert replay.backward.peaks[0] == SIZES[TANGENT] + SIZES[B] + SIZES[A]


def test_what_forward_returns_counts_in_backward_where_it_is_handed_over() -> None:
    reading = replace(step(), ops=(*step().ops[:4], replace(step().ops[4], reads=(GRAD_B, A, OUT))))
    plain, handed = (replay_step(each, runs_once(each)) for each in (step(), reading))
    assert handed.forward == plain.forward
    assert handed.backward.start_bytes - plain.backward.start_bytes == SIZES[OUT]
    assert handed.backward.peak_bytes - plain.backward.peak_bytes == SIZES[OUT]
    assert handed.backward.end_bytes == plain.backward.end_bytes


def test_gradients_that_others_hold_count_until_backward_ends() -> None:
    let_go, held = (replay_step(step(), runs_once(step()), gradients_held=held) for held in (False, True))
    assert held.forward == let_go.forward
    assert held.backward.peaks[1] - let_go.backward.peaks[1] == SIZES[TANGENT]
    assert held.backward.end_bytes - let_go.backward.end_bytes == SIZES[TANGENT]


def test_between_the_programs_what_is_written_into_buffers_is_gone() -> None:
    writing = step()
    storages = (*writing.storages[:B], replace(writing.storages[B], written=True), *writing.storages[B + 1 :])
    once = replay_step(replace(writing, storages=storages), runs_once(writing))
    again = replay_step(replace(writing, storages=storages), StepRuns((0, 1, 2), (0, 1, 3, 4)))
    assert once.handed == {A, B}
    assert once.between_bytes == SIZES[A] + SIZES[B] + SIZES[OUT]
    assert (again.forward.end_bytes, again.between_bytes) == (SIZES[B] + SIZES[OUT] + STATE, SIZES[OUT] + STATE)


def test_what_nothing_reads_before_it_runs_once_more_is_left_out_in_backward() -> None:
    twice = StepRuns((0, 1, 2), (1, 3, 0, 1, 3, 4))
    assert without_unread_runs(step(), twice) == StepRuns((0, 1, 2), (0, 1, 3, 4))
    read = StepRuns((0, 1, 2), (3, 4, 3))
    assert without_unread_runs(step(), read) == read
    drawn = replace(step(), ops=(replace(step().ops[0], random=True), *step().ops[1:]))
    assert without_unread_runs(drawn, StepRuns((0, 1, 2), (0, 0, 3, 4))).backward == (0, 0, 3, 4)
    assert without_unread_runs(step(), StepRuns((0, 1, 2), (0, 0, 3, 4))).backward == (0, 3, 4)
