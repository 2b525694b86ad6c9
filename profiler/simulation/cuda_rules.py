"""Lets a simulated CUDA device run what CUDA runs: fake tensors are labelled ``cpu``, whose kernels are others.

Dropout draws a mask of one byte per element, attention runs in a fused kernel, autocast has CUDA's lists, optimizers
step all parameters at once, and devices called ``cuda`` are the simulated one.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from profiler.workload.optimizers import COUNTS_ON_HOST

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_MOST_FLASH_HEAD = 256  # sdp_utils.cpp of torch: larger heads have no flash kernel

# Ops that autocast runs in float32 on CUDA (torch.amp, "CUDA Ops that can autocast to float32"), by aten's names.
_IN_FLOAT32 = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "softplus",
    "layer_norm",
    "group_norm",
    "native_layer_norm",
    "nll_loss",
    "nll_loss2d",
    "cosine_embedding_loss",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "cosine_similarity",
    "poisson_nll_loss",
    "huber_loss",
    "grid_sampler",
]
# Those of them that take the type of their result as an argument: it is float32 where none is given.
_WITH_DTYPE = ["softmax", "log_softmax", "cumprod", "cumsum", "prod", "sum"]


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """What runs inside on tensors of the CPU runs the ops that it would run on CUDA."""
    counts = COUNTS_ON_HOST.set(True)
    with _autocast_of_cuda(), _fused_norms(), _steps_at_once(), _meshes_of_cuda(), _within_torch(), _CudaFunctions():
        try:
            yield
        finally:
            COUNTS_ON_HOST.reset(counts)


class _CudaFunctions(TorchFunctionMode):
    """Replaces functions of torch whose kernels on CUDA save or return something else."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MOVES:
            args = tuple(map(_labelled, args))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _labelled(kwargs["device"])}
        replaced = _REPLACED.get(func)
        if replaced is not None and (result := replaced(*args, **kwargs)) is not None:
            return result
        if func is Tensor.cuda:
            return args[0].to("cpu")
        return func(*args, **kwargs)


_MOVES = {Tensor.to}


def _labelled(value: Any) -> Any:
    """The label of the simulated device in place of CUDA's."""
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor | None:
    if not training or inplace or not 0 < p < 1 or input.numel() == 0 or not input.is_floating_point():
        return None
    return torch.native_dropout(input, p, True)[0]


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor | None:
    if weight is not None and weight.dtype is not input.dtype:
        return None
    return _aten._fused_rms_norm(input, list(normalized_shape), weight, eps)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Scaled dot-product attention by the kernel that CUDA chooses: flash, memory-efficient, or op by op."""
    if not query.is_floating_point():
        return None
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    query, key, value = (each.to(dtype) for each in (query, key, value))
    grouped = enable_gqa and query.shape[1] != key.shape[1]
    width = query.shape[-1]
    of_heads = query.dim() == 4
    if of_heads and attn_mask is None and dtype in _HALVES and width <= _MOST_FLASH_HEAD:
        padded = -width % 8
        if padded:
            query, key, value = (functional.pad(each, (0, padded)) for each in (query, key, value))
        scale = scale if scale is not None else width**-0.5
        result = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
        return result[0][..., :width] if padded else result[0]
    if grouped or not of_heads or dtype not in (*_HALVES, torch.float32):
        if dropout_p:
            return _attention_op_by_op(query, key, value, attn_mask, dropout_p, is_causal, scale, grouped)
        return _aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    bias = None
    if attn_mask is not None:
        bias = _added(attn_mask, query.dtype).expand(*query.shape[:3], key.shape[2])
    saves = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, saves, dropout_p, is_causal, scale=scale
    )[0]


def _attention_op_by_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    """The ops of torch's attention without a fused kernel; its dropout is the one that CUDA has."""
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if mask is not None:
        mask = _added(mask, query.dtype)
    if grouped:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    root = (scale if scale is not None else query.shape[-1] ** -0.5) ** 0.5
    weights = torch.matmul(query * root, key.transpose(-2, -1) * root)
    if mask is not None:
        weights = weights.add_(mask)
    weights = torch.native_dropout(_aten._safe_softmax(weights, -1), dropout_p, True)[0]
    return torch.matmul(weights, value)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What a mask adds to the weights of attention."""
    if mask.dtype is torch.bool:
        return torch.empty(mask.shape, dtype=dtype).masked_fill_(mask.logical_not(), -torch.inf)
    return mask.to(dtype)


_REPLACED: dict[Any, Callable[..., Tensor | None]] = {
    functional.dropout: _dropout,
    functional.rms_norm: _rms_norm,
    functional.scaled_dot_product_attention: _attention,
}


@contextlib.contextmanager
def _within_torch() -> Iterator[None]:
    """Replaces them for torch's own functions as well, within which no function mode sees any others."""
    before = {func.__name__: func for func in _REPLACED}

    def replaced(func: Any) -> Callable[..., Any]:
        @functools.wraps(func)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Whoever imported it by name meanwhile keeps it.
            result = _REPLACED[func](*args, **kwargs) if COUNTS_ON_HOST.get() else None
            return func(*args, **kwargs) if result is None else result

        return call

    for name, func in before.items():
        setattr(functional, name, replaced(func))
    try:
        yield
    finally:
        for name, func in before.items():
            setattr(functional, name, func)


