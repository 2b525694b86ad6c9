"""U-Net: four levels down, four up, and a long skip connection at each."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.zoo.training import ZooModel

LEVELS = 4


class DoubleConv(nn.Module):
    """Two 3x3 convolutions, each with BatchNorm and an in-place ReLU; (N, inputs, H, W) to (N, outputs, H, W)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(x)))


class Up(nn.Module):
    """Double the image, join the skip connection of its level, convolve; halves the channels."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(inputs, inputs // 2, 2, stride=2)
        self.convs = DoubleConv(inputs, inputs // 2)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.convs(torch.cat([skip, self.grow(x)], dim=1))


class UNet(nn.Module):
    """Ronneberger et al. 2015 with padding and BatchNorm; (N, channels, H, W) to (N, classes, H, W).

    ``hidden`` channels on the first level, twice as many on each next one.
    """

    def __init__(self, *, channels: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.down1 = DoubleConv(channels, hidden)
        self.down2 = DoubleConv(hidden, 2 * hidden)
        self.down3 = DoubleConv(2 * hidden, 4 * hidden)
        self.down4 = DoubleConv(4 * hidden, 8 * hidden)
        self.mid = DoubleConv(8 * hidden, 16 * hidden)
        self.up4 = Up(16 * hidden)
        self.up3 = Up(8 * hidden)
        self.up2 = Up(4 * hidden)
        self.up1 = Up(2 * hidden)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Conv2d(hidden, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.down1(x)
        skip2 = self.down2(self.pool(skip1))
        skip3 = self.down3(self.pool(skip2))
        skip4 = self.down4(self.pool(skip3))
        x = self.mid(self.pool(skip4))
        x = self.up3(self.up4(x, skip4), skip3)
        return self.head(self.up1(self.up2(x, skip2), skip1))


def build_unet(
    *,
    batch: int = 8,
    hidden: int = 16,
    image: int = 96,
    classes: int = 4,
) -> ZooModel:
    """U-Net that labels every pixel; the image's side is a multiple of 16."""
    if image % 2**LEVELS:
        raise ValueError(
            f"zoo:unet: expected image to be a multiple of {2**LEVELS}, got {image}; "
            f"write image={max(1, image // 2**LEVELS) * 2**LEVELS}"
        )
    model = UNet(channels=3, hidden=hidden, classes=classes)
    pixels, labels = torch.randn(batch, 3, image, image), torch.randint(classes, (batch, image, image))
    return ZooModel(model, pixels, functional.cross_entropy, labels)
