"""Kinds, work and seconds of ops, by hand; and what kernels of the CPU hold meanwhile, as they are seen to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from profiler.device_record import BY_FLOPS, DeviceRecord, OpRate
from profiler.measurement.device_memory import held_beside_result
from profiler.simulation.op_costs import DeviceCosts, dtype_of, kind_of, name_of, work_of
from profiler.simulation.simulated_device import simulating
from profiler.trace.dropout_masks import MASK, MASKED

aten = torch.ops.aten
MATMUL, MEMORY = 1000.0, 100.0  # per second


def costs(kind: str = "cpu", **fields: Any) -> DeviceCosts:
    rates = (
        OpRate(kind="matmul", dtype="float32", per_second=MATMUL),
        OpRate(kind="matmul", dtype="tfloat32", per_second=8 * MATMUL),
        OpRate(kind="matmul", dtype="bfloat16", per_second=16 * MATMUL),
        OpRate(kind="memory", per_second=MEMORY),
    )
    record: Any = {"name": "d", "kind": kind, "memory_bytes": 2**30, "origin": "data sheet", "rates": rates, **fields}
    return DeviceCosts(DeviceRecord(**record))


def made(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def seconds(found: DeviceCosts, op: Any, *args: Any) -> float:
    return found.seconds(op, args, {}, op(*args))


IMAGE, WEIGHT = (2, 4, 8, 8), (6, 4, 3, 3)
FIXED = (None, [1, 1], [1, 1], [1, 1], False, [0, 0])


@pytest.mark.parametrize(
    ("op", "args", "kind"),
    [
        (aten.mm.default, (), "matmul"),
        (aten.addmm.default, (), "matmul"),
        (aten.bmm.default, (), "matmul"),
        (aten.convolution.default, (*[None] * 8, 1), "convolution"),
        (aten.convolution.default, (*[None] * 8, 4), "grouped_convolution"),
        (aten.convolution_backward.default, (*[None] * 9, 1), "convolution_backward"),
        (aten.convolution_backward.default, (*[None] * 9, 4), "grouped_convolution_backward"),
        (aten._scaled_dot_product_flash_attention.default, (), "attention"),
        (aten._scaled_dot_product_flash_attention_backward.default, (), "attention_backward"),
        (aten._scaled_dot_product_efficient_attention.default, (), "attention"),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (), "attention"),
        (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, (), "attention_backward"),
        (aten.native_layer_norm.default, (), "normalization"),
        (aten.native_batch_norm.default, (), "batch_norm"),
        (aten.native_batch_norm_backward.default, (), "batch_norm_backward"),
        (aten._softmax.default, (), "softmax"),
        (aten.gelu_backward.default, (), "gelu"),
        (aten.tanh.default, (), "transcendental"),
        (aten.sum.dim_IntList, (), "reduction"),
        (aten.embedding.default, (), "indexing"),
        (aten.native_dropout.default, (), "random"),
        (aten.clone.default, (), "copy"),
        (aten.cat.default, (), "copy"),
        (aten.zeros_like.default, (), "fill"),
        (aten.max_pool2d_with_indices.default, (), "pooling"),
        (aten.add.Tensor, (), "elementwise"),
        (aten.relu.default, (), "elementwise"),
        (aten.add_.Tensor, (), "in_place"),
        (aten._foreach_add_.List, (), "in_place"),
        (aten.view.default, (), "none"),
        (aten.transpose.int, (), "none"),
        (aten.empty.memory_format, (), "none"),
        (aten.detach.default, (), "none"),
    ],
)
def test_kinds(op: Any, args: tuple[Any, ...], kind: str) -> None:
    assert kind_of(op, args) == kind


def test_names_and_types() -> None:
    assert name_of(aten.add_.Tensor) == "add_" and name_of(len) == ""
    assert dtype_of((made(2, dtype=torch.bfloat16),), made(2)) == "bfloat16" and dtype_of(3, ()) == ""


def test_work_by_hand() -> None:
    def work(op: Any, *args: Any) -> float:
        return work_of(kind_of(op, args), op, args, {}, op(*args))

    assert work(aten.mm.default, made(2, 3), made(3, 5)) == 2 * 2 * 3 * 5
    assert work(aten.bmm.default, made(7, 2, 3), made(7, 3, 5)) == 7 * 2 * 2 * 3 * 5
    assert work(aten.addmm.default, made(5), made(2, 3), made(3, 5)) == 2 * 2 * 3 * 5
    convolved = 2 * 2 * 6 * 64 * 4 * 9  # twice, batch, channels out, places, channels in, kernel
    assert work(aten.convolution.default, made(*IMAGE), made(*WEIGHT), *FIXED, 1) == convolved
    gradients = (made(2, 6, 8, 8), made(*IMAGE), made(*WEIGHT), *FIXED, 1, [True, True, False])
    assert work(aten.convolution_backward.default, *gradients) == 2 * convolved
    heads = made(2, 3, 10, 16)
    attended = 2 * 2 * 2 * 3 * 10 * 10 * 16
    assert work(aten._scaled_dot_product_flash_attention_for_cpu.default, heads, heads, heads) == attended
    shared, narrow = made(2, 1, 7, 16), made(2, 1, 7, 4)  # heads that share keys; values of another width
    attended = 2 * 2 * 3 * 10 * 7 * (16 + 4)
    assert (
        work_of("attention", aten._scaled_dot_product_flash_attention.default, (heads, shared, narrow), {}, None)
        == attended
    )
    backward = aten._scaled_dot_product_flash_attention_backward.default
    given = made(2, 3, 10, 4), heads, shared, narrow
    assert work_of("attention_backward", backward, given, {}, None) == 2 * 2 * 3 * 10 * 7 * (3 * 16 + 2 * 4)
    assert work(aten.add.Tensor, made(10), made(10)) == 3 * 40, "two are read, one is written"
    assert work(aten.add.Tensor, made(10, dtype=torch.bfloat16), 1) == 2 * 20
    assert work(aten.clone.default, made(1, 8).expand(1000, 8)) == 32 + 32_000, "what is repeated is read once"
    assert {kind_of(op, ()) for op in (aten.mm.default, aten._softmax.default)} & BY_FLOPS == {"matmul"}


def test_seconds_by_hand() -> None:
    found = costs()
    left, right = made(2, 3), made(3, 5)
    assert seconds(found, aten.mm.default, left, right) == pytest.approx(60 / MATMUL)
    assert seconds(found, aten.mm.default, left.bfloat16(), right.bfloat16()) == pytest.approx(60 / (16 * MATMUL))
    assert seconds(found, aten.add.Tensor, made(10), made(10)) == pytest.approx(120 / MEMORY)
    assert seconds(found, aten.view.default, made(10), [2, 5]) == 0.0
    assert seconds(found, aten.empty.memory_format, [1000]) == 0.0


def test_on_a_cpu_a_draw_takes_as_long_whatever_it_is_of() -> None:
    rates = (OpRate(kind="memory", per_second=MEMORY), OpRate(kind="random", dtype="float32", per_second=1.0))
    found, numbers = costs(rates=rates), made(100)
    dropout = found.seconds(
        aten.native_dropout.default, (numbers, 0.5, True), {}, (numbers, made(100, dtype=torch.bool))
    )
    assert dropout == pytest.approx(900.0)
    assert seconds(found, MASK, [100], [1], 0.5) == pytest.approx(dropout)
    assert seconds(found, MASKED, numbers, made(100, dtype=torch.bool), 2.0) == pytest.approx(900 / MEMORY)
    on_cuda = costs("cuda", rates=rates)
    assert on_cuda.seconds(aten.randperm.default, (100,), {}, made(100, dtype=torch.int64)) == pytest.approx(
        800 / MEMORY
    )


def test_a_product_with_few_rows_takes_as_long_as_reading_its_matrices_on_cuda() -> None:
    few, many = (made(1, 10), made(10, 10)), (made(1000, 10), made(10, 10))
    moved_bytes = 4 * (10 + 100 + 10)
    assert seconds(costs("cuda"), aten.mm.default, *few) == pytest.approx(moved_bytes / MEMORY)
    assert seconds(costs("cpu"), aten.mm.default, *few) == pytest.approx(200 / MATMUL)
    assert seconds(costs("cuda"), aten.mm.default, *many) == pytest.approx(4 * 20_100 / MEMORY)


def test_products_of_float32_are_as_fast_as_tf32_where_that_is_on() -> None:
    fast = DeviceRecord(
        name="d",
        kind="cuda",
        memory_bytes=1,
        origin="data sheet",
        rates=(
            OpRate(kind="matmul", dtype="float32", per_second=1.0),
            OpRate(kind="matmul", dtype="tfloat32", per_second=4.0),
        ),
    )
    left, right = made(2, 3), made(3, 5)
    assert seconds(DeviceCosts(fast), aten.mm.default, left, right) == 60.0
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert seconds(DeviceCosts(fast), aten.mm.default, left, right) == 15.0
        assert seconds(costs("cpu"), aten.mm.default, left, right) == pytest.approx(60 / MATMUL), "no CPU has it"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_paces_stretch_seconds() -> None:
    found = costs(op_paces=(("mm", ((1.0, 1.5),)),), pace=2.0)
    assert seconds(found, aten.mm.default, made(2, 3), made(3, 5)) == pytest.approx(3 * 60 / MATMUL)
    assert seconds(found, aten.add.Tensor, made(10), made(10)) == pytest.approx(2 * 120 / MEMORY)


def _held(run: Callable[[], Any]) -> tuple[int, int]:
    """The bytes that an op on the CPU leaves, and the most that it holds, as torch's profiler sees them."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run()
    events: Any = profiled.profiler
    live = most = 0
    for event in sorted(events.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    del result
    return live, most


def _seen(run: Callable[[], Any]) -> int:
    """The most bytes that an op on the CPU holds beside its result."""
    live, most = _held(run)
    return most - live


FAST = tuple(OpRate(kind=kind, per_second=1e12) for kind in ("matmul", "memory"))


def _transient(op: Any, *args: Any) -> tuple[int, int]:
    known = DeviceCosts(costs(rates=FAST).device, held_beside_result)
    return known.transient_bytes(op, args, {}, op(*args)), _seen(lambda: op(*args))


@pytest.mark.parametrize(
    ("image", "weight", "stride"),
    [
        ((4, 64, 16, 16), (64, 64, 3, 3), 1),
        ((4, 16, 16, 16), (64, 16, 3, 3), 1),
        ((4, 64, 16, 16), (32, 64, 3, 3), 2),
        ((4, 36, 16, 16), (48, 36, 1, 1), 1),
        ((4, 48, 16, 16), (48, 1, 7, 7), 2),
    ],
)
def test_convolutions_on_the_cpu_hold_what_a_trial_on_zeros_does(
    image: tuple[int, ...], weight: tuple[int, ...], stride: int
) -> None:
    x, w = torch.randn(image), torch.randn(weight)
    fixed = (None, [stride] * 2, [1, 1], [1, 1], False, [0, 0], image[1] // weight[1])
    expected, seen = _transient(aten.convolution.default, x, w, *fixed)
    assert expected == seen
    result = aten.convolution.default(x, w, *fixed)
    backward = (torch.randn_like(result), x, w, [weight[0]], *fixed[1:], [True, True, True])
    expected, seen = _transient(aten.convolution_backward.default, *backward)
    assert expected == seen


def test_norms_and_losses_on_the_cpu_hold_what_is_expected() -> None:
    x = torch.randn(4, 64, 16, 16)
    weight, bias, mean, variance = (torch.ones(64) for _ in range(4))
    forward = (x, weight, bias, mean, variance, True, 0.1, 1e-5)
    expected, seen = _transient(aten.native_batch_norm.default, *forward)
    assert expected == seen
    saved = aten.native_batch_norm.default(*forward)[1:]
    backward = (x, x, weight, mean, variance, *saved, True, 1e-5, [True, True, True])
    expected, seen = _transient(aten.native_batch_norm_backward.default, *backward)
    assert expected == pytest.approx(seen, abs=2048)
    assert _transient(aten.mm.default, torch.randn(8, 8), torch.randn(8, 8)) == (0, 0)


def test_what_is_cast_inside_a_kernel_is_seen_in_a_trial() -> None:
    x, mask = torch.ones(64, 64), torch.ones(64, 64, dtype=torch.bool)
    assert _transient(aten.mul.Tensor, x, mask) == (x.nbytes, x.nbytes)
    assert _transient(aten.native_dropout.default, x, 0.5, True) == (x.nbytes, x.nbytes)
    assert _transient(aten.mul.Tensor, x, mask[:1].expand(64, 64)) == (x.nbytes, x.nbytes)


def test_trials_draw_nothing_and_write_to_nothing() -> None:
    known = DeviceCosts(costs(rates=FAST).device, held_beside_result)
    state, counts = torch.get_rng_state(), torch.arange(4)
    for op, args in ((aten.bernoulli.default, (torch.ones(8),)), (aten.add_.Tensor, (counts, counts))):
        known.transient_bytes(op, args, {}, args[0])
    assert torch.equal(torch.get_rng_state(), state)
    assert counts.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("op", "args", "rates"),
    [
        (aten.mul.Tensor, (torch.ones(64), torch.ones(64, dtype=torch.bool)), ()),  # Too long.
        (aten.linalg_cholesky_ex.default, (torch.ones(4, 8), True), FAST),  # Refused.
    ],
)
def test_what_cannot_be_tried_holds_what_rules_say(op: Any, args: tuple[Any, ...], rates: tuple[OpRate, ...]) -> None:
    slow = (OpRate(kind="memory", per_second=1.0),)
    known = DeviceCosts(costs(rates=rates or slow).device, held_beside_result)
    assert known.transient_bytes(op, args, {}, torch.ones(())) == 0


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": functional.mse_loss,
    "mse, summed": lambda x, y: functional.mse_loss(x, y, reduction="sum"),
    "mse of each": lambda x, y: functional.mse_loss(x, y, reduction="none"),
    "l1": functional.l1_loss,
    "smooth l1": functional.smooth_l1_loss,
    "huber": functional.huber_loss,
    "cross entropy of two": functional.binary_cross_entropy,
    "cross entropy of logits": functional.binary_cross_entropy_with_logits,
    "each of logits": lambda x, y: functional.binary_cross_entropy_with_logits(x, y, reduction="none"),
    "cross entropy": lambda x, y: functional.cross_entropy(x, y.argmax(1)),
    "logsumexp": lambda x, y: x.logsumexp(1),
    "layer norm": lambda x, y: functional.layer_norm(x, (100,)),
    "cosine": functional.cosine_similarity,
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_hold_meanwhile_and_afterwards_what_they_do_on_the_cpu(name: str) -> None:
    """A few losses keep a storage as large as their arguments, in which their one number lies."""
    loss, drawn = LOSSES[name], torch.rand(2, 200, 100)
    real_bytes, peak_bytes = _held(lambda: loss(*drawn.unbind()))
    with simulating(costs()) as device:
        x, y = torch.rand(200, 100), torch.rand(200, 100)
        live_bytes = device.live_bytes
        device.forget_peak()
        result = loss(x, y)
        assert device.live_bytes - live_bytes == real_bytes
        assert device.peak_bytes - live_bytes == pytest.approx(peak_bytes, abs=64)
        assert result.untyped_storage().nbytes() == real_bytes
