"""Allocators and workspaces of libraries: what they hold and count, page faults, the host's memory, the link to it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, distributed
from torch._C import _autograd, _profiler
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.current_device import active_device
from profiler.device_record import LinkRecord
from profiler.json_files import MOST
from profiler.workload.steps import causes_of
from profiler.workload.tensor_parts import any_distributed
from profiler.workload.tensor_trees import tensors_in

if sys.platform != "win32":
    import resource


# glibc's numbers for what ``mallopt`` sets, and the size from which a block is a mapping of its own.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MOST_ARENAS, _OWN_MAPPING_BYTES = -1, -3, -8, 2**17
_LARGEST_IN_HEAP_BYTES = 2**25  # glibc raises that size by itself, up to here, and the other threshold to twice it.
_WITH_FREED = 5  # A process grew by 4.2 times the tensors of its steps (a planned GPT-2 of 12 layers).


def release_cache(device: torch.device) -> None:
    """Give what the allocator holds and no tensor uses back to the device; nothing on the CPU."""
    if (simulated := active_device()) is not None:
        simulated.release_cache()
    elif device.type == "cuda":
        torch.cuda.empty_cache()


def give_back_freed_memory(device: torch.device) -> None:
    """Have memory that is freed go back to the device, or to the system, from now on: for where it is short.

    glibc keeps what is freed for the process, in pieces of other sizes than the next tensors have; a step may then
    take several times its tensors' bytes. Large blocks become mappings of their own, as by
    ``MALLOC_MMAP_THRESHOLD_``: fetching them anew takes time. With another C library nothing happens.
    """
    gc.collect()
    release_cache(device)
    if device.type == "cpu":
        _set_malloc(_OWN_MAPPING_BYTES, _OWN_MAPPING_BYTES)
        _call_libc("mallopt", _MOST_ARENAS, 1)  # Each takes 64 MiB of what a process may have.
    trim_heap(device)


@contextlib.contextmanager
def large_blocks_mapped() -> Iterator[None]:
    """Within it large blocks are mappings of their own: else what a step frees stays, and scattered tensors fill it."""
    _set_malloc(_OWN_MAPPING_BYTES, _OWN_MAPPING_BYTES)
    try:
        yield
    finally:
        mapped_bytes = int(os.environ.get("MALLOC_MMAP_THRESHOLD_", _LARGEST_IN_HEAP_BYTES))
        _set_malloc(mapped_bytes, int(os.environ.get("MALLOC_TRIM_THRESHOLD_", 2 * _LARGEST_IN_HEAP_BYTES)))


def _set_malloc(mapped_bytes: int, trimmed_bytes: int) -> None:
    _call_libc("mallopt", _MMAP_THRESHOLD, mapped_bytes)
    _call_libc("mallopt", _TRIM_THRESHOLD, trimmed_bytes)


def _call_libc(function: str, *arguments: int) -> None:
    """Call a function of glibc's; with another C library nothing happens."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            getattr(ctypes.CDLL("libc.so.6"), function)(*arguments)


def trim_heap(device: torch.device) -> None:
    """Give host memory that is freed now back to the system: glibc fills gaps before it makes mappings, and keeps them.

    Args:
        device: the device of the step; nothing happens unless it is the CPU.
    """
    if device.type == "cpu":
        _call_libc("malloc_trim", 0)


def is_limited() -> bool:
    """Whether the process's own limits bound its memory (``ulimit -v`` and ``-d``)."""
    return bool([*_below_limits()])


def is_short(needed_bytes: int) -> bool:
    """Whether host memory may not do for tensors of so many bytes and what glibc keeps of freed ones."""
    return is_limited() or _WITH_FREED * needed_bytes > available_host_bytes()


class RequestedBytes(NamedTuple):
    """The bytes that tensors on a CUDA device asked for: now, and at the most since the peaks were last reset."""

    now: int
    peak: int


def requested_bytes(device: torch.device) -> RequestedBytes:
    """Bytes that tensors on a CUDA device asked for.

    The allocator hands out whole blocks, up to a MiB larger: their bytes depend on what was allocated before, those
    asked for on the step alone. An allocator that does not count them is taken at its blocks.
    """
    counts = torch.cuda.memory_stats(device)
    kind = "requested_bytes" if counts.get("requested_bytes.all.allocated") else "allocated_bytes"
    return RequestedBytes(counts.get(f"{kind}.all.current", 0), counts.get(f"{kind}.all.peak", 0))


class HeldBytes(NamedTuple):
    """The bytes that the allocator had at a step's peak: blocks of tensors, and all that it took of the device."""

    allocated: int
    reserved: int


