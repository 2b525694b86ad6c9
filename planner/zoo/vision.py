"""Image classifiers: ViT and ResNet-50 from transformers configs, with random weights."""

from __future__ import annotations

import torch

from planner.zoo.training import ZooModel, transformers


def build_vit(
    *,
    batch: int = 16,
    layers: int = 12,
    hidden: int = 128,
    heads: int = 4,
    image: int = 64,
    patch: int = 8,
    classes: int = 10,
) -> ZooModel:
    """Vision transformer on square images cut into square patches; no dropout."""
    if image % patch:
        raise ValueError(
            f"zoo:vit: expected image to be a multiple of patch, got image={image} and patch={patch}; change one"
        )
    library = transformers()
    config = library.ViTConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        image_size=image,
        patch_size=patch,
        num_labels=classes,
    )
    return ZooModel(library.ViTForImageClassification(config), _images(batch, image, classes))


def build_resnet50(
    *,
    batch: int = 32,
    hidden: int = 32,
    image: int = 64,
    classes: int = 10,
) -> ZooModel:
    """ResNet-50: bottlenecks in depths 3, 4, 6, 3 with BatchNorm; ``hidden`` is the stem's width.

    The paper's width is 64; at half of it and small images the activations,
    not the 24 million parameters, fill the memory, as they do at full image size.
    """
    library = transformers()
    config = library.ResNetConfig(
        embedding_size=hidden,
        hidden_sizes=[4 * hidden, 8 * hidden, 16 * hidden, 32 * hidden],
        depths=[3, 4, 6, 3],
        layer_type="bottleneck",
        num_labels=classes,
    )
    return ZooModel(library.ResNetForImageClassification(config), _images(batch, image, classes))


def _images(batch: int, image: int, classes: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, image, image), "labels": torch.randint(classes, (batch,))}
