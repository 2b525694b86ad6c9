"""Times the ops that training is made of on the device at hand, for steps that are estimated elsewhere."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from profiler.device_record import DeviceRecord, OpRate
from profiler.measurement.device_memory import measure_link
from profiler.progress import told_by
from profiler.simulation.op_costs import kind_of, work_of

_aten = torch.ops.aten
Progress = Callable[[str, int, int], None]
Make = Callable[[int], tuple[Any, tuple[Any, ...]]]  # of a size: an op, and its arguments
_REPEATS, _SECONDS = 30, 0.25  # of one op at one size, at most
_LEAST, _MOST = 0.85, 1.2  # how far a step was seen to be from the sum of its ops


def calibrate(device: str | None = None, *, progress: Progress | None = None) -> DeviceRecord:
    """Measure how fast a device runs each kind of op, small and large, and its link to host memory.

    Args:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``; None for the first GPU, or the CPU where there is none.
        progress: called as ``progress(what, done, total)`` before each kind of op.

    Raises:
        ValueError: there is no such device.
    """
    found = _device(device)
    report = progress or told_by("planner", "calibrating")
    kinds = list(_samples(found))
    rates: list[OpRate] = []
    for number, (kind, dtype, sizes, makes) in enumerate(kinds):
        report(f"{kind} {dtype}".strip(), number, len(kinds))
        points = _points(found, sizes, makes)
        if points:
            rates.append(OpRate(kind=kind, dtype=dtype, points=points, source="measured"))
    rates.append(OpRate(kind="memory", points=_of(rates, "elementwise"), source="as elementwise"))
    report("link", len(kinds) - 1, len(kinds))
    cuda = found.type == "cuda"
    return DeviceRecord(
        name=torch.cuda.get_device_name(found) if cuda else _processor(),
        kind="cuda" if cuda else "cpu",
        memory_bytes=torch.cuda.get_device_properties(found).total_memory if cuda else psutil.virtual_memory().total,
        context_bytes=_context_bytes(found) if cuda else 0,
        block_bytes=512 if cuda else 1,
        origin="calibrated",
        least_seconds=_LEAST,
        most_seconds=_MOST,
        rates=tuple(rates),
        link=measure_link(found),
        sources=(
            f"planner calibrate, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}, "
            f"{torch.get_num_threads()} thread(s)",
        ),
    )


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device: there is no device {name!r}; use cpu or cuda") from error
    if found.type not in ("cpu", "cuda") or (found.type == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"--device: this machine has no {name}; use cpu, or run it on the machine that has one")
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "CPU"


def _context_bytes(device: torch.device) -> int:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return max(0, total_bytes - free_bytes - torch.cuda.memory_reserved(device))


def _of(rates: list[OpRate], kind: str) -> tuple[tuple[float, float], ...]:
    return next((rate.points for rate in rates if rate.kind == kind and rate.dtype in ("", "float32")), ())


def _points(device: torch.device, sizes: list[int], makes: Sequence[Make]) -> tuple[tuple[float, float], ...]:
    """Pairs (work, seconds), by work: at each size the mean of the ops of a kind, which are equally likely."""
    points = []
    for size in sizes:
        works, seconds = [], []
        for make in makes:
            op, args = make(size)
            try:
                result, took = _seconds(device, op, args)
            except (RuntimeError, NotImplementedError):  # The device has no such kernel.
                continue
            works.append(work_of(kind_of(op, args), op, args, {}, result))
            seconds.append(took)
            del result, args
        if works:
            points.append((statistics.fmean(works), statistics.fmean(seconds)))
    increasing: list[tuple[float, float]] = []
    for work, took in sorted(points):
        if not increasing or work > increasing[-1][0]:
            increasing.append((work, took))
    return tuple(increasing)


def _seconds(device: torch.device, op: Any, args: tuple[Any, ...]) -> tuple[Any, float]:
    """Returns the result of an op, and its median time; what it returns is freed each time, as in a step."""
    result = op(*args)
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 3 or (len(times) < _REPEATS and time.perf_counter() - begun < _SECONDS):
        result = None
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            result = op(*args)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        else:
            start = time.perf_counter()
            result = op(*args)
            times.append(time.perf_counter() - start)
    return result, statistics.median(times)


def _samples(device: torch.device) -> Iterator[tuple[str, str, list[int], Sequence[Make]]]:
    """Yields kinds of op, types of number, sizes, and ops of each kind at a size."""
    large = device.type == "cuda"
    widths = [16, 64, 128, 256, 512, 1024, *([2048, 4096, 8192] if large else [])]
    elements = [2**n for n in ((8, 12, 15, 18, 20, 22, 24) if not large else (8, 14, 18, 20, 22, 24, 26, 28))]

    def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    def whole(n: int, most: int) -> Tensor:
        return torch.randint(0, most, (n,), device=device)

    halves = ["bfloat16", "float16"] if large else ["bfloat16"]
    for name in ("float32", *halves):
        dtype = getattr(torch, name)

        def product(n: int, dtype: torch.dtype = dtype) -> tuple[Any, tuple[Any, ...]]:
            return _aten.mm.default, (drawn(n, n, dtype=dtype), drawn(n, n, dtype=dtype))

        def batched(n: int, dtype: torch.dtype = dtype) -> tuple[Any, tuple[Any, ...]]:
            heads = max(1, n // 64)
            return _aten.bmm.default, (drawn(heads, n, 64, dtype=dtype), drawn(heads, 64, n, dtype=dtype))

        yield "matmul", name, widths, [product, batched]
        for groups, kind in ((1, "convolution"), (0, "grouped_convolution")):
            for backward in (False, True):

                def convolved(
                    n: int, dtype: torch.dtype = dtype, groups: int = groups, backward: bool = backward, kernel: int = 3
                ) -> tuple[Any, tuple[Any, ...]]:
                    channels = max(8, n // 4)
                    groups = groups or channels
                    x, weight = (
                        drawn(4, channels, max(4, n // 8), max(4, n // 8), dtype=dtype),
                        drawn(channels, channels // groups, kernel, kernel, dtype=dtype),
                    )
                    pad = kernel // 2
                    if not backward:
                        fixed = (None, [1, 1], [pad, pad], [1, 1], False, [0, 0], groups)
                        return _aten.convolution.default, (x, weight, *fixed)
                    fixed = (None, [1, 1], [pad, pad], [1, 1], False, [0, 0], groups, [True, True, False])
                    return _aten.convolution_backward.default, (torch.randn_like(x), x, weight, *fixed)

                def pointwise(n: int, of: Any = convolved) -> tuple[Any, tuple[Any, ...]]:
                    return of(n, kernel=1)

                sizes = [32, 64, 128, 256, *([512] if large else [])]
                makes = [convolved, pointwise] if groups else [convolved]
                yield kind + ("_backward" if backward else ""), name, sizes, makes

        def heads(n: int, dtype: torch.dtype = dtype) -> tuple[Tensor, ...]:
            return tuple(drawn(2, 4, n, 64, dtype=dtype) for _ in range(3))

        if not large:

            def attended(n: int, heads: Any = heads) -> tuple[Any, tuple[Any, ...]]:
                return _aten._scaled_dot_product_flash_attention_for_cpu.default, (*heads(n), 0.0, True)

            def attended_backward(n: int, heads: Any = heads) -> tuple[Any, tuple[Any, ...]]:
                query, key, value = heads(n)
                out, sums = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
                args = (torch.randn_like(out), query, key, value, out, sums, 0.0, True)
                return _aten._scaled_dot_product_flash_attention_for_cpu_backward.default, args

            yield "attention", name, [32, 128, 512, 1024], [attended]
            yield "attention_backward", name, [32, 128, 512, 1024], [attended_backward]
        elif name != "float32":

            def flash(n: int, heads: Any = heads) -> tuple[Any, tuple[Any, ...]]:
                return _aten._scaled_dot_product_flash_attention.default, (*heads(n), 0.0, True)

            yield "attention", name, [128, 512, 1024, 2048, 4096], [flash]

        def vector(n: int, dtype: torch.dtype = dtype) -> Tensor:
            return drawn(n, dtype=dtype)

        def rows(n: int, dtype: torch.dtype = dtype) -> Tensor:
            return drawn(max(1, n // 256), 256, dtype=dtype)

        def weights(dtype: torch.dtype = dtype) -> Tensor:
            return drawn(256, dtype=dtype)

        def image(n: int, dtype: torch.dtype = dtype) -> Tensor:
            return drawn(
                4, 8, max(2, int((n / 32) ** 0.5)) // 2 * 2, max(2, int((n / 32) ** 0.5)) // 2 * 2, dtype=dtype
            )

        def of(op: Any, *make: Callable[[int], Any]) -> Make:
            return lambda n: (op, tuple(each(n) for each in make))

        def fixed(value: Any) -> Callable[[int], Any]:
            return lambda n: value

        kinds: dict[str, list[Make]] = {
            "elementwise": [of(_aten.add.Tensor, vector, vector), of(_aten.mul.Tensor, vector, vector)],
            "in_place": [of(_aten.add_.Tensor, vector, vector), of(_aten.mul_.Scalar, vector, fixed(1.0))],
            "copy": [of(_aten.clone.default, vector)],
            "fill": [of(_aten.zeros_like.default, vector)],
            "transcendental": [of(_aten.gelu.default, vector), of(_aten.tanh.default, vector)],
            "softmax": [of(_aten._softmax.default, rows, fixed(-1), fixed(False))],
            "normalization": [
                of(
                    _aten.native_layer_norm.default,
                    rows,
                    fixed([256]),
                    lambda n: weights(),
                    lambda n: weights(),
                    fixed(1e-5),
                )
            ],
            "reduction": [of(_aten.sum.dim_IntList, rows, fixed([0])), of(_aten.mean.dim, rows, fixed([-1]))],
            "indexing": [
                of(
                    _aten.embedding.default,
                    lambda n, dtype=dtype: drawn(1024, 256, dtype=dtype),
                    lambda n: whole(max(1, n // 256), 1024),
                ),
            ],
            "random": [of(_aten.native_dropout.default, vector, fixed(0.1), fixed(True))],
            "pooling": [of(_aten.avg_pool2d.default, image, fixed([2, 2]), fixed([2, 2]))],
        }  # fmt: skip
        for kind, makes in kinds.items():
            yield kind, name, elements, makes
