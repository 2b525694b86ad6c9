"""Whether a plan is for this model and this batch: what ``planner.apply`` refuses, and warnings while it is used."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from planner.plans.plan import Plan, PlannedStage
from planner.plans.sources import object_or_file, type_in_words
from planner.runtime.stage_places import module_named, split_name
from profiler.messages import warn_caller
from profiler.recomputation.module_rerun import RERUN_DEPTH
from profiler.recomputation.saved_tensors import hooks_of_the_user
from profiler.records import Profile
from profiler.workload.compiled_forwards import COMPILED, leave_uncompiled, plain_name
from profiler.workload.given_models import check_initialised, class_name, precision_of, types_part
from profiler.workload.tensor_parts import has_storage, sizes_of, storage_of
from profiler.workload.tensor_trees import tensors_in
from profiler.workload.torch_state import under_compiled_autograd, under_transform
from profiler.workload.workload import Workload

leave_uncompiled(__name__)


class PlanWarnings:
    """Gives the warnings of one applied plan, each once, whatever other plans have said."""

    __slots__ = ("_said",)

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, text: str, about: str = "") -> None:
        """Warn, once for each text; or once for what it is ``about``, whatever numbers the text has."""
        if (about or text) not in self._said:
            self._said.add(about or text)
            warn_caller(text)

    def of_stage(self, name: str, what: str) -> None:
        """Warn of a planned stage."""
        self.say(f"planned stage {name!r}: {what}")


def check_inputs(workload: Workload, plan: Plan) -> None:
    """Refuse a batch of other shapes than the plan's."""
    shapes = workload.input_shapes
    not_yet_run = workload.custom_step is not None and not shapes  # A custom step knows its shapes once it has run.
    if shapes != plan.input_shapes and not not_yet_run:
        raise ValueError(
            f"the batch has other shapes than the plan's: {list(shapes)}, the plan has {list(plan.input_shapes)}; give "
            "the --set values of the profile, or profile and solve for this batch"
        )


def check_device(workload: Workload, plan: Plan) -> None:
    """Refuse a model on another kind of device than the plan's."""
    planned = torch.device(plan.device).type
    if workload.device.type != planned:
        raise ValueError(
            f"the plan is for {planned}, and the model is on {workload.device.type}; "
            f"use --device {planned}, or profile and solve on {workload.device.type}"
        )


def check_not_captured(device: torch.device | None) -> None:
    """Refuse a step that is being captured as a CUDA graph.

    Recomputed ops read and set the random state on the host, and copies to host memory are waited for there: a graph
    repeats neither.
    """
    if device is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "forward: the step is being captured as a CUDA graph, and a plan has the host work in every step (random "
            "states, copies), which a graph does not repeat; run the planned step without torch.cuda.graph, or remove "
            "the plan before capturing"
        )


def transformed(warn: PlanWarnings) -> bool:
    """Whether a transform of ``torch.func`` or forward-mode differentiation is under way; says once what that means.

    Its tensors stand for others, for a batch of them or with tangents: what is saved of them cannot be recomputed.
    """
    if not under_transform():
        return False
    warn.say(
        "planner.apply: the model runs under torch.func or forward-mode differentiation; the plan does not act there: "
        "everything is kept, and the peak is not promised"
    )
    return True


def warn_of_compiled_autograd(warn: PlanWarnings) -> None:
    """Say once that backward is compiled."""
    if under_compiled_autograd():
        warn.say(
            "planner.apply: compiled autograd is on (torch._dynamo.config.compiled_autograd): it recomputes "
            "all dropped stages at once; the peak is not promised. Turn it off"
        )


def warn_about_outer_hooks(warn: PlanWarnings) -> None:
    """Say once that saved-tensor hooks around the model do not act in planned stages."""
    hooks = hooks_of_the_user()
    # Another model of the same loop is profiled: those that see all that its step saves are no user's.
    if hooks is not None and not getattr(hooks[0], "__module__", "").startswith("profiler."):
        warn.say(
            "planner.apply: saved-tensor hooks around the model (such as save_on_cpu) see only the parameters that "
            "planned stages save; the plan keeps or recomputes the rest as without the hooks. The peak is not promised"
        )


