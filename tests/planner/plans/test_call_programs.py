"""The programs of a captured call: what their replay says is what they keep, and they compute the same."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.plans import exact_programs
from planner.plans.call_programs import program_menu, with_exact_programs
from planner.plans.cost_model import chain_of
from profiler.measurement.captured_stages import measured_graph
from profiler.program_replay import CallReplay, call_replay
from profiler.step_graph import StepGraph, StepOp, StepRuns, StepStorage, runs_once
from profiler.trace.call_program import CallProgram
from profiler.trace.captured_call import CapturedCall, capture_call
from profiler.trace.programs import StepOrder
from solvers import Problem


def by_hand() -> StepGraph:
    """Two ops and their backwards: the first makes 100 bytes that both backwards read, the second returns 10."""
    storages = (
        StepStorage(size_bytes=100),
        StepStorage(size_bytes=10, returned=True),
        StepStorage(size_bytes=10, of_loss=True),
        StepStorage(size_bytes=100),
        StepStorage(size_bytes=4, gradient=True),
    )
    ops = (
        StepOp(name="a", op="aten.a", makes=(0,), seconds=1.0),
        StepOp(name="b", op="aten.b", reads=(0,), makes=(1,), seconds=2.0),
        StepOp(name="b_back", op="aten.b", side="backward", reads=(0, 2), makes=(3,), seconds=2.0),
        StepOp(name="a_back", op="aten.a", side="backward", reads=(0, 3), makes=(4,), seconds=1.0),
    )
    return StepGraph(ops=ops, storages=storages, resident_bytes=0)


def test_choices_worked_out_by_hand() -> None:
    step = by_hand()
    once = call_replay(step, runs_once(step))
    assert once == CallReplay(
        runs=StepRuns((0, 1), (2, 3)),
        kept_bytes=100,
        forward_peak_bytes=110,
        backward_peak_bytes=210,  # what a made, and the gradients of both results
        above_start_bytes=100,
        forward_seconds=3.0,
        backward_seconds=3.0,
    )
    again = call_replay(step, StepRuns((0, 1), (0, 2, 3)))
    assert (again.kept_bytes, again.seconds, again.backward_peak_bytes) == (0, 7.0, 210)
    assert program_menu(step) == (once, again)


def test_a_choice_between_two_levels_is_found_where_there_is_most_to_gain() -> None:
    """Levels are 17 or 18 bytes apart, and each but the least has room for both of the small ones, of 5 and 12."""
    made = ((5, 10.0), (12, 3.0), (88, 1.0))  # bytes, and seconds to make them
    storages = (
        *(StepStorage(size_bytes=size) for size, _ in made),
        StepStorage(size_bytes=1, returned=True),
        StepStorage(size_bytes=1, of_loss=True),
        StepStorage(size_bytes=4, gradient=True),
    )
    ops = (
        *(StepOp(name=f"op{k}", op="aten.op", makes=(k,), seconds=seconds) for k, (_, seconds) in enumerate(made)),
        StepOp(name="last", op="aten.last", reads=(0, 1, 2), makes=(3,), seconds=1.0),
        StepOp(name="back", op="aten.last", side="backward", reads=(0, 1, 2, 4), makes=(5,), seconds=1.0),
    )
    menu = program_menu(StepGraph(ops=ops, storages=storages, resident_bytes=0))
    assert {(each.kept_bytes, each.seconds - menu[0].seconds) for each in menu} >= {(5, 4.0), (17, 1.0), (0, 14.0)}


def test_what_forward_returns_is_not_counted_as_kept_though_backward_reads_it() -> None:
    storages = (
        StepStorage(size_bytes=10, returned=True),
        StepStorage(size_bytes=10, of_loss=True),
        StepStorage(size_bytes=4, gradient=True),
    )
    ops = (
        StepOp(name="a", op="aten.a", makes=(0,)),
        StepOp(name="a_back", op="aten.a", side="backward", reads=(0, 1), makes=(2,)),
    )
    step = StepGraph(ops=ops, storages=storages, resident_bytes=0)
    assert call_replay(step, runs_once(step)).kept_bytes == 0


@pytest.fixture(scope="module")
def block() -> tuple[nn.Module, Tensor, CapturedCall, StepGraph]:
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.1, batch_first=True, norm_first=True)
    x = torch.randn(8, 16, 32, requires_grad=True)
    captured = capture_call(module, module.forward, (x,), {})
    return module, x, captured, measured_graph(captured.graph, torch.device("cpu"))


@pytest.mark.slow
def test_of_two_choices_one_takes_less_and_the_other_is_faster(
    block: tuple[nn.Module, Tensor, CapturedCall, StepGraph],
) -> None:
    menu = program_menu(block[3])
    assert len(menu) > 2 and menu[0] == call_replay(block[3], runs_once(block[3]))
    for one, other in itertools.combinations(menu, 2):
        assert one.seconds <= other.seconds
        assert (
            one.kept_bytes > other.kept_bytes
            or one.forward_peak_bytes > other.forward_peak_bytes
            or one.backward_peak_bytes > other.backward_peak_bytes
        )
    most = max(menu[0].forward_peak_bytes, menu[0].backward_peak_bytes)
    assert all(max(each.forward_peak_bytes, each.backward_peak_bytes) <= most for each in menu)


@pytest.mark.slow
def test_every_choice_keeps_what_it_says_and_computes_the_same(
    block: tuple[nn.Module, Tensor, CapturedCall, StepGraph],
) -> None:
    module, x, captured, step = block
    for choice in program_menu(step):
        plain, planned = copy.deepcopy(module), copy.deepcopy(module)
        program = CallProgram(captured, StepOrder.of(step, choice.runs)).bound(planned)
        known = {t.untyped_storage()._cdata for t in (*planned.parameters(), x)}
        kept: dict[int, int] = {}

        def pack(tensor: Tensor, kept: dict[int, int] = kept, known: set[int] = known) -> Tensor:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            got = program(x)
        returned = got.untyped_storage()._cdata
        assert sum(n for key, n in kept.items() if key not in known | {returned}) == choice.kept_bytes
        (got * got).sum().backward()
        torch.manual_seed(1)
        expected = plain(x)
        (expected * expected).sum().backward()
        assert torch.equal(got, expected)
        for one, other in zip(planned.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


def test_a_dropped_stage_gets_a_program_for_the_room_from_its_first_run_on(blocks: planner.Profile) -> None:
    captured = [stage for stage in blocks.stages if stage.menu >= 0]
    dropped = planner.state(blocks, planner.Rules(checkpoints=[stage.name for stage in captured]))
    problem = Problem(chain=chain_of(blocks), budget_bytes=dropped.predicted_peak_bytes)
    more = with_exact_programs(blocks, problem, dropped.schedule, seconds=3.0)
    known = {id(option) for menu in blocks.menus for option in menu.options}
    new = [option for menu in more.menus for option in menu.options if id(option) not in known]
    assert max(option.freed_bytes for option in new) > captured[0].kept_bytes / 2
    assert any(option.ops_again for option in new)


@pytest.mark.slow
def test_a_plan_stays_where_the_chain_with_more_programs_has_none(
    blocks: planner.Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = planner.solve(blocks, "60%").predicted_peak_bytes
    tried: list[int] = []

    def fewer(profile: planner.Profile, *_: object) -> planner.Profile:
        tried.append(len(profile.menus))
        menus = tuple(replace(menu, options=menu.options[:1]) for menu in profile.menus)
        return replace(
            profile, menus=menus, stages=tuple(replace(each, reason="it has changed") for each in profile.stages)
        )

    monkeypatch.setattr(exact_programs, "with_exact_programs", fewer)
    assert planner.solve(blocks, budget).predicted_peak_bytes <= budget
    assert tried
