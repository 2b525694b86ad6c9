"""Networks that are no chain of stages: of our own, and transformers' Swin, ConvNeXt and Whisper in small sizes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from planner import Workload

WINDOW = 4


class WindowAttention(nn.Module):
    """Attention within windows of 4x4 pixels, every second time shifted by half of one; (N, H, W, C) to the same."""

    def __init__(self, width: int, heads: int, shift: int) -> None:
        super().__init__()
        self.heads, self.shift = heads, shift
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x))
        return x + self.mlp(self.norm2(x))

    def attend(self, x: Tensor) -> Tensor:
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        n, height, width, channels = x.shape
        x = x.reshape(n, height // WINDOW, WINDOW, width // WINDOW, WINDOW, channels).transpose(2, 3)
        qkv = self.qkv(x.reshape(-1, WINDOW * WINDOW, channels))
        q, k, v = qkv.unflatten(-1, (3, self.heads, channels // self.heads)).permute(2, 0, 3, 1, 4)
        made = self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        made = made.reshape(n, height // WINDOW, width // WINDOW, WINDOW, WINDOW, channels).transpose(2, 3)
        made = made.reshape(n, height, width, channels)
        return torch.roll(made, (self.shift, self.shift), (1, 2)) if self.shift else made


class Windows(nn.Module):
    """Two levels of shifted windows, with a merging of patches between them; (N, 3, H, W) to (N, 10)."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.first = nn.Sequential(*(WindowAttention(width, 3, shift) for shift in (0, WINDOW // 2)))
        self.merge = nn.Linear(4 * width, 2 * width)
        self.second = nn.Sequential(*(WindowAttention(2 * width, 6, shift) for shift in (0, WINDOW // 2)))
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(self.patches(images).permute(0, 2, 3, 1))
        x = torch.cat([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1)
        return self.head(self.second(self.merge(x)).mean((1, 2)))


class Branches(nn.Module):
    """A narrow and a wide branch of convolutions that read each other at every level; (N, 3, H, W) to (N, 10)."""

    def __init__(self, width: int = 24, levels: int = 5) -> None:
        super().__init__()
        self.narrow_in, self.wide_in = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(3, 2 * width, 3, padding=1)
        self.narrow = nn.ModuleList(nn.Conv2d(3 * width, width, 3, padding=1) for _ in range(levels))
        self.wide = nn.ModuleList(nn.Conv2d(3 * width, 2 * width, 1) for _ in range(levels))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(levels))
        self.head = nn.Linear(3 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        narrow, wide = torch.relu(self.narrow_in(images)), torch.relu(self.wide_in(images))
        for level, other, norm in zip(self.narrow, self.wide, self.norms, strict=True):
            both = torch.cat([narrow, wide], 1)
            narrow = narrow + torch.relu(norm(level(both)))
            wide = functional.silu(other(both)) * wide
        return self.head(torch.cat([narrow, wide], 1).mean((2, 3)))


def swin() -> Workload:
    """Shifted windows on 14, 7 and 4 patches across, in 8 blocks; 8 images of 112 by 112."""
    config = SwinConfig(
        image_size=112,
        patch_size=4,
        embed_dim=48,
        depths=[2, 2, 4],
        num_heads=[3, 6, 12],
    )
    return _of_images(SwinForImageClassification(config), 112)


def convnext() -> Workload:
    """Depthwise convolutions of 7 by 7 in 10 blocks on 3 levels; 8 images of 112 by 112."""
    config = ConvNextConfig(num_stages=3, hidden_sizes=[48, 96, 192], depths=[3, 3, 4])
    return _of_images(ConvNextForImageClassification(config), 112)


def whisper() -> Workload:
    """An encoder of 6 blocks on 200 frames of sound, and a decoder of 6 blocks that reads it; 4 pieces of 48 words."""
    config = WhisperConfig(
        vocab_size=1000,
        num_mel_bins=40,
        d_model=192,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=768,
        decoder_ffn_dim=768,
        max_source_positions=200,
        max_target_positions=48,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config)
    words = torch.randint(3, 1000, (4, 48))
    inputs = {"input_features": torch.randn(4, 40, 400), "decoder_input_ids": words, "labels": words}
    return Workload(model=model, inputs=inputs, optimizer=torch.optim.AdamW(model.parameters()))


def _of_images(model: nn.Module, size: int) -> Workload:
    inputs = {"pixel_values": torch.randn(8, 3, size, size), "labels": torch.randint(0, 2, (8,))}
    return Workload(model=model, inputs=inputs, optimizer=torch.optim.AdamW(model.parameters()))


def windows() -> Workload:
    """The two levels of windows, on 8 images of 64 by 64."""
    return _of_labels(Windows())


def branches() -> Workload:
    """The two branches, on 8 images of 64 by 64."""
    return _of_labels(Branches())


def _of_labels(model: nn.Module) -> Workload:
    images, labels = torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))

    def loss(logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits, labels)

    return Workload(model=model, inputs=images, loss=loss, optimizer=torch.optim.AdamW(model.parameters()))


# The builder of each network's workload, with AdamW.
BUILDERS: dict[str, Callable[[], Workload]] = {
    "windows": windows,
    "branches": branches,
    "swin": swin,
    "convnext": convnext,
    "whisper": whisper,
}
