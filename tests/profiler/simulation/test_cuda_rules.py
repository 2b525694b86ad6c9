"""Inside ``as_on_cuda`` ops run that CUDA would run, with the bytes of there; afterwards all is as before."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from profiler.device_record import DeviceRecord
from profiler.simulation.cuda_rules import as_on_cuda
from profiler.simulation.op_costs import DeviceCosts
from profiler.simulation.simulated_device import SimulatedDevice, simulating
from profiler.workload.optimizers import COUNTS_ON_HOST

CARD = DeviceRecord(name="a card", kind="cuda", memory_bytes=2**34, origin="data sheet", rates=())
KEPT = torch.bfloat16
FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
MATH = "_scaled_dot_product_attention_math"


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulating(DeviceCosts(CARD)) as found, as_on_cuda():
        yield found


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def _attention_ops(*sizes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, **settings: Any) -> tuple[str, Any]:
    """The kernel that attention on queries and keys of such sizes runs, and its result."""
    query, *rest = (torch.empty(size, dtype=dtype, requires_grad=True) for size in sizes)
    key = rest[0] if rest else torch.empty(sizes[0], dtype=dtype)
    with _Ops() as ops:
        result = functional.scaled_dot_product_attention(query, key, torch.empty_like(key), **settings)
    fused = [name for name in ops.names if "attention" in name]
    return (fused[0] if fused else "math" if "bmm" in ops.names else str(ops.names)), result


HEADS = (2, 4, 10, 16)  # batch, heads, positions, width


@pytest.mark.parametrize(
    ("kernel", "sizes", "settings"),
    [
        (FLASH, [HEADS], {}),
        (FLASH, [HEADS], {"dtype": torch.float16, "is_causal": True, "dropout_p": 0.1}),
        (FLASH, [(2, 4, 10, 256)], {}),
        (FLASH, [HEADS, (2, 2, 10, 16)], {"enable_gqa": True}),
        (FLASH, [(2, 4, 10, 20)], {}),
        (EFFICIENT, [(2, 4, 10, 264)], {}),
        (EFFICIENT, [HEADS], {"dtype": torch.float32}),
        ("math", [HEADS, (2, 2, 10, 16)], {"dtype": torch.float32, "enable_gqa": True}),
        ("math", [(4, 10, 16)], {}),
        ("math", [HEADS], {"dtype": torch.float64}),
    ],
)
def test_attention_runs_in_the_kernel_that_cuda_chooses(
    device: SimulatedDevice, kernel: str, sizes: list[tuple[int, ...]], settings: dict[str, Any]
) -> None:
    found, result = _attention_ops(*sizes, **settings)
    assert (found, tuple(result.shape), result.dtype) == (kernel, sizes[0], settings.get("dtype", torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
def test_attention_with_a_mask_is_the_memory_efficient_one(device: SimulatedDevice, dtype: torch.dtype) -> None:
    mask = torch.ones(2, 1, 10, 10, dtype=dtype)
    assert _attention_ops(HEADS, attn_mask=mask)[0] == EFFICIENT


def test_autocast_decides_the_type_of_attention(device: SimulatedDevice) -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found, result = _attention_ops(HEADS, dtype=torch.float32)
    assert (found, result.dtype) == (FLASH, torch.bfloat16)


def test_flash_attention_saves_its_arguments_its_result_and_a_number_for_each_row(device: SimulatedDevice) -> None:
    query, key, value = (torch.empty(HEADS, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    given_bytes, one_bytes = device.live_bytes, query.nbytes
    result = functional.scaled_dot_product_attention(query, key, value)
    rows_bytes = 4 * 2 * 4 * 10
    assert one_bytes == 2 * 2 * 4 * 10 * 16
    assert 0 <= device.live_bytes - given_bytes - one_bytes - rows_bytes <= 32, "and a seed"
    device.forget_peak()
    live_bytes = device.live_bytes
    result.backward(torch.empty_like(result))
    rows = 2 * 4 * 128  # positions in tiles of 128
    summed_bytes = 4 * rows * 32 + 4 * rows  # queries' gradients in float32, heads padded to 32; sums of rows
    assert device.peak_bytes == live_bytes + one_bytes + 3 * one_bytes + summed_bytes


def test_the_random_state_of_memory_efficient_attention_lies_in_host_memory(device: SimulatedDevice) -> None:
    query = torch.empty(HEADS, requires_grad=True)
    before = device.live_bytes
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        result = functional.scaled_dot_product_attention(query, query, query)
    rows = 2 * 4 * 32  # The positions of each head count as the next multiple of 32.
    assert device.live_bytes - before == result.nbytes + 4 * rows


def test_dropout_of_attention_without_a_fused_kernel_saves_a_byte_for_each_weight(device: SimulatedDevice) -> None:
    query = torch.empty(HEADS, requires_grad=True)
    key = torch.empty(2, 2, 10, 16)
    weights = 2 * 4 * 10 * 10

    def kept_bytes(dropout_p: float) -> int:
        before = device.live_bytes
        result = functional.scaled_dot_product_attention(query, key, key, dropout_p=dropout_p, enable_gqa=True)
        assert result.shape == query.shape
        return device.live_bytes - before

    assert kept_bytes(0.1) - kept_bytes(0.0) == weights


def test_dropout_saves_a_byte_for_each_element(device: SimulatedDevice) -> None:
    values = torch.empty(100, requires_grad=True)
    result = nn.Dropout(0.5)(values)
    assert device.live_bytes == 400 + 400 + 100
    del result
    assert device.live_bytes == 400
    for unchanged in (functional.dropout(values, 0.0), functional.dropout(values, 0.5, training=False)):
        assert unchanged.shape == values.shape
        del unchanged
        assert device.live_bytes == 400


def _ops_of(run: Callable[[], Any]) -> list[str]:
    with _Ops() as ops:
        run()
    return ops.names


def test_rms_norm_is_one_kernel_that_saves_a_number_for_each_row(device: SimulatedDevice) -> None:
    norm, values = nn.RMSNorm(10), torch.empty(4, 10, requires_grad=True)
    given_bytes = device.live_bytes
    result = norm(values)
    assert device.live_bytes - given_bytes == device.peak_bytes - given_bytes == 4 * (40 + 4)
    assert _ops_of(result.sum().backward).count("_fused_rms_norm_backward") == 1
    assert "_fused_rms_norm" in _ops_of(lambda: functional.rms_norm(values, (10,)))
    ops = _ops_of(lambda: norm(values.bfloat16()))
    assert "_fused_rms_norm" not in ops and "rsqrt" in ops, "CUDA has none for two types of number"


def _workspace(name: str, *args: Any) -> int:
    return DeviceCosts(CARD).transient_bytes(getattr(torch.ops.aten, name).default, args, {}, None)


def _heads(dtype: torch.dtype, *sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def test_workspaces_of_attention_backward() -> None:
    half, single = torch.bfloat16, torch.float32

    def efficient(query: Tensor, key: Tensor) -> int:
        return _workspace("_scaled_dot_product_efficient_attention_backward", query, query, key, key)

    # float32, width 64: queries in 2 tiles of 64 rows and 64 columns, each 16 bytes and 64 x 64 numbers of 4 bytes;
    # 4 bytes for each of 100 rows of sums; for each of 2 x 3 heads.
    expected = 2 * 3 * (2 * (16 + 64 * 64 * 4) + 4 * 100)
    assert efficient(_heads(single, 2, 3, 100, 64), _heads(single, 2, 3, 100, 64)) == expected
    # bfloat16, width 64: the gradients of keys stay in registers.
    assert efficient(_heads(half, 2, 3, 100, 64), _heads(half, 2, 3, 100, 64)) == expected
    # bfloat16, width 128: one tile of 128 rows and 128 columns.
    expected = 2 * 3 * ((16 + 128 * 128 * 4) + 4 * 100)
    assert efficient(_heads(half, 2, 3, 100, 128), _heads(half, 2, 3, 100, 128)) == expected
    # bfloat16, width 256: a tile of 128 rows, four of 64 columns; gradients of 100 keys, in tiles of 64, of keys and
    # values, in float32.
    expected = 2 * 3 * (4 * (16 + 128 * 64 * 4) + 4 * 128 * (256 + 256) + 4 * 100)
    assert efficient(_heads(half, 2, 3, 100, 256), _heads(half, 2, 3, 100, 256)) == expected

    def flash(query: Tensor, key: Tensor) -> int:
        return _workspace("_scaled_dot_product_flash_attention_backward", query, query, key, key)

    # 100 positions in tiles of 128, width 80 up to 96: in float32, and a sum of each row.
    summed = 4 * 2 * 6 * 128 * (96 + 1)
    assert flash(_heads(half, 2, 6, 100, 80), _heads(half, 2, 6, 100, 80)) == summed
    # Two heads of keys for six of queries: gradients of keys and values for all six of 50 positions.
    assert flash(_heads(half, 2, 6, 100, 80), _heads(half, 2, 2, 50, 80)) == summed + 2 * 2 * 6 * 50 * 80 * 2
    assert _workspace("mm", _heads(half, 8, 8), _heads(half, 8, 8)) == 0


def test_convolutions_have_a_margin_and_nothing_else_has() -> None:
    with simulating(DeviceCosts(CARD)) as device, as_on_cuda():
        _ = torch.empty(8, 8) @ torch.empty(8, 8)
        assert device.costs.margin() == (0, "")
        nn.Conv2d(3, 8, 3, bias=False)(torch.empty(2, 3, 10, 10))
        bytes_, why = device.costs.margin()
    assert bytes_ == 32 * 2**20 + 4 * (2 * 3 * 100 + 8 * 3 * 9) // 8 and "cuDNN" in why


def _types_under_autocast(label: str, dtype: torch.dtype | None = torch.bfloat16) -> dict[str, torch.dtype]:
    single, half = torch.empty(4, 8), torch.empty(4, 8, dtype=dtype or torch.float16)
    layer, norm = nn.Linear(8, 8), nn.LayerNorm(8)
    calls: dict[str, Callable[[], Tensor]] = {
        "linear": lambda: layer(single),
        "matmul": lambda: single @ half.t(),
        "conv": lambda: nn.Conv1d(4, 2, 3)(single),
        "layer_norm": lambda: norm(half),
        "softmax": lambda: half.softmax(-1),
        "log_softmax": lambda: functional.log_softmax(half, -1),
        "sum": lambda: half.sum(),
        "sum of a dimension": lambda: half.sum(0),
        "exp": lambda: half.exp(),
        "mse_loss": lambda: functional.mse_loss(half, half.clone()),
        "cross_entropy": lambda: functional.cross_entropy(half, torch.zeros(4, dtype=torch.long)),
        "gelu": lambda: functional.gelu(half),
        "add": lambda: half + half,
        "softmax to a type": lambda: half.softmax(-1, dtype=torch.float64),
    }
    with torch.autocast(label) if dtype is None else torch.autocast(label, dtype=dtype):
        return {name: call().dtype for name, call in calls.items()}


ON_CUDA = {
    "linear": KEPT,
    "matmul": KEPT,
    "conv": KEPT,
    "layer_norm": torch.float32,
    "softmax": torch.float32,
    "log_softmax": torch.float32,
    "sum": torch.float32,
    "sum of a dimension": torch.float32,
    "exp": torch.float32,
    "mse_loss": torch.float32,
    "cross_entropy": torch.float32,
    "gelu": KEPT,
    "add": KEPT,
    "softmax to a type": torch.float64,
}


def test_autocast_has_the_lists_of_cuda(device: SimulatedDevice) -> None:
    assert _types_under_autocast("cuda") == ON_CUDA
    in_float16 = {name: torch.float16 if dtype is KEPT else dtype for name, dtype in ON_CUDA.items()}
    assert _types_under_autocast("cuda", None) == in_float16, "which is CUDA's own default"
    assert functional.softmax(torch.empty(3, dtype=KEPT), -1).dtype is KEPT, "outside of autocast nothing is cast"


def test_what_is_cast_to_float32_counts(device: SimulatedDevice) -> None:
    half = torch.empty(10, 10, dtype=KEPT, requires_grad=True)
    with torch.autocast("cuda", dtype=KEPT):
        result = half.softmax(-1)
    assert device.live_bytes == 200 + 400 and device.peak_bytes == 200 + 400 + 400, "a copy, and the result"
    assert result.dtype is torch.float32


def test_devices_called_cuda_are_the_simulated_one(device: SimulatedDevice) -> None:
    card = torch.device("cuda", 0)
    model = nn.Linear(2, 3).to("cuda").cuda()
    made = [
        torch.empty(2, device="cuda"),
        torch.zeros(2, device=card),
        torch.empty(2).cuda(),
        torch.empty(2).to("cuda:0"),
        torch.empty(2).to(card, torch.float32),
        torch.empty(2).to(device=card),
        torch.empty(2).new_ones(2, device=card),
        model(torch.empty(1, 2).to(card, non_blocking=True)),
        nn.Linear(2, 2, device="cuda").weight,
    ]
    with torch.device("cuda"):
        made.append(torch.rand(2))
    assert all(isinstance(tensor, FakeTensor) for tensor in made)
    assert torch.arange(3, device="cuda").tolist() == [0, 1, 2]


def _state() -> dict[str, Any]:
    optimizers, heads = sys.modules["torch.optim.optimizer"], torch.ones(1, 2, 3, 4)
    return {
        "autocast": torch.autocast.__init__,
        "steps": (
            list(optimizers._global_optimizer_pre_hooks.values()),
            list(optimizers._global_optimizer_post_hooks.values()),
        ),
        "swap": torch.utils.swap_tensors,
        "dispatch": _get_current_dispatch_mode(),
        "functions": _get_current_function_mode(),
        "counts": COUNTS_ON_HOST.get(),
        "kernels": _types_under_autocast("cpu"),
        "functional": (functional.dropout, functional.rms_norm, functional.scaled_dot_product_attention),
        "norm": _ops_of(lambda: functional.rms_norm(torch.empty(4, 4, requires_grad=True), (4,))),
        "attention": type(functional.scaled_dot_product_attention(heads, heads, heads)),
    }


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_before_afterwards(fails: bool) -> None:
    before = _state()
    assert before["kernels"]["layer_norm"] is KEPT, "the CPU's autocast is another one, or this would prove nothing"
    with pytest.raises(KeyError) if fails else nullcontext(), simulating(DeviceCosts(CARD)), as_on_cuda():
        inside = _state()
        if fails:
            raise KeyError
    assert all(inside[key] != before[key] for key in before)
    assert _state() == before


def test_functions_that_were_imported_inside_by_name_are_torchs_own_afterwards() -> None:
    with simulating(DeviceCosts(CARD)), as_on_cuda():
        kept = functional.dropout, functional.scaled_dot_product_attention
    ones = torch.ones(1, 2, 3, 4, dtype=KEPT)
    assert torch.equal(kept[1](ones, ones, ones), ones)
    torch.manual_seed(0)
    dropped = kept[0](ones)
    torch.manual_seed(0)
    assert torch.equal(functional.dropout(ones), dropped)


def test_functions_of_torch_that_are_called_by_torch_itself_are_replaced(device: SimulatedDevice) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.5, batch_first=True)
    ops = _ops_of(lambda: layer(torch.empty(2, 10, 16)))
    assert EFFICIENT in ops and ops.count("native_dropout") == 3


def test_autocast_kernels_are_replaced_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch._C._set_warnAlways(True)
        try:
            with as_on_cuda():
                pass
        finally:
            torch._C._set_warnAlways(False)


def test_an_optimizer_that_fails_has_its_own_settings_at_its_next_step(device: SimulatedDevice) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def closure() -> float:
        raise KeyError

    with pytest.raises(KeyError):
        optimizer.step(closure)  # pyright: ignore[reportArgumentType]
    optimizer.step()
    assert optimizer.param_groups[0]["foreach"] is None
