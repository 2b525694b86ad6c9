"""DenseNet: inside a block every layer reads the concatenation of all outputs before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.zoo.training import ZooModel

BLOCKS = 3
BOTTLENECK = 4


class DenseLayer(nn.Module):
    """BatchNorm, ReLU, 1x1 convolution, and again with 3x3; several (N, any, H, W) to one (N, hidden, H, W)."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, BOTTLENECK * hidden, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(BOTTLENECK * hidden)
        self.conv2 = nn.Conv2d(BOTTLENECK * hidden, hidden, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = self.conv1(self.relu(self.norm1(torch.cat(features, dim=1))))
        return self.conv2(self.relu(self.norm2(x)))


class DenseBlock(nn.Module):
    """Layers of which each reads the input and what all layers before it made; adds ``layers * hidden`` channels."""

    def __init__(self, inputs: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(inputs + k * hidden, hidden) for k in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, dim=1)


class Transition(nn.Module):
    """Half the channels and half the image."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(inputs, inputs // 2, 1, bias=False)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.conv(self.relu(self.norm(x))))


class DenseNet(nn.Module):
    """DenseNet-BC of Huang et al. 2017 for small images; (N, 3, H, W) to (N, classes)."""

    def __init__(self, *, layers: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 2 * hidden, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList()
        channels = 2 * hidden
        for k in range(BLOCKS):
            self.blocks.append(DenseBlock(channels, hidden, layers))
            channels += layers * hidden
            if k < BLOCKS - 1:
                self.blocks.append(Transition(channels))
                channels //= 2
        self.norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(functional.relu(self.norm(x)).mean(dim=(2, 3)))


def build_densenet(
    *,
    batch: int = 16,
    layers: int = 4,
    hidden: int = 12,
    image: int = 32,
    classes: int = 10,
) -> ZooModel:
    """DenseNet with three blocks of ``layers``; ``hidden`` is its growth rate."""
    least = 2**BLOCKS  # Norms need more than one value of each channel, with a batch of 1 too.
    if image < least:
        raise ValueError(f"zoo:densenet: expected image to be at least {least}, got {image}; write image={least}")
    model = DenseNet(layers=layers, hidden=hidden, classes=classes)
    pixels, labels = torch.randn(batch, 3, image, image), torch.randint(classes, (batch,))
    return ZooModel(model, pixels, functional.cross_entropy, labels)