def running_backward() -> bool:
    """Whether a backward is under way in this thread, or a recomputation: a call then begins no forward."""
    return RERUN_DEPTH.get() > 0 or torch._C._current_graph_task_id() != -1


def warn_of_a_larger_step(warn: PlanWarnings, nodes: int) -> None:
    """Say once that a forward did more than the profiled one: what it saves besides is in no plan."""
    warn.say(
        f"planner.apply: the forward has {nodes} more differentiable ops than the profiled one (more layers, a rate "
        "that was 0, a frozen part that is trained now, another branch); the peak is not promised. Profile it "
        "as it is now"
    )


def warn_of_a_retained_graph(warn: PlanWarnings) -> None:
    """Say once that a backward under way leaves its graph for another one."""
    autograd: Any = torch._C._autograd  # type: ignore[attr-defined]  # without a stub
    if torch._C._current_graph_task_id() != -1 and autograd._get_current_graph_task_keep_graph():
        warn.say(
            "planner.apply: retain_graph=True or create_graph=True keeps what this backward used, and what was "
            "recomputed for it, until its graph is freed; the peak is not promised. Add the losses up and call "
            "backward once"
        )


class BatchChecks:
    """Says where a batch differs from the profiled one in its shapes, or from the one before where bytes follow values.

    Args:
        plan: the applied plan; one without shapes is for batches of any.
        warn: gives the warnings.

    Attributes:
        shapes: the shapes of the latest batch.
    """

    def __init__(self, plan: Plan, warn: PlanWarnings) -> None:
        self.shapes: tuple[tuple[int, ...], ...] = ()
        self._warn = warn
        self._profiled, self._follows = plan.input_shapes, plan.batch_sized
        self._seen: list[tuple[StorageWeakRef, int]] | None = None

    def check(self, arguments: Any) -> bool:
        """Look at a batch; returns whether it has other shapes than the profiled one."""
        tensors = tensors_in(arguments)
        self._check_values(tensors)
        self.shapes = shapes = tuple(map(sizes_of, tensors))
        # Arguments by name may come in another order, or be others than those of the workload.
        if not self._profiled or len(shapes) != len(self._profiled) or sorted(shapes) == sorted(self._profiled):
            return False
        if is_larger(sorted(shapes), sorted(self._profiled)):
            self._warn.say(
                f"planner.apply: a batch of shapes {list(shapes)} is larger than the profiled one of "
                f"{list(self._profiled)} and needs more memory than the plan promises. Profile the largest batch, or "
                "use auto_checkpoint(..., dynamic=True)"
            )
        else:
            self._warn.say(
                f"planner.apply: a batch of shapes {list(shapes)} is smaller than the profiled one of "
                f"{list(self._profiled)}: it needs less memory than the plan predicts",
                about="a smaller batch",
            )
        return True

    def _check_values(self, tensors: Sequence[Tensor]) -> None:
        """Compare the storages with those of the forward before, and how often they were changed in place."""
        if not self._follows:
            return
        # Such a reference keeps the storage's address from being used again, and none of its bytes.
        now = [(StorageWeakRef(storage_of(tensor)), tensor._version) for tensor in tensors if has_storage(tensor)]
        if self._seen is not None and now != self._seen:
            self._warn.say(
                "planner.apply: the memory of a step depends on the values of its batch, and this batch is not that of "
                f"the step before ({'; '.join(self._follows)}); the peak may be above the plan's. Profile the batch "
                "that needs the most memory, or solve with headroom"
            )
            self._follows = ()
        self._seen = now


def is_larger(shapes: Sequence[Sequence[int]], profiled: Sequence[Sequence[int]]) -> bool:
    """Whether tensors of some shapes may take more than those of others: any dimension is larger."""
    pairs = zip(shapes, profiled, strict=False)
    return len(shapes) > len(profiled) or any(
        len(now) != len(then) or any(a > b for a, b in zip(now, then, strict=True)) for now, then in pairs
    )


