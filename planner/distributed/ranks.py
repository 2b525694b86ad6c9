"""The ranks of a process group that plan together: small messages between them, and what fails on one failing on all.

Messages go through the group's store, not through collectives: they cannot mix with the model's own, need no device,
work whatever the backend, and still arrive where a collective has broken.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from profiler.agreement import measured_with
from profiler.workload.steps import causes_of

Value = TypeVar("Value")

# Ranks that wait in one collective give up at about the same time; so long later all have said so.
GRACE_SECONDS = 3.0
_LONGEST_NAP_SECONDS = 0.02
# Torch's own group of processes that do not exist: one process plays one rank of it.
_FAKE = "fake"
_calls_of: Counter[str] = Counter()  # by the name of a group: how many calls its ranks have made together
# What torch raises, as plain RuntimeErrors, where another rank has not answered in a collective.
_UNANSWERED = (
    "gloo/transport",
    "pair closure",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL",
    "collective operation timeout",
)


class RankError(ValueError):
    """Something failed on one rank, so it failed on all; or ranks were to do the same, and do not.

    Attributes:
        rank: on which it failed, or which differs from the first one.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> Any:
        return RankError, (str(self), self.rank)


class Unanswered(Exception):
    """Another rank has not sent what was waited for: one of ``ranks``, where that is known."""

    def __init__(self, ranks: Sequence[int] = ()) -> None:
        super().__init__("no answer from " + (in_words(ranks) if ranks else "another rank"))


class FailedElsewhere(Unanswered):
    """Another rank has failed meanwhile, in the call whose messages begin with ``prefix``."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix


class Failure(NamedTuple):
    """The failure of one rank.

    Attributes:
        kind: the class of the error.
        said: its message.
        unanswered: it came of another rank that did not answer.
    """

    rank: int
    kind: str
    said: str
    unanswered: bool


def failure_on(rank: int, error: BaseException) -> Failure:
    """An error that was raised on a rank, as the others are told of it."""
    said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    about = error.rank if isinstance(error, RankError) else rank
    return Failure(about, type(error).__name__, said, is_unanswered(error))


def is_unanswered(error: BaseException) -> bool:
    """Whether an error came of another rank that did not take part in a collective, or did not send a message."""
    for cause in causes_of(error):
        if isinstance(cause, RankError):  # All ranks have it: what it came of has been told.
            return False
        if _says_so(cause):
            return True
    return False


def _says_so(error: BaseException) -> bool:
    if isinstance(error, (Unanswered, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _UNANSWERED)


def is_the_same_on_all(failures: Sequence[Failure], size: int) -> bool:
    """Whether all ranks failed by themselves, for reasons of one kind: each can say its own."""
    kinds = {failure.kind for failure in failures}
    return len(failures) == size and len(kinds) == 1 and not any(failure.unanswered for failure in failures)


def failed(what: str, failures: Sequence[Failure], missing: Sequence[int], seconds: float) -> RankError:
    """The error that all ranks raise.

    Args:
        what: the function that failed, which begins the message.
        failures: in the order in which ranks failed; at least one, where no rank is missing.
        missing: ranks that have not said how they ended.
        seconds: that were waited for them.
    """
    own = next((failure for failure in failures if not failure.unanswered), None)
    if own is not None and own.kind == RankError.__name__:
        return RankError(own.said, own.rank)  # It names the function and the rank itself.
    if own is not None:
        return RankError(f"{what}: rank {own.rank} failed, so all ranks stop: {own.said}", own.rank)
    heard = f"; {in_words([failures[0].rank])} had: {failures[0].said}" if failures else ""
    if missing:
        return RankError(
            f"{what}: no answer came from {in_words(missing)} within {seconds:g} seconds{heard}; see how it "
            "ended, in its own output (killed, out of memory?), and start all ranks again",
            missing[0],
        )
    return RankError(
        f"{what}: a rank waited in vain for the others{heard}; "
        "run the same step on every rank, or raise the group's timeout where one is slow",
        failures[0].rank,
    )


def in_words(ranks: Sequence[int]) -> str:
    """Their numbers, as a sentence has them."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class _Call:
    """One function that all ranks run: where its messages are, and how many of them there were."""

    def __init__(self, what: str, prefix: str) -> None:
        self.what, self.prefix = what, prefix
        self.messages = 0
        self.sent: list[str] = []  # keys of this rank's messages that others may not have read yet

    def key(self, name: object) -> str:
        return f"{self.prefix}/{name}"


