"""Dropout as two ops has the bits of torch's own, forward and backward."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from profiler.current_device import activated
from profiler.trace.captured_call import capture_call
from profiler.trace.dropout_masks import MASK, MASKED

ATEN = torch.ops.aten
SPECIAL = [float("inf"), -float("inf"), float("nan"), -0.0]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def values(shape: tuple[int, ...], dtype: torch.dtype, *, transposed: bool) -> Tensor:
    x = 100 * torch.randn(shape, dtype=dtype)
    x.view(-1)[:4] = torch.tensor(SPECIAL, dtype=dtype)[: x.numel()]
    return x.transpose(0, -1) if transposed else x


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (3, 5), (4, 8), (33, 2, 31)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rate", [0.1, 0.37, 0.5, 0.9])
def test_both_ops_have_the_bits_of_torchs_kernels(
    rate: float, dtype: torch.dtype, shape: tuple[int, ...], transposed: bool
) -> None:
    torch.manual_seed(1)
    x, gradient = (values(shape, dtype, transposed=transposed) for _ in range(2))
    state = torch.get_rng_state()
    expected, mask = torch.native_dropout(x, rate, True)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    drawn = MASK(x.shape, mask.stride(), 1 - rate)
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(drawn, mask) and drawn.stride() == mask.stride()
    found = MASKED(x, drawn, torch.tensor(1 / (1 - rate), dtype=dtype).item())
    assert torch.equal(bits(found), bits(expected)) and found.stride() == expected.stride()
    for given in (gradient, gradient.contiguous()):
        found, expected = MASKED(given, mask, 1 / (1 - rate)), ATEN.native_dropout_backward(given, mask, 1 / (1 - rate))
        assert torch.equal(bits(found), bits(expected)) and found.stride() == expected.stride()


def ops_of(rate: float = 0.1) -> list[str]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate), nn.GELU())
    graph = capture_call(model, model.forward, (torch.randn(4, 8, requires_grad=True),), {}).graph
    return [str(op.target) for op in graph.ops]


def test_a_captured_call_has_the_two_ops_on_the_cpu_and_torchs_own_on_cuda() -> None:
    ours, torchs = ["dropout_mask", "masked_dropout"], ["native_dropout"]

    def kinds() -> list[str]:
        return sorted({name.split(".")[1] for name in ops_of() if "dropout" in name})

    assert kinds() == ours
    with activated(SimpleNamespace(record=SimpleNamespace(kind="cuda"))):
        assert kinds() == sorted([*torchs, "native_dropout_backward"])


def test_a_rate_of_nought_or_one_stays_torchs_own() -> None:
    for rate in (0.0, 1.0):
        assert str(MASK) not in ops_of(rate)
