"""A simulated device counts a storage from the op that makes it until nothing refers to it, and keeps whole numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from profiler.current_device import active_device, host_seconds
from profiler.device_record import DeviceRecord, NetworkRecord
from profiler.simulation import simulated_device as module
from profiler.simulation.cuda_rules import as_on_cuda
from profiler.simulation.simulated_device import SimulatedDevice, simulating
from profiler.workload.steps import optimizer_state_bytes
from profiler.workload.workload import Workload

FLOAT_BYTES = 4
N = 100
TENSOR_BYTES = N * FLOAT_BYTES
BLOCK_BYTES = 512
NETWORK = NetworkRecord(bytes_per_second=100.0, ranks_per_machine=8)


class Costs:
    """Each op takes a second, and the bytes that a test says."""

    def __init__(self, transient: dict[str, int] | None = None) -> None:
        self.transient = transient or {}
        self.device = DeviceRecord(
            name="paper",
            kind="cuda",
            memory_bytes=2**30,
            origin="data sheet",
            rates=(),
            network=NETWORK,
        )

    def seconds(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
        return 1.0

    def margin(self) -> tuple[int, str]:
        return 0, ""

    def transient_bytes(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        return self.transient.get(op._schema.name, 0)


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulating(Costs()) as found:
        yield found


def test_a_tensor_counts_from_its_op_until_nothing_refers_to_it(device: SimulatedDevice) -> None:
    first = torch.empty(N)
    second = first + 1
    assert isinstance(second, FakeTensor)
    assert device.live_bytes == device.peak_bytes == 2 * TENSOR_BYTES
    del first
    assert device.live_bytes == TENSOR_BYTES and device.peak_bytes == 2 * TENSOR_BYTES
    device.forget_peak()
    assert device.peak_bytes == TENSOR_BYTES
    half = second.to(torch.bfloat16)
    assert device.live_bytes == TENSOR_BYTES + 2 * N
    del half, second
    assert device.live_bytes == 0


def test_views_and_what_is_done_in_place_take_nothing(device: SimulatedDevice) -> None:
    whole = torch.empty(10, 10)
    view = whole.t()[2:4].reshape(-1, 1, 10).expand(2, 7, 10)
    whole.add_(1).mul_(view[:, 0].sum())
    whole[0] = 3.0
    del whole
    assert view.shape == (2, 7, 10)
    assert device.live_bytes == TENSOR_BYTES, "the view holds the whole storage"
    assert device.peak_bytes == TENSOR_BYTES + FLOAT_BYTES, "the sum went in the same line"
    del view
    assert device.live_bytes == 0


def test_what_only_autograd_refers_to_counts_until_backward_is_through(device: SimulatedDevice) -> None:
    weight = torch.empty(N, requires_grad=True)
    loss = weight.exp().sum()  # The result of exp is saved for backward, and has no name.
    assert device.live_bytes == 2 * TENSOR_BYTES + FLOAT_BYTES
    loss.backward()
    assert weight.grad is not None
    assert device.live_bytes == 2 * TENSOR_BYTES + FLOAT_BYTES  # weight, its gradient, loss
    # weight, exp, the gradient, loss, and the ones that backward begins with
    assert device.peak_bytes == 3 * TENSOR_BYTES + 2 * FLOAT_BYTES


@pytest.mark.parametrize("held", [False, True])
def test_gradients_are_added_in_place_unless_the_first_is_held(device: SimulatedDevice, held: bool) -> None:
    x = torch.ones(N, requires_grad=True)
    first, second, gradient = -x, -x, torch.ones(N)
    kept: list[Any] = []
    if held:  # The gradient that comes first is that of what was made last.
        second.grad_fn.register_hook(lambda made, _: kept.append(made))  # type: ignore[union-attr]
    device.forget_peak()
    before_bytes, before_blocks = device.live_bytes, [each.allocated_bytes for each in device.allocators]
    torch.autograd.backward([first, second], [gradient, gradient])
    first.detach()  # What was held is known when the next op begins.
    tensors = 3 if held else 2
    assert device.peak_bytes - before_bytes == tensors * TENSOR_BYTES
    for allocator, before in zip(device.allocators, before_blocks, strict=True):
        assert allocator.peak_allocated_bytes - before == tensors * BLOCK_BYTES
        assert allocator.allocated_bytes == device.live_bytes // TENSOR_BYTES * BLOCK_BYTES


def test_the_gradient_of_a_gather_is_made_in_place(device: SimulatedDevice) -> None:
    x, index = torch.ones(N, requires_grad=True), torch.zeros(1, dtype=torch.long)
    y, gradient = x.gather(0, index), torch.ones(1)
    device.forget_peak()
    before_bytes = device.live_bytes
    torch.autograd.backward([y], [gradient])
    y.detach()
    assert device.peak_bytes - before_bytes == TENSOR_BYTES


@pytest.mark.parametrize("axis", [1, 3])
def test_batch_norm_of_transposed_inputs_is_laid_out_as_kernels_do(device: SimulatedDevice, axis: int) -> None:
    def strides() -> list[tuple[int, ...]]:
        x = torch.ones(2, 4, 3, 3).transpose(1, axis).contiguous().transpose(1, axis).requires_grad_()
        result = nn.BatchNorm2d(x.shape[1])(x)
        return [result.stride(), *(each.stride() for each in torch.autograd.grad(result, [x], torch.ones_like(x)))]

    estimated = strides()
    with _disable_current_modes():
        assert strides() == estimated


def test_sums_in_python_are_tensors_of_their_own(device: SimulatedDevice) -> None:
    def doubled(gradient: Tensor) -> Tensor:
        return gradient + torch.ones_like(gradient)

    x = torch.ones(N, requires_grad=True)
    inner, gradient = -x, torch.ones(N)
    inner.register_hook(doubled)
    y = -inner
    device.forget_peak()
    before_bytes = device.live_bytes
    torch.autograd.backward([y], [gradient])
    y.detach()
    assert device.peak_bytes - before_bytes == 3 * TENSOR_BYTES


def test_a_kernel_may_hold_bytes_only_while_it_runs() -> None:
    with simulating(Costs({"aten::mm": 1000})) as device:
        left = torch.empty(10, 10)
        result = left @ left
        assert device.live_bytes == left.nbytes + result.nbytes == 800
        assert device.peak_bytes == 1800
        for allocator in device.allocators:
            assert allocator.allocated_bytes == 2 * BLOCK_BYTES
            assert allocator.peak_allocated_bytes == 4 * BLOCK_BYTES
        del result
        assert {allocator.allocated_bytes for allocator in device.allocators} == {BLOCK_BYTES}


def test_a_storage_that_is_resized_counts_anew(device: SimulatedDevice) -> None:
    gathered = torch.empty(N)
    storage = gathered.untyped_storage()
    storage.resize_(0)
    assert device.live_bytes == 0
    storage.resize_(TENSOR_BYTES)
    assert device.live_bytes == device.peak_bytes == TENSOR_BYTES
    del gathered, storage
    assert device.live_bytes == 0


def test_whole_numbers_are_real_as_long_as_they_come_from_whole_numbers(device: SimulatedDevice) -> None:
    ids = torch.arange(5)
    ids.add_(1)
    assert not isinstance(ids, FakeTensor) and ids.tolist() == [1, 2, 3, 4, 5], "added once, not twice"
    assert (ids * 2).tolist() == [2, 4, 6, 8, 10] and (ids > 3).tolist() == [False, False, False, True, True]
    assert ids.max().item() == 5 and torch.equal(ids, ids.clone()) and not torch.equal(ids, ids + 1)
    assert (ids > 3).nonzero().tolist() == [[3], [4]] and ids.unique().tolist() == ids.tolist()
    assert isinstance(ids.float(), FakeTensor) and isinstance(torch.empty(5).argmax(), FakeTensor)
    assert device.live_bytes == ids.nbytes == 40


def test_numbers_that_code_states_are_known_until_they_meet_others(device: SimulatedDevice) -> None:
    rates = torch.linspace(0, 0.5, 3)
    mask = torch.ones(2, 5)
    assert [rate.item() for rate in rates] == [0.0, 0.25, 0.5]
    assert isinstance(mask, FakeTensor)
    assert bool(mask[:, None].bool().all())
    assert (1.0 - mask).sum().item() == 0.0
    assert (mask * torch.rand(2, 5)).sum().item() == 1.0  # What nobody knows.
    mask += torch.rand(2, 5)
    assert mask.sum().item() == 1.0


def test_models_are_copied_deeply(device: SimulatedDevice) -> None:
    model = nn.Sequential(nn.Linear(N, N, bias=False), nn.BatchNorm1d(N), nn.Linear(N, N, bias=False))
    model[2].weight = model[0].weight
    model.requires_grad_(False)[1].requires_grad_()
    model[1].weight.itself = model[1].weight  # type: ignore[attr-defined]
    before_bytes = device.live_bytes
    copied = copy.deepcopy(model)
    assert device.live_bytes == 2 * before_bytes == 2 * ((N * N + 4 * N) * FLOAT_BYTES + 8)
    assert copied[2].weight is copied[0].weight is not model[0].weight
    assert [type(p) for p in copied.parameters()] == [type(p) for p in model.parameters()]
    assert [p.requires_grad for p in copied.parameters()] == [False, True, True]
    assert vars(copied[1].weight)["itself"] is copied[1].weight
    copied(torch.rand(4, N)).sum().backward()
    assert copy.deepcopy(copied)[1].weight.grad is not None and model[1].weight.grad is None
    with pytest.raises(RuntimeError, match="leaves"):
        copy.deepcopy(copied(torch.rand(4, N)))


def test_stated_numbers_count_and_their_views_do_not(device: SimulatedDevice) -> None:
    before_bytes = device.live_bytes
    weight = nn.Parameter(torch.ones(N))
    assert device.live_bytes - before_bytes == TENSOR_BYTES
    views = weight[None], weight.detach(), weight.view(2, -1)
    assert device.live_bytes - before_bytes == TENSOR_BYTES
    (views[0] * torch.rand(3, N)).sum().backward()
    assert weight.grad is not None


def test_random_whole_numbers_are_those_of_the_seed(device: SimulatedDevice) -> None:
    torch.manual_seed(3)
    simulated = torch.randint(0, 1000, (4,)).tolist()
    next_one = torch.randint(0, 1000, (1,)).item()
    torch.manual_seed(3)
    with _disable_current_modes():
        assert torch.randint(0, 1000, (4,)).tolist() == simulated
        assert torch.randint(0, 1000, (1,)).item() == next_one


def test_very_many_whole_numbers_are_fake(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_REAL_BYTES", 800)
    assert not isinstance(torch.zeros(100, dtype=torch.long), FakeTensor)
    assert isinstance(torch.zeros(101, dtype=torch.long), FakeTensor)


def test_masks_of_real_numbers_pick_as_many_as_they_have(device: SimulatedDevice) -> None:
    ids, rows = torch.tensor([3, -1, 4, -1, 5]), torch.empty(5, 7)
    assert rows[ids >= 0].shape == (3, 7)
    rows[ids >= 0] = rows[:3]
    assert device.live_bytes == ids.nbytes + rows.nbytes
    with pytest.raises(Exception, match="aten.nonzero.default"):
        rows[rows > 0]


def test_whoever_asks_for_values_hears_those_of_a_step_without_accidents(device: SimulatedDevice) -> None:
    values = torch.empty(5)
    assert not torch.isnan(values).any() and torch.isfinite(values).all() and not torch.isinf(values).any()
    assert values.sum().item() == 1.0 and bool(values.sum() > 0) is False
    copy = values.clone()
    assert torch.equal(copy, values)
    values.add_(1)
    assert not torch.equal(copy, values) and not torch.equal(values, copy)


def test_drawing_advances_the_random_generator(device: SimulatedDevice) -> None:
    values = torch.empty(5)
    before = torch.get_rng_state().tolist()
    assert torch.get_rng_state().tolist() == before
    nn.functional.dropout(values, 0.5)
    assert torch.get_rng_state().tolist() != before


def _step_peak(optimizer: type[torch.optim.Optimizer], cuda: bool, **settings: Any) -> tuple[int, int]:
    """The bytes that the second step of an optimizer takes meanwhile, and those of its states on the device."""
    with simulating(Costs()) as device, as_on_cuda() if cuda else nullcontext():
        model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(4)))
        stepped = optimizer(model.parameters(), lr=0.1, **settings)  # pyright: ignore[reportCallIssue]
        for parameter in model.parameters():
            parameter.grad = torch.empty(10, 10)
        stepped.step()
        device.forget_peak()
        live_bytes = device.live_bytes
        stepped.step()
        taken_bytes = device.peak_bytes - live_bytes
        assert device.live_bytes == live_bytes
        assert stepped.param_groups[0]["foreach"] is settings.get("foreach"), "it is as its owner has it"
        workload = Workload(model, torch.empty(1), loss=lambda y: y, optimizer=stepped)
        return taken_bytes, optimizer_state_bytes(workload)


def test_optimizers_step_all_parameters_at_once_on_cuda_and_one_by_one_on_the_cpu() -> None:
    """AdamW: the root of the second moment, of all parameters at once; else of one, twice, beside a quotient."""
    moments_bytes, counts_bytes = 2 * 4 * TENSOR_BYTES, 4 * FLOAT_BYTES
    assert _step_peak(torch.optim.AdamW, cuda=True) == (4 * TENSOR_BYTES, moments_bytes)
    alone, states_bytes = _step_peak(torch.optim.AdamW, cuda=False)
    assert alone < 4 * TENSOR_BYTES and states_bytes == moments_bytes + counts_bytes, "counts lie with the others"
    one_by_one, _ = _step_peak(torch.optim.AdamW, cuda=True, foreach=False)
    assert one_by_one == alone, "who asks for single steps gets them"
    assert _step_peak(torch.optim.SGD, cuda=True, momentum=0.9) == (0, 4 * TENSOR_BYTES)


def test_the_clock_is_that_of_ops(device: SimulatedDevice) -> None:
    assert host_seconds() == 0.0
    _ = torch.empty(3) + 1
    assert device.seconds == host_seconds() == 2.0


def test_computation_hides_collectives_that_nothing_waits_for() -> None:
    """A whole of 200 bytes on 2 ranks: each sends 100 of them, in a second."""
    with simulating(Costs()) as device:
        device.communicate(200, 2, awaited=True)
        assert device.seconds == 1.0
        device.communicate(200, 2, awaited=False)
        device.communicate(200, 2, awaited=False)
        assert device.seconds == 1.0, "nothing waits"
        torch.empty(1)
        assert device.seconds == 2.0
        device.wait_for_collectives()
        assert device.seconds == 3.0
        device.wait_for_collectives()
        assert device.seconds == 3.0
        for _ in range(5):
            torch.empty(1)
        device.communicate(200, 2, awaited=True)
        assert device.seconds == 8.0, "the host ran ahead: it began when the last one had ended"


def _resize() -> Any:
    return vars(torch.UntypedStorage).get("resize_")


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_before_afterwards(fails: bool) -> None:
    swap, resize, storage = torch.utils.swap_tensors, _resize(), torch.empty(2).untyped_storage()
    with pytest.raises(KeyError) if fails else nullcontext(), simulating(Costs()):
        assert torch.utils.swap_tensors is not swap and _resize() is not resize and active_device() is not None
        if fails:
            raise KeyError
    assert active_device() is None and _get_current_dispatch_mode() is None
    assert torch.utils.swap_tensors is swap and _resize() is resize
    assert type(torch.ones(2) + 1) is Tensor and host_seconds() > 1.0
    storage.resize_(16)
    assert storage.nbytes() == 16


def test_one_device_is_simulated_at_a_time(device: SimulatedDevice) -> None:
    with pytest.raises(RuntimeError, match="being simulated already"), simulating(Costs()):
        pass
    assert active_device() is device


@pytest.mark.parametrize("move", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.to("cpu").bfloat16()])
def test_modules_are_cast(device: SimulatedDevice, move: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Linear(10, 10)
    model.bias = nn.Parameter(torch.ones(10))
    whole_bytes = device.live_bytes
    parameters = list(model.parameters())
    move(model)
    assert next(model.parameters()) is parameters[0]
    assert whole_bytes == 110 * 4 and device.live_bytes == 110 * 2


def test_tensors_from_outside_go_in_and_do_not_count(device: SimulatedDevice) -> None:
    with _disable_current_modes():
        outside = torch.ones(N)
    result = torch.empty(N) * outside
    assert isinstance(result, FakeTensor) and device.live_bytes == TENSOR_BYTES
    assert isinstance(outside + 1, FakeTensor)
    with _disable_current_modes():
        assert outside.tolist() == [1.0] * N
