"""Runs a training step on fake tensors, and counts the bytes and the seconds that it would take on a device.

Floating-point tensors are fake: they have a layout and a lifetime, and no values. Whole numbers (token ids, positions,
masks) are real as long as nothing but whole numbers went into them, so that code which looks at them takes the branch
that it takes in training. A storage counts from the op that makes it until nothing refers to it, autograd included,
which is how an allocator counts; the clock is advanced by what each op would take.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false, suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from profiler.current_device import activated
from profiler.device_record import DeviceRecord
from profiler.recomputation.op_schema import traits_of
from profiler.simulation.cuda_allocator import CudaAllocator, MemoryBlock
from profiler.workload.tensor_parts import COLLECTIVES, any_distributed
from profiler.workload.tensor_trees import map_tensors

# Larger tensors of whole numbers are fake as well.
MOST_REAL_BYTES = 64 * 2**20
_aten, _collectives = torch.ops.aten, torch.ops._c10d_functional


class _Sum(NamedTuple):
    """A sum of gradients that may have been made in the place of one of them; what was alive then, with it.

    Attributes:
        replaced, made: the storage of the gradient, and that of the sum.
        live_bytes: with both.
        allocated_bytes: by each allocator, without a block for the sum.
    """

    replaced: int
    made: int
    live_bytes: int
    allocated_bytes: tuple[int, ...]


class OpCosts(Protocol):
    """Tells what ops take on a device."""

    device: DeviceRecord

    def seconds(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
        """Returns how long an op takes."""
        ...

    def margin(self) -> tuple[int, str]:
        """Returns the bytes by which peaks may be higher than what was counted, and why."""
        ...

    def transient_bytes(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        """Returns the most bytes that an op holds while it runs, beside its arguments and its result."""
        ...


class SimulatedDevice(TorchDispatchMode):
    """Counts what the ops inside take on a device that is not there.

    Args:
        costs: of ops on the device.

    Attributes:
        record, costs: what is known of the device, and what its ops take.
        live_bytes: the bytes of all storages that are alive now.
        peak_bytes: the most since ``forget_peak``.
        capacity_bytes: what allocators may hold of the device, from the next ``release_cache`` on; None for all.
        allocators: where CUDA's would put them: by default and, with a capacity, with expandable segments; none on a
            CPU.
        seconds: the time that all ops so far would have taken.
        guessed_at: the file and line that last asked for a value that nobody knows; empty before.
    """

    def __init__(self, costs: OpCosts) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.capacity_bytes: int | None = None
        self.allocators = _new_allocators(costs.device, None)
        self.seconds = 0.0
        self.guessed_at = ""
        self._network_free = self._last_awaited = 0.0
        self.record, self.costs = costs.device, costs
        self._size_bytes: dict[int, int] = {}  # by storage
        self._blocks: dict[int, tuple[MemoryBlock | None, ...]] = {}  # by storage, of each allocator
        self._writes: Counter[int] = Counter()
        self._copies: dict[int, tuple[int, int]] = {}  # the storage that one is a copy of, and its writes by then
        self._stated = WeakTensorKeyDictionary()  # numbers that code states, and the writes to their storage by then
        self._sum: _Sum | None = None

    def forget_peak(self) -> None:
        """The peak is what is alive now."""
        self.peak_bytes = self.live_bytes
        for allocator in self.allocators:
            allocator.forget_peak()

    def release_cache(self) -> None:
        """Has the allocators hold what is alive, one tensor behind the other, and nothing else."""
        self.allocators = _new_allocators(self.record, self.capacity_bytes)
        self._blocks = {key: self._allocated(size_bytes) for key, size_bytes in self._size_bytes.items()}

    def _allocated(self, size_bytes: int) -> tuple[MemoryBlock | None, ...]:
        return tuple(allocator.allocate(size_bytes) for allocator in self.allocators)

    def _free(self, blocks: tuple[MemoryBlock | None, ...]) -> None:
        for allocator, block in zip(self.allocators, blocks, strict=False):
            allocator.free(block)

    def _note_peak(self, transient_bytes: int = 0) -> None:
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + transient_bytes)
        if transient_bytes:
            self._free(self._allocated(transient_bytes))

    def hold(self, tensor: Tensor) -> None:
        """Counts the storage of a tensor until it is gone."""
        self._count(tensor, on_host=False)
        self._note_peak()

    def _count(self, tensor: Tensor, *, on_host: bool, has_block: bool = True) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._size_bytes:
            return
        self._size_bytes[key] = size_bytes = 0 if on_host else storage.nbytes()
        self.live_bytes += size_bytes
        if has_block:
            self._blocks[key] = self._allocated(size_bytes)
        # Torch keeps the Python object of a storage for as long as anything refers to the storage itself.
        weakref.finalize(storage, self._let_go, key)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage anew whose size has changed, as that of parameters that ranks gather and give back."""
        key = storage._cdata
        if key in self._size_bytes:
            before, after = self._size_bytes[key], storage.nbytes()
            self._size_bytes[key] = after
            self.live_bytes += after - before
            self._free(self._blocks.pop(key, ()))
            self._blocks[key] = self._allocated(after)
            self._note_peak()

    def _let_go(self, key: int) -> None:
        size_bytes = self._size_bytes.pop(key)
        self.live_bytes -= size_bytes
        blocks = self._blocks.pop(key, ())
        if self._sum is not None and key == self._sum.replaced and self._sum.made in self._size_bytes:
            self._blocks[self._sum.made] = blocks  # The sum was made in its place.
        else:
            self._free(blocks)
        self._writes.pop(key, None)
        self._copies.pop(key, None)

    def wait(self, seconds: float) -> None:
        """Advances the clock while nothing is computed."""
        self.seconds += seconds

    def communicate(self, whole_bytes: int, ranks: int, *, awaited: bool) -> None:
        """Advances the clock by what a collective takes, as far as computation does not hide it.

        Args:
            whole_bytes, ranks: as for ``NetworkRecord.seconds``.
            awaited: whether what follows needs its result. Such a collective may begin as early as the last awaited one
                has ended, since the host runs ahead; another one begins now, and only later collectives wait for it.
        """
        if self.record.network is None:
            return
        seconds = self.record.network.seconds(whole_bytes, ranks)
        self._network_free = max(self._network_free, self._last_awaited if awaited else self.seconds) + seconds
        if awaited:
            self.seconds = max(self.seconds, self._network_free)
            self._last_awaited = self.seconds

    def wait_for_collectives(self) -> None:
        """Advances the clock to the end of all collectives."""
        self.seconds = self._last_awaited = max(self.seconds, self._network_free)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any_distributed(types):
            return NotImplemented  # It comes back for the part that lies here.
        if func.namespace == "prim":  # Asks for a fake tensor's device.
            return func(*args, **kwargs)
        self._settle_sum()
        in_place = _storage_summed_in(func, args)
        result = self._run(func, args, kwargs)
        made = _tensors_in(result)
        transient_bytes = self.costs.transient_bytes(func, args, kwargs, result)
        # The random state of this kernel is two numbers in host memory.
        seeded = func is _aten._scaled_dot_product_efficient_attention.default
        for tensor in made:
            self._count(tensor, on_host=seeded and tensor.dim() == 0, has_block=in_place is None)
        if in_place is None:
            self._note_peak(transient_bytes)
        else:
            allocated_bytes = tuple(allocator.allocated_bytes for allocator in self.allocators)
            self._sum = _Sum(in_place, _key(made[0]), self.live_bytes, allocated_bytes)
        if func.namespace == COLLECTIVES:
            self._exchange(func, args, made)
        else:
            self.seconds += self.costs.seconds(func, args, kwargs, result)
        return result

    def _settle_sum(self) -> None:
        """Notes the peak of the last sum of gradients, unless nothing else held what it would have been made in."""
        if (pending := self._sum) is not None and pending.replaced in self._size_bytes:
            self.peak_bytes = max(self.peak_bytes, pending.live_bytes)
            if pending.made in self._size_bytes:
                blocks = self._blocks[pending.made] = self._allocated(self._size_bytes[pending.made])
                for allocator, block, before_bytes in zip(
                    self.allocators, blocks, pending.allocated_bytes, strict=True
                ):
                    allocator.note_peak(before_bytes + (block.size_bytes if block else 0))
        self._sum = None

    def _exchange(self, func: Any, args: tuple[Any, ...], made: list[Tensor]) -> None:
        """Advances the clock by a collective of distributed tensors, whose result is needed at once."""
        groups: list[Any] = [arg for arg in args if isinstance(arg, str)]
        if func is _collectives.wait_tensor.default or not groups or not made:
            return
        ranks = torch.distributed.distributed_c10d._resolve_process_group(groups[-1]).size()
        whole_bytes = max(tensor.nbytes for tensor in (*_tensors_in(args), *made))
        for _ in range(2 if func in _SUMMED else 1):  # A sum is scattered, and gathered.
            self.communicate(whole_bytes, ranks, awaited=True)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op on fake tensors, or for real where it makes whole numbers of whole numbers."""
        given = _tensors_in((args, kwargs))
        if func._schema.name in _DRAWN_FOR_FAKE or any(isinstance(tensor, FakeTensor) for tensor in given):
            return self._run_fake(func, args, kwargs, given)
        whole = all(map(is_whole, given))
        shaped_by_values = torch.Tag.dynamic_output_shape in func.tags
        # What is written to would be written to twice.
        if func not in _READERS and not (whole and (func._schema.is_mutable or shaped_by_values)):
            result = func(*args, **kwargs)
            if not all(map(is_whole, (*given, *_tensors_in(result)))):
                return self._with_stated(func, args, kwargs, given, result) if func in _STATED else result
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _run_fake(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> Any:
        """Runs an op on fake tensors; whoever asks for values is told what a step without accidents would show."""
        if func is _aten._local_scalar_dense.default:
            if (known := self._stated_numbers(given[0])) is not None:
                with unset_fake_temporarily():
                    return known.item()
            self.guessed_at = _caller_outside_torch()
            return _ORDINARY.get(given[0].dtype, 1.0 if given[0].is_floating_point() else 1)
        if func in _READERS:
            return self._are_same(*given)
        args, kwargs = _with_positions(func, args, kwargs)
        result = _by_shapes(func, args, kwargs)
        result = self._with_stated(func, args, kwargs, given, result)
        traits = traits_of(func)
        renewed = [args[i] for i in traits.statistics if i < len(args)] if traits.renews_statistics(args) else []
        for tensor in (*traits.writes(args, kwargs), *_tensors_in(renewed)):
            self._writes[_key(tensor)] += 1
        if func is _aten.clone.default:
            source = _key(given[0])
            self._copies[_key(result)] = source, self._writes[source]
        if traits.random:
            with unset_fake_temporarily():
                torch.empty(1).uniform_()  # Random generators advance.
        usual = _USUALLY.get(func._schema.name)
        if usual is not None and result.dtype is torch.bool and is_whole(result):
            with unset_fake_temporarily():  # Nothing is NaN, nothing lies outside of what is asked for.
                return torch.full(result.shape, usual)
        return result

    def forget_stated(self, *tensors: Tensor) -> None:
        """Nothing refers to these tensors weakly; their numbers are not known any more."""
        for tensor in tensors:
            self._stated.pop(tensor, None)

    def _stated_numbers(self, tensor: Tensor) -> Tensor | None:
        """The numbers of a tensor that code stated; whole numbers are their own; None where nobody knows."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        numbers, writes = self._stated.get(tensor) or (None, 0)
        return numbers if writes == self._writes[_key(tensor)] else None

    def _with_stated(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], result: Any
    ) -> Any:
        """The result of an op, with its numbers where it was given stated ones alone: whole ones are in its place."""
        if not isinstance(result, Tensor | list | tuple) or func._schema.is_mutable or traits_of(func).random:
            return result
        made = _tensors_in(result)
        if any(self._stated_numbers(tensor) is None for tensor in given):
            return result
        if not made or sum(tensor.numel() for tensor in made) > _MOST_STATED:
            return result
        with unset_fake_temporarily():
            numbers = func(*map_tensors(self._stated_numbers, args), **map_tensors(self._stated_numbers, kwargs))
        if isinstance(numbers, Tensor) and is_whole(numbers):
            return numbers
        for tensor, known in zip(made, _tensors_in(numbers), strict=True):
            self._stated[tensor] = known, self._writes[_key(tensor)]
        return result

    def _are_same(self, left: Tensor, right: Tensor) -> bool:
        """Whether two tensors would have equal values; a copy has those of its source until that is written to."""
        for copied, source in ((_key(left), _key(right)), (_key(right), _key(left))):
            of, writes = self._copies.get(copied, (None, 0))
            if of == source:
                return self._writes[source] == writes
        return True


