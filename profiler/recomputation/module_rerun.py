"""Recomputes a module call so that it gives exactly the results of its first run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from profiler.recomputation.module_state import ModuleState
from profiler.recomputation.remembered_tensors import MOST_COPIED_BYTES, UncountedCopy, uncounted_copy
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.data_parallel import units_of
from profiler.workload.plain_objects import Change
from profiler.workload.random_states import HostRandomness, drawing_from_all, states_on
from profiler.workload.tensor_parts import collectives_under_way, wait_for_results
from profiler.workload.tensor_trees import map_tensors
from profiler.workload.torch_state import TorchState, stacks_kept

leave_uncompiled(__name__)

Packed = TypeVar("Packed")
Saw = Callable[[Tensor], bool]  # is told of each tensor that is saved, in order; whether it is needed
NOT_NEEDED = torch.empty(0)  # in the place of a saved tensor that is not
# The depth of nested recomputations at this moment; 0 in a first run.
RERUN_DEPTH: ContextVar[int] = ContextVar("RERUN_DEPTH", default=0)


class _AllSaved(BaseException):
    """Raised inside a recomputation once all that backward needs has been made; no user code should catch it."""


class CallState:
    """Records what a call depends on besides its arguments, before its first run.

    That is what its modules hold, random numbers, and what torch keeps for the whole process (autocast, flags, modes).

    Args:
        module: the called module.
        device: the device of its arguments.
        draws_random: whether it may advance a random generator, of torch, Python or numpy.
        changing: the names (relative to the module) of buffers that it is known to change.
        inputs: the parameters and buffers of a program, which reads nothing else of the modules.

    Attributes:
        units: the units of ``fully_shard`` whose parameters the call uses.
    """

    __slots__ = ("_host", "_modules", "_random", "_torch", "units")

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        *,
        draws_random: bool,
        changing: Collection[str] = (),
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        self._torch = TorchState(device)
        self._random = states_on(device) if draws_random else []
        self._host = HostRandomness() if draws_random and inputs is None else None
        self.units = units_of(module)
        self._modules = ModuleState(module, changing, self.units, inputs=inputs)

    @contextmanager
    def reinstated(self) -> Iterator[None]:
        """Reinstates everything as it was before the first run; on leaving, it is as it was on entering.

        Sharded parameters are there inside.

        Raises:
            RerunError: something has changed that cannot be put back.
        """
        gathered, numbers, host = self.units.gathered(), drawing_from_all(self._random), self._host or nullcontext()
        with running_again(), gathered, self._torch.reinstated(), numbers, host, self._modules.reinstated():
            yield

    def casts(self) -> bool:
        """Whether it runs under autocast."""
        return self._torch.casts()

    def has_changed(self) -> bool:
        """Whether the state of the modules, tensors' values aside, or a generator of the host has changed."""
        return not self._modules.holds_what_it_held() or (self._host is not None and self._host.has_advanced())

    def plain_changes(self) -> list[Change] | None:
        """Returns the changes of attributes and containers of the modules; None where more has changed."""
        advanced = self._host is not None and self._host.has_advanced()
        return None if advanced else self._modules.plain_changes()

    def tensors_now(self) -> list[Tensor]:
        """The tensors that the modules hold now."""
        return self._modules.tensors_now()

    def first_run_over(self, before: Mapping[int, UncountedCopy]) -> list[Tensor]:
        """Has recomputations begin with the values that parameters had before the first run, which may have set them.

        Args:
            before: copies of parameters by their ids, as ``copies_of_parameters`` makes them.

        Returns:
            The parameters that it set and that have no copy.
        """
        return self._modules.first_run_over(before)

    def state_storages(self) -> set[int]:
        """The storages of the tensors that the modules hold besides parameters."""
        return self._modules.storages()


def copies_of_parameters(module: nn.Module) -> dict[int, UncountedCopy]:
    """Copies a module's parameters but the large ones, in case that a first run sets them by its data."""
    small = (p for p in module.parameters() if p.numel() * p.element_size() <= MOST_COPIED_BYTES)
    return {id(p): copied for p in small if (copied := uncounted_copy(p)) is not None}


