"""What ops that run again in backward read of a call's inputs: it has to be as it was in forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, fx

from profiler.capture.joint_graph import is_view
from profiler.capture.programs import AGAIN
from profiler.recomputation.host_copies import UncountedCopy
from profiler.recomputation.saved_tensors import RerunError, Values, some_values_of, version_of

CHANGED = (
    "expected {} that ops which run again read to be as it was in forward, got one that was changed in place since; "
    "call backward before anything writes to it, or profile with menus=False"
)


class Batch(Protocol):
    """What a model was given in a step; the loop may write to it before backward.

    Attributes:
        backward_begun: set as the backward of a call begins.
    """

    backward_begun: bool

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is a part of it."""
        ...

    def copy_of(self, tensor: Tensor) -> UncountedCopy | None:
        """Its values; None for tensors that cannot be copied as they lie."""
        ...


class InputRead(NamedTuple):
    """An input of a call that ops read which run again in backward.

    Attributes:
        place: among what forward hands over.
        of_module: it is a parameter or a buffer, not an argument.
        alone: no op of backward itself reads it.
    """

    place: int
    of_module: bool
    alone: bool


def inputs_read_again(backward: fx.GraphModule, of_module: dict[str, bool]) -> list[InputRead]:
    """The inputs that a program of a backward takes, and reads in second runs.

    Args:
        backward: the program.
        of_module: by the names of the call's inputs, whether they are parameters or buffers.
    """
    found: list[InputRead] = []
    for place, node in enumerate(backward.graph.find_nodes(op="placeholder")):
        if node.name in of_module:
            readers = _readers(node)
            again = [AGAIN in reader.meta for reader in readers]
            if any(again):
                found.append(InputRead(place, of_module[node.name], all(again)))
    return found


def _readers(node: fx.Node) -> list[fx.Node]:
    """What reads a value, by views of it as well."""
    readers: list[fx.Node] = []
    for user in node.users:
        readers += _readers(user) if is_view(user) and AGAIN not in user.meta else [user]
    return readers


class _Copied(NamedTuple):
    """A part of the batch that backward itself does not read, with its version, some of its values, and all of them."""

    place: int
    tensor: Tensor
    version: int
    values: Values
    copy: UncountedCopy

    def as_before(self) -> Tensor:
        """The tensor, or one with its values where it was changed."""
        is_same = version_of(self.tensor) == self.version and some_values_of(self.tensor) == self.values
        return self.tensor if is_same and not self.copy.other_than(self.tensor) else self.copy.on(self.tensor.device)


class ReadAgain:
    """Inputs that ops read which run again, as they were in forward.

    Args:
        reads: the inputs.
        handed: what forward hands over; what of the batch only second runs read is taken out of it.
        batch: of the step; None where it is not known.
        checked: whether backward compares some values of parameters with those of forward.
    """

    __slots__ = ("_copies", "_values")

    def __init__(self, reads: Sequence[InputRead], handed: list[Any], batch: Batch | None, *, checked: bool) -> None:
        self._copies: list[_Copied] = []
        self._values: list[tuple[int, bool, Values]] = []
        for place, of_module, alone in reads:
            tensor = handed[place]
            if of_module:
                if checked:
                    self._values.append((place, True, some_values_of(tensor)))
            elif batch is not None and batch.holds(tensor):
                values = some_values_of(tensor)
                if alone and (copy := batch.copy_of(tensor)) is not None:
                    self._copies.append(_Copied(place, tensor.detach(), version_of(tensor), values, copy))
                    handed[place] = None  # Autograd would refuse it once it was changed.
                else:
                    self._values.append((place, False, values))

    def put_into(self, saved: list[Any]) -> None:
        """Put what was taken out back into what was handed over.

        Raises:
            RerunError: something that is read again was changed.
        """
        for each in self._copies:
            saved[each.place] = each.as_before()
        for place, of_module, values in self._values:
            if some_values_of(saved[place]) != values:
                shape = tuple(saved[place].shape)
                raise RerunError(CHANGED.format(f"{'a parameter' if of_module else 'an input'} of shape {shape}"))
