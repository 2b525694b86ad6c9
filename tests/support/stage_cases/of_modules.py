"""Stages of torch's own modules: norms, dropouts, recurrent layers, embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.stage_cases.registry import modules

modules("mlp")(lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)))
modules("dropouts")(
    lambda: nn.Sequential(
        nn.Linear(16, 64), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 16), nn.Dropout(0.1)
    )
)
modules("alpha_dropouts")(
    lambda: nn.Sequential(nn.Linear(16, 64), nn.AlphaDropout(0.3), nn.SELU(), nn.FeatureAlphaDropout(0.2))
)
modules("dropouts_2d", (2, 3, 8, 8))(
    lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Dropout2d(0.3), nn.LeakyReLU(), nn.Dropout(0.2, True), nn.Conv2d(8, 8, 3)
    )
)
modules("rrelu")(lambda: nn.Sequential(nn.Linear(16, 16), nn.RReLU(), nn.Linear(16, 16), nn.RReLU(inplace=True)))
modules("batchnorm")(
    lambda: nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Linear(64, 16), nn.BatchNorm1d(16)
    )
)
modules("batchnorm_average")(
    lambda: nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64, momentum=None), nn.ReLU(inplace=True))
)
modules("batchnorm_untracked")(
    lambda: nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64, track_running_stats=False), nn.ReLU(inplace=True))
)
modules("batchnorm_eval")(lambda: nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64).eval(), nn.ReLU(inplace=True)))
modules("batchnorm_2d", (2, 3, 10, 10))(
    lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
)
modules("groupnorm", (2, 3, 10, 10))(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(True)))
modules("instancenorm", (2, 3, 10, 10))(
    lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.SiLU())
)
modules("lstm", (5, 4, 16))(lambda: nn.LSTM(16, 16, 2, dropout=0.3))
modules("gru", (3, 4, 16))(lambda: nn.GRU(16, 16, 1, bidirectional=True))
modules("rnn", (3, 4, 16))(lambda: nn.RNN(16, 16, 2))
modules("lstm_cell", (4, 16))(lambda: nn.LSTMCell(16, 16))
modules("encoder_layer", (5, 4, 16))(lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1))
modules("attention", (5, 4, 16), (5, 4, 16), (5, 4, 16))(lambda: nn.MultiheadAttention(16, 2, dropout=0.1))
modules("bilinear", (5, 16), (5, 16))(lambda: nn.Bilinear(16, 16, 8))
modules("spectral_norm")(lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), nn.ReLU()))
modules("weight_norm")(lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), nn.ReLU()))


class Words(nn.Module):
    """Embeddings with tied weights, or with sparse gradients."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table, self.bag = (
            nn.Embedding(20, 16, sparse=sparse, padding_idx=0),
            nn.EmbeddingBag(20, 16, sparse=sparse),
        )
        self.out = nn.Linear(16, 20, bias=False)
        if not sparse:
            self.out.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.table(words).tanh()) + self.out(self.bag(words)).sigmoid()[:, None]


class Clipped(nn.Module):
    """An embedding that renormalises its table in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20, 16, max_norm=1.0), nn.Linear(16, 16)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.table(words)).exp()


modules("embedding_tied", (4, 6), words=20)(lambda: Words(sparse=False))
modules("embedding_sparse", (4, 6), words=20)(lambda: Words(sparse=True))
modules("embedding_clipped", (4, 6), words=20)(Clipped)


@modules("batchnorm_twice")
class TwiceNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.norm(self.linear(x))))


@modules("statistics_read")
class ReadsStatistics(nn.Module):
    """No version counter shows that a BatchNorm changes its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm((self.a(x) * self.norm.running_var.exp()).sigmoid())  # type: ignore[union-attr]
        return self.b(y * self.norm.running_mean.exp()).exp()  # type: ignore[union-attr]


@modules("moving_average")
class MovingAverage(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("mean", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.mean.clone()
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0) * 0.1)
        return y.exp() / self.mean


@modules("buffer_replaced")
class ReplacesBuffer(MovingAverage):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.mean.exp()
        self.mean = self.mean * 0.9 + y.detach().mean(0) * 0.1
        return y.exp() / self.mean
