"""Models from configs of transformers, with random weights: GPT-2, BERT, Llama, T5, ViT and ResNet-50."""

from __future__ import annotations

from typing import Any

import torch

from planner.zoo.training import ZooModel, transformers


def build_gpt2(
    *,
    batch: int = 8,
    layers: int = 12,
    hidden: int = 128,
    heads: int = 4,
    seq: int = 64,
    vocab: int = 1000,
) -> ZooModel:
    """GPT-2 for next-token prediction; dropout 0.1."""
    library = transformers()
    config = library.GPT2Config(
        n_layer=layers,
        n_embd=hidden,
        n_head=heads,
        n_positions=seq,
        vocab_size=vocab,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = library.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what it falls back to anyway, with a warning: its class name tells it nothing
    return ZooModel(model, _tokens(batch, seq, vocab))


def build_bert(
    *,
    batch: int = 8,
    layers: int = 12,
    hidden: int = 128,
    heads: int = 4,
    seq: int = 64,
    vocab: int = 1000,
) -> ZooModel:
    """BERT with its masked-token head; dropout 0.1."""
    config = bert_config(layers=layers, hidden=hidden, heads=heads, seq=seq, vocab=vocab)
    return ZooModel(transformers().BertForMaskedLM(config), _tokens(batch, seq, vocab))


def bert_config(*, layers: int, hidden: int, heads: int, seq: int, vocab: int, attention: str = "sdpa") -> Any:
    """A ``transformers.BertConfig``; ``attention`` is ``sdpa`` (one fused kernel) or ``eager`` (ops of its own)."""
    return transformers().BertConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=seq,
        vocab_size=vocab,
        use_cache=False,
        attn_implementation=attention,
    )


def build_llama(
    *,
    batch: int = 8,
    layers: int = 8,
    hidden: int = 128,
    heads: int = 4,
    seq: int = 64,
    vocab: int = 1000,
) -> ZooModel:
    """Llama for next-token prediction: RMSNorm, rotary positions, gated MLP of 8/3 hidden; no dropout."""
    if hidden // heads % 2:
        raise ValueError(
            f"zoo:llama: expected hidden / heads to be even (rotary positions turn pairs), got {hidden // heads}; "
            f"write hidden={2 * hidden}"
        )
    library = transformers()
    config = library.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=max(1, 8 * hidden // 3),
        max_position_embeddings=seq,
        vocab_size=vocab,
        use_cache=False,
    )
    return ZooModel(library.LlamaForCausalLM(config), _tokens(batch, seq, vocab))


def build_t5(
    *,
    batch: int = 8,
    layers: int = 6,
    hidden: int = 128,
    heads: int = 4,
    seq: int = 64,
    vocab: int = 1000,
) -> ZooModel:
    """T5: ``layers`` encoder and ``layers`` decoder blocks, as long a target as a source; dropout 0.1."""
    library = transformers()
    config = library.T5Config(
        num_layers=layers,
        num_decoder_layers=layers,
        d_model=hidden,
        d_kv=hidden // heads,
        num_heads=heads,
        d_ff=4 * hidden,
        vocab_size=vocab,
        pad_token_id=0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return ZooModel(library.T5ForConditionalGeneration(config), _tokens(batch, seq, vocab))


def _tokens(batch: int, seq: int, vocab: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(vocab, (batch, seq)), "labels": torch.randint(vocab, (batch, seq))}


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
