"""What an op takes on a device: its kind, its work, and from these its seconds; and what its kernel holds meanwhile."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry

from profiler.device_record import BY_FLOPS, DeviceRecord
from profiler.workload.tensor_trees import map_tensors, tensors_in

_MATMUL = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "mv", "addmv", "dot", "_scaled_mm", "addbmm"})
_KINDS = {
    "copy": "clone copy_ _to_copy cat stack constant_pad_nd repeat index_select select_backward slice_backward roll "
    "flip as_strided_scatter slice_scatter unfold_backward tril triu _foreach_copy_ expand_copy split_with_sizes_copy",
    "fill": "zeros zeros_like ones ones_like full full_like fill_ zero_ new_zeros new_full new_ones arange "
    "_foreach_zero_ scalar_tensor",
    "gelu": "gelu gelu_backward erf",
    "transcendental": "exp exp_ log log1p expm1 tanh tanh_backward sigmoid sigmoid_backward silu "
    "silu_backward pow rsqrt sqrt sin cos softplus softplus_backward mish mish_backward elu elu_backward hardswish "
    "logsigmoid log_sigmoid_forward log_sigmoid_backward atan2 acos",
    "softmax": "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax logsumexp",
    "normalization": "native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward "
    "_fused_rms_norm _fused_rms_norm_backward",
    "batch_norm": "native_batch_norm _native_batch_norm_legit cudnn_batch_norm",
    "batch_norm_backward": "native_batch_norm_backward cudnn_batch_norm_backward",
    "reduction": "sum mean max min amax amin var std var_mean norm linalg_vector_norm _foreach_norm argmax argmin "
    "cumsum prod any all topk sort",
    "indexing": "embedding embedding_dense_backward index index_put index_put_ _index_put_impl_ gather scatter "
    "scatter_ scatter_add scatter_add_ index_add index_add_ nll_loss_forward nll_loss_backward nll_loss2d_forward "
    "nll_loss2d_backward _embedding_bag masked_select where",
    "random": "native_dropout dropout_mask bernoulli bernoulli_ rand rand_like randn randn_like normal_ uniform_ "
    "randint randperm",
    "pooling": "max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward "
    "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward upsample_nearest2d upsample_nearest2d_backward "
    "upsample_bilinear2d upsample_bilinear2d_backward",
    "none": "empty empty_like new_empty new_empty_strided empty_strided _local_scalar_dense detach",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}


Run = Callable[[], object]
# Calls that move or take more are not tried.
_MOST_TRIED_BYTES, _MOST_TRIED_SECONDS = 2**30, 1.0
# cuDNN 9 took less than so much, and a share of the largest convolution's tensors, on an H200.
_CUDNN_BYTES, _CUDNN_SHARE = 32 * 2**20, 8
# What a dropout of float32 moves for each number: the op that files of devices have the rate of draws from.
_DRAWN_BYTES = 9
_FLOATS = ("float32", "float64", "bfloat16", "float16")


class DeviceCosts:
    """Tells what ops take on a device, from what is known of it.

    Args:
        device: the device.
        held_beside_result: tells how many bytes a call takes on this machine's CPU; None where the device is another.
    """

    def __init__(self, device: DeviceRecord, held_beside_result: Callable[[Run], int] | None = None) -> None:
        self.device = device
        self._convolution_bytes = 0  # of the tensors of the largest
        self._held_beside_result = held_beside_result
        self._tried_bytes: dict[str, int] = {}

    def margin(self) -> tuple[int, str]:
        """Returns the bytes by which peaks may be higher than what was counted, and why."""
        if not self._convolution_bytes or self.device.kind != "cuda":
            return 0, ""
        return _CUDNN_BYTES + self._convolution_bytes // _CUDNN_SHARE, "workspaces of convolutions, which cuDNN chooses"

    def seconds(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> float:
        """Returns how long an op takes: by its floating-point operations, or by the bytes that it reads and writes."""
        kind = kind_of(op, args)
        if kind == "none":
            return 0.0
        if kind.endswith(("convolution", "convolution_backward")):
            self._convolution_bytes = max(self._convolution_bytes, _moved_bytes(args, kwargs, ()))
        dtype = dtype_of(result, args, kwargs)
        cuda = self.device.kind == "cuda"
        if kind == "matmul" and dtype == "float32" and cuda and torch.backends.cuda.matmul.allow_tf32:
            dtype = "tfloat32"
        work = work_of(kind, op, args, kwargs, result)
        if kind == "random" and not cuda and dtype not in _FLOATS:  # On a CPU draws take time, whatever they are of.
            dtype, work = "float32", float(_DRAWN_BYTES * sum(tensor.numel() for tensor in tensors_in(result)))
        seconds = self.device.rate_of(kind, dtype).seconds(work)
        if kind in BY_FLOPS and cuda:  # A product with few rows is limited by reading its matrices.
            moved_bytes = _moved_bytes(args, kwargs, result)
            seconds = max(seconds, self.device.rate_of("memory", dtype).seconds(moved_bytes))
        return seconds * self.device.pace_of(name_of(op), work)

    def transient_bytes(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
        """Returns the most bytes that the kernel of an op holds while it runs, beside its arguments and its result."""
        if self._held_beside_result is None or kind_of(op, args) == "none":
            return self._by_rule(op, args, kwargs, result)
        # What kernels on the CPU hold depends on the processor, on libraries' versions and on threads.
        key = repr((op, map_tensors(_layout, (args, kwargs))))
        if key not in self._tried_bytes:
            small = _moved_bytes(args, kwargs, result) <= _MOST_TRIED_BYTES
            short = small and self.seconds(op, args, kwargs, result) <= _MOST_TRIED_SECONDS
            tried = _held_on_zeros(self._held_beside_result, op, args, kwargs) if short else None
            self._tried_bytes[key] = self._by_rule(op, args, kwargs, result) if tried is None else tried
        return self._tried_bytes[key]

    def _by_rule(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
        rule = _TRANSIENT[self.device.kind].get(name_of(op))
        return 0 if rule is None else int(rule(args, kwargs, result))


def _held_on_zeros(
    held_beside_result: Callable[[Run], int], op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> int | None:
    """Runs an op on zeros of the same layouts; None where it cannot."""
    with _disable_current_modes(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real, options = map_tensors(_stand_in, (args, kwargs))
        try:
            op(*real, **options)  # Libraries keep what they prepare for a shape.
        except Exception:  # noqa: BLE001  (an op, which may be anybody's, need not take zeros)
            return None
        return held_beside_result(lambda: op(*real, **options))


def _layout(tensor: Tensor) -> Any:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _stand_in(tensor: Tensor) -> Tensor:
    """A tensor of the same layout, expanded ones included: zeros for a fake one, a copy of a real one."""
    if isinstance(tensor, FakeTensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()
    storage = tensor.untyped_storage().clone()
    return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


@functools.cache
def name_of(op: Any) -> str:
    """Returns the name of an op without namespace and overload; empty of what is no op."""
    return op._schema.name.partition("::")[2] if isinstance(op, torch._ops.OpOverload) else ""


@functools.cache
def _is_view(op: Any) -> bool:
    """Whether an op returns its argument's storage, unchanged."""
    if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable:
        return False
    returns = [each.alias_info is not None for each in op._schema.returns]
    return bool(returns) and all(returns)