def held_for(device: torch.device, peak_bytes: int) -> HeldBytes | None:
    """Most bytes held at once since the peaks were last reset, other tensors than the step's left out; None on the CPU.

    Args:
        device: of the step.
        peak_bytes: the most bytes that the step's tensors asked for in the same time.
    """
    if (simulated := active_device()) is not None:
        if not simulated.allocators:
            return None
        asked_bytes, allocator = simulated.peak_bytes, simulated.allocators[0]
        allocated_bytes, reserved_bytes = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
    elif device.type == "cuda":
        asked_bytes = requested_bytes(device).peak
        allocated_bytes, reserved_bytes = (
            torch.cuda.max_memory_allocated(device),
            torch.cuda.max_memory_reserved(device),
        )
    else:
        return None
    beside_bytes = peak_bytes - asked_bytes
    return HeldBytes(allocated=allocated_bytes + beside_bytes, reserved=reserved_bytes + beside_bytes)


def cache_flushes(device: torch.device) -> int:
    """Returns how often the device had no memory left until the allocator gave back what it cached; 0 on the CPU."""
    return torch.cuda.memory_stats(device).get("num_alloc_retries", 0) if device.type == "cuda" else 0


def faulted_bytes(device: torch.device) -> int | None:
    """Bytes that the system has given to this process until now, a page fault each; None where nothing counts them.

    A large page counts as a small one: what is cleared in one go costs little.
    """
    if device.type != "cpu" or sys.platform == "win32":
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()


def has_expandable_segments() -> bool:
    """Whether the CUDA allocator grows its segments, as one of them shows that is there now.

    Other allocators than torch's own (``cudaMallocAsync``) have none, and show nothing.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return False
    return any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())


class _GroupFiles(NamedTuple):
    """The names of a version of control groups for the files of limit and usage, and for file pages in statistics."""

    limit: str
    usage: str
    pages_of_files: tuple[str, str]


_VERSION_1 = _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_VERSION_2 = _GroupFiles("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process may still take: free on the machine, allowed by its groups and limits.

    Other programs may take them first.

    Args:
        root: the root of the file system of control groups.
    """
    allowed = [_allowed_bytes(group, files) for group, files in _groups(root)]
    sizes = [psutil.virtual_memory().available, *allowed, *_below_limits()]
    return min(size for size in sizes if size is not None)


def _below_limits() -> Iterator[int]:
    """Returns the bytes that the process's own limits leave (``ulimit -v`` and ``-d``)."""
    if sys.platform == "win32":
        return
    used = psutil.Process().memory_info()
    for limit, used_bytes in ((resource.RLIMIT_AS, used.vms), (resource.RLIMIT_DATA, getattr(used, "data", None))):
        most_bytes, _ = resource.getrlimit(limit)
        if most_bytes != resource.RLIM_INFINITY and used_bytes is not None:
            yield max(0, most_bytes - used_bytes)


def _groups(root: Path) -> Iterator[tuple[Path, _GroupFiles]]:
    """The folder of each control group that this process is in, of both versions."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            base = root / "sys/fs/cgroup" / controllers
            inner = base / path.strip("/")
            for group in (inner, *(parent for parent in inner.parents if parent.is_relative_to(base))):
                yield group, _VERSION_1 if controllers else _VERSION_2


def _allowed_bytes(group: Path, files: _GroupFiles) -> int | None:
    """Returns the bytes that a group leaves; None where it has no limit ("max"). File pages are freed where needed."""
    most, used = _read(group / files.limit).strip(), _read(group / files.usage).strip()
    if not (most.isdigit() and used.isdigit()):
        return None
    pages = dict(line.split(maxsplit=1) for line in _read(group / "memory.stat").splitlines())
    needed = int(used) - sum(int(pages.get(name, 0)) for name in files.pages_of_files)
    return max(0, int(most) - max(0, needed))


def _read(path: Path) -> str:
    """A file's text; empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


