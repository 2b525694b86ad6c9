"""Everything is put back, whatever fails or interrupts meanwhile, and tensors of every kind are."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.workload.remembered_values import RestoreError, Restoring
from profiler.workload.snapshot import preserved
from profiler.workload.tensor_memory import TensorMemory, same_values
from profiler.workload.tensor_parts import parts_of, sizes_of
from profiler.workload.workload import Workload

SQUARE = torch.arange(64.0).reshape(8, 8) * (torch.arange(64).reshape(8, 8) % 3 == 0)


class Plain(Tensor):
    """A subclass of the user's."""


def twice(sparse: Tensor) -> Tensor:
    indices, values = sparse.indices(), sparse.values()
    return torch.sparse_coo_tensor(torch.cat([indices] * 2, 1), torch.cat([values] * 2), sparse.shape)


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)


KINDS: dict[str, Callable[[], Tensor]] = {
    "dense": SQUARE.clone,
    "a number": lambda: torch.tensor(3.0),
    "empty": lambda: torch.zeros(0),
    "expanded": lambda: torch.ones(4, 1).expand(4, 8),
    "not a number": lambda: torch.tensor([float("nan"), -0.0, 0.0]),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "bool": lambda: torch.ones(3, dtype=torch.bool),
    "subclass": lambda: SQUARE.clone().as_subclass(Plain),
    "coo": lambda: SQUARE.to_sparse().coalesce(),
    "coo, not coalesced": lambda: twice(SQUARE.to_sparse().coalesce()),
    "csr": SQUARE.to_sparse_csr,
    "csc": SQUARE.to_sparse_csc,
    "bsr": lambda: SQUARE.to_sparse_bsr((4, 4)),
    "bsc": lambda: SQUARE.to_sparse_bsc((4, 4)),
    "jagged": jagged,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
    "mkldnn": SQUARE.to_mkldnn,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_every_kind_come_back_bit_for_bit(kind: str) -> None:
    tensor, reference = KINDS[kind](), KINDS[kind]()
    memory = TensorMemory(tensor)
    for part in parts_of(tensor):
        if part.layout is torch.strided and part.dtype != torch.int64 and part.numel():
            single = part[:, :1] if kind == "expanded" else part
            single.data.copy_(torch.zeros_like(single))
    assert memory.put_back() is tensor
    assert same_values(tensor, reference) or kind == "jagged"
    assert all(map(torch.equal, map(bits, parts_of(tensor)), map(bits, parts_of(reference))))
    del tensor
    again = memory.put_back()
    assert again is not None and sizes_of(again)[:1] == sizes_of(reference)[:1] and type(again) is type(reference)


def bits(part: Tensor) -> Tensor:
    plain = part.to_dense() if part.layout is not torch.strided else part
    return plain.contiguous().reshape(-1).view(torch.uint8)


def test_a_tensor_that_was_resized_or_moved_lies_where_it_lay() -> None:
    whole = torch.arange(6.0)
    view, other, grown = whole[2:4], torch.ones(2), torch.zeros(0)
    memories = [TensorMemory(t) for t in (view, other, grown)]
    view.data, other.data = torch.zeros(9), torch.zeros(3, dtype=torch.float64)
    grown.resize_(4)
    whole.mul_(2)
    for memory in memories:
        memory.put_back()
    assert whole.tolist() == [0, 2, 2, 3, 8, 10] and view.tolist() == [2, 3]
    assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert other.tolist() == [1, 1] and other.dtype is torch.float32
    assert grown.shape == (0,) and grown.untyped_storage().nbytes() == 0
    grown.resize_(4)  # as it could be before


def test_no_failure_and_no_interrupt_keeps_the_others_from_being_put_back() -> None:
    done: list[str] = []
    back = Restoring()

    def interrupted() -> None:
        done.append("second")
        if done.count("second") == 1:
            raise KeyboardInterrupt

    def interrupted_by_a_signal() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        done.append("third")

    def failing() -> None:
        raise RuntimeError("no way\nback")

    for name, way in {"first": failing, "second": interrupted, "third": interrupted_by_a_signal}.items():
        back.add(name, way)
    back.add("fourth", lambda: done.append("fourth"))
    with pytest.raises(KeyboardInterrupt):
        back.restore()
    assert done == ["second", "second", "third", "fourth"]
    only = Restoring()
    for _ in range(5):
        only.add("weight", failing)
    with pytest.raises(RestoreError, match=r"5 things .*weight: RuntimeError: no way; .*and 2 more.*Build what is"):
        only.restore()


class Wild(nn.Module):
    """Changes all that a forward can change, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.extra = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.adjacency: Tensor
        self.table: Tensor
        self.register_buffer("adjacency", torch.eye(16).to_sparse())
        self.register_buffer("lazy", None)
        self.register_buffer("table", torch.zeros(0))
        self.generator, self.noise, self.seen = torch.Generator(), np.zeros(3), {1}
        self.cache, self.helper, self.fails = [torch.eye(16).to_sparse_csr()], object(), False

    def forward(self, batch: dict[str, Any]) -> Tensor:
        x = self.adjacency @ batch["x"]
        batch["history"].append(1)
        if self.lazy is None:
            self.lazy = torch.rand(8)
            self.table.resize_(8).fill_(1)
            self.register_buffer("later", torch.rand(8))
            self.scale = nn.Parameter(torch.ones(8))
            self.added = nn.Identity()
            self.norm.register_forward_hook(lambda *_: None)
        self.adjacency._values().mul_(0.9)
        self.noise += torch.rand(1, generator=self.generator).item() + random.random() + float(np.random.rand())
        self.seen.add(len(self.seen) + 1)
        self.cache[0], self.helper = self.cache[0] * 2, object()
        self.linear.weight.requires_grad_(True)
        self.extra.requires_grad_(False)
        torch.use_deterministic_algorithms(True)
        torch.set_default_dtype(torch.float64)
        torch.set_default_dtype(torch.float32)
        if self.fails:
            raise RuntimeError("told to")
        return self.linear(self.norm(x + self.lazy + self.table) * self.scale).square().mean()


class Swapping(torch.optim.SGD):
    """Replaces the parameters' values, and takes one more group."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - 0.01 * parameter.grad
                    self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
        self.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})


