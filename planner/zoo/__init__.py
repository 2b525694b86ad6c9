"""Built-in models by name: real architectures at sizes whose step takes about a second on two cores.

All are built offline from configs with random weights, so nothing is downloaded. May import ``profiler`` and no other
room of ``planner``. Begin with ``build`` in this file, then ``training.py``, which sets seed, device, optimizer and
precision of every model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.zoo.own_models import build_densenet, build_mindspore_blocks, build_mlp, build_unet
from planner.zoo.training import COMMON, Unknown, ZooModel, checked_settings, did_you_mean, in_training, seeded
from planner.zoo.transformers_models import build_bert, build_gpt2, build_llama, build_resnet50, build_t5, build_vit
from profiler.workload.workload import Workload

_BUILDERS: dict[str, Callable[..., ZooModel]] = {
    "gpt2": build_gpt2,
    "bert": build_bert,
    "llama": build_llama,
    "vit": build_vit,
    "t5": build_t5,
    "resnet50": build_resnet50,
    "unet": build_unet,
    "densenet": build_densenet,
    "mlp": build_mlp,
    "mindspore_blocks": build_mindspore_blocks,
}

__all__ = ["Unknown", "build", "names"]


def names() -> tuple[str, ...]:
    """The models that ``build`` knows."""
    return tuple(_BUILDERS)


def build(name: str, **settings: Any) -> Workload:
    """One training step of the model ``name``.

    Args:
        name: one of ``names()``.
        settings: what differs from the defaults: ``batch``, the model's sizes
            (``layers``, ``hidden``, ``seq``, ``image``, ...), ``seed`` (weights
            and batch are the same for the same seed), ``device``, ``optimizer``
            (``adamw``, ``adam``, ``sgd``, ``momentum``, ``adafactor`` or ``none``),
            ``precision`` (``float32``, ``amp-bf16``, ``amp-fp16`` or ``bf16``).

    Raises:
        ValueError: an unknown model or setting, or a value that cannot work.
        ModuleNotFoundError: the model needs transformers and it is not installed.
    """
    if name not in _BUILDERS:
        raise Unknown(f"zoo: expected one of {', '.join(_BUILDERS)}, got {name!r}; {did_you_mean(name, _BUILDERS)}")
    sizes = checked_settings(name, _BUILDERS[name], settings)
    common = {key: sizes.pop(key) for key in COMMON}
    with seeded(common.pop("seed")):
        built = _BUILDERS[name](**sizes)
    return in_training(built, **common)
