"""Ops that draw, run again from a state."""

from __future__ import annotations

import torch

from profiler.trace.joint_graph import random_state, run_from_state

CPU = torch.device("cpu")


def test_an_op_draws_the_numbers_of_its_state_and_the_generator_goes_on_as_before() -> None:
    state = random_state(CPU)
    first = torch.rand(3)
    after = random_state(CPU)
    again = run_from_state(state, CPU, torch.ops.aten.rand.default, [3], device=CPU, pin_memory=False)
    assert torch.equal(again, first) and torch.equal(random_state(CPU), after)
