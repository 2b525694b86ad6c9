"""The profile: what one training step of one model cost on one device, as plain records in versioned JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol

import msgspec

from profiler.device_record import EstimateRecord, LinkRecord, Rate
from profiler.json_files import check_positions, from_plain, read_document, to_plain, write_document
from profiler.op_graph import StageOps
from profiler.program_replay import CallReplay, call_replay, forward_flow, kept_and_rerun, name_of_runs
from profiler.step_graph import Bytes, Seconds, StepGraph, StepRuns
from profiler.target_record import TargetRecord

if TYPE_CHECKING:
    import pandas as pd

WHOLE_MODEL = "the model"  # the name of the stage where its call is the only one
FORMAT = "planner-profile"
VERSION = 3

# A recomputed call keeps nothing, keeps its saved tensors, or keeps them and stops once all are there.
RecomputeMode = Literal["drop", "keep", "until_saved"]
Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of the step: bytes alive on the device at its start, peak and end, and its seconds."""

    start_bytes: Bytes = 0
    peak_bytes: Bytes = 0
    end_bytes: Bytes = 0
    seconds: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """A stage, or what runs outside of stages between two of them.

    Attributes:
        name: the module's name (``#n``: its n-th further call), or a description.
        kind, module_class: ``stage`` or ``outside``, and the class of the module.
        forward, backward: phases of the unplanned step.
        dropped: the forward in which no stage keeps anything.
        recompute_seconds: the forward again, up to its last saved tensor.
        recompute_peak_bytes: the peak of its recomputation above the bytes alive at its start.
        recompute_ops: aten ops it runs; ``forward_ops`` those of a whole forward.
        boundary_bytes: bytes handed to the next stage that live only for it.
        kept_output_bytes: the part of them that this stage keeps for its own backward.
        lasting_output_bytes: bytes of its other outputs that are alive when its backward begins.
        own_output_bytes: bytes of its other outputs that nothing but its own backward needs.
        kept_bytes: bytes saved for backward, each storage once, without parameters, buffers and the stage's own input.
        links: pairs (input tensor, output tensor of the stage before) that are the same tensor.
        parameter_gradient_bytes: the gradients of the module's own parameters.
        parameter_shapes: names and shapes, to recognise the model.
        input_shapes: shapes of the tensors that go in.
        draws_random, mutated_buffers: the states that a recomputation has to reinstate.
        reason: why the stage cannot be recomputed; empty where it can. ``remedy`` says what to change.
        menu: number of its menu in ``Profile.menus``; -1 for what has none.
        parents: pairs (name, class) of the modules whose call it is a part of, the model first.
        calls: the number of times that the step called its module; 0 in files of older releases.
        inner_calls: pairs (name, times) of other stages' modules that it calls itself: an activation that layers share.
        late_releases: pairs (number of a later stage, bytes): what this one saved, and what went again in that one's
            forward, since the loss does not depend on it.
        gathered_bytes: the bytes of its parameters as they are gathered in its forward, the buffer included; they are
            there when its backward begins.
        copied_bytes: the bytes of a copy of other stages' gradients that may be there as its backward begins.
        unit_bytes: the bytes of the parameters that it gathers in its forward, gives back, and gathers again before its
            backward.
        gather_seconds: the time of gathering them once, beside nothing else.
        trailing_peak_bytes, dropped_trailing_peak_bytes: the peak of the ops without gradients that ran after its
            forward, outside of stages, and count as its own: above the bytes at that forward's start; 0 without any.
        gradient_strides: the strides of the gradients of its outputs that take one; empty where none came.
    """

    name: str
    kind: Literal["stage", "outside"]
    module_class: str = ""
    forward: Phase
    backward: Phase
    dropped: Phase = Phase()
    recompute_seconds: Seconds = 0.0
    recompute_peak_bytes: Bytes = 0
    recompute_ops: Count = 0
    forward_ops: Count = 0
    boundary_bytes: Bytes = 0
    kept_output_bytes: Bytes = 0
    lasting_output_bytes: Bytes = 0
    own_output_bytes: Bytes = 0
    kept_bytes: Bytes = 0
    links: tuple[tuple[int, int], ...] = ()
    parameter_gradient_bytes: Bytes = 0
    parameter_shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    input_shapes: tuple[tuple[int, ...], ...] = ()
    draws_random: bool = False
    mutated_buffers: tuple[str, ...] = ()
    reason: str = ""
    remedy: str = ""
    menu: int = -1
    parents: tuple[tuple[str, str], ...] = ()
    calls: Count = 0
    inner_calls: tuple[tuple[str, int], ...] = ()
    late_releases: tuple[tuple[int, int], ...] = ()
    gathered_bytes: Bytes = 0
    copied_bytes: Bytes = 0
    unit_bytes: Bytes = 0
    gather_seconds: Seconds = 0.0
    trailing_peak_bytes: Bytes = 0
    dropped_trailing_peak_bytes: Bytes = 0
    gradient_strides: tuple[tuple[int, ...], ...] = ()

    @property
    def recomputable(self) -> bool:
        """Whether recomputing the stage gives the same result."""
        return self.kind == "stage" and not self.reason

    @property
    def held_bytes(self) -> int:
        """Bytes that it keeps from its forward to its backward where all of it is kept."""
        return self.kept_bytes if self.kind == "stage" else max(0, self.forward.end_bytes - self.forward.start_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRecord:
    """A program of the stages of a menu: an order of the runs of their graph's ops, and what it costs.

    Attributes:
        name: the recomputed ops, in words.
        runs: the order of the runs.
        kept: storages of the menu's dataflow that are kept, besides those that are held anyway: inputs that backward
            reads.
        rerun: ordinals of the graph's ops that are recomputed in backward.
        kept_output_bytes: the bytes of the program's output that its backward reads.
        forward_seconds, backward_seconds: the time of a stage run so; backward with the recomputed ops in it. To be
            compared with the menu's seconds of keeping everything, timed in the same steps.
        freed_bytes: the bytes by which less is alive after the forward than when everything is kept.
        forward_peak_bytes, backward_peak_bytes: above the bytes alive at the phase's start.
    """

    name: str
    runs: StepRuns
    kept: tuple[int, ...]
    rerun: tuple[int, ...]
    forward_seconds: Seconds
    backward_seconds: Seconds
    freed_bytes: int
    forward_peak_bytes: Bytes
    backward_peak_bytes: Bytes
    kept_output_bytes: Bytes = 0

    @property
    def ops_again(self) -> int:
        """The number of recomputations of ops, each counted as often as it happens."""
        return self.runs.again.total()


@dataclass(frozen=True, slots=True, kw_only=True)
class MenuRecord:
    """Stages that do the same: the dataflow of their forward, and the programs that they may run as.

    Attributes:
        ops: the inputs, results and costs of their ops.
        options: the programs; the first runs each op once, and was measured.
        keep_forward_seconds, keep_backward_seconds: the time of the stages' own code in the same steps.
        graph: the graph of the ops of stages that can run as programs; None for opaque ones.
        opaque: why stages are opaque; empty where they are captured, or that was not tried.
        other_bits: the results that programs of the stages round otherwise than their own code does, in words; empty
            for none.
        compiled: the menu of such programs of opaque stages, for plans that may have other bits; None for other stages.
        unread: attributes in which the stages' modules differ, and which their graph does not depend on.
        gradients_held: the gradients of what some of the stages return are held by others until their backward is over.
        outputs_held: so is what some of them return.
        copied_gradient_bytes: by which more is alive after backward than the gradients that it has made, while autograd
            copies those of parameters that have other strides than the parameter.
    """

    ops: StageOps
    options: tuple[OptionRecord, ...] = ()
    keep_forward_seconds: Seconds = 0.0
    keep_backward_seconds: Seconds = 0.0
    graph: StepGraph | None = None
    opaque: str = ""
    other_bits: str = ""
    compiled: MenuRecord | None = None
    unread: tuple[str, ...] = ()
    gradients_held: bool = False
    outputs_held: bool = False
    copied_gradient_bytes: Bytes = 0

    def check_positions(self) -> None:
        """Raises ValueError where it refers to an op or a storage that it does not have."""
        self.ops.check_positions()
        if self.graph is not None:
            self.graph.check_positions()
        for option in self.options:
            check_positions("storages that an option keeps", option.kept, len(self.ops.storages))
            if self.graph is None:
                raise ValueError("expected programs of stages that have a graph, got some of stages without")
            runs = *option.runs.forward, *option.runs.backward, *option.rerun
            check_positions("ops that an option runs", runs, len(self.graph.ops))
        if self.compiled is not None:
            self.compiled.check_positions()

    @property
    def once(self) -> OptionRecord | None:
        """The program in which each op runs once, as measured; None of opaque stages."""
        return next((option for option in self.options if not option.rerun), None)

    def program(self, runs: StepRuns) -> OptionRecord:
        """Returns the cost of a program: the measured one's and the difference of their replays, at its pace.

        Args:
            runs: the order of the runs of the graph's ops.
        """
        once, inputs = self.once, self.ops.inputs
        assert once is not None and self.graph is not None
        replays = [*zip(self.replays(once.runs), self.replays(runs), strict=True)]
        measured, replayed = replays[0]
        held = {inputs[number] for number in replayed.arguments if number < len(inputs)}
        forward_bytes = replayed.forward_peak_bytes - measured.forward_peak_bytes
        backward_bytes = max(after.above_start_bytes - before.above_start_bytes for before, after in replays)
        return OptionRecord(
            name=name_of_runs(self.graph, runs),
            runs=runs,
            kept=tuple(sorted(number for number in held if number >= 0)),
            rerun=tuple(sorted(runs.again)),
            forward_seconds=_at_pace(once.forward_seconds, replayed.forward_seconds, measured.forward_seconds),
            backward_seconds=_at_pace(once.backward_seconds, replayed.backward_seconds, measured.backward_seconds),
            freed_bytes=once.freed_bytes + measured.kept_bytes - replayed.kept_bytes,
            kept_output_bytes=replayed.kept_output_bytes,
            forward_peak_bytes=max(0, once.forward_peak_bytes + forward_bytes),
            backward_peak_bytes=max(0, once.backward_peak_bytes + backward_bytes),
        )

    def replays(self, runs: StepRuns) -> list[CallReplay]:
        """The replays of an order, one for each way in which stages are held: first where others hold nothing."""
        assert self.graph is not None
        given = {n: self.ops.storages[storage] for n, storage in enumerate(self.ops.inputs) if storage >= 0}
        given_bytes = {n: storage.size_bytes for n, storage in given.items()}
        own_bytes = {n: size for n, size in given_bytes.items() if given[n].dies_after_stage}
        held_by_others = product(sorted({False, self.gradients_held}), sorted({False, self.outputs_held}))
        return [
            call_replay(
                self.graph,
                runs,
                argument_bytes=freed,
                gradients_held=gradients,
                outputs_held=outputs,
                copied_gradient_bytes=self.copied_gradient_bytes,
            )
            for gradients, outputs in held_by_others  # Of some of the stages; what is more counts.
            # What comes from further back than the stage before may live for this stage alone, too.
            for freed in ([own_bytes] if own_bytes == given_bytes else [own_bytes, given_bytes])
        ]

    def with_programs(self, orders: Iterable[StepRuns]) -> MenuRecord:
        """The menu with these programs in the place of those that it has."""
        return replace(self, options=tuple(map(self.program, orders)))

    def flow(self, option: OptionRecord | None) -> tuple[StageOps, OptionRecord | None]:
        """The ops of stages under an option, and the option by their numbers; of a program those of its graph."""
        if option is None or self.graph is None:
            return self.ops, option
        kept, rerun = kept_and_rerun(self.graph, option.runs)
        return forward_flow(self.graph), replace(option, kept=kept, rerun=rerun)

    def extra_seconds(self, option: OptionRecord) -> tuple[float, float]:
        """Returns the time by which a program makes forward and backward longer than the stages' own code does.

        A program whose ops run once is never counted as faster than that: where it was measured so, that may be noise.
        """
        once = self.once
        assert once is not None
        forward = max(0.0, once.forward_seconds - self.keep_forward_seconds)
        backward = max(0.0, once.backward_seconds - self.keep_backward_seconds)
        forward += option.forward_seconds - once.forward_seconds
        return forward, backward + option.backward_seconds - once.backward_seconds


def _at_pace(seconds: float, ops_seconds: float, measured_ops_seconds: float) -> float:
    return seconds * ops_seconds / measured_ops_seconds if measured_ops_seconds > 0 else seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRecord:
    """A tensor that stages take as input and that does not live for one link only. Numbers are positions of stages.

    Attributes:
        size_bytes: the size of its storage.
        born: the place where it was made.
        readers, linked_readers: stages that take it; linked ones as the unchanged output of the stage before.
        savers: the places where autograd saved it.
        death_phase, death: the moment when it was freed in the unplanned step: ``forward`` or ``backward`` of that
            stage; ``never`` within the step.
        cast: whether it is no input but made of parameters by autocast, which holds it until the forward ends.
        recast_in: the stages that found it made, and make it themselves when they are recomputed.
    """

    size_bytes: Bytes
    born: int
    readers: tuple[int, ...]
    linked_readers: tuple[int, ...]
    savers: tuple[int, ...]
    death_phase: Literal["forward", "backward", "never"]
    death: int
    cast: bool = False
    recast_in: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentBytes:
    """Bytes that are there before the step begins and after it ends.

    ``buffers``: also other tensors that modules keep from step to step, as attributes or as buckets of gradients.
    ``loop``: what the loop holds of the step before, the output and the loss, until those of the next take their place.
    ``other_parameters``: of the loss, and those of the optimizer that are not the model's (master copies, say).
    """

    parameters: Bytes
    buffers: Bytes
    optimizer: Bytes
    inputs: Bytes
    gradients: Bytes = 0
    other_parameters: Bytes = 0
    scaler: Bytes = 0
    loop: Bytes = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))