def kind_of(op: Any, args: tuple[Any, ...]) -> str:
    """Returns the kind of an op, as device files name them."""
    name = name_of(op)
    if name in _MATMUL:
        return "matmul"
    if name in ("convolution", "convolution_backward", "_convolution"):
        groups = args[8] if name != "convolution_backward" else args[9]
        return f"grouped_{name}" if groups > 1 else name
    if "_attention" in name and (op.overloadpacket in flop_registry or "_for_cpu" in name):
        return "attention_backward" if name.endswith("backward") else "attention"
    if (kind := _KIND_OF.get(name)) is not None:
        return kind
    if _is_view(op):
        return "none"
    return "in_place" if isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable else "elementwise"


def work_of(kind: str, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> float:
    """Returns the work of an op: floating-point operations, or bytes that it reads and writes, as its kind is given."""
    return float((_flops if kind in BY_FLOPS else _of_bytes)(op, args, kwargs, result))


def _of_bytes(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    return _moved_bytes(args, kwargs, result)


def _flops(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    if "_scaled_dot_product" in name_of(op):  # Torch counts none of the CPU's; before 2.12 none whose heads share keys.
        backward = name_of(op).endswith("backward")
        query, key, value = args[1:4] if backward else args[:3]
        by_query, by_value = (6, 4) if backward else (2, 2)
        scores = query.numel() // query.shape[-1] * key.shape[-2]
        return scores * (by_query * query.shape[-1] + by_value * value.shape[-1])
    count = flop_registry.get(op.overloadpacket)
    if count is None:
        return 2 * sum(tensor.numel() for tensor in tensors_in((args, kwargs)))
    return count(*args, **kwargs, out_val=result)


def dtype_of(*trees: Any) -> str:
    """Returns the type of the numbers of the first tensor, as device files name it; empty where there is none."""
    tensors = tensors_in(trees)
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else ""


def _moved_bytes(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Returns the bytes that a kernel reads and writes: each argument and each result once."""
    tensors = tensors_in((args, kwargs, result))
    return sum(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in tensors)


# What kernels of either device hold meanwhile.


def _reduced(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Returns the bytes of a loss of each element, where one number is made of them."""
    return args[0].nbytes if result.dim() < args[0].dim() else 0


def _with_logits(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    return 2 * args[0].nbytes - (0 if result.dim() < args[0].dim() else result.nbytes)


def _logsumexp(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    return args[0].nbytes + result.nbytes


# Backward kernels of fused attention on CUDA, from kernel_backward.h of mem_eff_attention and flash_api.cpp in PyTorch.


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _efficient_backward(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Returns the bytes of the workspace, in which gradients of queries (and of wide heads' keys) are summed."""
    query, key, value = args[1:4]
    batch, heads, queries, width = query.shape
    widest = max(width, value.shape[-1])
    half = query.itemsize < 4
    rows = 64 if widest <= 64 else 128
    in_registers = half and widest <= rows
    columns = 128 if in_registers and widest > 64 else 64
    elements = -(-queries // rows) * -(-width // columns) * (16 + rows * columns * 4) // 4
    if half and not in_registers:
        keys = _up(key.shape[2], columns)
        elements += keys * (_up(width, rows) + _up(value.shape[-1], rows))
    return batch * heads * (4 * _up(elements, 4) + 4 * queries)


def _flash_backward(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Returns the bytes of the gradients of queries in float32, of row sums, and of keys and values of each head."""
    query, key = args[1:3]
    batch, heads, queries, width = query.shape
    rows = batch * heads * _up(queries, 128)
    summed_bytes = 4 * rows * (_up(width, 32) + 1)
    expanded = 2 * batch * heads * key.shape[2] * width * query.itemsize if key.shape[1] != heads else 0
    return summed_bytes + expanded


_TRANSIENT_ANYWHERE = {
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), _reduced),
    "binary_cross_entropy_with_logits": _with_logits,
    "logsumexp": _logsumexp,
}
_TRANSIENT: dict[str, dict[str, Any]] = {
    "cpu": _TRANSIENT_ANYWHERE,
    "cuda": {
        **_TRANSIENT_ANYWHERE,
        "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
        "_scaled_dot_product_flash_attention_backward": _flash_backward,
    },
}
