"""What failed on which rank, told to all of them, and what to say of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from profiler.workload.steps import causes_of

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
    """How one rank failed.

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
        return RankError(
            f"{what}: expected it to succeed on every rank, got an error on rank {own.rank}: {own.said}", own.rank
        )
    heard = f"; {in_words([failures[0].rank])} had: {failures[0].said}" if failures else ""
    if missing:
        return RankError(
            f"{what}: expected every rank to take part, got no answer from {in_words(missing)} within {seconds:g} "
            f"seconds{heard}; see how it ended, in its own output (killed, out of memory?), and start all ranks again",
            missing[0],
        )
    return RankError(
        f"{what}: expected every rank to take part in the same collectives, got a rank that waited in vain{heard}; "
        "run the same step on every rank, or raise the group's timeout where one is slow",
        failures[0].rank,
    )


def in_words(ranks: Sequence[int]) -> str:
    """Their numbers, as a sentence has them."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