@contextlib.contextmanager
def _steps_at_once() -> Iterator[None]:
    """Optimizers that are told nothing else step all parameters with one call for each op, as on CUDA."""
    asked: list[dict[str, Any]] = []

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
                asked.append(group)

    def after(*_: Any) -> None:
        while asked:
            asked.pop()["foreach"] = None

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _meshes_of_cuda() -> Iterator[None]:
    """Meshes of ranks on CUDA are of the simulated device."""
    made = DeviceMesh.__init__

    @functools.wraps(made)
    def make(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        made(self, _labelled(device_type), *args, **kwargs)

    DeviceMesh.__init__ = make  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeviceMesh.__init__ = made  # type: ignore[method-assign]


@contextlib.contextmanager
def _fused_norms() -> Iterator[None]:
    """The RMS norm is one op with a backward of its own, as where its device has a kernel, and not op by op."""

    def kernel(*_: Any) -> Any:
        raise NotImplementedError("Fake tensors alone are normalized on a simulated device.")

    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", kernel, "CPU")
    try:
        yield
    finally:
        library._destroy()


@contextlib.contextmanager
def _autocast_of_cuda() -> Iterator[None]:
    """``torch.autocast`` of either device type casts on tensors of the CPU as CUDA's does."""
    library = torch.library.Library("aten", "IMPL")
    for name in (*_IN_FLOAT32, *_WITH_DTYPE):
        packet = getattr(_aten, name)
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if overload.endswith("out") or op._schema.is_mutable:
                continue
            kernel = _with_dtype(op) if name in _WITH_DTYPE else _in_float32(op)
            with contextlib.suppress(RuntimeError), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # That another kernel is replaced, which is meant.
                library.impl(op, kernel, "AutocastCPU", allow_override=True)
    begun = torch.amp.autocast_mode.autocast.__init__

    @functools.wraps(begun)
    def begin(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda" and not args and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.get_autocast_dtype("cuda")
        begun(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.amp.autocast_mode.autocast.__init__ = begin  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.amp.autocast_mode.autocast.__init__ = begun  # type: ignore[method-assign]
        library._destroy()


def _autocast_off() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _in_float32(op: Any) -> Callable[..., Any]:
    def cast(*args: Any, **kwargs: Any) -> Any:
        with _autocast_off():
            return op(*map(_float32, args), **{key: _float32(value) for key, value in kwargs.items()})

    return cast


def _with_dtype(op: Any) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]
    place = names.index("dtype") if "dtype" in names else None

    def cast(*args: Any, **kwargs: Any) -> Any:
        given = place is None or kwargs.get("dtype") is not None or (place < len(args) and args[place] is not None)
        with _autocast_off():
            if given or not args[0].is_floating_point():
                return op(*args, **kwargs)
            assert place is not None
            positional = args[:place] if place < len(args) else args
            return op(*positional, **{**kwargs, "dtype": torch.float32})

    return cast


def _float32(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in _HALVES:
        return value.to(torch.float32)
    if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
        return type(value)(map(_float32, value))
    return value
