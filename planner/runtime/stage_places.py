"""Finds the module of a name in a plan, compiled or not, and the stage of the plan that a call of a module is."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from torch import nn

from planner.plans.plan import Plan, PlannedStage
from profiler.records import WHOLE_MODEL
from profiler.workload.compiled_forwards import (
    COMPILED,
    leave_uncompiled,
    plain_name,
    unwrapped,
)
from profiler.workload.given_models import inner_model

leave_uncompiled(__name__)


def module_named(model: nn.Module, name: str) -> nn.Module:
    """Returns the module of a stage's name, whether ``torch.compile`` has wrapped parts of the model or not.

    Raises:
        AttributeError: there is none.
    """
    module = inner_model(model)
    for part in plain_name(name).split("."):
        module = unwrapped(module.get_submodule(part))
    return module


def made_compiled(plan: Plan) -> bool:
    """Whether the plan comes from the profile of a compiled model."""
    return plan.precision.endswith(COMPILED)


_Kind = tuple[str, tuple[tuple[str, tuple[int, ...]], ...]]  # class, and shapes of the parameters


class StagePlace(NamedTuple):
    """A stage's position in the plan; ``unseen`` for a call that comes on top of all stages like it."""

    position: int
    unseen: bool = False


class StagePlaces:
    """Finds the places of calls in one forward after the other.

    A call that the profile has not seen takes the place of the next stage of its kind (class and shapes of parameters)
    that has not run: of several experts, another one may be drawn.

    Args:
        plan: the applied plan.
        model: the model with the plan.
        wanted: positions of the stages to look for; those that an unseen module may stand for are added.
    """

    def __init__(self, plan: Plan, model: nn.Module, wanted: Collection[int]) -> None:
        self._kinds = {split_name(s.name)[0]: _kind(s) for s in plan.stages if s.kind == "stage"}
        unseen = {name: kind for name in plan.unseen if (kind := _kind_in(model, name)) is not None}
        known = {name: kind for name, kind in unseen.items() if kind in set(self._kinds.values())}
        self._kinds |= known
        self._unseen = frozenset(known)
        self._places: dict[_Kind, list[int]] = {}
        for k, stage in enumerate(plan.stages):
            if stage.kind == "stage":
                self._places.setdefault(_kind(stage), []).append(k)
        drawn = {k for kind in known.values() for k in self._places[kind]}
        modules = {split_name(plan.stages[k].name)[0] for k in (*wanted, *drawn)}
        # All calls of these modules: a step may leave the first of them out.
        named = {split_name(stage.name): k for k, stage in enumerate(plan.stages) if stage.kind == "stage"}
        self.positions = {call: k for call, k in named.items() if call[0] in modules}
        self.names = tuple(dict.fromkeys([*(name for name, _ in self.positions), *known]))
        self._calls = {split_name(s.name)[0]: s.record.calls for s in plan.stages}
        self._inner_calls = [stage.record.inner_calls for stage in plan.stages]
        self._counts: dict[str, int] = {}
        self._taken: set[int] = set()

    def begin(self) -> None:
        """Another forward begins."""
        self._counts.clear()
        self._taken.clear()

    def has_run(self, name: str) -> bool:
        """Whether a module has made all the calls in this forward that the profiled step made."""
        known = sum(position_name == name for position_name, _ in self.positions)
        return self._counts.get(name, 0) >= max(self._calls.get(name, 0), known, 1)

    def next_of(self, name: str, *, inside: bool) -> StagePlace | None:
        """The place of the next call of a module; None of what is no stage.

        Args:
            name: the name of the module.
            inside: whether it is called inside a stage.
        """
        if inside:
            return None  # It counts as the stage's own: a stage that runs as a program calls no modules.
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        position = self._position_of(name, count)
        if position is not None and position not in self._taken:
            return self._taken_by(StagePlace(position))
        if position is None and name not in self._unseen and count < (self._calls[name] or count + 1):
            return None
        return self._taken_by(self._place_of_kind(self._places[self._kinds[name]]))

    def _taken_by(self, place: StagePlace) -> StagePlace:
        if not place.unseen:
            self._taken.add(place.position)
        for name, times in self._inner_calls[place.position]:
            self._counts[name] = self._counts.get(name, 0) + times
        return place

    def _position_of(self, name: str, count: int) -> int | None:
        """The place of a module's call; a later call's where what came between has run: this step left calls out."""
        position = self.positions.get((name, count))
        if position is None or self._ahead([position]) is not None:
            return position
        later = self._ahead(k for (known, _), k in self.positions.items() if known == name)
        return position if later is None else later

    def _place_of_kind(self, places: list[int]) -> StagePlace:
        free = self._ahead(places)
        if free is None:
            return StagePlace(places[0], unseen=True)
        return StagePlace(free)

    def _ahead(self, places: Iterable[int]) -> int | None:
        """The first of some places, in order, that lies behind all that were taken."""
        last = max(self._taken, default=-1)
        return next((k for k in places if k > last), None)


def split_name(stage: str) -> tuple[str, int]:
    """A stage's module name and call number: ``"block#2"`` is the third call of ``block``.

    What runs outside of stages is named after those around it, and has no number. The model's own name is empty.

    >>> split_name("block#2"), split_name("between block#1 and head")
    (('block', 2), ('between block#1 and head', 0))
    """
    if stage == WHOLE_MODEL:
        return "", 0
    name, _, number = stage.partition("#")
    return (name, int(number)) if number.isdecimal() else (stage, 0)


def _kind(stage: PlannedStage) -> _Kind:
    return stage.record.module_class, tuple(sorted(stage.record.parameter_shapes))


def _kind_in(model: nn.Module, name: str) -> _Kind | None:
    try:
        module = module_named(model, name)
    except AttributeError:
        return None
    shapes = ((plain_name(key), tuple(p.shape)) for key, p in module.named_parameters())
    return type(module).__name__, tuple(sorted(shapes))
