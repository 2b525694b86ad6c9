"""A cache of plans by signature: a safe plan at once, and a fitting one as soon as a thread beside training has
solved it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

from planner.plans.headroom import headroom_from
from planner.plans.offload_request import Offload
from planner.plans.plan import Plan
from planner.plans.refusals import Infeasible
from planner.plans.solving import SEARCH_SECONDS, find_plan, quick_plan
from planner.training.signatures import Basis, Signature, SizeLine, expected, lines_of
from planner.units import format_bytes
from profiler.records import Profile

PlanStatus = Literal["profiled", "safe"] | Basis
CACHE_SIZE = 64  # signatures; a plan with its chain takes some hundred kilobytes
_NEVER = Offload(mode="never")
_UNLIKE_PROFILED = ("safe", "covered", "extrapolated")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Entry:
    """The plan of one signature and its basis.

    Attributes:
        plan: the one to run it with now.
        status: what the plan rests on.
        promised: whether the plan is known to keep the budget at this signature.
        refusal: why no plan meets the budget, if so; ``plan`` is the leanest then.
        count: calls so far.
    """

    signature: Signature
    plan: Plan
    status: PlanStatus
    promised: bool
    refusal: Infeasible | None = None
    count: int = 0


class PlanCache:
    """Plans per signature. ``choose`` is quick and never solves; solving happens on another thread.

    A safe plan is one of a signature that covers the new one, if there is any: the same actions on tensors none of
    which is larger keep the budget. Otherwise it is the plan that needs least memory of those of the largest profile,
    and the budget is not promised.

    Args:
        budget_bytes: the most bytes alive at once.
        solver, headroom: as for ``solve``.
        cache_size: signatures remembered beside the profiled ones; the least recently used is forgotten first.
    """

    def __init__(
        self, *, budget_bytes: int, solver: str = "auto", headroom: str | int = 0, cache_size: int = CACHE_SIZE
    ) -> None:
        if cache_size < 1:
            raise ValueError(f"cache_size: expected at least 1 signature, got {cache_size}; pass a larger number")
        self.budget_bytes = budget_bytes
        self.solver = solver
        self.headroom = headroom
        self.cache_size = cache_size
        self.solves = 0
        self.background = Background("planner-plans", self._failed)
        self._profiled: dict[Signature, Profile] = {}
        self._lines = lines_of({})
        self._leanest: Plan | None = None
        self._entries: OrderedDict[Signature, Entry] = OrderedDict()
        self._lock = threading.RLock()
        self._notes: list[str] = []
        self._said: set[str] = set()

    # On the training path --------------------------------------------------------

    def add(self, profiles: Mapping[Signature, Profile]) -> None:
        """Take profiles and solve for each of them, here and now.

        What other signatures have without a profile around them is forgotten: they get a new plan when they come again.

        Raises:
            IncompatibleProfiles: the profiles of one kind do not have the same stages.
        """
        profiled = {**self._profiled, **profiles}
        lines = lines_of(profiled)
        for line in lines:
            line.scaling.at(line.scaling.sizes[-1])
        largest = max(profiled.values(), key=lambda profile: profile.unplanned_peak_bytes)
        leanest = _leanest(largest)
        solved = {signature: self._solved(profile) for signature, profile in profiles.items()}
        with self._lock:
            self._profiled, self._lines, self._leanest = profiled, lines, leanest
            for signature, entry in list(self._entries.items()):
                if entry.status in _UNLIKE_PROFILED:
                    del self._entries[signature]
            for signature, (plan, refusal) in solved.items():
                old = self._entries.get(signature)
                count = 0 if old is None else old.count
                self._entries[signature] = Entry(
                    signature, plan, "profiled", refusal is None, refusal=refusal, count=count
                )

    def choose(self, signature: Signature) -> Entry:
        """The entry of a signature; one that is new gets a safe plan, and a job to find its own."""
        with self._lock:
            entry = self.remembered(signature)
            entry.count += 1
            return entry

    def remembered(self, signature: Signature) -> Entry:
        """As ``choose``, where nothing is called yet."""
        with self._lock:
            entry = self._entries.get(signature)
            if entry is None:
                entry = self._entries[signature] = self._new(signature)
                self._evict()
                self.background.submit(lambda: self._plan_entry(entry))
            self._entries.move_to_end(signature)
            return entry

    def foretells(self, signature: Signature) -> bool:
        """Whether a plan for such calls is there, or can be found, or is known not to be, without another profile."""
        with self._lock:
            lines, profiled, entries = self._lines, self._profiled, list(self._entries.values())
        if any(entry.promised and entry.signature.covers(signature) for entry in entries):
            return True
        return expected(lines, profiled, signature) is not None

    @property
    def profiled(self) -> Mapping[Signature, Profile]:
        """The profiles there are."""
        return self._profiled

    def entry(self, signature: Signature) -> Entry:
        """The entry of a signature that is remembered; does not count as a call."""
        with self._lock:
            return self._entries[signature]

    def entries(self) -> list[Entry]:
        """All entries, the least recently used first."""
        with self._lock:
            return list(self._entries.values())

    def notes(self) -> list[str]:
        """The notes for a person since the last call, each once."""
        if not self._notes:
            return []
        with self._lock:
            notes, self._notes = self._notes, []
            return notes

    def _new(self, signature: Signature) -> Entry:
        covers = [
            entry.plan for entry in self._entries.values() if entry.promised and entry.signature.covers(signature)
        ]
        if covers:
            return Entry(signature, min(covers, key=lambda plan: plan.unplanned_peak_bytes), "safe", True)
        assert self._leanest is not None
        return Entry(signature, self._leanest, "safe", False)

    def _evict(self) -> None:
        forgettable = [s for s in self._entries if s not in self._profiled]
        for signature in forgettable[: max(0, len(forgettable) - self.cache_size)]:
            del self._entries[signature]

    # On the other thread ---------------------------------------------------------

    def _plan_entry(self, entry: Entry) -> None:
        """Find the plan of a new signature, unless it is forgotten by now."""
        with self._lock:
            lines, profiled = self._lines, self._profiled
            wanted = self._entries.get(entry.signature) is entry
        if not wanted:
            return
        self._fill(entry, lines, profiled)

    def _failed(self, error: BaseException) -> None:
        kind = type(error).__name__
        self._note(kind, f"no plan was found for some signatures, {kind}: {error}; they keep the plan they have")

    def _fill(self, entry: Entry, lines: Sequence[SizeLine], profiled: Mapping[Signature, Profile]) -> None:
        expectation = expected(lines, profiled, entry.signature)
        if expectation is None:
            if entry.promised:
                return
            self._note(
                "unknown",
                f"a call of {entry.signature} is beyond the profiled sizes; it runs with the "
                "plan that needs least memory, and the budget is not promised. Give such a batch in sizes=, or call "
                "planner.handle_of(model).profile_now(batch)",
            )
            return
        with self._lock:
            known = self._entries.get(expectation.at)
        if known is not None and known is not entry and known.status in ("profiled", "interpolated"):
            plan, refusal = known.plan, known.refusal
        else:
            plan, refusal = self._solved(expectation.profile, expectation.spare_bytes)
        with self._lock:
            entry.plan, entry.status = plan, expectation.basis
            entry.refusal, entry.promised = refusal, refusal is None

    def _solved(self, profile: Profile, spare_bytes: int = 0) -> tuple[Plan, Infeasible | None]:
        """The plan for a profile that leaves some bytes; where none meets the budget the leanest, and the refusal."""
        self.solves += 1
        headroom_bytes = headroom_from(self.headroom).of(self.budget_bytes) + spare_bytes
        try:
            # So little time leaves out the integer program of "auto", which would hold up the signatures behind.
            limit = SEARCH_SECONDS if self.solver == "auto" else None
            plan = find_plan(
                profile,
                self.budget_bytes,
                solver=self.solver,
                time_limit_seconds=limit,
                offload=_NEVER,
                headroom=headroom_bytes,
            )
            return plan, None
        except Infeasible as refusal:
            least = refusal.minimum_budget_bytes
            self._note(
                f"{profile.input_shapes}",
                f"inputs of {list(map(list, profile.input_shapes))} need a budget of at least {least} bytes "
                f"({format_bytes(least)}), and it is {self.budget_bytes}; they run with the plan that needs least "
                "memory. Raise the budget, or make such batches smaller",
            )
            return _leanest(profile), refusal

    def _note(self, key: str, text: str) -> None:
        with self._lock:
            if key not in self._said and len(self._said) < self.cache_size:
                self._said.add(key)
                self._notes.append(text)


def _leanest(profile: Profile) -> Plan:
    """The plan with the smallest budget that the quick method can meet."""
    try:
        return quick_plan(profile, 1, _NEVER)
    except Infeasible as refusal:
        return quick_plan(profile, refusal.minimum_budget_bytes, _NEVER)


def without_shapes(plan: Plan) -> Plan:
    """The plan for calls of other sizes than its own: its stages do not compare shapes."""
    stages = (replace(stage, record=replace(stage.record, input_shapes=())) for stage in plan.stages)
    return replace(plan, input_shapes=(), stages=tuple(stages))


Job = Callable[[], None]


class Background:
    """Runs jobs in the order they come. What a job raises goes to ``failed``, and the next job is run.

    The thread stays until ``close()``.

    When the main thread has ended the job under way is finished and no other begun: an executor finishes all that it
    was given before the program ends, so it is given one job at a time.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._waiting: deque[Job] = deque()
        self._running: Future[None] | None = None
        self._closed = False
        self._changed = threading.Condition()

    def submit(self, job: Job) -> None:
        """Run a job later; none is taken after ``close()``."""
        with self._changed:
            if self._closed:
                return
            self._waiting.append(job)
            if self._running is None:
                self._begin()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until there is no job left; whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._running is None, timeout_seconds)

    def close(self) -> None:
        """Drop the jobs that have not begun, wait for the one that has, and end the thread."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
        self._executor.shutdown()

    def _begin(self) -> None:
        self._running = self._executor.submit(self._waiting.popleft())
        self._running.add_done_callback(self._done)

    def _done(self, job: Future[None]) -> None:
        if (error := job.exception()) is not None:
            self._failed(error)
        with self._changed:
            self._running = None
            try:
                if self._waiting:
                    self._begin()
            except RuntimeError:  # The program is ending: an executor takes nothing then.
                self._waiting.clear()
            self._changed.notify_all()