class RoomWatch(TorchDispatchMode):
    """Ends a step on the CPU before the system kills the process, as it does where a control group's memory is used up.

    The room is read whenever ops have made a sixteenth of it, or as much as the largest tensor so far.

    Attributes:
        used_bytes: the most that was seen gone of the room.

    Raises:
        MemoryError: within it, where less is left than an eighth of the room at first, or twice the largest tensor.
    """

    def __init__(self, room: Callable[[], int] = available_host_bytes) -> None:
        super().__init__()
        self._room = room
        self._at_first_bytes = room()
        self._reserve_bytes = self._at_first_bytes // 8
        self._made_bytes = 0
        self.used_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any_distributed(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        made = sum(tensor.nbytes for tensor in tensors_in(result) if tensor.layout is torch.strided)
        self._made_bytes += made
        self._reserve_bytes = max(self._reserve_bytes, 2 * made)
        if 2 * self._made_bytes >= self._reserve_bytes:
            self._made_bytes = 0
            left = self._room()
            self.used_bytes = max(self.used_bytes, self._at_first_bytes - left)
            if left < self._reserve_bytes:
                raise MemoryError(f"{left} bytes are left to this process, after {func.name()} made {made}")
        return result


def ran_out(error: BaseException) -> bool:
    """Whether an error, or what it came from, says that the device has no memory left."""
    return any(map(_says_so, causes_of(error)))


def _says_so(error: BaseException) -> bool:
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # what torch says on the CPU
        return True
    if isinstance(error, SystemError) and is_limited():  # what C code says that checks no allocation of its own
        return True
    return isinstance(error, (MemoryError, torch.OutOfMemoryError))


def room_bytes(device: torch.device) -> int:
    """Bytes that a new tensor may take on the device: other programs may take them first."""
    if active_device() is not None:  # A step that a card has no room for is estimated all the same.
        return MOST
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return available_host_bytes()


MEMORY = "[memory]"  # what the profiler calls such an event


class AllocatorEvent(NamedTuple):
    """An op or a mark that ran; or ``[memory]`` that was taken, or given back (then the change is below 0)."""

    start_ns: int
    duration_ns: int
    name: str
    change_bytes: int


class AllocatorEvents:
    """Records what the CPU's allocator takes and gives back, and what ``torch.profiler.record_function`` marks.

    Args:
        ops: record ops as well.

    ``torch.profiler`` itself records every op as well, which takes a tenth of a step's time and, in one of some
    thousands of ops, 100 MiB that a process may not have.

    The profiler does not watch the threads in which gloo communicates: what these give back would count as alive to the
    end. The allocator's own total has it, where a process group makes such threads.
    """

    def __init__(self, *, ops: bool = False) -> None:
        self._scopes = set() if ops else {_profiler.RecordScope.USER_SCOPE}  # none: all of them
        self._counts_all: ctypes.c_bool | None = None

    def start(self) -> None:
        """Begin; raises RuntimeError where the process is profiled already."""
        config = _profiler.ProfilerConfig(
            _profiler.ProfilerState.KINETO, False, True, False, False, False, _profiler._ExperimentalConfig()
        )
        activities = {_profiler.ProfilerActivity.CPU}
        _autograd._prepare_profiler(config, activities)
        enable: Any = _autograd._enable_profiler  # torch's own description of it has no scopes
        enable(config, activities, self._scopes)
        if distributed.is_available() and distributed.is_initialized():
            self._counts_all = _counts_all_threads()
        if self._counts_all is not None:
            self._counts_all.value = True

    def stop(self) -> list[AllocatorEvent]:
        """The events in order of time; of those that begin together, the longest first."""
        result: Any = _autograd._disable_profiler()
        if self._counts_all is None:
            events = [
                AllocatorEvent(e.start_ns(), e.duration_ns(), e.name(), e.nbytes() if e.name() == MEMORY else 0)
                for e in result.events()
                if e.device_type() == torch.autograd.DeviceType.CPU
            ]
            return sorted(events, key=_in_time)
        self._counts_all.value = False
        return list(_changes_of_total(result.experimental_event_tree()))


def held_beside_result(run: Callable[[], object]) -> int:
    """Returns the most bytes that a call takes on the CPU beside what it returns.

    Raises:
        RuntimeError: the process is profiled already.
    """
    events = AllocatorEvents()
    events.start()
    try:
        result = run()
    finally:
        changes = [event.change_bytes for event in events.stop() if event.name == MEMORY]
    del result
    return max(itertools.accumulate(changes, initial=0)) - sum(changes)


@functools.cache
def _counts_all_threads() -> ctypes.c_bool | None:
    """The switch with which the allocator counts in every thread (CPUAllocator.cpp); None in builds without it."""
    for library in sorted((Path(torch.__file__).parent / "lib").glob("*c10.*")):
        try:
            return ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage")
        except (OSError, ValueError):  # It is no library, or has another name for it.
            continue
    return None


def _changes_of_total(tree: list[Any]) -> Iterator[AllocatorEvent]:
    """Events with the changes of the allocator's total, those of threads that made none of them included."""
    total_bytes: int | None = None
    for start_ns, negated_ns, event in sorted(_in_tree(tree), key=lambda found: found[:2]):
        change_bytes = 0
        if event.name == MEMORY:
            now, known = event.extra_fields.total_allocated, total_bytes
            change_bytes, total_bytes = event.extra_fields.alloc_size if known is None else now - known, now
        yield AllocatorEvent(start_ns, -negated_ns, event.name, change_bytes)


def _in_tree(tree: list[Any]) -> Iterator[tuple[int, int, Any]]:
    for event in tree:
        yield event.start_time_ns, event.start_time_ns - event.end_time_ns, event
        yield from _in_tree(event.children)


def _in_time(event: AllocatorEvent) -> tuple[int, int]:
    return event.start_ns, -event.duration_ns


# Long against the 10 microseconds that a copy takes to begin, short against the memory of a device: at 25 GB/s it takes
# 2.7 ms.
COPY_BYTES = 64 * 1024**2
REPEATS = 5
# Of what is free on the device at most this part is taken for measuring.
_PART_OF_FREE = 8
_WIDTH = 2048


def measure_link(device: torch.device) -> LinkRecord | None:
    """Measure the link of a device; None where it has no streams besides the computation's."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        return _Copies(device).record()


class _Copies:
    """Timed copies on a side stream while the device multiplies matrices."""

    def __init__(self, device: torch.device) -> None:
        free_bytes, _ = torch.cuda.mem_get_info(device)
        self._size = max(1, min(COPY_BYTES, free_bytes // _PART_OF_FREE))
        self._device = torch.empty(self._size, dtype=torch.uint8, device=device)
        self._host, self._pinned = _host_buffer(self._size)
        self._factor = torch.zeros(_WIDTH, _WIDTH, device=device)
        self._product = torch.zeros(_WIDTH, _WIDTH, device=device)
        self._stream = torch.cuda.Stream(device)

    def record(self) -> LinkRecord:
        to_host = self._seconds(self._host, self._device)
        to_device = self._seconds(self._device, self._host)
        latency = max(self._seconds(self._host[:1], self._device[:1]), self._seconds(self._device[:1], self._host[:1]))
        devices = torch.cuda.device_count()
        return LinkRecord(
            to_host_bytes_per_second=_rate(self._size, to_host, latency),
            to_device_bytes_per_second=_rate(self._size, to_device, latency),
            latency_seconds=latency,
            devices=devices,
            host_bytes=pinnable_bytes(available_host_bytes() // devices),
            pinned=self._pinned,
        )

    def _seconds(self, target: Tensor, source: Tensor) -> float:
        """Returns the seconds of one copy; the first, which warms up, does not count."""
        return statistics.median([self._one(target, source) for _ in range(1 + REPEATS)][1:])

    def _one(self, target: Tensor, source: Tensor) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._compute()
        begin.record(self._stream)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        end.record(self._stream)
        self._compute()
        torch.cuda.synchronize(self._device.device)
        return begin.elapsed_time(end) / 1000.0

    def _compute(self) -> None:
        """Keep the device busy for some milliseconds."""
        for _ in range(10):
            torch.mm(self._factor, self._factor, out=self._product)


def pinnable_bytes(free_bytes: int) -> int:
    """The most that may be asked for as pinned memory where so much is free: a power of two.

    Torch's pinned allocator takes the next power of two of the system (CachingHostAllocator): for 70 GB 128 GiB, which
    may be more than there is.
    """
    return 1 << free_bytes.bit_length() - 1 if free_bytes > 0 else 0


def _host_buffer(size_bytes: int) -> tuple[Tensor, bool]:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True), True
    except RuntimeError:  # Torch has no kind of its own for what cudaHostAlloc refuses.
        return torch.empty(size_bytes, dtype=torch.uint8), False


def _rate(size_bytes: int, seconds: float, latency_seconds: float) -> float:
    moving = seconds - latency_seconds
    return size_bytes / (moving if moving > 0 else seconds)


_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROWS = 16  # Smaller products do not reach the kernels that have a workspace.


def take_workspaces(device: torch.device) -> None:
    """Has cuBLAS take its workspaces, in this thread and in the one that runs backward; nothing on the CPU.

    Each thread has a handle of its own, with a workspace for products and another one for products with a bias. Without
    a plan, the thread of backward runs none of the latter; where a plan has it recompute a linear layer, the workspace
    would count in the first such step.
    """
    if device.type == "cuda":
        products_in_both_threads(device)


def products_in_both_threads(device: torch.device) -> None:
    """Multiplies small matrices, with a bias and without, in this thread and in the one that runs backward."""
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        for dtype in _TYPES:
            given = torch.ones(_ROWS, _ROWS, device=device, dtype=dtype, requires_grad=True)
            _InBackward.apply(_product(given)).sum().backward()


def _product(given: Tensor) -> Tensor:
    return functional.linear(functional.linear(given, given), given, given[0])


class _InBackward(torch.autograd.Function):
    """Returns what it is given; the products run again in backward."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        _product(gradients[0].contiguous())
        return gradients[0]
