"""An interrupt between any two lines leaves none of torch's modes, hooks or keys on, and no step under way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.recomputation.module_rerun import RERUN_DEPTH, running_again
from profiler.recomputation.saved_tensors import without_graph
from profiler.workload.data_parallel import SHARDING, running_sharding
from profiler.workload.torch_state import stacks_kept


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


BODIES: list[int] = []  # that have run


def body() -> None:
    BODIES.append(1)


def under_a_mode() -> None:
    with stacks_kept(), Passing(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), torch.no_grad():
        body()


def again_under_a_mode() -> None:
    with running_again(), Passing(), torch.no_grad():
        body()


def detached() -> None:
    without_graph(torch.ones(1))
    body()


def as_the_shardings_own() -> None:
    with running_sharding():
        body()


def state() -> tuple[Any, ...]:
    tls: Any = torch._C
    return (
        dispatch._len_torch_dispatch_stack(),
        *(value for name, value in vars(dispatch).items() if name.startswith("_is_in_") and type(value) is bool),
        tls._autograd._top_saved_tensors_default_hooks(False),
        torch.is_grad_enabled(),
        str(tls._dispatch_tls_local_exclude_set()),
        torch.is_autocast_enabled("cpu"),
        RERUN_DEPTH.get(),
        SHARDING.get(),
        torch.get_rng_state().sum().item(),
    )


def interrupted_at(number: int, run: Callable[[], object], files: tuple[str, ...], *, leaving: bool = True) -> bool:
    """Run it, and raise KeyboardInterrupt as the line of this number begins; whether there were so many."""
    seen = 0
    BODIES.clear()

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.endswith(files):
            return None
        seen += event == "line"
        if event == "line" and seen == number and (leaving or not BODIES):
            raise KeyboardInterrupt(f"{frame.f_code.co_name}, line {frame.f_lineno}")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


ENTERING = ("torch_state.py", "module_rerun.py", "saved_tensors.py", "data_parallel.py")
ENTERED = ("_python_dispatch.py", "autograd/graph.py", "grad_mode.py")
RUNS = (under_a_mode, again_under_a_mode, detached, as_the_shardings_own)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_an_interrupt_between_two_lines_leaves_torch_as_it_was(run: Callable[[], object]):
    run()
    before, number = state(), 1
    # Python may interrupt what leaves as well, before it has left: of ours only the outermost is sound there.
    while interrupted_at(number, run, (*ENTERING, *ENTERED), leaving=run is under_a_mode):
        assert state() == before, f"after an interrupt at line {number} of the run"
        number += 1
    assert number > 2
    torch._dynamo.reset()
    assert torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)(torch.ones(1)).item() == 2
