"""Times the ops that training is made of on the device at hand, for steps that are estimated elsewhere."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.device_record import DeviceRecord, OpRate
from profiler.measurement.device_memory import measure_link
from profiler.measurement.meter import metered, time_meter
from profiler.messages import told_by
from profiler.simulation.op_costs import DeviceCosts, kind_of, name_of, work_of
from profiler.workload.tensor_trees import map_tensors, tensors_in
from profiler.workload.workload import Workload

_aten = torch.ops.aten
Progress = Callable[[str, int, int], None]
Make = Callable[[int], tuple[Any, tuple[Any, ...]]]  # of a size: an op, and its arguments
_STEPS = 9  # of each model
_LONG_SECONDS = 1e-5
_SECONDS = 0.1  # for one op at one size
_MOST_SETS = 400
# Tensors are worked on in turns: operands of products are in some cache in a step, those of other ops mostly in none.
_IN_CACHES = ("matmul", "attention", "attention_backward")
_WARM_BYTES, _COLD_BYTES = 96 * 2**20, 768 * 2**20
_LEAST, _MOST = 0.7, 1.3  # 40 steps of ten models took 0.72 to 1.26 of the estimate (benchmarks.estimates)


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
    report("whole steps", len(kinds) - 1, len(kinds))
    cuda = found.type == "cuda"
    record = DeviceRecord(
        name=torch.cuda.get_device_name(found) if cuda else _processor(),
        kind="cuda" if cuda else "cpu",
        memory_bytes=torch.cuda.get_device_properties(found).total_memory if cuda else psutil.virtual_memory().total,
        context_bytes=_context_bytes(found) if cuda else 0,
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
    return _at_pace_of_steps(record, found)


class _Timed(TorchDispatchMode):
    """Times each op of a step beside what it was expected to take.

    Attributes:
        measured, expected: seconds of ops that are not short, by name and by the power of two next to their work.
        works: the work of each of these.
        all_expected: seconds of all ops.
    """

    def __init__(self, costs: DeviceCosts, device: torch.device) -> None:
        super().__init__()
        self.measured: dict[tuple[str, int], float] = defaultdict(float)
        self.expected: dict[tuple[str, int], float] = defaultdict(float)
        self.works: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.all_expected = 0.0
        self._costs, self._device = costs, device

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        begun = time.perf_counter()
        result = func(*args, **kwargs)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        took = time.perf_counter() - begun
        expected = self._costs.seconds(func, args, kwargs, result)
        self.all_expected += expected
        work = work_of(kind_of(func, args), func, args, kwargs, result)
        if work and expected > _LONG_SECONDS:  # Of short ones this mode takes a large part.
            key = name_of(func), round(math.log2(work))
            self.measured[key] += took
            self.expected[key] += expected
            self.works[key].append(work)
        return result


def _at_pace_of_steps(record: DeviceRecord, device: torch.device) -> DeviceRecord:
    """Returns the record with the pace of ops within steps, where caches hold other things than beside them."""
    timed, ratios = _Timed(DeviceCosts(record), device), []
    workloads = list(steps_to_time(device))
    for workload in workloads:
        workload.step()
        for _ in range(3):
            with timed:
                workload.step()
    paces: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (op, size), seconds in timed.expected.items():
        paces[op].append((statistics.fmean(timed.works[op, size]), timed.measured[op, size] / seconds))
    record = replace(record, op_paces=tuple((op, tuple(sorted(points))) for op, points in sorted(paces.items())))
    for workload in workloads:
        whole = _Timed(DeviceCosts(record), device)
        seconds = [metered(time_meter(device), workload.step).seconds for _ in range(_STEPS)]
        with whole:
            workload.step()
        ratios.append(statistics.median(seconds) / whole.all_expected)
    return replace(record, pace=statistics.geometric_mean(ratios))


def steps_to_time(device: torch.device) -> Iterator[Workload]:
    """Yields the steps of transformers and of convolutions, small and large, that ops are timed in."""
    large = device.type == "cuda"
    for width, layers, batch, rows in (
        [(256, 4, 8, 128), (1024, 4, 12, 512), (2048, 2, 8, 1024)]
        if large
        else [(64, 4, 8, 64), (128, 4, 8, 128), (256, 4, 12, 128), (512, 2, 4, 256)]
    ):
        yield _transformer(device, width, layers, batch, rows)
    for width, batch, side in (
        [(32, 16, 32), (128, 48, 64), (256, 32, 32)] if large else [(16, 16, 16), (32, 48, 32), (128, 16, 16)]
    ):
        yield _convolutions(device, width, batch, side)


def _transformer(device: torch.device, width: int, layers: int, batch: int, rows: int) -> Workload:
    words = 16 * width
    layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, activation=functional.gelu, batch_first=True)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(words, width), encoder, nn.Linear(width, words)).to(device)
    tokens = torch.randint(words, (batch, rows), device=device)

    def next_words(logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    return Workload(model, tokens, loss=next_words, optimizer=torch.optim.AdamW(model.parameters()))


def _convolutions(device: torch.device, width: int, batch: int, side: int) -> Workload:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(4):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 1)]
    layers += [nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU()]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    return Workload(model, torch.randn(batch, 3, side, side, device=device), loss=_squared, optimizer=optimizer)


def _squared(output: Tensor) -> Tensor:
    return output.square().mean()


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
                kind = kind_of(op, args)
                result, took = _seconds(device, op, args, _WARM_BYTES if kind in _IN_CACHES else _COLD_BYTES)
            except (RuntimeError, NotImplementedError):  # The device has no such kernel.
                continue
            works.append(work_of(kind, op, args, {}, result))
            seconds.append(took)
            del result, args
        if works:
            points.append((statistics.fmean(works), statistics.fmean(seconds)))
    increasing: list[tuple[float, float]] = []
    for work, took in sorted(points):
        if not increasing or work > increasing[-1][0]:
            increasing.append((work, took))
    return tuple(increasing)


def _seconds(device: torch.device, op: Any, args: tuple[Any, ...], beside_bytes: int) -> tuple[Any, float]:
    """Returns the result of an op, and its median time, with so many bytes of other tensors between two uses of one."""
    result = op(*args)
    size_bytes = sum(tensor.nbytes for tensor in tensors_in((args, result)))
    count = int(min(_MOST_SETS, max(2, beside_bytes // max(1, size_bytes))))
    sets = [args, *(map_tensors(torch.clone, args) for _ in range(count - 1))]
    results: deque[Any] = deque(maxlen=max(1, count - 1))  # Memory of results that went is cold, too.
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 2 * count or time.perf_counter() - begun < _SECONDS / 2:
        chosen = sets[len(times) % count]
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            results.append(op(*chosen))
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        else:
            start = time.perf_counter()
            results.append(op(*chosen))
            times.append(time.perf_counter() - start)
        if time.perf_counter() - begun > _SECONDS and len(times) > 2:
            break
    return result, statistics.median(times[min(count, len(times) // 2) :])


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
            "gelu": [of(_aten.gelu.default, vector)],
            "transcendental": [of(_aten.tanh.default, vector), of(_aten.exp.default, vector)],
            "softmax": [of(_aten._softmax.default, rows, fixed(-1), fixed(False))],
            "normalization": [
                of(
                    _aten.native_layer_norm.default,
                    rows,
                    fixed([256]),
                    lambda n, weights=weights: weights(),
                    lambda n, weights=weights: weights(),
                    fixed(1e-5),
                )
            ],
            "batch_norm": [lambda n, image=image: (_aten.native_batch_norm.default, _batch_norm(image(n))[0])],
            "batch_norm_backward": [
                lambda n, image=image: (_aten.native_batch_norm_backward.default, _batch_norm(image(n))[1])
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


def _batch_norm(image: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the arguments of a batch norm's forward and backward on an image."""
    weight, bias, mean, variance = (torch.ones(image.shape[1], device=image.device) for _ in range(4))
    forward = (image, weight, bias, mean, variance, True, 0.1, 1e-5)
    _, saved_mean, saved_scale = _aten.native_batch_norm.default(*forward)
    backward = (image, image, weight, mean, variance, saved_mean, saved_scale, True, 1e-5, [True, True, True])
    return forward, backward