def parameter_tables(model: nn.Module) -> list[dict[str, nn.Parameter | None]]:
    """The tables in which a model's modules have their parameters: going over these is faster than ``parameters()``."""
    return [module._parameters for module in model.modules() if module._parameters]


class ParameterChecks:
    """A model's parameters, to be looked at in every step: their types, and which are trained. It takes microseconds.

    Args:
        model: the model with the parameters.
        precision: the plan's, which says what types they should have.
        warn: gives the warnings.
    """

    def __init__(self, model: nn.Module, precision: str, warn: PlanWarnings) -> None:
        self._warn = warn
        self._owned = parameter_tables(model)
        self._expected = {getattr(torch, name) for name in types_part(precision).split("+") if name}
        self._cast = "autocast" in precision
        self._trained = self._trained_now()
        self._zeros = [
            (module, name) for module in model.modules() for name, value in vars(module).items() if _is_zero(value)
        ]

    def differ(self) -> bool:
        """Whether they are others than they should be."""
        return self._expected != {p.dtype for owned in self._owned for p in owned.values() if p is not None}

    def check_trained(self) -> None:
        """Warn where a frozen one is trained now, or one is frozen and that may be more or hide more.

        Under autocast its casts are more. Without its ops, a forward in which a rate is no longer 0 has no more of them
        than the profiled one had.
        """
        now = self._trained_now()
        if now == self._trained:
            return
        changes = set(zip(self._trained, now, strict=False))
        if (False, True) in changes:
            got = "a frozen one that is trained now"
        elif self._cast and (True, False) in changes:
            got = "one that is frozen now, whose casts autocast makes anew for every use"
        elif (True, False) in changes and any(vars(module).get(name) for module, name in self._zeros):
            got = "one that is frozen now, and a rate that was 0 and is not now"
        else:
            return
        self._warn.say(
            f"planner.apply: other parameters are trained than when the plan was applied ({got}); the peak is not "
            "promised. Profile the model as it is now"
        )

    def _trained_now(self) -> list[bool]:
        return [p.requires_grad for owned in self._owned for p in owned.values() if p is not None]


def _is_zero(value: object) -> bool:
    """Whether it is a rate that is 0, or may be."""
    return type(value) is float and not value


class CheckTurns:
    """Decides in which forwards a dropped stage compares the tensors saved in its recomputation and in its forward.

    Every stage is checked in the first forwards, and after the circumstances change. After that, each forward
    checks one stage, in turn: reading values of every saved tensor takes a tenth of a step of tiny ops. A fault that
    persists is found after at most one forward per dropped stage. The number of saved tensors is always compared.

    Args:
        dropped: positions of the stages that take turns; others are always checked.
    """

    ALL_FORWARDS = 5

    __slots__ = ("_circumstances", "_dropped", "_forwards", "_left")

    def __init__(self, dropped: Iterable[int] = ()) -> None:
        self._dropped = sorted(dropped)
        self._left = self._forwards = 0
        self._circumstances: Hashable = None

    def forward_begins(self, circumstances: Hashable) -> None:
        """Another forward.

        Args:
            circumstances: known things that the stages may depend on: shapes of the batch, the mode.
        """
        self._forwards += 1
        self._left = max(0, self._left - 1)
        if circumstances != self._circumstances:
            self._circumstances, self._left = circumstances, self.ALL_FORWARDS

    def checked(self, position: int) -> bool:
        """Whether a stage is checked in the forward under way."""
        if self._left or position not in self._dropped:
            return True
        return self._dropped[self._forwards % len(self._dropped)] == position


