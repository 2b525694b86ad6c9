"""Has a head wait for its loss, so that both run a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import profiler.pieces.row_functions  # noqa: F401 - it says what becomes of the output
from profiler.pieces.head_output import HeadCall, HeadOutput, LossScale, Row
from profiler.recomputation.torch_state import TorchState
from profiler.tensors.tensor_parts import any_distributed
from profiler.workload.compiled_forwards import Forward

_ROWS = {"cpu": 128}  # fewer would not fill the cores
_ROWS_ELSEWHERE = 1024


def rows_at_once(device_type: str) -> int:
    """How many rows of a head make up a piece on this kind of device."""
    return _ROWS.get(device_type, _ROWS_ELSEWHERE)


class HeadInPieces:
    """Calls of a head that give a stand-in for their output, which its loss makes in pieces.

    Args:
        head: takes each row by itself.
        rows_at_once: that run together; a call of no more runs as it is.
        say_whole: called where all of an output is made at once after all.

    Attributes:
        made_whole: how many calls had to make all of their output at once.
        waited: how many calls waited for a loss.
    """

    def __init__(self, head: nn.Module, rows_at_once: int, say_whole: Callable[[], None] | None = None) -> None:
        self._head, self._rows_at_once, self._say_whole = head, rows_at_once, say_whole
        self._scale = LossScale(next(head.parameters(), torch.empty(0)).device)
        self._kinds: dict[Any, Row] = {}  # of the output, by all that its type depends on
        self.made_whole = self.waited = 0

    def wrapped(self, forward: Forward) -> Forward:
        """In the place of the head's forward."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._may_wait(args, kwargs):
                return forward(*args, **kwargs)
            self.waited += 1
            return self._output(forward, args[0])

        return run

    def _may_wait(self, args: Any, kwargs: Any) -> bool:
        if not torch.is_grad_enabled() or kwargs or len(args) != 1 or not self._head.training:
            return False
        (rows,) = args
        if type(rows) is not Tensor or not rows.is_floating_point() or rows.dim() < 2:
            return False
        if rows.shape[:-1].numel() <= self._rows_at_once or any_distributed(map(type, self._head.parameters())):
            return False
        return rows.requires_grad or any(p.requires_grad for p in self._head.parameters())

    def _output(self, forward: Callable[..., Any], rows: Tensor) -> HeadOutput:
        call = HeadCall(
            forward=forward,
            state=TorchState(rows.device),
            parameters=tuple(p for p in self._head.parameters() if p.requires_grad),
            rows_at_once=self._rows_at_once,
            whole=self._note_whole,
            scale=self._scale,
        )
        given = rows.dtype, rows.shape[-1], call.state.casts() and torch.get_autocast_dtype(rows.device.type)
        if given not in self._kinds:
            with torch.no_grad():
                row = call.outputs(rows.detach().reshape(-1, rows.shape[-1])[:1])[0]
            self._kinds[given] = Row(len(row), row.dtype)
        return HeadOutput.of(call, rows, self._kinds[given])

    def _note_whole(self) -> None:
        self.made_whole += 1
        if self._say_whole is not None:
            self._say_whole()