def _new_allocators(device: DeviceRecord, capacity_bytes: int | None) -> tuple[CudaAllocator, ...]:
    if device.kind != "cuda":
        return ()
    kinds = (False,) if capacity_bytes is None else (False, True)
    return tuple(CudaAllocator(expandable=each, capacity_bytes=capacity_bytes) for each in kinds)


def _storage_summed_in(func: Any, args: tuple[Any, ...]) -> int | None:
    """The storage of a gradient to which autograd adds another one in place, if nothing else refers to it.

    Under a dispatch mode it makes a third tensor instead (``can_accumulate_inplace`` in input_buffer.cpp, and
    ``gather_backward`` and others in FunctionsManual.cpp).
    """
    if func not in _ADDS_GRADIENTS or torch.is_grad_enabled() or not isinstance(args[0], Tensor):
        return None
    summed, other = args[:2]
    if func is _aten.add.Tensor:
        if not isinstance(other, Tensor) or summed is other:
            return None
        if (summed.shape, summed.dtype) != (other.shape, other.dtype):
            return None
    storage = summed.untyped_storage()
    alone = torch._C._storage_Use_Count(storage._cdata) == 2  # This one, and the tensor's.
    if not alone or summed._is_view() or not is_non_overlapping_and_dense_or_false(summed):
        return None
    return storage._cdata if _is_called_by_autograd() else None