class running_again:  # as torch.no_grad; a generator would take longer than what it does
    """Marks ops inside as recomputed: recorders of a first run leave them out.

    Where an error leaves it, torch's stacks are as on entering.
    """

    __slots__ = ("_depth", "_stacks")

    def __enter__(self) -> None:
        self._depth, self._stacks = RERUN_DEPTH.get(), stacks_kept()
        try:
            self._stacks.__enter__()
            RERUN_DEPTH.set(self._depth + 1)
        except BaseException:
            RERUN_DEPTH.set(self._depth)
            raise

    def __exit__(self, *error: object) -> None:
        RERUN_DEPTH.set(self._depth)
        self._stacks.__exit__(*error)


def rerun_dropping(call: Callable[..., Any], state: CallState, args: Any, kwargs: Any, saw: Saw | None = None) -> Any:
    """Run again, keep nothing for backward, return the output cut off from the graph.

    Args:
        call, args, kwargs: the call to run.
        state: recorded in the first run.
        saw: called with each tensor that autograd saves.
    """
    hooks = torch.autograd.graph.saved_tensors_hooks(saw or (lambda tensor: False), _not_to_be_unpacked)
    with state.reinstated(), torch.enable_grad(), hooks:
        return detached(wait_for_results(call(*args, **kwargs)))


def rerun_keeping(
    call: Callable[..., Any], state: CallState, args: Any, kwargs: Any, saw: Saw | None = None
) -> tuple[list[Tensor], Any]:
    """Recomputes to the end; returns the tensors that autograd saved, in order, and the output without its graph."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> None:
        saved.append(tensor.detach() if saw is None or saw(tensor) else NOT_NEEDED)

    with state.reinstated(), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, _not_to_be_unpacked):
        output = detached(wait_for_results(call(*args, **kwargs)))
    return emptied(saved), output


def rerun_until_saved(
    call: Callable[..., Any], state: CallState, args: Any, kwargs: Any, expected: int, saw: Saw | None = None
) -> list[Tensor]:
    """Recomputes only until ``expected`` tensors have been saved; returns them in order, fewer where it ended before.

    A call that has units of ``fully_shard`` inside runs to its end: a unit that is left by an exception stays gathered.
    So does one where a collective is under way then.
    """
    if expected and state.units.inside:
        return rerun_keeping(call, state, args, kwargs, saw)[0]
    saved: list[Tensor] = []
    under_way = collectives_under_way()

    def pack(tensor: Tensor) -> None:
        saved.append(tensor.detach() if saw is None or saw(tensor) else NOT_NEEDED)
        if len(saved) == expected and collectives_under_way() <= under_way:
            raise _AllSaved

    if expected == 0:
        return saved
    with state.reinstated(), torch.enable_grad():
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, _not_to_be_unpacked):
                wait_for_results(call(*args, **kwargs))
        except _AllSaved:
            pass
    return emptied(saved)


def emptied(saved: list[Packed]) -> list[Packed]:
    """Empties the hook's own list: a node that outlives the recomputation (a stored tensor's) keeps the hook alive."""
    taken = list(saved)
    saved.clear()
    return taken


def detached(tree: Any) -> Any:
    """Returns the same tensors without their history; those that required grad still do, and become no leaves.

    A tensor that stands there several times is one tensor afterwards, too: attention asks whether its inputs are.
    """
    cuts: dict[int, Tensor] = {}

    def cut(tensor: Tensor) -> Tensor:
        if tensor.grad_fn is None:
            return tensor
        if id(tensor) not in cuts:
            cuts[id(tensor)] = with_other_history(tensor)
        return cuts[id(tensor)]

    return map_tensors(cut, tree)


def with_other_history(tensor: Tensor) -> Tensor:
    """Returns the same tensor as the result of a node that is never walked."""
    with torch.enable_grad():
        return _Cut.apply(_ANCHOR, [tensor])  # pyright: ignore[reportArgumentType, reportReturnType]


_ANCHOR = torch.zeros((), requires_grad=True)


class _Cut(torch.autograd.Function):
    """Gives the tensor in ``box`` another history: of one node, which is never walked.

    Autocast caches the casts of leaves, so a recomputation with a leaf for its input would cast, and save, less often
    than the first run did.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, box: list[Tensor]) -> Tensor:
        return box[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("a rerun's graph is never walked")


def _not_to_be_unpacked(_: Any) -> Tensor:
    raise AssertionError("a rerun's graph is never walked")
