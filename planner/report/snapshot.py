"""The predicted step of a plan as a memory snapshot of torch's: what pytorch.org/memory_viz opens.

The layout is that of ``torch.cuda.memory._snapshot()``: traces of allocations by device, and segments that hold what is
left at the end. Sizes are the plan's own bytes; addresses are made up, by first fit.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from planner.explain.timeline import Span
from planner.plans.plan import Plan
from planner.report.plan_report import ExplainedStep, predicted_steps
from profiler.json_files import write_whole

PROTOCOL = 4  # the viewer reads pickles of protocol 2 to 4
_BASE = 1 << 40
_ALIGNMENT = 512  # of CUDA's caching allocator
Label = tuple[str, str, str]


def write_snapshot(plan: Plan, path: str | Path) -> None:
    """Write the predicted step of a plan, on any device, for https://pytorch.org/memory_viz.

    Args:
        plan: with its chain.
        path: the path of the pickle. Dragging it onto the viewer does not upload it.

    Raises:
        ValueError: a folder that is not there, or a plan of an older release, without its chain.
    """
    write_whole(path, pickle.dumps(snapshot_of(predicted_steps(plan)[1]), protocol=PROTOCOL))


def snapshot_of(step: ExplainedStep) -> dict[str, Any]:
    """The snapshot of a step: the most bytes allocated in each action are those of its peak."""
    heap = _Heap()
    sizes: dict[int, int] = {}
    for number, (span, changes) in enumerate(zip(step.timeline.spans, step.history.changes, strict=True)):
        sizes.update(changes)
        heap.hold({step.history.labels[k]: size for k, size in _positive(sizes).items()}, span, number)
    return {"segments": [heap.segment()], "device_traces": [heap.trace], "allocator_settings": {}}


def _positive(sizes: Mapping[int, int]) -> dict[int, int]:
    """Bytes without negative ones, which correct what is counted twice: the largest things have so much less."""
    left = {k: size for k, size in sorted(sizes.items(), key=lambda item: -item[1]) if size > 0}
    twice = -sum(size for size in sizes.values() if size < 0)
    for k, size in left.items():
        taken = min(twice, size)
        left[k], twice = size - taken, twice - taken
    return {k: size for k, size in left.items() if size}


class _Block(NamedTuple):
    address: int
    size: int
    frames: list[dict[str, Any]]

    @property
    def end(self) -> int:
        return self.address + -(-self.size // _ALIGNMENT) * _ALIGNMENT


class _Heap:
    """Allocations that follow the bytes that are to be alive, and the trace of them."""

    def __init__(self) -> None:
        self.trace: list[dict[str, Any]] = []
        self._blocks: dict[Label, list[_Block]] = {}
        self._highest = _BASE

    def hold(self, wanted: Mapping[Label, int], span: Span, number: int) -> None:
        """Free what is not wanted any more, then allocate what is missing."""
        for label, blocks in self._blocks.items():
            while sum(block.size for block in blocks) > wanted.get(label, 0):
                self._free(blocks.pop(), span)
        for label, size in wanted.items():
            blocks = self._blocks.setdefault(label, [])
            missing = size - sum(block.size for block in blocks)
            if missing:
                blocks.append(self._allocate(missing, _frames(label, span, number), span))

    def _allocate(self, size: int, frames: list[dict[str, Any]], span: Span) -> _Block:
        block = _Block(self._first_fit(size), size, frames)
        self._highest = max(self._highest, block.end)
        self._tell("alloc", block, span)
        return block

    def _first_fit(self, size: int) -> int:
        address = _BASE
        for block in self._alive():
            if block.address - address >= size:
                break
            address = block.end
        return address

    def _alive(self) -> list[_Block]:
        return sorted(block for blocks in self._blocks.values() for block in blocks)

    def _free(self, block: _Block, span: Span) -> None:
        self._tell("free_requested", block, span)
        self._tell("free_completed", block, span)

    def _tell(self, action: str, block: _Block, span: Span) -> None:
        self.trace.append(
            {
                "action": action,
                "addr": block.address,
                "size": block.size,
                "stream": 0,
                "time_us": round(span.start_seconds * 1e6),
                "frames": block.frames,
            }
        )

    def segment(self) -> dict[str, Any]:
        """All memory that was ever used, with the blocks that are left."""
        alive, blocks, address = self._alive(), [], _BASE
        for block in alive:
            if block.address > address:
                blocks.append(_inactive(address, block.address))
            blocks.append(
                {
                    "address": block.address,
                    "size": block.end - block.address,
                    "requested_size": block.size,
                    "state": "active_allocated",
                    "frames": block.frames,
                }
            )
            address = block.end
        if self._highest > address:
            blocks.append(_inactive(address, self._highest))
        used = sum(block.end - block.address for block in alive)
        return {
            "device": 0,
            "address": _BASE,
            "total_size": self._highest - _BASE,
            "allocated_size": used,
            "active_size": used,
            "requested_size": sum(block.size for block in alive),
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }


def _inactive(address: int, end: int) -> dict[str, Any]:
    size = end - address
    return {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}


def _frames(label: Label, span: Span, number: int) -> list[dict[str, Any]]:
    """The stack that the viewer shows: the op in its module, the reason, and the action of the step."""
    what, op, module = label
    action = f"{span.action} of {span.stage}" if span.stage else span.action
    return [
        {"name": op or what, "filename": module or "model", "line": 0},
        {"name": what, "filename": "plan", "line": 0},
        {"name": action, "filename": "step", "line": number + 1},
    ]
