"""The models of the headline benchmark: BERT's pretraining on masked positions, at BERT-Large's size and a small one.

Targets of ``planner max-batch``: ``benchmarks.headline_models:bert_large`` and, of the same module, ``bert_small``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from planner.zoo.training import check_available, seeded, transformers
from planner.zoo.transformers_models import bert_config
from profiler.workload.workload import Workload

LEARNING_RATE = 1e-4  # of BERT's pretraining (Devlin et al. 2018, appendix A.2)
ATTENTION = ("eager", "sdpa")


class MaskedLanguageModel(nn.Module):
    """BERT's encoder with the masked-token head, which runs on the masked positions alone as in BERT's pretraining.

    Args:
        config: a ``transformers.BertConfig``.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        library = transformers()
        self.bert = library.BertModel(config, add_pooling_layer=False)
        head = library.BertForMaskedLM(config).cls
        head.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight
        self.head = head

    def forward(self, input_ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of the masked tokens.

        Args:
            input_ids: tokens, [batch, seq].
            positions: of the masked tokens, [batch, masked].
            labels: what stands there, [batch, masked].
        """
        hidden = self.bert(input_ids=input_ids).last_hidden_state
        rows = positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        scores = self.head(hidden.gather(1, rows))
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def bert_large(
    *,
    batch: int = 18,
    layers: int = 24,
    hidden: int = 1024,
    heads: int = 16,
    seq: int = 512,
    vocab: int = 30522,
    masked: int = 80,
    attention: str = "eager",
    amp: str = "float16",
    seed: int = 0,
    device: str = "cpu",
) -> Workload:
    """One step of BERT-Large's pretraining: Adam, mixed precision, dropout 0.1, the loss of ``masked`` positions.

    Args:
        attention: ``eager`` (scores, softmax and dropout are ops of their own) or ``sdpa`` (one fused kernel).
        amp: ``float16`` (with a GradScaler), ``bfloat16`` or ``none``.

    Raises:
        ValueError: a value that cannot work.
    """
    _check(batch=batch, layers=layers, seq=seq, masked=masked, attention=attention, amp=amp)
    check_available("bert", device)
    config = bert_config(layers=layers, hidden=hidden, heads=heads, seq=seq, vocab=vocab, attention=attention)
    with seeded(seed), torch.device(device):  # Drawn there: a host takes seconds for as many numbers, at every size.
        model = MaskedLanguageModel(config).train()
        inputs = _batch(batch, seq, vocab, masked)
    return Workload(
        model=model,
        inputs=inputs,
        optimizer=torch.optim.Adam(model.parameters(), lr=LEARNING_RATE),
        autocast=None if amp == "none" else amp,
        scaler=torch.amp.GradScaler(torch.device(device).type) if amp == "float16" else None,
    )


def bert_small(
    *,
    batch: int = 4,
    layers: int = 24,
    hidden: int = 128,
    heads: int = 4,
    seq: int = 256,
    vocab: int = 4096,
    masked: int = 40,
    attention: str = "eager",
    amp: str = "none",
    seed: int = 0,
    device: str = "cpu",
) -> Workload:
    """The same at an eighth of the width and half of the length, in float32: its step runs on a CPU in a second.

    40 masked positions of 256 are the share that 80 of 512 are.
    """
    return bert_large(
        batch=batch,
        layers=layers,
        hidden=hidden,
        heads=heads,
        seq=seq,
        vocab=vocab,
        masked=masked,
        attention=attention,
        amp=amp,
        seed=seed,
        device=device,
    )


def _batch(batch: int, seq: int, vocab: int, masked: int) -> dict[str, Tensor]:
    """Random tokens; the masked positions of a sequence are distinct."""
    return {
        "input_ids": torch.randint(vocab, (batch, seq)),
        "positions": torch.rand(batch, seq).argsort(dim=1)[:, :masked].sort(dim=1).values,
        "labels": torch.randint(vocab, (batch, masked)),
    }


def _check(*, batch: int, layers: int, seq: int, masked: int, attention: str, amp: str) -> None:
    if min(batch, layers, masked) < 1 or masked > seq:
        raise ValueError(
            f"bert: expected batch, layers and masked of at least 1 and no more masked positions than seq, got "
            f"batch={batch}, layers={layers}, masked={masked}, seq={seq}; correct them"
        )
    if attention not in ATTENTION:
        raise ValueError(f"bert: expected attention to be {' or '.join(ATTENTION)}, got {attention!r}; use one of them")
    if amp not in ("float16", "bfloat16", "none"):
        raise ValueError(f"bert: expected amp to be float16, bfloat16 or none, got {amp!r}; use one of them")