class Ranks:
    """The processes of a group. Each calls the same functions in the same order.

    Args:
        group: a process group that this process belongs to.

    Attributes:
        rank: this process's number in the group.
        size: how many there are.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        self._name = group.group_name
        self._store = dist.distributed_c10d._get_default_store()
        self._calls: list[_Call] = []  # the innermost last

    @property
    def timeout_seconds(self) -> float:
        """The group's; what waits for another rank in vain ends soon after."""
        return _timeout_of(self._group)

    # Messages ------------------------------------------------------------------

    def gathered(self, value: Value) -> list[Value]:
        """Returns the values of all ranks, in their order; call it on all of them, inside ``together``."""
        call = self._calls[-1]
        call.messages += 1
        keys = [call.key(f"{call.messages}/{rank}") for rank in range(self.size)]
        self._send(keys[self.rank], value)
        self._wait_for(keys)
        values = [pickle.loads(self._store.get(key)) for key in keys]
        self._forget(call)  # Whoever has sent this message has read those before.
        call.sent.append(keys[self.rank])
        return values

    def from_first(self, value: Value) -> Value:
        """Returns the value of the first rank; those of the others are ignored."""
        call = self._calls[-1]
        call.messages += 1
        key = call.key(f"{call.messages}/0")
        if self.rank == 0:
            self._send(key, value)
            call.sent.append(key)
            return value
        self._wait_for([key])
        return pickle.loads(self._store.get(key))

    def made_by_rank0(self, make: Callable[[], Value]) -> Value:
        """Returns the result of ``make`` on the first rank to all; a ValueError from it is raised on all."""
        made: Value | None = None
        refusal: ValueError | None = None
        if self.rank == 0:
            try:
                made = make()
            except ValueError as error:
                refusal = error
        made, refusal = self.from_first((made, refusal))
        if refusal is not None:
            raise refusal
        return made  # type: ignore[return-value]

    def check_answered(self, error: Exception | None) -> None:
        """Raise where a rank's error says that another one did not answer: that rank's own error is the cause."""
        try:
            unanswered = any(self.gathered(error is not None and is_unanswered(error)))
        except Unanswered as lost:
            raise error or lost from None
        if unanswered:
            raise error or Unanswered()

    def check_same(self, what: str, values: Mapping[str, Any]) -> None:
        """Refuse ranks of which these values differ.

        Args:
            what: the function that was called, which begins the message.
            values: by what to call them.

        Raises:
            RankError: says which value, of which rank.
        """
        first, *others = self.gathered(dict(values))
        for rank, other in enumerate(others, start=1):
            for name in dict.fromkeys([*first, *other]):
                if first.get(name) != other.get(name):
                    raise RankError(
                        f"{what}: expected the same {name} on every rank, got {first.get(name)} on rank 0 and "
                        f"{other.get(name)} on rank {rank}; give all ranks the same",
                        rank,
                    )

    # What all ranks run ----------------------------------------------------------

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Inside, all ranks do the same; what fails on one fails on all.

        Args:
            what: the function that was called, which begins messages.

        Raises:
            RankError: it failed on some ranks, some did not answer, or they call different functions.
            Exception: as raised, where all failed for reasons of one kind.
        """
        _calls_of[self._name] += 1
        call = _Call(what, f"sublinear-planner/{self._name}/{_calls_of[self._name]}")
        self._calls.append(call)
        try:
            with measured_with(self):
                for rank, other in enumerate(self.gathered(what)):
                    if other != what:
                        raise RankError(f"{what}: expected it on every rank, got {other} on rank {rank}", rank)
                yield
        except Exception as error:
            if any(isinstance(cause, FailedElsewhere) and cause.prefix != call.prefix for cause in causes_of(error)):
                raise  # All leave a call around this one, and meet there.
            outcome = self._failed(call, error)
            if outcome is error:
                raise
            raise outcome from error
        except BaseException as error:
            self._publish(call, error)
            raise
        else:
            self._succeeded(call)
        finally:
            self._calls.remove(call)

    def _succeeded(self, call: _Call) -> None:
        """Raises RankError where another rank did not."""
        missing = self._ended(call, self.timeout_seconds + GRACE_SECONDS)
        failures = self._failures(call)
        if failures or missing:
            raise failed(call.what, failures, missing, self.timeout_seconds)
        self._forget(call)

    def _failed(self, call: _Call, error: Exception) -> Exception:
        """The error to raise on this rank, once all have said how they ended."""
        seconds, began = GRACE_SECONDS + (0 if is_unanswered(error) else self.timeout_seconds), time.monotonic()
        try:
            self._publish(call, error)
            missing = self._ended(call, seconds)
            if len(missing) > 1 and is_unanswered(error):
                # Only neighbours of a rank that is gone see that at once: others wait as long as the group lets them.
                missing = self._ended(call, self.timeout_seconds, missing=1)
            failures = self._failures(call)
        except dist.DistError as lost:
            return RankError(
                f"{call.what}: expected the process that holds the group's store to be there, got {lost}; this rank "
                f"had: {failure_on(self.rank, error).said}; see how that process ended, in its own output",
                0,
            )
        if not missing and is_the_same_on_all(failures, self.size):
            return error
        return failed(call.what, failures, missing, round(time.monotonic() - began))

    def _publish(self, call: _Call, error: BaseException) -> None:
        number = self._store.add(call.key("failures"), 1)
        self._send(call.key(f"failure/{number}"), failure_on(self.rank, error))

    def _failures(self, call: _Call) -> list[Failure]:
        """In the order in which ranks failed."""
        count = self._store.add(call.key("failures"), 0)
        return [pickle.loads(self._store.get(call.key(f"failure/{number}"))) for number in range(1, count + 1)]

    def _ended(self, call: _Call, seconds: float, *, missing: int = 0) -> list[int]:
        """Say that this rank is through, and wait for the others, or all but so many: those that have not said so."""
        keys = [call.key(f"ended/{rank}") for rank in range(self.size)]
        self._send(keys[self.rank], None)
        deadline, nap = time.monotonic() + seconds, _naps()
        while not self._store.check(keys):
            left = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if len(left) <= missing or time.monotonic() > deadline:
                return left
            time.sleep(next(nap))
        return []

    def _wait_for(self, keys: Sequence[str]) -> None:
        """Until all of these messages are there; raises Unanswered where one does not come."""
        # Others may come from a collective in which they waited as long as the group lets them.
        deadline, nap = time.monotonic() + self.timeout_seconds + GRACE_SECONDS, _naps()
        while not self._store.check(list(keys)):
            for call in self._calls:
                # A rank may send first and fail then: its message counts.
                if self._store.check([call.key("failure/1")]) and not self._store.check(list(keys)):
                    raise FailedElsewhere(call.prefix)
            if time.monotonic() > deadline:
                raise Unanswered([int(key.rpartition("/")[2]) for key in keys if not self._store.check([key])])
            time.sleep(next(nap))

    def _send(self, key: str, value: Any) -> None:
        self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # It takes bytes as well.

    def _forget(self, call: _Call) -> None:
        for key in call.sent:
            self._store.delete_key(key)
        call.sent.clear()


def _naps() -> Iterator[float]:
    """Seconds to sleep between looks: messages come at once, or a solver has to end first."""
    seconds = 0.0005
    while True:
        yield seconds
        seconds = min(1.5 * seconds, _LONGEST_NAP_SECONDS)


def _timeout_of(group: dist.ProcessGroup) -> float:
    """A process group's timeout, in seconds."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)
    return timeout.total_seconds()


_known: dict[str, tuple[dist.ProcessGroup, Ranks]] = {}
_groups: list[dist.ProcessGroup | None] = []


@contextlib.contextmanager
def planning_among(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Inside, the planner's functions are collective among the ranks of this group; with None each plans alone."""
    _groups.append(group)
    try:
        yield
    finally:
        _groups.pop()


def together(what: str) -> contextlib.AbstractContextManager[None]:
    """Inside, all ranks do the same, as ``Ranks.together`` says; nothing where this process plans alone."""
    ranks = current_ranks()
    return contextlib.nullcontext() if ranks is None else ranks.together(what)


def current_ranks() -> Ranks | None:
    """The ranks that the planner's functions are collective among; None where this process plans alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = _groups[-1] if _groups else dist.distributed_c10d._get_default_group()
    if group is None or dist.get_world_size(group) < 2 or dist.get_backend(group) == _FAKE:
        return None
    known = _known.get(group.group_name)
    if known is None or known[0] is not group:
        known = _known[group.group_name] = group, Ranks(group)
    return known[1]