def _is_called_by_autograd() -> bool:
    """Whether an op is dispatched from the engine or from a node written in C++, not from Python within a backward."""
    frame = sys._getframe(3)  # Of whoever called the mode.
    while frame.f_back is not None and frame.f_globals.get("__name__", "") in _WRAPPERS:
        frame = frame.f_back
    return frame.f_code is torch.autograd.graph._engine_run_backward.__code__


def _caller_outside_torch() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "profiler"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_ADDS_GRADIENTS = {
    _aten.add.Tensor,
    _aten.scatter_add.default,
    _aten.scatter.src,
    _aten.scatter.value,
    _aten.index_add.default,
}
_WRAPPERS = {"torch._compile", "torch._dynamo.eval_frame"}  # Torch wraps every mode's ``__torch_dispatch__`` in these.
_SUMMED = {_collectives.all_reduce.default, _collectives.all_reduce_.default, _collectives.all_reduce_coalesced.default}
# Numbers that code states are known (masks of ones, rates of layers), until they meet others.
_STATED = {
    _aten.ones.default,
    _aten.zeros.default,
    _aten.full.default,
    _aten.linspace.default,
    _aten.scalar_tensor.default,
}
_MOST_STATED = 2**20
# Ops that hand values to Python.
_READERS = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.allclose.default}
_ORDINARY: dict[torch.dtype, Any] = {torch.bool: False}  # of values that nobody knows


