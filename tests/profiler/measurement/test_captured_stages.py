"""Stages of a kind are captured as one graph, each with a program; or all of them are opaque, and say why."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.measurement.captured_stages import CapturedKind, KindCapture
from profiler.measurement.meter import NoMeter
from profiler.measurement.stage_probe import StageProbe
from profiler.trace.captured_call import capture_call
from profiler.trace.partition import choose_stages
from profiler.trace.step_trace import trace_step
from profiler.workload.snapshot import preserved
from profiler.workload.workload import Workload

WIDTH = 8
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, scale: float = 1.0, label: str = "") -> None:
        super().__init__()
        self.line, self.back, self.scale, self.label = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), scale, label

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(torch.sigmoid(self.line(x)) * self.scale)


class Net(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_() * 1
        for block in self.blocks:
            x = block(x)
        return x


class CallsAgain(Net):
    """Calls a part of its first block by itself, which is no stage."""

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0].line(super().forward(x))  # type: ignore[union-attr, operator]


def captured(model: nn.Module, *, autocast: torch.dtype | None = None, refused: str = "") -> CapturedKind:
    torch.manual_seed(0)
    work = Workload(model=model, inputs=torch.randn(4, WIDTH), loss=torch.sum, autocast=autocast)
    trace = trace_step(work)
    stages = choose_stages(trace, ["blocks.*"])
    capture = KindCapture(stages, trace, model, CPU, {})
    if refused:
        capture.refuse(refused)
    with preserved(work), StageProbe(work, stages) as probe:
        for k, first in enumerate(probe.dropping_forward(NoMeter(), hold_all=True).first_runs):
            capture.add(k, first)
    return capture.finished()


def test_stages_that_do_the_same_have_one_graph_and_a_program_each() -> None:
    model = Net([Block(label="first"), Block(), Block(label="last")])
    kind = captured(model)
    assert kind.opaque == "" and kind.graph is not None
    assert [op.kind for op in kind.graph.ops if op.side == "forward"] == ["addmm", "sigmoid", "mul", "addmm", "add"]
    assert all(op.seconds > 0 for op in kind.graph.ops)
    assert [*kind.once] == [0, 1, 2] and [each.module for each in kind.once.values()] == [*model.blocks]
    assert len({id(each.program) for each in kind.once.values()}) == 1
    assert kind.unread == {".label"}  # It makes no difference to what they compute.
    x = torch.randn(4, WIDTH, requires_grad=True) * 1
    for k, block in enumerate(model.blocks):
        expected, found = block(x), kind.run(k, (x,), {})
        assert torch.equal(found, expected)
        pairs = [torch.autograd.grad(each.exp().sum(), [x, *block.parameters()]) for each in (found, expected)]
        assert all(map(torch.equal, *pairs))


def test_stages_that_differ_in_numbers_of_their_code_have_programs_of_their_own() -> None:
    kind = captured(Net([Block(1.0), Block(2.0), Block(1.0, label="last")]))
    assert kind.opaque == "" and kind.unread == {".label"}
    first, second, third = (kind.once[k].program for k in range(3))
    assert first is third and first is not second


def hooked(block: nn.Module) -> nn.Module:
    block.get_submodule("line").register_forward_hook(lambda *_: None)
    return block


class Own(nn.Parameter):
    pass


def of_own_type(block: nn.Module) -> nn.Module:
    line = block.get_submodule("line")
    line.weight = Own(torch.randn(WIDTH, WIDTH))
    return block


class Branches(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() < 1e9 else x * 2


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: hooked(Block()), "'line' inside it has hooks"),
        (lambda: of_own_type(Block()), "its parameters are of a type of their own"),
        (Branches, "traced as one graph of ops"),
    ],
    ids=["hooks", "types", "branches"],
)
def test_what_cannot_run_as_a_program_is_opaque(make: Callable[[], nn.Module], why: str) -> None:
    for count in (1, 2):
        kind = captured(Net([make() for _ in range(count)]))
        assert why in kind.opaque and kind.graph is None and not kind.once


@pytest.mark.slow
def test_under_autocast_parameters_that_others_share_are_cast_once_for_all() -> None:
    shared, other, tied = Block(), Block(), Block()
    other.line, tied.line.weight = shared.line, shared.line.weight
    for blocks in ([shared, Block(), shared], [shared, other], [Block(), tied, shared]):
        assert "autocast casts its parameters once" in captured(Net(blocks), autocast=torch.bfloat16).opaque
    assert "autocast casts its parameters once" in captured(CallsAgain([Block()]), autocast=torch.bfloat16).opaque
    assert captured(Net([shared, Block()]), autocast=torch.bfloat16).opaque == ""
    assert captured(Net([shared, other, tied])).opaque == ""


def test_once_a_stage_is_opaque_all_of_its_kind_are() -> None:
    kind = captured(Net([Block(), hooked(Block()), Block()]))
    assert "has hooks" in kind.opaque and kind.graph is None and not kind.once


def test_stages_whose_ops_are_others_are_opaque() -> None:
    class Other(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.back(torch.tanh(self.line(x)))

    assert captured(Net([Block(), Other()])).opaque == "stages like it are captured as another graph"


def test_what_is_refused_is_not_captured_and_the_first_reason_counts() -> None:
    kind = captured(Net([hooked(Block())]), refused="there is no room")
    assert kind.opaque == "there is no room" and kind.graph is None


class Scales(nn.Module):
    """Makes a tensor of numbers in its code."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.up, self.down = count, nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor([0.5] * self.count).mean()
        return x + self.down(torch.relu(self.up(x)) * scale)


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 2000])
def test_numbers_in_the_code_take_no_bytes_that_are_not_predicted(count: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Scales(count) for _ in range(4)))
    work = planner.Workload(model=model, inputs=torch.randn(512, 16), loss=lambda y: y.square().sum())
    profile = planner.profile(work)
    captured = [menu for menu in profile.menus if menu.ops.saved_bytes]
    if count == 3:
        assert all(menu.graph is not None for menu in captured)
    else:
        assert all("8,000 bytes" in menu.opaque for menu in captured)
    plan = planner.solve(profile, "80%")
    fresh = nn.Sequential(*(Scales(count) for _ in range(4)))
    with planner.apply(fresh, plan):
        work = planner.Workload(model=fresh, inputs=work.inputs, loss=work.loss)
        assert planner.measure(work, repeats=1).peak_bytes <= plan.predicted_peak_bytes


def test_numbers_in_the_code_lie_where_no_allocator_counts_them() -> None:
    module, x = Scales(3), torch.randn(4, 16)
    graph = capture_call(module, module.forward, (x,), {}).graph
    held = [getattr(graph.module, str(node.target)) for node in graph.constants]
    assert [tensor.tolist() for tensor in held] == [[0.5, 0.5, 0.5]]
    assert not held[0].untyped_storage().resizable()  # No storage of torch's own.
