"""What options inside stages cost in a chain: never less than the forward of the ops that run again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import planner
from planner.explain.peak import predicted_peak
from planner.explain.timeline import predicted_timelines
from planner.plans.cost_model import chain_of, memory_table
from profiler.records import MenuRecord
from solvers.chain import baselines
from solvers.problem.simulator import replay


def luckiest(menu: MenuRecord) -> MenuRecord:
    """As if the program that was measured had been measured to cost nothing."""
    options = [
        replace(o, forward_seconds=menu.keep_forward_seconds, backward_seconds=menu.keep_backward_seconds)
        for o in menu.options
    ]
    lucky = replace(menu, options=tuple(options))
    return lucky.with_programs([o.runs for o in menu.options])


def test_no_option_is_free_however_it_was_measured(blocks: planner.Profile) -> None:
    lucky = replace(blocks, menus=tuple(luckiest(menu) for menu in blocks.menus))
    checked = 0
    for record, stage in zip(lucky.stages, chain_of(lucky).stages, strict=True):
        if record.menu < 0:
            continue
        menu, keep = lucky.menus[record.menu], stage.options[0]
        if menu.graph is None:
            continue
        graph, once = menu.graph, menu.options[0].runs
        assert not once.again
        for option, made in zip(menu.options, stage.options[1:], strict=True):
            # A program may also run an op in backward alone.
            forward, backward = (
                sum(graph.ops[ordinal].seconds for ordinal in ordinals) / sum(graph.ops[o].seconds for o in each) - 1
                for ordinals, each in zip(option.runs, once, strict=True)
            )
            extra = made.forward_seconds + made.backward_seconds - keep.forward_seconds - keep.backward_seconds
            expected = forward * menu.keep_forward_seconds + backward * menu.keep_backward_seconds
            assert extra == pytest.approx(expected)
            checked += extra > 0 and bool(option.runs.again)
    assert checked


def test_the_terms_of_each_stage_add_up_to_what_the_chain_counts(blocks: planner.Profile) -> None:
    chain, table = chain_of(blocks), memory_table(blocks)
    assert list(table.name) == [stage.name for stage in chain.stages]
    assert list(table.kept_bytes) == [stage.options[0].kept_bytes for stage in chain.stages]
    assert list(table.residue_bytes) == [stage.residue_bytes for stage in chain.stages]
    assert list(table.dropped_peak_bytes) == [stage.forward_peak_bytes for stage in chain.stages]
    lasting = table.forward_growth_bytes - table.late_release_bytes + table.late_arrival_bytes
    kept = lasting - table.shared_growth_bytes - table.boundary_bytes + table.cleared_bytes
    assert list(kept) == list(table.kept_bytes)
    gradients = table.later_gradient_bytes + table.gradient_bytes
    assert list(gradients) == list(table.other_live_bytes)
    after_forward = [stage.forward.end_bytes for stage in blocks.stages]
    assert list(blocks.stages[0].forward.start_bytes + table.forward_growth_bytes.cumsum()) == after_forward


def own_step(clearing_first: bool) -> planner.Workload:
    """Of a model whose parameters take most of the memory; gradients are cleared at one end of the step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 64)

    def step() -> torch.Tensor:
        if clearing_first:
            optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if not clearing_first:
            optimizer.zero_grad()
        return loss

    return planner.Workload(model=model, step=step, optimizer=optimizer)


def test_gradients_that_a_step_clears_first_count_once() -> None:
    """They are alive as it begins, and do not come back when what the first stage keeps goes."""
    first, last = (planner.profile(own_step(clearing), menus=False) for clearing in (True, False))
    assert first.unplanned_peak_bytes == last.unplanned_peak_bytes
    chain = chain_of(first)
    (kept,) = baselines.keep_all(chain)
    timeline = replay(chain, kept).timeline
    assert max(each.peak_bytes for each in timeline) <= first.unplanned_peak_bytes
    assert timeline[-1].after_bytes == first.stages[0].backward.end_bytes
    assert planner.solve(first, "100%").predicted_peak_bytes == first.unplanned_peak_bytes


def test_gradients_that_a_step_clears_first_are_no_part_of_a_later_peak() -> None:
    plan = planner.solve(planner.profile(own_step(clearing_first=True), menus=False), "100%")
    assert plan.chain is not None and plan.resident is not None and plan.resident.gradients > 0
    _, planned = predicted_timelines(plan.chain, plan.schedule)
    peak = predicted_peak(plan.chain, plan.schedule, planned, plan=plan)
    assert "gradients of parameters" in [part.what for part in peak.parts]
    assert all(part.what != "other resident" for part in peak.parts)
    # The last step's loss, which the loop holds as the step begins, goes with them.
    before_bytes = sum(
        part.size_bytes for part in peak.parts if part.what == "gradients from before" or part.stage == "before 0"
    )
    assert before_bytes == 0
