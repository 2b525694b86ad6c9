"""Every habit that a stage may have: a choice of its ops runs again, exactly those, bit for bit, and nothing stays."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator

import pytest

from profiler.op_graph import StageOps
from profiler.recomputation.selection import Selection
from tests.support.op_cases import CASES
from tests.support.op_cases.observed import Observed, expected_again, expected_more, more, observe
from tests.support.op_cases.runs import closed_choices, differences, everything_once, flow_of, run

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
SEED, COUNT = 1, 4
# Less runs again than a choice says where what was saved was not seen to be what the op made: it is kept.
LESS_AGAIN = {
    "functions": "marking an output as changed counts as a change",
    "inference_inside": "by its schema aten.to returns its argument, and then no op has made the result",
    "data_replaced": "what a tensor is set to counts as changed",
    "backward_inside": "what a backward inside asks for is not made again while it is still there",
}
# More or less is kept than the dataflow says.
OTHER_BYTES = {
    **LESS_AGAIN,
    "gradients_toggled": "a leaf that the stage makes is kept, and a backward inside lets go of what its graph saved",
    "out_arguments": "storages are resized after they were made",
    "sparse": "sparse tensors have no storage of their own",
    "made_in_forward": "indices that are there anyway are saved as well",
    "buffer_replaced": "the new buffer stays with the module",
}


@functools.cache
def flow(name: str) -> StageOps:
    return flow_of(CASES[name])


@functools.cache
def reruns(name: str) -> tuple[frozenset[int], ...]:
    """Random choices, and as much as possible at once."""
    found = [choice.rerun for choice in closed_choices(flow(name), SEED, COUNT)]
    return tuple(dict.fromkeys([*found, frozenset(everything_once(flow(name)))]))


@functools.cache
def observed(name: str, rerun: frozenset[int] | None) -> Observed:
    return observe(CASES[name], None if rerun is None else Selection.of(flow(name), rerun))


@pytest.fixture(scope="module")
def imported() -> None:
    """What torch imports in a process's first step of this kind leaves cycles with that step's tensors."""
    observe(CASES["piece_changed"], None)


@pytest.fixture
def uncollected(imported: None) -> Iterator[None]:
    """What only the garbage collector would find is alive."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("name", CASES)
def test_whatever_runs_again_the_step_is_the_same_bit_for_bit(name: str) -> None:
    """Also the second time, by what the first has prepared."""
    plain, _ = run(CASES[name], None)
    for rerun in reruns(name):
        for _ in range(2):
            found, call = run(CASES[name], Selection.of(flow(name), rerun))
            assert differences(plain, found) == [], sorted(rerun)
            assert call is not None and call.diverged is None


@pytest.mark.parametrize("name", CASES)
def test_what_runs_again_is_what_was_chosen(name: str, uncollected: None) -> None:
    for rerun in reruns(name):
        again, expected = observed(name, rerun).again, expected_again(flow(name), rerun)
        assert again <= expected if name in LESS_AGAIN else again == expected, sorted(rerun)


@pytest.mark.parametrize("name", CASES)
def test_after_forward_the_bytes_of_the_choice_are_alive_and_after_backward_none(name: str, uncollected: None) -> None:
    plain = observed(name, None)
    for rerun in reruns(name):
        found = observed(name, rerun)
        if name not in OTHER_BYTES:
            assert more(found.after_forward, plain.after_forward) == expected_more(flow(name), rerun), sorted(rerun)
        assert found.after_backward == plain.after_backward, sorted(rerun)


def test_in_every_case_something_runs_again() -> None:
    """But where all that is saved are inputs."""
    assert [name for name in CASES if not any(reruns(name))] == ["bilinear"]
