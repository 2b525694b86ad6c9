"""Models of packages for sequences: transformers, state spaces, and optimizers and loops around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.packages.training import Training, model, of, tokens, trained

# transformers

ENABLE = "gradient_checkpointing_enable()"
SMALL = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 128}


def _of_transformers(name: str, config: str, checkpointed: bool, batch: Any, **settings: Any) -> Training:
    net = of(f"transformers.{name}")(of(f"transformers.{config}")(use_cache=False, **settings))
    if checkpointed:
        net.gradient_checkpointing_enable()
    net.train()
    return trained(net, lambda: net(**batch).loss, clip_norm=1.0)


def _text(batch: int = 4, length: int = 64) -> dict[str, Tensor]:
    found = tokens(batch, length)
    return {"input_ids": found, "labels": found}


@model("transformers", own=ENABLE)
def gpt2(checkpointed: bool) -> Training:
    return _of_transformers(
        "GPT2LMHeadModel", "GPT2Config", checkpointed, _text(), n_embd=64, n_layer=6, n_head=4, vocab_size=256
    )


@model("transformers", own=ENABLE)
def bert(checkpointed: bool) -> Training:
    encoded = of("transformers.BatchEncoding")({**_text(), "attention_mask": torch.ones(4, 64, dtype=torch.long)})
    return _of_transformers("BertForMaskedLM", "BertConfig", checkpointed, encoded, vocab_size=256, **SMALL)


@model("transformers", own=ENABLE)
def llama(checkpointed: bool) -> Training:
    return _of_transformers("LlamaForCausalLM", "LlamaConfig", checkpointed, _text(), vocab_size=256, **SMALL)


@model("transformers", own=ENABLE)
def mixtral(checkpointed: bool) -> Training:
    return _of_transformers(
        "MixtralForCausalLM", "MixtralConfig", checkpointed, _text(), vocab_size=256, num_local_experts=4,
        num_key_value_heads=2, output_router_logits=True, **SMALL,
    )  # fmt: skip


@model("transformers", own=ENABLE)
def t5(checkpointed: bool) -> Training:
    return _of_transformers(
        "T5ForConditionalGeneration", "T5Config", checkpointed, _text(), vocab_size=256, d_model=64, d_ff=128, d_kv=16,
        num_layers=4, num_heads=4, decoder_start_token_id=0,
    )  # fmt: skip


@model("transformers", own=ENABLE)
def whisper(checkpointed: bool) -> Training:
    batch = {"input_features": torch.randn(2, 16, 128), "labels": tokens(2, 32)}
    return _of_transformers(
        "WhisperForConditionalGeneration", "WhisperConfig", checkpointed, batch, vocab_size=256, num_mel_bins=16,
        d_model=64, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, max_source_positions=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip


@model("transformers", own=ENABLE)
def vit_mae(checkpointed: bool) -> Training:
    batch = {"pixel_values": torch.randn(8, 3, 64, 64)}
    return _of_transformers(
        "ViTMAEForPreTraining", "ViTMAEConfig", checkpointed, batch, image_size=64, patch_size=8,
        decoder_hidden_size=32, decoder_num_attention_heads=4, decoder_num_hidden_layers=2,
        decoder_intermediate_size=64, **SMALL,
    )  # fmt: skip


# lucidrains and others


@model("x_transformers")
def autoregressive(checkpointed: bool) -> Training:
    net = of("x_transformers.TransformerWrapper")(
        num_tokens=256,
        max_seq_len=64,
        attn_layers=of("x_transformers.Decoder")(dim=64, depth=6, heads=4, attn_dim_head=16, rotary_pos_emb=True),
    )
    whole, text = of("x_transformers.AutoregressiveWrapper")(net), tokens(4, 65)
    return trained(whole, lambda: whole(text), clip_norm=0.5)


@model("x_transformers")
def encoder_decoder(checkpointed: bool) -> Training:
    net = of("x_transformers.XTransformer")(
        dim=64, enc_num_tokens=256, enc_depth=3, enc_heads=4, enc_max_seq_len=64, dec_num_tokens=256, dec_depth=3,
        dec_heads=4, dec_max_seq_len=64, tie_token_emb=True,
    )  # fmt: skip
    source, goal = tokens(4, 64), tokens(4, 64)
    return trained(net, lambda: net(source, goal))


@model("x_transformers")
def image_encoder(checkpointed: bool) -> Training:
    net = of("x_transformers.ViTransformerWrapper")(
        image_size=64, patch_size=8, num_classes=10,
        attn_layers=of("x_transformers.Encoder")(dim=64, depth=6, heads=4, layer_dropout=0.1, attn_dropout=0.1),
    )  # fmt: skip
    images, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
    return trained(net, lambda: F.cross_entropy(net(images), labels))


@model("performer_pytorch")
def performer(checkpointed: bool) -> Training:
    net = of("performer_pytorch.PerformerLM")(
        num_tokens=256, max_seq_len=64, dim=64, depth=4, heads=4, dim_head=16, causal=False, feature_redraw_interval=2
    )
    text = tokens(4, 64)
    return trained(net, lambda: F.cross_entropy(net(text).transpose(1, 2), text))


@model("performer_pytorch", own="reversible=True")
def reversible_performer(checkpointed: bool) -> Training:
    net = of("performer_pytorch.PerformerLM")(
        num_tokens=256, max_seq_len=64, dim=64, depth=4, heads=4, dim_head=16, reversible=checkpointed
    )
    text = tokens(4, 64)
    return trained(net, lambda: F.cross_entropy(net(text).transpose(1, 2), text))


@model("local_attention")
def local_transformer(checkpointed: bool) -> Training:
    net = of("local_attention.LocalTransformer")(
        num_tokens=256, dim=64, depth=4, causal=True, local_attn_window_size=32, max_seq_len=128, heads=4, dim_head=16
    )
    text = tokens(4, 129)
    return trained(net, lambda: net(text, return_loss=True))


@model("perceiver_pytorch")
def perceiver(checkpointed: bool) -> Training:
    net = of("perceiver_pytorch.PerceiverIO")(
        dim=32, queries_dim=32, logits_dim=10, depth=4, num_latents=32, latent_dim=64, cross_heads=1, latent_heads=4,
        cross_dim_head=16, latent_dim_head=16, weight_tie_layers=True, seq_dropout_prob=0.2,
    )  # fmt: skip
    text, queries, labels = torch.randn(4, 256, 32), torch.randn(16, 32), torch.randint(10, (4, 16))
    return trained(net, lambda: F.cross_entropy(net(text, queries=queries).transpose(1, 2), labels))


@model("vector_quantize_pytorch")
def quantized_autoencoder(checkpointed: bool) -> Training:
    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
            self.quantized = of("vector_quantize_pytorch.VectorQuantize")(dim=64, codebook_size=64, decay=0.8)
            self.decoder = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            codes, _, commitment = self.quantized(self.encoder(x))
            return self.decoder(codes), commitment

    net, x = Autoencoder(), torch.randn(8, 128, 64)

    def loss() -> Tensor:
        found, commitment = net(x)
        return F.mse_loss(found, x) + commitment.sum()

    return trained(net, loss)


def _mamba(net: nn.Module) -> Training:
    x, goal = torch.randn(4, 64, 32), torch.randn(4, 64, 32)
    return trained(net, lambda: F.mse_loss(net(x), goal))


@model("mambapy")
def mamba(checkpointed: bool) -> Training:
    return _mamba(of("mambapy.mamba.Mamba")(of("mambapy.mamba.MambaConfig")(d_model=32, n_layers=4)))


@model("mambapy")
def mamba_sequential(checkpointed: bool) -> Training:
    return _mamba(of("mambapy.mamba.Mamba")(of("mambapy.mamba.MambaConfig")(d_model=32, n_layers=3, pscan=False)))


@model("mambapy")
def jamba(checkpointed: bool) -> Training:
    settings = of("mambapy.jamba.JambaLMConfig")(
        d_model=32, n_layers=4, mlp_size=64, vocab_size=256, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=2, expert_layer_offset=1, num_experts=4, num_experts_per_tok=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    net, text = of("mambapy.jamba.JambaLM")(settings), tokens(2, 48)

    def loss() -> Tensor:
        logits, routed = net(text)
        balance = of("mambapy.jamba.load_balancing_loss")(routed, 4, 2)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten()) + 0.01 * balance

    return trained(net, loss)


@model("pytorch_tcn")
def tcn(checkpointed: bool) -> Training:
    net = of("pytorch_tcn.TCN")(num_inputs=16, num_channels=[32] * 6, kernel_size=4, dropout=0.1, causal=True)
    x, goal = torch.randn(8, 16, 256), torch.randn(8, 32, 256)
    return trained(net, lambda: F.mse_loss(net(x), goal))


@model("pytorch_tabnet")
def tabnet(checkpointed: bool) -> Training:
    net = of("pytorch_tabnet.tab_network.TabNet")(
        input_dim=32, output_dim=4, group_attention_matrix=torch.eye(32), n_steps=4, n_d=16, n_a=16
    )
    x, labels = torch.randn(512, 32), torch.randint(4, (512,))

    def loss() -> Tensor:
        scores, sparsity = net(x)
        return F.cross_entropy(scores, labels) - 1e-3 * sparsity

    return trained(net, loss)


# Optimizers and loops around a model


def _layers(width: int = 64, count: int = 6) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)]
    return nn.Sequential(*blocks, nn.Linear(width, 10))


@model("pytorch_optimizer")
def lookahead(checkpointed: bool) -> Training:
    net, x, labels = _layers(), torch.randn(512, 64), torch.randint(10, (512,))
    inner = torch.optim.AdamW(net.parameters())
    return trained(net, lambda: F.cross_entropy(net(x), labels), of("pytorch_optimizer.Lookahead")(inner, k=2))


@model("pytorch_optimizer")
def sam(checkpointed: bool) -> Training:
    net, x, labels = _layers(), torch.randn(512, 64), torch.randint(10, (512,))
    optimizer = of("pytorch_optimizer.SAM")(net.parameters(), base_optimizer=torch.optim.SGD, lr=0.01, momentum=0.9)

    def step() -> float:
        loss = F.cross_entropy(net(x), labels)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        F.cross_entropy(net(x), labels).backward()
        optimizer.second_step(zero_grad=True)
        return loss.item()

    return Training(net, step, optimizer)


def _private(net: nn.Module, x: Any, labels: Tensor) -> Training:
    engine = of("opacus.PrivacyEngine")()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, labels), batch_size=len(x))
    net, optimizer, _ = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.05), data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    return trained(net, lambda: F.cross_entropy(net(x), labels), optimizer)


@model("opacus")
def private_layers(checkpointed: bool) -> Training:
    return _private(_layers(), torch.randn(64, 64), torch.randint(10, (64,)))


@model("opacus")
def private_convolutions(checkpointed: bool) -> Training:
    def block(k: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3 if k == 0 else 16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU())

    net = nn.Sequential(*[block(k) for k in range(5)], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return _private(net, torch.randn(16, 3, 32, 32), torch.randint(10, (16,)))


@model("lightning", "torchvision")
def fabric(checkpointed: bool) -> Training:
    net, x, labels = _layers(), torch.randn(512, 64), torch.randint(10, (512,))
    runner = of("lightning.fabric.Fabric")(accelerator="cpu", devices=1, precision="bf16-mixed")
    wrapped, optimizer = runner.setup(net, torch.optim.AdamW(net.parameters()))

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(x), labels)
        runner.backward(loss)
        runner.clip_gradients(wrapped, optimizer, max_norm=1.0)
        optimizer.step()
        return loss.item()

    return Training(wrapped, step, optimizer)