def wild() -> Workload:
    torch.manual_seed(0)
    model = Wild()
    optimizer = Swapping(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    batch = {"x": torch.rand(16, 8), "history": []}
    return Workload(model=model, inputs=(batch,), optimizer=optimizer)


def world(work: Workload) -> list[Any]:
    """All that can be seen of a workload, identities and bits."""
    model, optimizer, seen = work.model, work.optimizer, []
    assert isinstance(model, Wild) and optimizer is not None
    for name, module in model.named_modules():
        seen += [name, module.training, {*vars(module)}, len(module._forward_hooks), [*module._modules]]
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            values = [] if tensor is None else [bits(part).tolist() for part in parts_of(tensor)]
            gradient = None if tensor is None else tensor.grad
            seen += [leaf, id(tensor), values, id(gradient), None if gradient is None else gradient.tolist()]
            seen += [None if tensor is None else (tensor.shape, tensor.requires_grad, tensor.layout)]
    seen += [model.noise.tolist(), {*model.seen}, id(model.helper), model.generator.get_state().tolist()]
    seen += [id(model.cache), model.cache[0].values().tolist(), repr(work.inputs)]
    seen += [optimizer.state_dict(), [[id(p) for p in g["params"]] for g in optimizer.param_groups]]
    seen += [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]
    return [*seen, torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(), torch.is_grad_enabled()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("measure", [planner.profile, planner.measure])
@pytest.mark.parametrize("fails", ["", "forward", "hook", "interrupt", "optimizer"])
def test_a_workload_is_bit_for_bit_as_it_was_whatever_happens(measure: Any, fails: str) -> None:
    work = wild()
    assert isinstance(work.model, Wild)
    calls = [0]

    def hook(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt if fails == "interrupt" else RuntimeError("told to")

    if fails in ("hook", "interrupt"):
        work.model.norm.register_full_backward_hook(hook)
    if fails == "optimizer":
        assert work.optimizer is not None
        work.optimizer.register_step_post_hook(hook)
    work.model.fails = fails == "forward"
    before = world(work)
    expected = KeyboardInterrupt if fails == "interrupt" else (ValueError, RuntimeError)
    with pytest.raises(expected) if fails else contextlib.nullcontext():
        measure(work)
    assert world(work) == before


def test_what_is_known_only_by_a_first_forward_is_asked_for_before_anything_runs() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    work = Workload(model=model, inputs=torch.rand(2, 3), loss=lambda y: y.sum())
    with pytest.raises(ValueError, match=r"lazy modules .*\(0\.weight, 0\.bias\).*run one forward first"):
        planner.profile(work)
    model(torch.rand(2, 3))
    with preserved(work):
        work.step()


def test_gradient_mode_is_as_before() -> None:
    work = Workload(model=nn.Linear(2, 2), inputs=torch.rand(2, 2), loss=lambda y: y.sum())
    with preserved(work):
        torch.set_grad_enabled(False)
    assert torch.is_grad_enabled()
