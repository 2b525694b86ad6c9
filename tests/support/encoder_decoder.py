"""An encoder-decoder of Whisper's shape: convolutions in front, the encoder's output read by every decoder layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.odd_stages import Cache
from tests.support.small_blocks import WIDTH, block

FRAMES, PLACES, VOCABULARY = 32, 8, 96


class Attention(nn.Module):
    """From one sequence to another; keys and values go into a cache where there is one."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = dropout

    def forward(self, x: Tensor, memory: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        own = self.norm(x)
        read = own if memory is None else memory
        key, value = self.key(read), self.value(read)
        if cache is not None:
            cache.past += [key, value]
        heads = (each.unflatten(2, (2, -1)).transpose(1, 2) for each in (self.query(own), key, value))
        found = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return x + functional.dropout(self.out(found), self.dropout, self.training)


class EncoderLayer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(dropout)
        self.inner = block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.inner(x)


class DecoderLayer(EncoderLayer):
    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.cross = Attention(dropout)

    def forward(self, x: Tensor, memory: Tensor, cache: Cache | None = None) -> Tensor:
        x = self.cross(self.attention(x, cache=cache), memory, cache)
        return x + self.inner(x)


class EncoderDecoder(nn.Module):
    """Returns its loss beside its last state and the cache, which thereby live until the output is let go of."""

    def __init__(self, *, cached: bool, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.front = nn.ModuleList([nn.Conv1d(1, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 3, 2, padding=1)])
        self.encoder = nn.ModuleList([EncoderLayer(dropout) for _ in range(layers)])
        self.middle = nn.LayerNorm(WIDTH)
        self.places = nn.Parameter(torch.zeros(PLACES, WIDTH))
        self.decoder = nn.ModuleList([DecoderLayer(dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.cached = cached

    def forward(self, x: Tensor) -> Mapping[str, Any]:
        sound = x.reshape(-1, 1, FRAMES)
        for convolution in self.front:
            sound = functional.gelu(convolution(sound))
        memory = sound.transpose(1, 2)
        for layer in self.encoder:
            memory = layer(memory)
        memory = self.middle(memory)
        cache = Cache() if self.cached else None
        state = self.places.expand(len(memory), PLACES, WIDTH)
        for layer in self.decoder:
            state = layer(state, memory, cache)
        state = self.norm(state)
        scores = self.head(state)
        target = torch.arange(len(memory) * PLACES) % VOCABULARY
        loss = functional.cross_entropy(scores.view(-1, VOCABULARY), target)
        return {"loss": loss, "scores": scores, "state": state, "memory": memory, "cache": cache}
