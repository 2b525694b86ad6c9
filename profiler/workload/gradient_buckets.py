"""The buckets of DistributedDataParallel: the memory in which gradients are summed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from profiler.tensors.storages import distinct_bytes


def bucket_bytes(model: nn.Module) -> int:
    """Bytes of the buckets in a model from step to step, apart from gradients that lie in them.

    A bucket is as large as the gradients of its parameters. Buckets are made with the wrapper, and made anew as the
    second forward begins, in the order in which gradients came.
    """
    total_bytes = 0
    for wrapper in _wrappers(model):
        dense = _reduced(wrapper)
        size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in dense)
        if wrapper.gradient_as_bucket_view:
            size_bytes -= distinct_bytes(parameter.grad for parameter in dense if parameter.grad is not None)
        total_bytes += max(0, size_bytes) + _used_map_bytes(wrapper, len(dense))
    return total_bytes


def _used_map_bytes(wrapper: Any, parameters: int) -> int:
    """Of a flag for each parameter, whether it was used: a table in host memory, and another one on the device."""
    if not (wrapper.static_graph or wrapper.find_unused_parameters):
        return 0
    return 4 * parameters * (2 if wrapper.device.type == "cpu" else 1)


def buckets_change(model: nn.Module) -> bool:
    """Whether the next forward makes buckets anew: the first of all backwards has shown in which order gradients come.

    With ``find_unused_parameters`` it never does.
    """
    return any(
        not wrapper._has_rebuilt_buckets and (wrapper.static_graph or not wrapper.find_unused_parameters)
        for wrapper in _wrappers(model)
    )


def buckets_restored(module: nn.Module) -> Callable[[], None] | None:
    """A way back to the buckets of before the first step, where they are those now; None where there is nothing to do.

    In which bucket a gradient lies decides in which order ranks are summed, and so may change its last bits.
    """
    if not isinstance(module, DistributedDataParallel) or module._has_rebuilt_buckets:
        return None
    if module._comm_hooks or module.mixed_precision is not None or module._use_python_reducer:
        return None  # What was registered with the buckets cannot be read from there.
    return lambda: _made_anew(module)


def _made_anew(wrapper: Any) -> None:
    """As the wrapper does it where it is made, and where it is unpickled."""
    wrapper.reducer._remove_autograd_hooks()
    parameters, expect_sparse_gradient = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, expect_sparse_gradient, names, wrapper.static_graph)
    wrapper._has_rebuilt_buckets = False
    if wrapper.static_graph:
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()


def _wrappers(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, DistributedDataParallel))


def _reduced(wrapper: Any) -> list[Tensor]:
    """The parameters whose gradients have a place in a bucket: sparse ones have none."""
    parameters, sparse = wrapper._build_params_for_reducer()
    return [parameter for parameter, is_sparse in zip(parameters, sparse, strict=True) if not is_sparse]
