"""The profile of a step as one graph of ops: what each op costs, and the bytes around the graph's two programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from profiler.json_files import from_plain, read_document, to_plain, write_document
from profiler.records import FORMAT, VERSION, Bytes, LinkRecord, Phase, ResidentBytes, Seconds
from profiler.step_graph import StepGraph
from profiler.target_record import TargetRecord

GRAPH_KIND = "graph"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GraphProfile:
    """One profiled training step as a graph of aten ops.

    The phases are those of a step in which every op of the graph runs once, in the order in which they were traced:
    one program for forward and one for backward, and what runs around them. Resident bytes are included. Where a step
    has several forwards and backwards, each phase begins, reaches and ends at the most of them.

    Attributes:
        model_class: class of the model.
        input_shapes: of the batch's tensors.
        device, device_name, torch_version, precision: where and how it ran.
        unused_outputs: places of the forward's outputs, among all leaves, to which the loss hands no gradient.
        graph: its ops, with seconds and transient bytes as measured.
        resident: bytes that are always there.
        before: from the step's beginning to the forward's program.
        forward, backward: the programs.
        between: from the end of the forward's program to the backward's: the loss.
        after: what is left of backward: gradients are accumulated.
        optimizer: the optimizer step; zero seconds and no bytes without one.
        unplanned_peak_bytes, unplanned_seconds: of a plain step, without the graph.
        once_seconds: median seconds of the step in which every op of the graph runs once.
        step_seconds: each plain step that was timed.
        evaluations: how often a step runs forward and backward.
        link: to host memory; None where the device has none.
        target: what the command line built it from; None for a workload that Python made.
        allocator_bytes: as of a Profile.
    """

    kind: ClassVar[str] = GRAPH_KIND

    model_class: str
    input_shapes: tuple[tuple[int, ...], ...]
    device: str
    device_name: str
    torch_version: str
    precision: str
    unused_outputs: tuple[int, ...]
    graph: StepGraph
    resident: ResidentBytes
    before: Phase
    forward: Phase
    between: Phase
    backward: Phase
    after: Phase
    optimizer: Phase
    unplanned_peak_bytes: Bytes
    unplanned_seconds: Seconds
    once_seconds: Seconds
    step_seconds: tuple[Seconds, ...]
    evaluations: int = 1
    link: LinkRecord | None = None
    target: TargetRecord | None = None
    allocator_bytes: Bytes = 0

    def __repr__(self) -> str:
        return (
            f"<GraphProfile of {self.model_class} on {self.device}, {self.precision}: {len(self.graph.ops)} ops, "
            f"unplanned peak {self.unplanned_peak_bytes:,} bytes, {self.unplanned_seconds:.3g} s a step>"
        )

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, whole or not at all."""
        header = {"format": FORMAT, "version": VERSION, "kind": GRAPH_KIND}
        write_document(path, {**header, **to_plain(self)})

    @classmethod
    def load(cls, path: str | Path) -> GraphProfile:
        """Read a profile.

        Raises:
            ValueError: the file is missing, truncated, of another format, kind or version, holds NaN, or lacks a field.
        """
        return cls.from_document(read_document(path, {FORMAT: VERSION}), str(path))

    @classmethod
    def from_document(cls, document: Mapping[str, Any], where: str) -> GraphProfile:
        """Build a profile from its JSON document; ``where`` names it in errors."""
        if document.get("kind") != GRAPH_KIND:
            raise ValueError(
                f"{where}: expected a profile of a graph, got one of stages; profile with graph=True (--graph)"
            )
        data = {key: value for key, value in document.items() if key not in ("format", "version", "kind")}
        try:
            profile = from_plain(cls, data)
            profile.graph.check_positions()
        except ValueError as error:
            raise ValueError(
                f"{where}: expected the fields of a profile, got a mismatch: {error}; profile again"
            ) from error
        return profile
