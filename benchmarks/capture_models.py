"""The models whose training steps are captured: plain PyTorch definitions, a loss, a batch, and the sizes used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.zoo.own_models import UNet


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A training step to capture.

    Attributes:
        title: one line on the model and its sizes.
        model: builds the module.
        batch: makes the inputs and the target of a batch of a given size.
        size: batch size of the problem: its bytes.
        timed_size: batch size that is run for its seconds, which scale with the batch; at least 2 for BatchNorm.
    """

    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    size: int
    timed_size: int


class VGG16(nn.Module):
    """Simonyan and Zisserman 2014, configuration D; (N, 3, 224, 224) to (N, 1000)."""

    WIDTHS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for block in self.WIDTHS:
            for width in block:
                layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
                inputs = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 1000),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut; (N, inputs, H, W) to (N, 4 width, H / stride, W / stride)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv_norm(inputs, width, 1),
            nn.ReLU(inplace=True),
            *_conv_norm(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_conv_norm(width, 4 * width, 1),
        )
        plain = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if plain else nn.Sequential(*_conv_norm(inputs, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """He et al. 2015 with bottlenecks, ``depths`` of them per stage; (N, 3, H, W) to (N, 1000)."""

    def __init__(self, depths: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = [*_conv_norm(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        inputs = 64
        for stage, depth in enumerate(depths):
            width = 64 * 2**stage
            for k in range(depth):
                layers.append(Bottleneck(inputs, width, 2 if stage and not k else 1))
                inputs = 4 * width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class InvertedResidual(nn.Module):
    """Expand, depthwise convolution, project; adds its input where the shapes agree."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        widen = [*_conv_norm(inputs, hidden, 1), nn.ReLU6(inplace=True)] if expand > 1 else []
        self.body = nn.Sequential(
            *widen,
            *_conv_norm(hidden, hidden, 3, stride, groups=hidden),
            nn.ReLU6(inplace=True),
            *_conv_norm(hidden, outputs, 1),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.adds else self.body(x)


class MobileNetV2(nn.Module):
    """Sandler et al. 2018, Table 2, width 1; (N, 3, H, W) to (N, 1000)."""

    # Expansion, channels, blocks, stride of the first one.
    STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [*_conv_norm(3, 32, 3, 2), nn.ReLU6(inplace=True)]
        inputs = 32
        for expand, outputs, blocks, stride in self.STAGES:
            for k in range(blocks):
                layers.append(InvertedResidual(inputs, outputs, 1 if k else stride, expand))
                inputs = outputs
        self.features = nn.Sequential(*layers, *_conv_norm(inputs, 1280, 1), nn.ReLU6(inplace=True))
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class GPTBlock(nn.Module):
    """Attention and MLP behind a LayerNorm each, as GPT-2 has them, attention written out op by op; (N, T, C)."""

    def __init__(self, hidden: int, heads: int, seq: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.project = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(approximate="tanh"), nn.Linear(4 * hidden, hidden)
        )
        self.dropout = nn.Dropout(0.1)
        self.future: Tensor
        self.register_buffer("future", torch.ones(seq, seq, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.project(self.attend(self.norm1(x))))
        return x + self.dropout(self.mlp(self.norm2(x)))

    def attend(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        shape = (batch, seq, self.heads, hidden // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).split(hidden, dim=2))
        scores = (q @ k.transpose(2, 3)) * shape[-1] ** -0.5
        weights = self.dropout(scores.masked_fill(self.future, float("-inf")).softmax(dim=-1))
        return (weights @ v).transpose(1, 2).reshape(batch, seq, hidden)


class GPT(nn.Module):
    """GPT-2 with tied embeddings and dropout 0.1; token ids (N, T) to scores (N, vocabulary, T)."""

    def __init__(self, *, layers: int, hidden: int, heads: int, seq: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.places = nn.Parameter(torch.zeros(seq, hidden))
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*[GPTBlock(hidden, heads, seq) for _ in range(layers)])
        self.norm = nn.LayerNorm(hidden)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.dropout(self.tokens(ids) + self.places)))
        return functional.linear(x, self.tokens.weight).transpose(1, 2)


def _conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return convolution, nn.BatchNorm2d(outputs)


def _images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 224, 224), torch.randint(1000, (size,))


def _pixels(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 256, 256), torch.randint(4, (size, 256, 256))


def _tokens(size: int, seq: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(vocabulary, (size, seq + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _gpt(layers: int, *, size: int, seq: int, vocabulary: int) -> Subject:
    return Subject(
        title=f"GPT-2, {layers} layers, hidden 768, 12 heads, {seq} tokens of {vocabulary}, attention written out",
        model=lambda: GPT(layers=layers, hidden=768, heads=12, seq=seq, vocabulary=vocabulary),
        batch=lambda count: _tokens(count, seq, vocabulary),
        size=size,
        timed_size=2,
    )


def _image_model(title: str, model: Callable[[], nn.Module], size: int) -> Subject:
    return Subject(title=f"{title}, 224x224 images", model=model, batch=_images, size=size, timed_size=2)


SUBJECTS: dict[str, Subject] = {
    "vgg16": _image_model("VGG-16", VGG16, 64),
    "unet": Subject(
        title="U-Net, 64 channels on the first level, 256x256 images",
        model=lambda: UNet(channels=3, hidden=64, classes=4),
        batch=_pixels,
        size=16,
        timed_size=2,
    ),
    "resnet50": _image_model("ResNet-50", lambda: ResNet((3, 4, 6, 3)), 64),
    "resnet152": _image_model("ResNet-152", lambda: ResNet((3, 8, 36, 3)), 64),
    "mobilenetv2": _image_model("MobileNetV2", MobileNetV2, 128),
    "gpt4": _gpt(4, size=16, seq=512, vocabulary=8192),
    "gpt12": _gpt(12, size=8, seq=1024, vocabulary=50257),
    "gpt48": _gpt(48, size=8, seq=512, vocabulary=8192),
}
