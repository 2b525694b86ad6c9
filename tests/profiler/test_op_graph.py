"""Which ops of a stage run again when something is not kept, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from profiler.json_files import from_plain, to_plain
from profiler.op_graph import ChoiceError, StageOp, StageOps, StageStorage, is_allocation, kind_of

INPUT, BUFFER, ROOT, EXP, TANH, LAST = range(6)
MUL, TO_EXP, RELU, TO_TANH, ADD = range(5)


def op(kind: str, **values) -> StageOp:
    return StageOp(**{"op": f"aten.{kind}.default", "module": "", "seconds": 1.0, **values})


def flow(**changes: StageOp) -> StageOps:
    """y = input * buffer; z = exp(y); relu_(y); w = tanh(y); return w + z. Of what is made, z and w are saved."""
    ops = {
        "mul": op("mul", reads=((INPUT, 0), (BUFFER, 0)), allocates=(ROOT,)),
        "exp": op("exp", reads=((ROOT, 0),), allocates=(EXP,), seconds=3.0),
        "relu_": op("relu_", reads=((ROOT, 0),), writes=(ROOT,)),
        "tanh": op("tanh", reads=((ROOT, 1),), allocates=(TANH,), seconds=2.0),
        "add": op("add", reads=((EXP, 0), (TANH, 0)), allocates=(LAST,)),
    }
    storages = (
        StageStorage(size_bytes=8, op=-1, dies_after_stage=True),
        StageStorage(size_bytes=1, op=-1, always_live=True, saved=True),
        StageStorage(size_bytes=16, op=MUL, versions=1),
        StageStorage(size_bytes=32, op=TO_EXP, saved=True),
        StageStorage(size_bytes=64, op=TO_TANH, saved=True),
        StageStorage(size_bytes=128, op=ADD, returned=True),
    )
    return StageOps(ops=tuple({**ops, **changes}.values()), storages=storages)


def test_every_value_has_its_writer() -> None:
    assert flow().writers() == {
        (ROOT, 0): MUL,
        (ROOT, 1): RELU,
        (EXP, 0): TO_EXP,
        (TANH, 0): TO_TANH,
        (LAST, 0): ADD,
    }
    assert flow().saved_bytes == 32 + 64


@pytest.mark.parametrize(
    ("kept", "rerun"),
    [
        ({EXP, TANH}, set()),
        ({INPUT}, {MUL, TO_EXP, RELU, TO_TANH}),  # Not the sum: nothing needs it.
        ({INPUT, EXP}, {MUL, RELU, TO_TANH}),
        ({INPUT, TANH}, {MUL, TO_EXP}),
        # What is kept of the root is what relu_ leaves: it serves tanh, and exp does not find in it what it read.
        ({INPUT, ROOT}, {MUL, TO_EXP, TO_TANH}),
        ({ROOT, EXP}, {TO_TANH}),
        ({INPUT, EXP, LAST}, {MUL, RELU, TO_TANH}),
    ],
)
def test_what_is_needed_for_what_is_saved_runs_again(kept: set[int], rerun: set[int]) -> None:
    assert flow().rerun(kept) == rerun
    assert flow().rerun([*kept, BUFFER]) == rerun  # It is there anyway.


def test_the_input_has_to_be_kept_to_read_it_again() -> None:
    with pytest.raises(ChoiceError, match="input 0 of the stage, .* is dropped or changed in place; keep it"):
        flow().rerun({EXP})


@pytest.mark.parametrize(
    ("dropped", "rerun"),
    [
        ([TO_TANH], {TO_TANH}),
        # What exp reads cannot be kept, as relu_ changes it: the op that makes it runs again too.
        ([TO_EXP], {MUL, TO_EXP}),
        ([TO_EXP, TO_TANH], {MUL, TO_EXP, TO_TANH}),
        ([RELU, TO_TANH], {MUL, RELU, TO_TANH}),
        ([MUL, TO_TANH], {TO_TANH}),  # What it reads is kept as relu_ leaves it.
        ([MUL, RELU, TO_TANH], {MUL, RELU, TO_TANH}),
        ([RELU], set()),  # Nobody asks for it.
        ([ADD], set()),
        ([], set()),
    ],
)
def test_to_drop_ops_keeps_what_they_read(dropped: list[int], rerun: set[int]) -> None:
    assert flow().rerun_without(dropped) == rerun


def test_an_op_that_must_not_run_again_is_named_with_the_reason() -> None:
    fixed = flow(
        relu_=op("relu_", reads=((ROOT, 0),), writes=(ROOT,), not_rerunnable_reason="it must not", module="act")
    )
    with pytest.raises(
        ChoiceError, match=r"op 2 .aten\.relu_\.default in act. must not be recomputed: .*; keep its results"
    ):
        fixed.rerun({INPUT})
    assert fixed.rerun({INPUT}, forced={RELU}) == {MUL, TO_EXP, RELU, TO_TANH}
    assert fixed.rerun({INPUT, TANH}) == {MUL, TO_EXP}
    with pytest.raises(ChoiceError, match=r"op 2 \(aten\.relu_\.default in act\)"):
        fixed.rerun_without([RELU, TO_TANH])
    assert fixed.rerun_without([RELU, TO_TANH], forced=[RELU]) == {MUL, RELU, TO_TANH}
    assert fixed.rerun_without([TO_TANH]) == {TO_TANH}
    alone = flow(mul=op("mul", reads=((INPUT, 0),), allocates=(ROOT,), not_rerunnable_reason="no"))
    with pytest.raises(ChoiceError, match=r"in the stage itself"):
        alone.rerun({INPUT})


def test_what_ops_read() -> None:
    assert flow().read_by([MUL, TO_TANH]) == {INPUT, BUFFER, ROOT}


def test_kinds() -> None:
    assert kind_of("aten.mul.Tensor") == "mul" and kind_of("odd") == "odd"
    assert [is_allocation(f"aten.{name}.default") for name in ("new_empty_strided", "zeros", "new_zeros")] == [
        True,
        False,
        False,
    ]


def test_a_dataflow_goes_through_plain_data() -> None:
    saved = replace(flow(), modules=(("", "Block"), ("act", "ReLU")))
    saved = replace(saved, storages=tuple(replace(s, saved_in=("act",)) for s in saved.storages))
    assert from_plain(StageOps, to_plain(saved)) == saved
