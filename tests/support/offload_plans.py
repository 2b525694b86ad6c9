"""Plans that send tensors to host memory, made from the simplest schedules by drawing transfers into them."""

from __future__ import annotations

import random
from typing import Any

import planner
from planner.plans.cost_model import chain_of
from solvers import Chain, Schedule
from solvers.chain.baselines import Segment, droppable_runs, segmented_schedule
from solvers.problem.chain import Link
from tests.support.exactness import choosing_inside, following
from tests.support.random_transfers import AMPLE, with_transfers


def kept(chain: Chain) -> Schedule:
    return segmented_schedule([Segment(k, k + 1, option=0) for k in range(len(chain.stages))])


def recomputed(chain: Chain) -> Schedule:
    """Each stage that can be runs again alone, from its input."""
    found: list[Segment] = []
    for run in droppable_runs(chain):
        found += [run] if run.kept else [Segment(k, k + 1) for k in range(run.start, run.end)]
    return segmented_schedule(found)


def halves(chain: Chain) -> Schedule:
    """In every run of stages the first half runs again together, from one input; the others are kept."""
    found: list[Segment] = []
    for run in droppable_runs(chain):
        half = (run.start + run.end + 1) // 2
        found += [run] if run.kept else [Segment(run.start, half)]
        found += [] if run.kept else [Segment(k, k + 1, option=0) for k in range(half, run.end)]
    return segmented_schedule(found)


SCHEDULES = {"kept": kept, "recomputed": recomputed, "halves": halves, "inside": choosing_inside}


def planned(
    profile: planner.Profile, make: Any, *, seed: int = 0, share: float = 1.0, link: Link = AMPLE
) -> planner.Plan:
    """A plan with transfers drawn into the schedule that ``make`` gives."""
    chain = chain_of(profile)
    schedule = make(chain)
    if not any(action.kind == "send" for action in schedule.actions):
        schedule = with_transfers(chain, schedule, random.Random(seed), share)
    return following(profile, schedule, link)
