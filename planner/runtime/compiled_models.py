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
    unwrapped,
)
from profiler.workload.given_models import inner_model


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
    """Finds the stages of an applied plan that run as compiled code; what cannot be kept there is said once.

    Such a stage stays compiled: where the plan has a program for it, it is recomputed as a whole instead. It keeps
    less, and takes longer in backward.
    """

    def __init__(self, plan: Plan, selective: Collection[int]) -> None:
        self._plan = plan
        self._selective = frozenset(selective)
        self._promised = made_compiled(plan)
        self._checked: set[int] = set()
        self._compiled: set[int] = set()

    def in_model(self, forward: Forward) -> None:
        """The model is about to be run with ``forward``."""
        if isinstance(forward, CompiledForward):
            self._warn_of_the_peak()

    def runs_compiled(self, position: int, module: nn.Module, forward: Forward) -> bool:
        """Whether compiled code runs a stage, which is about to be run with ``forward``."""
        if position not in self._checked or isinstance(forward, CompiledForward):
            self._check(position, module, forward)
        return position in self._compiled

    def _check(self, position: int, module: nn.Module, forward: Forward) -> None:
        self._checked.add(position)
        if position in self._compiled or not (isinstance(forward, CompiledForward) or is_compiled(module)):
            return
        self._compiled.add(position)
        self._warn_of_the_peak()
        if position in self._selective:
            stage = self._plan.stages[position]
            warn_caller(
                f"planned stage {stage.name!r}: {stage.option} cannot be recomputed inside compiled code; it stays "
                "compiled and is recomputed as a whole. Profile the compiled model for a plan without such choices"
            )

    def _warn_of_the_peak(self) -> None:
        if not self._promised:
            self._promised = True
            warn_caller(
                "apply: expected a plan from the profile of the compiled model, got one from the uncompiled one; "
                "gradients are the same, the peak is not promised. Compile before planner.profile"
            )
