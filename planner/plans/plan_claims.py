"""What every plan claims."""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from planner.pictures import AliveDuring, SvgPicture, small_timeline
from planner.units import counted, format_bytes, format_seconds
from profiler.json_files import write_document
from profiler.target_record import TargetRecord
from solvers.problem.chain import Link

FORMAT = "planner-plan"
VERSION = 3
FINGERPRINT_DIGITS = 16  # as of profiles


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended a search for a plan.

    Attributes:
        plan: the best one until then.
    """

    def __init__(self, plan: PlanClaims) -> None:
        self.plan = plan
        super().__init__(f"the search for a plan: {plan!r} is the best until then")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanClaims:
    """What a plan was made from and for, and what it predicts. Bytes and seconds are of one whole training step.

    Attributes:
        model_class, input_shapes, device, precision: of the profile it was made from.
        solver: the method that found it.
        status: ``optimal``: none that does the same kind of things within the budget is faster; ``feasible``: see the
            bound.
        budget_bytes: the most bytes that may be alive at once.
        headroom_bytes: of the budget, left to what the device's allocator wastes; the solver had the rest.
        predicted_peak_bytes, predicted_seconds: by exact replay.
        unplanned_peak_bytes, unplanned_seconds: of the model without a plan.
        resident_bytes: always there: parameters, optimizer states, batch.
        recomputed_seconds: predicted seconds spent on running again.
        recomputed_ops: how many ops run again, each time counted; exact.
        lower_bound_seconds: no such plan within the budget is faster.
        gap: relative distance of the prediction from that bound.
        solve_seconds: time that the solver took.
        link: to host memory, that the plan may send over; None where nothing could be sent.
        host_bytes: the most bytes that the plan holds in host memory at once.
        stall_seconds: predicted seconds in which computation waits for copies.
        no_offload: why nothing could be sent to host memory where that was to be weighed; empty otherwise.
        offload_only: whether it was asked for that nothing is recomputed; ``solver`` may name that method without.
        stated: what was stated manually and what it came to, one line each; empty for a plan that was solved for.
        restricted: status and bound hold among the plans that do what was stated.
        target: as in the profile.
        interrupted: Ctrl-C ended the search; this is the best plan until then.
    """

    model_class: str
    input_shapes: tuple[tuple[int, ...], ...]
    device: str
    precision: str
    solver: str
    status: Literal["optimal", "feasible"]
    budget_bytes: int
    predicted_peak_bytes: int
    predicted_seconds: float
    unplanned_peak_bytes: int
    unplanned_seconds: float
    resident_bytes: int
    recomputed_seconds: float
    recomputed_ops: int
    lower_bound_seconds: float
    gap: float
    solve_seconds: float
    headroom_bytes: int = 0
    link: Link | None = None
    host_bytes: int = 0
    stall_seconds: float = 0.0
    no_offload: str = ""
    offload_only: bool = False
    stated: tuple[str, ...] = ()
    restricted: bool = False
    target: TargetRecord | None = None
    interrupted: bool = False

    @property
    def slowdown(self) -> float:
        """Predicted seconds over unplanned seconds."""
        return self.predicted_seconds / self.unplanned_seconds if self.unplanned_seconds > 0 else 1.0

    @property
    def fingerprint(self) -> str:
        """Of what is done in which order, and to which model: equal on all ranks that run the same; not what it costs.

        Names, shapes, precision, the kind of device and every decision count, bytes and seconds do not.
        """
        about = [self.model_class, self.precision, self.device.split(":")[0], self._decided()]
        text = json.dumps(about, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_DIGITS]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.model_class}: {'; '.join(self._claims())}>"

    def _repr_html_(self) -> str:
        """For notebooks: the first lines of ``summary``, a table of what is done, and the timeline."""
        try:
            picture = self.timeline().svg
        except ValueError:  # A plan of an older release.
            picture = ""
        return f"<pre>{html.escape(self._in_short())}</pre>{self._decision_table()}{picture}"

    def summary(self) -> str:
        """Some lines on what the plan does, what it predicts and how good that is; ``planner show`` says more."""
        return "\n".join([self._in_short(), *self._what_is_done()])

    def _in_short(self) -> str:
        size = ", ".join("x".join(map(str, shape)) for shape in self.input_shapes)
        where = f"inputs {size or 'as any'}; {self.precision} on {self.device}"
        interrupted = "interrupted, " if self.interrupted else ""
        found = f"{interrupted}{self.status}, by {self.solver} in {format_seconds(self.solve_seconds)}"
        least = self.lower_bound_seconds / self.unplanned_seconds if self.unplanned_seconds > 0 else 1.0
        bound = f"no such plan is faster than {least:.3g} times it"
        unplanned = f"unplanned {format_bytes(self.unplanned_peak_bytes)}, {format_seconds(self.unplanned_seconds)}"
        lines = [f"{type(self).__name__} of {self.model_class} ({where})", *self._claims(), unplanned]
        return "\n".join([*lines, f"{found}; {bound}"])

    def timeline(self) -> SvgPicture:
        """The bytes alive over forward and backward as a small picture, which notebooks show; a line is the budget.

        ``planner show plan.json -o step.png`` draws a larger one, with names.

        Raises:
            ValueError: the plan is of an older release, and carries no chain.
        """
        return small_timeline(self._alive(), peak_bytes=self.predicted_peak_bytes, budget_bytes=self.budget_bytes)

    def in_one_line(self) -> str:
        """Model, peak, budget, slowdown, how good that is, and how much is done for it."""
        found = f"{self.status}, by {self.solver}"
        return f"plan of {self.model_class}: {'; '.join([*self._claims(), found, self._done_in_short()])}"

    def _done_in_short(self) -> str:
        """How much is done, in numbers."""
        host = f", {format_bytes(self.host_bytes)} in host memory" if self.host_bytes else ""
        return f"{counted(self.recomputed_ops, 'op')} run again{host}"

    def _claims(self) -> list[str]:
        """Peak and budget, and the time that it takes."""
        peak = f"peak {format_bytes(self.predicted_peak_bytes)} of {format_bytes(self.budget_bytes)} allowed"
        return [peak, f"{self.slowdown:.2f} times the unplanned step"]

    def _what_is_done(self) -> list[str]:
        """What the plan does, a line for each kind of thing."""
        again = f"{counted(self.recomputed_ops, 'op')} run again, {format_seconds(self.recomputed_seconds)}"
        host = f"{format_bytes(self.host_bytes)} in host memory at most, {format_seconds(self.stall_seconds)} waited"
        return [again, *([host] if self.host_bytes else []), *self.stated]

    def _decision_table(self) -> str:
        """What is done to what, as HTML."""
        raise NotImplementedError

    def _alive(self) -> Iterator[AliveDuring]:
        """The actions of forward and backward, with the bytes alive in them."""
        raise NotImplementedError

    def _decided(self) -> Any:
        """The parts of the model, and what is done with them, as plain data."""
        raise NotImplementedError

    def to_document(self) -> dict[str, Any]:
        """Plain data, as it stands in the file."""
        raise NotImplementedError

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all."""
        write_document(path, self.to_document())
