"""Messages between ranks, and what fails on one failing on all, in words that name it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import planner
from benchmarks.rank_processes import run_on_ranks, values_of_ranks
from planner.distributed.ranks import RankError, Ranks, _Call, current_ranks, planning_among
from profiler.agreement import agreed, any_rank, first_failure, gathered


def too_small() -> None:
    raise planner.Infeasible(minimum_budget_bytes=7, reason="so it is", solver="auto", budget_bytes=3)


def raised(what: str, run) -> str:
    """What ``run`` raises inside a call of this name."""
    ranks = current_ranks()
    assert ranks is not None
    try:
        with ranks.together(what):
            run()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fail(rank: int, own: int, message: str) -> None:
    group = dist.new_group(timeout=timedelta(seconds=3))  # It breaks, and the default one stays whole.
    if rank == own:
        raise ValueError(message)
    dist.all_reduce(torch.ones(1), group=group)  # The others wait for it there.


def messages(rank: int) -> dict:
    ranks = current_ranks()
    assert ranks is not None and planner.solve is not None
    seen: dict = {}
    with ranks.together("look"):
        seen["gathered"] = gathered({"rank": rank})
        seen["agreed"] = agreed(10 + rank)
        seen["any"] = any_rank(rank == 1), any_rank(False)
        seen["failure"] = first_failure("mine" if rank == 1 else "")
        with ranks.together("look closer"):
            seen["inner"] = ranks.gathered(rank)
        seen["made"] = ranks.made_by_rank0(lambda: os.getpid())
    seen["refused by the first"] = raised("solve", lambda: ranks.made_by_rank0(too_small))
    seen["differs"] = raised("apply", lambda: ranks.check_same("apply", {"plan": f"plan of {rank}"}))
    seen["fails on all"] = raised("profile", lambda: fail(rank, rank, f"no {rank}"))
    seen["other function"] = raised("measure" if rank else "profile", lambda: None)
    with planning_among(None):
        seen["alone"] = current_ranks(), gathered(rank)
    seen["still there"] = raised("look again", lambda: gathered(rank))
    return seen


@pytest.mark.slow
def test_what_ranks_tell_each_other():
    first, second = values_of_ranks(messages)
    for seen in (first, second):
        assert seen["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert seen["agreed"] == 10
        assert seen["any"] == (True, False)
        assert seen["failure"] == "mine"
        assert seen["inner"] == [0, 1]
        assert seen["refused by the first"].startswith("Infeasible: budget: ")
        assert "known to be enough is 7 bytes" in seen["refused by the first"]
        assert (
            "expected the same plan on every rank, got plan of 0 on rank 0 and plan of 1 on rank 1" in seen["differs"]
        )
        assert seen["alone"][0] is None
        assert seen["still there"] == ""
    assert "profile: expected it on every rank, got measure on rank 1" in first["other function"]
    assert "measure: expected it on every rank, got profile on rank 0" in second["other function"]
    assert first["made"] == second["made"]
    assert [seen["fails on all"] for seen in (first, second)] == ["ValueError: no 0", "ValueError: no 1"]


class LateStore:
    """In which a message and a failure come between two looks at it."""

    def __init__(self) -> None:
        self.looks = 0

    def check(self, keys: Sequence[str]) -> bool:
        self.looks += 1
        return self.looks > 1


def test_a_message_that_came_before_its_rank_failed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "timeout_seconds", 1.0)
    ranks: Any = object.__new__(Ranks)
    ranks._store, ranks._calls = LateStore(), [_Call("solve", "one")]
    ranks._wait_for(["one/1/0"])


HOW = ("in a step", "between messages", "swallowed", "inside")


def one_fails(rank: int) -> dict[str, str]:
    return {how: raised("profile", lambda how=how: fails(rank, how)) for how in HOW}


def fails(rank: int, how: str) -> None:
    if how == "in a step":
        fail(rank, 1, "the layer has no room")
    elif how == "between messages":
        if rank == 1:
            raise ValueError("the layer has no room")
        gathered(0)
    elif how == "swallowed":
        error = None
        try:
            fail(rank, 1, "the layer has no room")
        except (ValueError, RuntimeError) as caught:
            error = caught
        first_failure("cannot run twice" if error else "", error)
    elif how == "inside":
        ranks = current_ranks()
        assert ranks is not None
        with ranks.together("measure"):
            fail(rank, 1, "the layer has no room")


@pytest.mark.slow
def test_what_fails_on_one_rank_fails_on_all():
    for said in values_of_ranks(one_fails, group_seconds=2.0):
        for how in HOW:
            assert "rank 1 failed, so all ranks stop: the layer has no room" in said[how], how
            assert said[how].startswith("RankError: " + ("measure" if how == "inside" else "profile"))


def two_are_killed(rank: int) -> list[str]:
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    said = [raised("profile", lambda: killed_in_a_step(rank))]
    assert isinstance(pair, dist.ProcessGroup)
    with planning_among(pair):
        said.append(raised("solve", lambda: killed_between_messages(rank)))
    return said


def killed_in_a_step(rank: int) -> None:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def killed_between_messages(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gathered(0)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_rank_that_is_killed_is_named():
    survivor, *killed = run_on_ranks(two_are_killed, ranks=3, group_seconds=2.0)
    assert [result.exit_code for result in killed] == [-signal.SIGKILL, -signal.SIGKILL]
    assert "profile: no answer came from rank 2" in survivor.value[0]
    assert "solve: no answer came from rank 1" in survivor.value[1]


def test_a_rank_error_keeps_its_rank_where_it_is_sent():
    import pickle

    error = pickle.loads(pickle.dumps(RankError("what", 3)))
    assert (str(error), error.rank) == ("what", 3)


def test_a_process_without_a_group_plans_alone():
    assert current_ranks() is None
    assert gathered(1) == [1]
