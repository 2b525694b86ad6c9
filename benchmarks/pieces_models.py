"""Models with one large op: heads of many words, MLPs of long sequences, a U-Net; steps to plan in pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiler.workload.workload import Workload

WORDS, WIDTH = 16_000, 128


class Block(nn.Module):
    """A block of a GPT, its MLP ``times`` as wide."""

    def __init__(self, width: int, times: int = 4) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, times * width), nn.GELU(), nn.Linear(times * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        split = self.qkv(self.norm(hidden)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*split.unbind(), is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(-2))
        return hidden + self.mlp(self.other_norm(hidden))


class GPT(nn.Module):
    """Words in, logits out; ``tied``: with the embedding's weight for the head."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        nn.init.normal_(self.words.weight, std=0.02)  # As GPT-2; larger logits would be slow denormal numbers.
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Convolutions(nn.Module):
    """Two convolutions, each with GroupNorm and SiLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm, self.other_norm = nn.GroupNorm(4, outputs), nn.GroupNorm(4, outputs)

    def forward(self, image: Tensor) -> Tensor:
        return F.silu(self.other_norm(self.second(F.silu(self.norm(self.first(image))))))


class UNet(nn.Module):
    """Two levels down and up, with GroupNorm."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.down1, self.down2 = Convolutions(3, hidden), Convolutions(hidden, 2 * hidden)
        self.mid = Convolutions(2 * hidden, 4 * hidden)
        self.up2, self.up1 = Convolutions(6 * hidden, 2 * hidden), Convolutions(3 * hidden, hidden)
        self.out = nn.Conv2d(hidden, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        first = self.down1(image)
        second = self.down2(F.avg_pool2d(first, 2))
        deep = self.mid(F.avg_pool2d(second, 2))
        up = self.up2(torch.cat([F.interpolate(deep, scale_factor=2), second], 1))
        return self.out(self.up1(torch.cat([F.interpolate(up, scale_factor=2), first], 1)))


def _of_words(model: nn.Module, words: Tensor) -> Workload:
    flat = words.roll(-1, 1).view(-1)
    return _trained(model, words, lambda logits: F.cross_entropy(logits.view(-1, logits.shape[-1]), flat))


def _trained(model: nn.Module, inputs: Any, loss: Callable[[Any], Tensor]) -> Workload:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    return Workload(model=model, inputs=inputs, loss=loss, optimizer=optimizer)


def _of_transformers(model: Any, batch: int = 4, length: int = 256) -> Workload:
    """The model's own loss."""
    words = torch.randint(model.config.vocab_size, (batch, length))
    inputs = {"input_ids": words, "labels": words, "use_cache": False}
    if model.config.model_type == "bert":
        del inputs["use_cache"]
    model.train()
    return _trained(model, inputs, lambda output: output.loss)


def gpt() -> Workload:
    """A GPT, its loss in the loop."""
    return _of_words(GPT(), torch.randint(WORDS, (4, 256)))


def tied_gpt() -> Workload:
    """The same with one weight for words and head."""
    return _of_words(GPT(tied=True), torch.randint(WORDS, (4, 256)))


def llama(words: int = WORDS, width: int = WIDTH, length: int = 256) -> Workload:
    """A Llama of four layers with its own loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=4, num_attention_heads=4
    )
    return _of_transformers(LlamaForCausalLM(config), length=length)


def gpt2() -> Workload:
    """GPT-2 without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": 4, "n_head": 4, "n_positions": 256}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return _of_transformers(GPT2LMHeadModel(config))


def bert() -> Workload:
    """BERT with masked words, without dropout."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=4 * WIDTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _of_transformers(BertForMaskedLM(config))


def t5() -> Workload:
    """T5 without dropout."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 32, "d_ff": 4 * WIDTH, "num_heads": 4}
    config = T5Config(**sizes, num_layers=2, dropout_rate=0.0)
    config.decoder_start_token_id = 0
    return _of_transformers(T5ForConditionalGeneration(config))


def long_mlp() -> Workload:
    """Three blocks on one long sequence."""
    hidden = torch.randn(1, 4096, 64)
    return _trained(nn.Sequential(*(Block(64) for _ in range(3))), hidden, lambda output: output.square().mean())


def unet() -> Workload:
    """A U-Net on eight images."""
    images, wanted = torch.randn(8, 3, 64, 64), torch.randn(8, 3, 64, 64)
    return _trained(UNet(), images, lambda output: F.mse_loss(output, wanted))


MODELS: dict[str, Callable[[], Workload]] = {
    "gpt": gpt,
    "tied gpt": tied_gpt,
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "long sequence": long_mlp,
    "U-Net": unet,
}