@dataclass(slots=True)
class Deviations:
    """Differences from the profile that were seen in the stages of an applied plan, from step to step.

    Attributes:
        undefined: by stage, numbers of saved tensors some of whose values are undefined memory.
        dropped_stages: the stages that ran a first time since; each may be the one that sets its parameters.
        other_batch: the forward under way has a batch of other shapes, which has been said.
        other_inputs: a stage's input was said to have other shapes.
        turns: which dropped stages are checked in the forward under way.
    """

    undefined: dict[int, set[int]] = field(default_factory=dict)
    dropped_stages: set[int] = field(default_factory=set)
    other_batch: bool = False
    other_inputs: bool = False
    turns: CheckTurns = field(default_factory=CheckTurns)


def given_plan(plan: Any, caller: str = "apply") -> Plan:
    """The plan, read from its file where a path is given; ``caller`` names in errors who was given it.

    Raises:
        ValueError: it is of another kind, or the file is no plan.
    """
    return object_or_file(plan, Plan, caller, _remedy)


def given_model(model: Any) -> nn.Module:
    """The model, with parameters that have shapes.

    Raises:
        ValueError: it is of another kind, or has lazy modules that have not run.
    """
    if isinstance(model, Workload):
        raise ValueError("apply: the model is a Workload, not a torch.nn.Module; pass workload.model")
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"apply: the model is {type_in_words(model)}, not a torch.nn.Module; "
            "call planner.apply(model, plan), the model first"
        )
    check_initialised(model, "apply")
    return model


def _remedy(plan: Any) -> str:
    if isinstance(plan, Profile):
        return "solve it first: plan = planner.solve(profile, budget=...)"
    if isinstance(plan, (Workload, nn.Module)):
        return "profile and solve first: plan = planner.solve(planner.profile(workload), budget=...)"
    if isinstance(getattr(plan, "plan", None), Plan):
        return "pass its plan attribute"
    return "pass what planner.solve returned"


class PlanMismatch(ValueError):
    """The model is not the one that the plan was made for; the message says what differs."""


def check_model(model: nn.Module, plan: Plan) -> None:
    """Refuse a model of which a stage is another module, or has parameters of other shapes; raises PlanMismatch."""
    differences = [text for stage in plan.stages if stage.kind == "stage" if (text := _difference(model, stage))]
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise PlanMismatch(
            f"apply: this {type(model).__name__} differs from the {plan.model_class} that was profiled: "
            f"{'; '.join(differences[:3])}{more}; profile and solve for this model"
        )


def check_types(model: nn.Module, plan: Plan) -> None:
    """Refuse parameters of other types, the part of the precision that shows before the model runs.

    Raises:
        PlanMismatch: they are others.
    """
    expected, got = types_part(plan.precision), precision_of(model, None)
    if got != expected:
        raise PlanMismatch(
            f"the parameters are in {got}, and the plan for {plan.precision} needs {expected}; "
            "use them as they were profiled, or profile and solve for these"
        )


def check_precision(model: nn.Module, precision: str, autocast: torch.dtype | None) -> None:
    """Refuse a step in another precision than the plan's: bytes, casts and kernels are others then.

    Raises:
        PlanMismatch: the parameters' types, or what autocast casts to.
    """
    expected, got = precision.removesuffix(COMPILED), precision_of(model, autocast)
    if got != expected:
        raise PlanMismatch(
            f"the step runs in {got}, and the plan is for {expected}; "
            "run it as it was profiled, or profile and solve in this precision"
        )


def _difference(model: nn.Module, stage: PlannedStage) -> str:
    """The first thing in which a stage's module differs from the profiled one; empty where there is none."""
    name, _ = split_name(stage.name)
    try:
        module = module_named(model, name)
    except AttributeError:
        return f"it has no module {name!r}"
    if class_name(module) != stage.record.module_class:
        return f"{name!r} is a {class_name(module)}, expected {stage.record.module_class}"
    shapes = {plain_name(key): tuple(p.shape) for key, p in module.named_parameters()}
    expected = dict(stage.record.parameter_shapes)
    for key in sorted({*shapes, *expected}):
        if shapes.get(key) != expected.get(key):
            return f"{name}.{key} has shape {shapes.get(key)}, expected {expected.get(key)}"
    return ""
