"""Models written here: a multilayer perceptron, U-Net, DenseNet, and attention blocks of a tutorial of MindSpore."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.zoo.training import ZooModel

LEVELS = 4  # of U-Net, down and up
BLOCKS, BOTTLENECK = 3, 4  # of DenseNet

# The constants of MindSpore's tutorial on recomputation; its dropout keeps 0.9.
SCALE = 2.37891
MASK_WEIGHT = -0.0001
DROPOUT = 0.1


def build_mlp(
    *,
    batch: int = 4096,
    layers: int = 12,
    hidden: int = 128,
) -> ZooModel:
    """``layers`` pairs of Linear and ReLU, all ``hidden`` wide, with a mean squared error."""
    pairs = [module for _ in range(layers) for module in (nn.Linear(hidden, hidden), nn.ReLU())]
    inputs, target = torch.randn(batch, hidden), torch.randn(batch, hidden)
    return ZooModel(nn.Sequential(*pairs), inputs, _squared_error, target)


def _squared_error(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.float(), target)


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


class ResidualBlock(nn.Module):
    """One block of the tutorial's network; (batch, seq, heads, width) to the same shape.

    Every position looks at every other through its own input (query, key and
    value are the input itself), with a mask ``y`` of shape (batch, seq, seq)
    that all heads share.
    """

    def __init__(self, batch: int, seq: int) -> None:
        super().__init__()
        self.y = nn.Parameter(torch.ones(batch, seq, seq))
        self.softmax = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        queries = x.permute(0, 2, 1, 3) / SCALE
        keys = x.permute(0, 2, 3, 1) / SCALE
        scores = torch.matmul(queries, keys)
        mask = (1.0 - self.y.unsqueeze(1)) * MASK_WEIGHT
        weights = self.dropout(self.softmax(mask + scores))
        values = x.permute(0, 2, 1, 3)
        return torch.matmul(weights, values).permute(0, 2, 1, 3)


class Blocks(nn.Module):
    """Blocks one after another."""

    def __init__(self, *, blocks: int, batch: int, seq: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(batch, seq) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build_mindspore_blocks(
    *,
    batch: int = 8,
    blocks: int = 10,
    hidden: int = 512,
    heads: int = 16,
    seq: int = 128,
) -> ZooModel:
    """The network of MindSpore's tutorial "Recomputation": derivative of the summed output with respect to the input.

    The input is (batch, seq, heads, hidden / heads), (8, 128, 16, 32) by
    default as in the tutorial, which fills it with ones where the zoo draws from
    the seed. Beyond the tutorial, the masks are trained as well: they are the only
    parameters.

    Source: https://mindspore.cn/docs/en/r2.5.0/model_train/parallel/recompute.html
    """
    model = Blocks(blocks=blocks, batch=batch, seq=seq)
    return ZooModel(model, torch.randn(batch, seq, heads, hidden // heads, requires_grad=True), Tensor.sum)
