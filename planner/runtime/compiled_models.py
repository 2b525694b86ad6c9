"""Plans on compiled models: which modules a plan's names mean there, and warnings where it cannot be kept."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from planner.plans.plan import Plan
from profiler.caller_warnings import warn_caller
from profiler.workload.compiled_forwards import (
    COMPILED,
    CompiledForward,
    Forward,
    is_compiled,
    plain_name,
    uncompiled,
    unwrapped,
)
from profiler.workload.wrapped_models import inner_model


def module_named(model: nn.Module, name: str) -> nn.Module:
    """The module that a stage's name means, whatever of the model ``torch.compile`` has wrapped, then or now.

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


class CompiledCalls:
    """How stages of an applied plan run where code is compiled; what cannot be kept is said once, at the first call.

    A plan that keeps a choice of what a stage saves tells single ops, as they are dispatched, what to do; compiled
    code dispatches none. In a compiled model such a stage runs uncompiled, as planned. Where the stage itself is
    compiled it stays so, and is recomputed as a whole: it keeps less, and takes longer in backward.
    """

    def __init__(self, plan: Plan, selective: Collection[int]) -> None:
        self._plan = plan
        self._selective = frozenset(selective)
        self._model_compiled = False
        self._promised = made_compiled(plan)
        self._uncompiled: set[int] = set()
        self._checked: set[int] = set()
        self._compiled: set[int] = set()

    def in_model(self, forward: Forward) -> None:
        """The model is about to be run with ``forward``."""
        self._model_compiled = isinstance(forward, CompiledForward)
        if self._model_compiled:
            self._warn_of_the_peak()

    def in_stage(self, position: int, module: nn.Module, forward: Forward, diverged_stages: set[int]) -> Forward:
        """A stage is about to be run with ``forward``: what to run it with instead.

        One that cannot keep its choice of ops joins ``diverged_stages``, which are recomputed whole.
        """
        if position not in self._checked or isinstance(forward, CompiledForward):
            self._check(position, module, forward, diverged_stages)
        runs_uncompiled = position in self._uncompiled and position not in diverged_stages
        return uncompiled(forward) if runs_uncompiled else forward

    def runs_compiled(self, position: int) -> bool:
        """Whether compiled code runs a stage, which no program takes the place of."""
        return position in self._compiled and position not in self._uncompiled

    def _check(self, position: int, module: nn.Module, forward: Forward, diverged_stages: set[int]) -> None:
        self._checked.add(position)
        if not (isinstance(forward, CompiledForward) or is_compiled(module)):
            return
        self._compiled.add(position)
        self._warn_of_the_peak()
        if position not in self._selective or position in diverged_stages or position in self._uncompiled:
            return
        stage = self._plan.stages[position]
        if self._model_compiled or not stage.recomputable:
            self._uncompiled.add(position)
            instead = "it runs uncompiled"
        else:
            diverged_stages.add(position)
            instead = "it stays compiled and is recomputed as a whole"
        warn_caller(
            f"planned stage {stage.name!r}: {stage.option or 'a choice of its ops'} cannot be recomputed inside "
            f"compiled code; {instead}. Profile the compiled model for a plan without such choices"
        )

    def _warn_of_the_peak(self) -> None:
        if not self._promised:
            self._promised = True
            warn_caller(
                "apply: expected a plan from the profile of the compiled model, got one from the uncompiled one; "
                "gradients are the same, the peak is not promised. Compile before planner.profile"
            )