_USUALLY = {
    **dict.fromkeys(("aten::any", "aten::isnan", "aten::isinf", "aten::_is_any_true"), False),
    **dict.fromkeys(("aten::all", "aten::isfinite", "aten::_is_all_true"), True),
}
# Dropout in programs: a mask has no tensor among its arguments, and whole numbers would be drawn for real.
_DRAWN_FOR_FAKE = ("sublinear_planner::dropout_mask",)
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}


_BATCH_NORMS = {_aten.native_batch_norm.default: 0, _aten.native_batch_norm_backward.default: 1}  # The input's place.
# Their result is made as large as the arguments, and is one number in that storage then.
_SHRUNK = {_aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.binary_cross_entropy.default}


def _with_positions(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Arguments of an op that picks elements, with their positions in the place of real masks: how many is known."""
    if func not in _INDEXED or len(args) < 2:
        return args, kwargs
    positions: list[Tensor | None] = []
    for index in args[1]:
        if isinstance(index, Tensor) and index.dtype is torch.bool and not isinstance(index, FakeTensor):
            with unset_fake_temporarily():
                positions += index.nonzero().unbind(1)
        else:
            positions.append(index)
    return (args[0], positions, *args[2:]), kwargs


def _by_shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The fake result of an op."""
    if func._schema.name == "aten::_grouped_mm" and args[0].dtype is not torch.bfloat16:
        # Its rule for shapes takes bfloat16 alone; kernels take float32 as well.
        halves = [each.to(torch.bfloat16) for each in args[:2]]
        return func(*halves, *args[2:], **{**kwargs, "out_dtype": None}).to(args[0].dtype)
    result = func(*args, **kwargs)
    if func in _BATCH_NORMS and result[0] is not None:
        # Its rule for shapes keeps the strides of transposed inputs; kernels do not.
        memory_format = suggest_memory_format(args[_BATCH_NORMS[func]])
        return torch.empty_like(result[0], memory_format=memory_format), *result[1:]
    if func in _SHRUNK and result.dim() < args[0].dim():
        return result.new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape)).as_strided((), ())
    return result


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is of whole numbers, which are real on a simulated device unless they are very many."""
    whole = not tensor.is_floating_point() and not tensor.is_complex()
    return whole and tensor.layout is torch.strided and tensor.untyped_storage().nbytes() <= MOST_REAL_BYTES


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def simulating(costs: OpCosts) -> Iterator[SimulatedDevice]:
    """Tensors that are made inside are fake, and ops count on a simulated device."""
    device, fakes = SimulatedDevice(costs), FakeTensorMode(allow_non_fake_inputs=True)
    deep_copies = patch.object(FakeTensor, "__deepcopy__", _deep_copy)
    with activated(device), fakes, device, _swaps_of(device, fakes), _resizes_of(device), deep_copies:
        yield device


@contextlib.contextmanager
def _swaps_of(device: SimulatedDevice, fakes: FakeTensorMode) -> Iterator[None]:
    """Lets ``Module.to`` swap fake parameters: modes refer to them weakly, which ``swap_tensors`` refuses."""
    swap_tensors, converter = torch.utils.swap_tensors, fakes.fake_tensor_converter

    def swap(first: Tensor, second: Tensor) -> None:
        if (first.dtype, first.shape, first.stride()) == (second.dtype, second.shape, second.stride()):
            return  # It was moved to the only device that there is, where it has been.
        for memory in (converter.meta_converter.tensor_memo, converter.constant_storage_mapping):
            memory.clear()
        converter.meta_converter.describer.lookup_tensor.clear()
        device.forget_stated(first, second)
        swap_tensors(first, second)

    torch.utils.swap_tensors = swap
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap_tensors


@contextlib.contextmanager
def _resizes_of(device: SimulatedDevice) -> Iterator[None]:
    """Tells the device of storages that are resized, which no op does."""
    resize = torch.UntypedStorage.resize_

    def resize_counted(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        device.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        del torch.UntypedStorage.resize_  # Its own is inherited.


def _deep_copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """A copy with what was set on the tensor; torch would copy its mode as well, and damages memory with that."""
    if not tensor.is_leaf:
        raise RuntimeError("only tensors that no operation made (leaves of the graph) can be copied deeply")
    copied = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        copied = torch.nn.Parameter(copied, tensor.requires_grad)
    else:
        copied.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        copied.grad = copy.deepcopy(tensor.grad, memo)
    memo[id(tensor)] = copied
    set_on_it = {name: value for name, value in vars(tensor).items() if name not in vars(copied)}
    vars(copied).update(copy.deepcopy(set_on_it, memo))
    return copied
