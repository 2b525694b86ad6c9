"""What a habit of a training loop is: lines of code at places of the loop, the same with and without a plan."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.fuzz.cases import Model

PLACES = ("setup", "begin", "around", "forward", "between", "during", "backward", "after", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """What somebody does in a training loop.

    The lines may use ``model``, ``inputs``, ``optimizer``, ``scaler``, ``step`` (from 0), ``loss``, ``call(model,
    inputs)``, ``loss_fn(output)``, ``backward(loss)``, and ``plan`` and ``handle``, which are None without a plan.

    Attributes:
        setup: once, after the plan was applied.
        begin: at the begin of a step.
        around: a context manager around the forward.
        forward: instead of ``loss = loss_fn(call(model, inputs))``.
        between: after the forward.
        during: a context manager around the backward.
        backward: instead of ``backward(loss)``.
        after: between backward and the optimizer's step.
        update: instead of the optimizer's step.
        promised: whether the plan's budget holds in a loop like this; not where it keeps more alive than one step.
        needs: only for models of which one layer has a kind of these; any where empty.
        lacks: only for models without layers of these kinds.
        facts: only for models of which all these fields are set.
        unless: only for models of which none of these fields is set.
    """

    name: str
    setup: str = ""
    begin: str = ""
    around: str = ""
    forward: str = ""
    between: str = ""
    during: str = ""
    backward: str = ""
    after: str = ""
    update: str = ""
    promised: bool = True
    needs: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()

    def fits(self, model: Model) -> bool:
        """Whether the habit means anything for this model."""
        kinds = {layer.kind for layer in model.layers}
        wanted = all(getattr(model, fact) for fact in self.facts) and not any(getattr(model, f) for f in self.unless)
        return wanted and not kinds & set(self.lacks) and (not self.needs or bool(kinds & set(self.needs)))


def places_of(habit: Habit) -> list[str]:
    """Where it acts."""
    return [field.name for field in fields(habit) if field.name in PLACES and getattr(habit, field.name)]


def each_module(condition: str, lines: str) -> str:
    """The lines that do ``lines`` to every module ``part`` of the model for which the condition holds."""
    return f"for part in model.modules():\n    if {condition}:\n{textwrap.indent(lines, 8 * ' ')}"


def validation(context: str) -> str:
    """The lines of a forward in eval mode inside a context, as ``torch.no_grad()``."""
    return f"model.eval()\nwith {context}:\n    call(model, inputs)\nmodel.train()"