class OpRecord(NamedTuple):
    """One aten op: where it ran (``place``: a stage, or outside), how long, the bytes of new storage it returned
    (0 of views and in-place ops), and whether backward keeps them.
    """

    side: Literal["forward", "backward"]
    place: str
    module: str
    op: str
    seconds: Seconds
    output_bytes: Bytes
    kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutRecord:
    """Equal blocks that would have been stages, had something not spoken against running them again.

    Attributes:
        names: the names of their modules, in forward order; further calls are named as those of stages.
        module_class: class of the modules.
        kept_bytes: the bytes that they keep for backward together, apart from stages inside of them.
        reason: why they cannot be recomputed.
        remedy: the change that would make them recomputable; empty where none is known.
    """

    names: tuple[str, ...]
    module_class: str
    kept_bytes: Bytes
    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRecord:
    """The last layer of a model, which may wait for its loss and then run a few rows at a time.

    Attributes:
        name: the name of its module.
        rows: that it takes in a step.
        output_bytes: the size of its whole output.
    """

    name: str
    rows: Count
    output_bytes: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePieces:
    """A module that runs in pieces, and again so in backward.

    Attributes:
        name: the name of the module.
        dim: the dimension along which its tensors are taken apart.
        count: the number of its pieces.
    """

    name: str
    dim: Count
    count: Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecesRecord:
    """The parts of a model that run in pieces: its head together with its loss, and modules by themselves.

    Attributes:
        head: name of its module; empty where none waits for a loss.
        rows: that it takes in a step.
        rows_at_once: the most rows of a piece.
        modules: the modules that run in pieces.
        loss_difference: relative, between a step in pieces and a plain one; None where nothing was measured.
        gradient_difference: the same of the gradients: the largest of any parameter, each by its norm.
    """

    head: str = ""
    rows: Count = 0
    rows_at_once: Annotated[int, msgspec.Meta(ge=1)] = 1
    modules: tuple[ModulePieces, ...] = ()
    loss_difference: Rate | None = None
    gradient_difference: Rate | None = None

    @property
    def count(self) -> int:
        """How many pieces the head has in a step."""
        return -(-self.rows // self.rows_at_once)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


def is_of_whole_model(stages: Iterable[_Named]) -> bool:
    """Whether the model's call is one of the stages, as of ``stages="whole"``."""
    return any(stage.name == WHOLE_MODEL for stage in stages)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Profile:
    """One profiled training step.

    Attributes:
        model_class, input_shapes: the class of the model, and the shapes of the batch's tensors.
        device, device_name, torch_version, precision: the device, the release of torch and the precision of the step.
        stages: stages and what lies outside of them, in forward order.
        shared: tensors that several stages hold.
        resident: bytes alive during the whole step.
        optimizer: the optimizer step; zero seconds and no bytes without one.
        evaluation: where the optimizer evaluates the loss again within its step (LBFGS): the bytes alive as such a
            forward and backward begins and the most within it, at their highest, and the seconds of all of them.
        evaluations: the number of forwards and backwards in a step.
        frugal: whether it was measured where a step that keeps everything does not fit, a few stages kept at a time:
            unplanned peak and seconds are put together from these, and were never measured as a whole.
        allocator_bytes: the bytes of CUDA's blocks beyond those that a plain step's tensors asked for, and those that
            stay beside; else 0.
        collective_bytes: the size of the largest tensor that a collective makes; on the CPU a thread may hold it a
            while longer.
        in_flight: pairs (other micro-batches there, other bytes) of a pipeline's stage, profiled with one micro-batch.
        unplanned_peak_bytes: most bytes alive at once in the whole step.
        unplanned_seconds, step_seconds: the median time of a plain step, and the time of each measured step.
        op_records: every aten op of one step.
        menus: per kind of stage, its ops and its programs.
        link: the link to host memory; None where the device has none.
        unseen: modules of the same class and parameter shapes as a stage's that the step did not call.
        forward_nodes: autograd nodes that the model's forward makes; 0 where that is not known, or it is compiled.
        unsteady: the causes of other bytes in other steps, a line each; the peak is not promised where there is any.
        batch_sized: the causes of other bytes on another batch of the same shapes, a line each.
        left_out: blocks that keep much memory but cannot be stages.
        heads: the modules that may run in pieces together with the loss, the first that can does; empty where that
            would save nothing.
        pieces: the parts that ran in pieces in all measured steps; None where none did.
        in_pieces: the same step with its head, and if measured also modules, in pieces.
        target: the command-line target of the workload; None for a workload created in Python.
        estimate: the device that bytes and seconds are estimated for; None where they were measured.
    """

    model_class: str
    input_shapes: tuple[tuple[int, ...], ...]
    device: str
    device_name: str
    torch_version: str
    precision: str
    stages: tuple[StageRecord, ...]
    shared: tuple[SharedRecord, ...]
    resident: ResidentBytes
    optimizer: Phase
    unplanned_peak_bytes: Bytes
    unplanned_seconds: Seconds
    step_seconds: tuple[Seconds, ...]
    op_records: tuple[OpRecord, ...]
    menus: tuple[MenuRecord, ...] = ()
    link: LinkRecord | None = None
    unseen: tuple[str, ...] = ()
    unsteady: tuple[str, ...] = ()
    batch_sized: tuple[str, ...] = ()
    forward_nodes: int = 0
    left_out: tuple[LeftOutRecord, ...] = ()
    evaluation: Phase = Phase()
    evaluations: Annotated[int, msgspec.Meta(ge=1)] = 1
    frugal: bool = False
    collective_bytes: Bytes = 0
    allocator_bytes: Bytes = 0
    in_flight: tuple[tuple[int, Bytes], ...] = ()
    target: TargetRecord | None = None
    heads: tuple[HeadRecord, ...] = ()
    pieces: PiecesRecord | None = None
    in_pieces: tuple[Profile, ...] = ()
    estimate: EstimateRecord | None = None

    def __repr__(self) -> str:
        stages = sum(stage.kind == "stage" for stage in self.stages)
        kind = "Estimated profile" if self.estimated else "Profile"
        return (
            f"<{kind} of {self.model_class} on {self.device}, {self.precision}: {stages} stages, unplanned peak "
            f"{self.unplanned_peak_bytes:,} bytes, {self.unplanned_seconds:.3g} s a step>"
        )

    @property
    def estimated(self) -> bool:
        """Whether its numbers were estimated, and not measured."""
        return self.estimate is not None

    def _check_positions(self) -> None:
        """Raises ValueError where it refers to a stage or a menu that it does not have."""
        if not self.stages:
            raise ValueError("expected at least one stage, got none")
        count = len(self.stages)
        for menu in self.menus:
            menu.check_positions()
        for number, stage in enumerate(self.stages):
            check_positions("menus", (stage.menu,), len(self.menus), least=-1)
            check_positions("stages of late releases", (later for later, _ in stage.late_releases), count, number)
        for shared in self.shared:
            holders = (shared.born, *shared.readers, *shared.linked_readers, *shared.savers, *shared.recast_in)
            check_positions("stages of shared tensors", holders, count)
            check_positions("stages of shared tensors", (shared.death,), count, least=-1)

    @property
    def states_bytes(self) -> int:
        """Bytes of the model states: parameters, buffers, gradients and what the optimizer keeps, all alive at once."""
        return self.resident.total - self.resident.inputs - self.resident.loop + self.made_gradient_bytes

    @property
    def made_gradient_bytes(self) -> int:
        """Bytes of gradients that the step makes: alive after backward, at most what parameters can have."""
        resident = self.resident
        after_bytes = self.optimizer.start_bytes if self.optimizer.peak_bytes else self.stages[0].backward.end_bytes
        most_bytes = resident.parameters + resident.other_parameters - resident.gradients
        return max(0, min(after_bytes - resident.total, most_bytes))

    def stage_level(self) -> Profile:
        """Returns the profile without programs: each stage is kept, or recomputed, as a whole."""
        return replace(self, menus=tuple(replace(menu, options=()) for menu in self.menus))

    @property
    def fingerprint(self) -> str:
        """Names, shapes, precision and kind of device: two profiles of the same thing have the same one."""
        stages = [[s.name, s.module_class, s.parameter_shapes, s.input_shapes] for s in self.stages]
        text = json.dumps([self.model_class, self.precision, self.device.split(":")[0], stages])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def ops(self) -> pd.DataFrame:
        """Every aten op of forward and backward in order; columns as the fields of ``OpRecord``."""
        import pandas as pd

        return pd.DataFrame(self.op_records, columns=OpRecord._fields)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, whole or not at all."""
        header = {"format": FORMAT, "version": VERSION, "fingerprint": self.fingerprint}
        write_document(path, {**header, **to_plain(self)})

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile.

        Raises:
            ValueError: the file is missing, truncated, of another format or version, holds NaN, or lacks a field.
        """
        return cls.from_document(read_document(path, {FORMAT: VERSION}), str(path))

    @classmethod
    def from_document(cls, document: Mapping[str, Any], where: str) -> Profile:
        """Build a profile from its JSON document; ``where`` names it in errors."""
        header = ("format", "version", "fingerprint")
        data = {key: value for key, value in document.items() if key not in header}
        try:
            profile = from_plain(cls, data)
            profile._check_positions()
        except ValueError as error:
            what = f"expected the fields of a profile, got a mismatch: {error}; profile again"
            raise ValueError(f"{where}: {what}") from error
        if document.get("fingerprint") != profile.fingerprint:
            raise ValueError(f"{where}: expected its fingerprint to match its contents, it does not; profile again")
        return profile
