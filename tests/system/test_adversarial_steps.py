"""Steps that train a generator against a discriminator, as loops write them, with a plan of either network."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.workload.workload import Workload
from tests.support.exactness import assert_same, state_after

WIDTH = 48


def network(inside: int, outside: int) -> nn.Sequential:
    hidden = [nn.Sequential(nn.Linear(96, 96), nn.LeakyReLU(0.2)) for _ in range(4)]
    return nn.Sequential(nn.Linear(inside, 96), nn.ReLU(), *hidden, nn.Linear(96, outside))


def is_called(judged: Tensor, value: float) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(judged, torch.full_like(judged, value))


def adversarial(planned: str) -> Workload:
    """One update of both networks; the discriminator runs forward and backward three times in it."""
    torch.manual_seed(0)
    generator, discriminator = network(16, WIDTH), network(WIDTH, 1)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (generator, discriminator)]
    noise, real = torch.randn(512, 16), torch.randn(512, WIDTH)

    def step() -> float:
        discriminator.zero_grad()
        of_real = is_called(discriminator(real), 1.0)
        of_real.backward()
        made = generator(noise)
        of_made = is_called(discriminator(made.detach()), 0.0)
        of_made.backward()
        optimizers[1].step()
        generator.zero_grad()
        deceiving = is_called(discriminator(made), 1.0)
        deceiving.backward()
        optimizers[0].step()
        return (of_real + of_made + deceiving).item()

    return Workload(generator if planned == "generator" else discriminator, step=step)


@pytest.mark.parametrize("planned", ["generator", "discriminator"])
def test_a_plan_of_either_network_trains_both_alike_and_says_where_it_promises_no_peak(planned: str) -> None:
    plan = planner.solve(planner.profile(adversarial(planned), stages="whole"), "80%")
    expected, work = state_after(adversarial(planned)), adversarial(planned)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with planner.apply(work.model, plan):
            peak_bytes = planner.measure(work).peak_bytes
        work = adversarial(planned)
        with planner.apply(work.model, plan):
            assert_same(state_after(work), expected)
    words = " ".join(str(each.message) for each in said)
    if planned == "generator":
        assert not words and peak_bytes == plan.predicted_peak_bytes <= plan.budget_bytes
        return
    # The third forward alone passes a gradient on to its input.
    assert "3 forwards, with inputs that take a gradient in some of them and none in others" in words
    assert "called with a tensor of shape (512, 48) that takes a gradient, and took none" in words
    assert plan.predicted_peak_bytes <= plan.budget_bytes
