"""What training loops of generated models call; the script of a case has the sources of those that it needs."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class Fields:
    """A batch that is none of Python's containers, as those of graphs and of tokenizers are."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class InFields(tuple[Tensor, ...]):
    """The tensors of a batch that comes to the model as one object with them."""


def tensors_of(inputs: Any) -> list[Tensor]:
    """The tensors of a batch, a tuple or a dict."""
    return list(inputs.values()) if isinstance(inputs, dict) else list(inputs)


def refill(inputs: Any) -> None:
    """Another batch in the same tensors."""
    for tensor in tensors_of(inputs):
        with torch.no_grad():
            tensor.normal_() if tensor.is_floating_point() else tensor.random_(0, 20)
        tensor.grad = None


def copied(inputs: Any) -> Any:
    """Another batch in tensors of its own."""
    copies = [tensor.detach().flip(0).requires_grad_(tensor.requires_grad) for tensor in tensors_of(inputs)]
    return dict(zip(inputs, copies, strict=True)) if isinstance(inputs, dict) else type(inputs)(copies)


def cast(inputs: Any, dtype: torch.dtype) -> Any:
    """A batch with its numbers in another type."""
    parts = [
        tensor.detach().to(dtype).requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor
        for tensor in tensors_of(inputs)
    ]
    return dict(zip(inputs, parts, strict=True)) if isinstance(inputs, dict) else type(inputs)(parts)


def halved(inputs: Any) -> Any:
    """The first half of a batch."""
    parts = [tensor[: len(tensor) // 2] for tensor in tensors_of(inputs)]
    return dict(zip(inputs, parts, strict=True)) if isinstance(inputs, dict) else type(inputs)(parts)


def joined(inputs: Any) -> Any:
    """The same batch twice, as one."""
    parts = [
        torch.cat([tensor.detach(), tensor.detach()]).requires_grad_(tensor.requires_grad)
        for tensor in tensors_of(inputs)
    ]
    return dict(zip(inputs, parts, strict=True)) if isinstance(inputs, dict) else type(inputs)(parts)


def args_of(inputs: Any) -> tuple[Any, ...]:
    if isinstance(inputs, InFields):
        return (Fields(*inputs),)
    return () if isinstance(inputs, dict) else inputs


def kwargs_of(inputs: Any) -> dict[str, Tensor]:
    return inputs if isinstance(inputs, dict) else {}


def call(model: nn.Module, inputs: Any) -> Any:
    return model(*args_of(inputs), **kwargs_of(inputs))


def first_of(output: Any) -> Tensor:
    """The predictions in what a model returns."""
    if isinstance(output, dict):
        return output["logits"]
    return output[0] if isinstance(output, tuple) else output


def loss_fn(output: Any) -> Tensor:
    if isinstance(output, dict) and "loss" in output:
        return output["loss"]
    more = output[1].float().mean() if isinstance(output, tuple) else 0.0
    return (first_of(output).float() ** 2).mean() + more


def remade(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The same kind of optimizer for another model."""
    kind: Any = type(optimizer)
    made = kind([p for p in model.parameters() if p.requires_grad], lr=optimizer.defaults["lr"])
    for name, value in optimizer.defaults.items():
        made.param_groups[0][name] = value
    return made


def in_thread(run: Callable[[], Any]) -> Any:
    """Call in another thread; its exception comes here.

    A new thread of Python's computes with OpenMP's number of threads until torch's is asked for or its first op is
    split, so that without a plan, too, sums of oneDNN differ from those of the main thread where the numbers do.
    """
    done: list[Any] = []

    def target() -> None:
        torch.get_num_threads()
        try:
            done.append((run(), None))
        except Exception as error:  # noqa: BLE001 - it is raised again where the thread was started
            done.append((None, error))

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    value, error = done[0]
    if error is not None:
        raise error
    return value


class Holder(nn.Module):
    """A module around another one, as trainers have it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*args, **kwargs)


def net_of(model: nn.Module) -> Any:
    """The generated model itself."""
    return model.net if isinstance(model, Holder) else model


def head_of(model: nn.Module) -> str:
    """The name of its last module."""
    return "net.head" if isinstance(model, Holder) else "head"


def reloaded(plan: Any) -> Any:
    """The plan, written to a file and read again."""
    with tempfile.TemporaryDirectory() as folder:
        plan.save(f"{folder}/plan.json")
        return type(plan).load(f"{folder}/plan.json")


class Interrupt(Exception):
    """Raised in the middle of something."""


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
