"""Optimizer steps, by their code: which tensors one step holds beside gradients and states, moment by moment."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Variant = Literal["for-loop", "foreach", "fused"]
Settings = dict[str, Any]
# A Python number that an op takes becomes a tensor of one element on the CPU, float64 or int64 (ATen's wrapped
# numbers), and is cast to the type that the op computes in.
_NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A parameter as far as its optimizer is concerned.

    Attributes:
        shape: of the parameter, and of its gradient.
        item_bytes: of one element.
        kind: name of its type, as ``float32``.
        block_bytes: allocations are multiples of this: 1 on the CPU, 512 on CUDA.
        product_bytes: scratch that the kernel asks for which multiplies a column by a row to this shape.
    """

    shape: tuple[int, ...]
    item_bytes: int = 4
    kind: str = "float32"
    block_bytes: int = 1
    product_bytes: int = 0

    @property
    def count(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """What the device's allocator counts for it."""
        return self.bytes_of(self.shape)

    def bytes_of(self, shape: Sequence[int], item_bytes: int | None = None) -> int:
        """What the allocator counts for a tensor of ``shape`` beside it, of its own type or another."""
        size = math.prod(shape) * (item_bytes or self.item_bytes)
        return -(-size // self.block_bytes) * self.block_bytes

    def number_bytes(self, item_bytes: int | None = None) -> int:
        """A Python number beside it, or beside a tensor of another type: on the host, so nothing where it is not."""
        return _NUMBER_BYTES + (item_bytes or self.item_bytes) if self.block_bytes == 1 else 0


class Room:
    """The local variables of an optimizer's step: what they hold, and the most that they ever held."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._held: dict[str, int] = {}

    def hold(self, name: str, size_bytes: int, *, beside_bytes: int = 0) -> None:
        """Bind a name to a new tensor; what it held before is there until the new one is.

        ``beside_bytes`` are alive only while the tensor is made.
        """
        self.most_bytes = max(self.most_bytes, sum(self._held.values()) + size_bytes + beside_bytes)
        self._held[name] = size_bytes

    def use(self, size_bytes: int) -> None:
        """Make something that is gone at once."""
        self.most_bytes = max(self.most_bytes, sum(self._held.values()) + size_bytes)

    def drop(self, *names: str) -> None:
        """Bind names to what is alive anyway."""
        for name in names:
            self._held.pop(name, None)


def sgd_for_loop(room: Room, weights: Sequence[Weight], settings: Settings) -> None:
    """torch.optim.sgd._single_tensor_sgd."""
    for weight in weights:
        _gradient(room, weight, settings, decays=bool(settings["weight_decay"]))
        if settings["momentum"]:
            room.use(weight.number_bytes())
        if settings["momentum"] and settings["nesterov"]:
            room.hold("grad", weight.size_bytes)
        elif settings["momentum"]:
            room.drop("grad")


def sgd_foreach(room: Room, weights: Sequence[Weight], settings: Settings) -> None:
    """torch.optim.sgd._multi_tensor_sgd."""
    for group in _by_kind(weights):
        _gradients(room, group, settings, decays=bool(settings["weight_decay"]))
        if settings["momentum"]:
            room.use(group[0].number_bytes())
        if settings["momentum"] and not settings["nesterov"]:
            room.drop("grad")


def adam_for_loop(room: Room, weights: Sequence[Weight], settings: Settings) -> None:
    """torch.optim.adam._single_tensor_adam."""
    for weight in weights:
        _gradient(room, weight, settings, decays=_adds_decay(settings))
        room.hold("root", weight.size_bytes)
        room.hold("denom", weight.size_bytes, beside_bytes=weight.number_bytes())
        room.drop("root")


def adam_foreach(room: Room, weights: Sequence[Weight], settings: Settings) -> None:
    """torch.optim.adam._multi_tensor_adam."""
    for group in _by_kind(weights):
        _gradients(room, group, settings, decays=_adds_decay(settings))
        room.drop("grad")
        room.hold("root", _total(group), beside_bytes=group[0].number_bytes())


def adafactor_for_loop(room: Room, weights: Sequence[Weight], settings: Settings) -> None:
    """torch.optim._adafactor._single_tensor_adafactor; the update of one weight is there until the next one's."""
    for weight in weights:
        _gradient(room, weight, settings, decays=False)
        if len(weight.shape) > 1:
            room.hold("row_mean", weight.bytes_of((*weight.shape[:-1], 1)))
            room.hold("col_mean", weight.bytes_of((*weight.shape[:-2], 1, weight.shape[-1])))
            mean_bytes = _mean_bytes(weight) + weight.number_bytes()
            beside_bytes = max(weight.product_bytes, mean_bytes, _averaging_bytes(weight))
            room.hold("update", weight.size_bytes, beside_bytes=beside_bytes)
        else:
            room.hold("grad_squared", weight.size_bytes)
            room.hold("update", weight.size_bytes)


def adafactor_foreach(room: Room, weights: Sequence[Weight], settings: Settings) -> None:
    """torch.optim._adafactor._multi_tensor_adafactor."""
    for flat in (False, True):
        for group in _by_kind([weight for weight in weights if (len(weight.shape) <= 1) == flat]):
            _gradients(room, group, settings, decays=False)
            if flat:
                room.hold("grads_squared", _total(group))
                room.drop("grads_squared")
                room.hold("updates", _total(group))
            else:
                _products(room, group)


def _products(room: Room, group: Sequence[Weight]) -> None:
    """One after the other; the updates of the group before are there until all of this one's are."""
    before_bytes = 0
    for weight in group:
        room.use(before_bytes + weight.size_bytes + weight.product_bytes)
        before_bytes += weight.size_bytes
    means_bytes = 0
    for weight in group:
        room.use(before_bytes + means_bytes + _averaging_bytes(weight))
        means_bytes += _mean_bytes(weight)
    room.hold("updates", before_bytes, beside_bytes=means_bytes + group[0].number_bytes())


def _mean_bytes(weight: Weight) -> int:
    """The mean over the rows of the row factor."""
    return weight.bytes_of((*weight.shape[:-2], 1, 1))


def _averaging_bytes(weight: Weight) -> int:
    """What making it takes: of half-precision factors by way of float32, both of them."""
    if weight.item_bytes >= 4:
        return _mean_bytes(weight)
    rows = weight.bytes_of((*weight.shape[:-1], 1), 4)
    return _mean_bytes(weight) + weight.bytes_of((*weight.shape[:-2], 1, 1), 4) + rows


def transformers_adafactor(room: Room, weights: Sequence[Weight], settings: Settings) -> None:
    """transformers.optimization.Adafactor.step: in float32, with copies of half-precision gradients and weights."""
    for weight in weights:
        whole, half = weight.bytes_of(weight.shape, 4), weight.item_bytes < 4
        room.drop("grad", "weight")
        for name in ("grad", "weight") if half else ():
            room.hold(name, whole)
        if settings["scale_parameter"]:
            room.hold("lr", weight.bytes_of((), 4))
        room.hold("square", whole)
        room.hold("update", whole, beside_bytes=weight.number_bytes(4))
        room.drop("square")
        if len(weight.shape) > 1:
            room.hold("row", weight.bytes_of(weight.shape[:-1], 4))
            room.hold("column", weight.bytes_of((*weight.shape[:-2], weight.shape[-1]), 4))
        room.hold("update", whole)
        room.drop("row", "column")
        if settings["beta1"] is not None:
            room.drop("update")
        room.hold("negative", whole)
        room.drop("negative")


def sgd_fused(room: Room, weights: Sequence[Weight], settings: Settings) -> None:
    """torch.optim.sgd._fused_sgd: in place."""


def adam_fused(room: Room, weights: Sequence[Weight], settings: Settings) -> None:
    """torch.optim.adam._fused_adam: in place, but for the one that is added to the number of steps."""
    room.use(weights[0].number_bytes(4) if weights else 0)


def with_unscaling(scale: Weight, step_bytes: int) -> int:
    """torch.amp.GradScaler.step: the scale's inverse by way of float64; whether all are finite is held in the step."""
    return max(2 * scale.bytes_of((), 8), scale.bytes_of((), 4) + step_bytes)


Step = Callable[[Room, Sequence[Weight], Settings], None]


def _gradient(room: Room, weight: Weight, settings: Settings, *, decays: bool) -> None:
    """The variable ``grad`` of a for-loop: the parameter's own gradient, or a copy with another sign, or with decay."""
    if settings.get("maximize"):
        room.hold("grad", weight.size_bytes)
    else:
        room.drop("grad")
    if decays:
        room.hold("grad", weight.size_bytes)


def _gradients(room: Room, group: Sequence[Weight], settings: Settings, *, decays: bool) -> None:
    """The same for all weights of a type at once; decay is added in place to what has another sign."""
    room.drop("grad")
    if settings.get("maximize") or decays:
        room.hold("grad", _total(group))


def _adds_decay(settings: Settings) -> bool:
    """Adam's weight decay is added to the gradient, AdamW's taken from the parameter in place."""
    return bool(settings["weight_decay"]) and not settings.get("decoupled_weight_decay")


def _total(weights: Sequence[Weight]) -> int:
    return sum(weight.size_bytes for weight in weights)


def _by_kind(weights: Sequence[Weight]) -> list[list[Weight]]:
    """Foreach variants take the weights of one type at a time."""
    kinds = dict.fromkeys(weight.kind for weight in weights)
    return [[weight for weight in weights if weight.kind == kind] for kind in kinds]
