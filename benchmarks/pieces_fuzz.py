"""Generated steps in pieces: bodies, heads, losses and budgets, each held to its plan and to the unplanned step."""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner
from benchmarks.pieces import error, gradients
from benchmarks.reporting import RESULTS, write_result
from planner.plans.solving import least_budget_bytes
from profiler.workload.tensor_trees import map_tensors
from profiler.workload.workload import Workload

WIDTH = 32
SHARES = (
    0.0,
    0.05,
    0.1,
    0.2,
    0.35,
    0.5,
    0.7,
    1.0,
)  # from the smallest budget in pieces to the unplanned peak
# Gradients of a step in pieces may be so many times as far from double precision as the plain step's, or as rounding.
_FARTHER, _ROUNDINGS = 2.0, 64


class Residual(nn.Module):
    """Adds what an inner module makes of its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inner(hidden)


class Gated(nn.Module):
    """An MLP with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*size, bias=False) for size in (_UP, _UP, _DOWN))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class Attention(nn.Module):
    """Causal, with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class AlongTokens(nn.Module):
    """A convolution along the tokens, then a norm over features, or over the whole batch."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), norm

    def forward(self, hidden: Tensor) -> Tensor:
        return F.gelu(self.norm(self.conv(hidden.transpose(1, 2)))).transpose(1, 2)


class Written(nn.Module):
    """Ops between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        mean = hidden.mean(1, keepdim=True)
        return torch.sigmoid(self.inner(hidden) * self.scale) * (hidden - mean)


_UP, _DOWN = (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(*_UP), nn.GELU(), nn.Linear(*_DOWN)),
    "gated": Gated,
    "attention": Attention,
    "convolution": lambda: AlongTokens(nn.GroupNorm(4, WIDTH)),
    "batch norm": lambda: AlongTokens(nn.BatchNorm1d(WIDTH)),
    "dropout": lambda: nn.Sequential(nn.Linear(*_UP), nn.ReLU(), nn.Dropout(0.2), nn.Linear(*_DOWN)),
    "written": Written,
}
HEADS = ("linear", "bias", "tied", "with a norm", "no head")
VIEWS = ("flat", "shifted", "classes second", "scaled", "capped", "in float32")
LOSSES = ("mean", "sum", "each", "ignored", "weighted", "smoothed", "shares", "nll", "penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What is generated: all of a step but its values."""

    seed: int
    layers: tuple[str, ...]
    head: str
    view: str
    loss: str
    words: int
    batch: int
    tokens: int
    autocast: bool
    accumulate: bool


def drawn(seed: int) -> Drawn:
    """The step of a number."""
    rng = random.Random(seed)
    batch = rng.choice((1, 2, 4))
    return Drawn(
        seed=seed,
        layers=tuple(rng.choice([*LAYERS]) for _ in range(rng.randint(1, 4))),
        head=rng.choice(HEADS),
        view=rng.choice(VIEWS),
        loss=rng.choice(LOSSES),
        words=rng.choice((300, 1000, 3000)),
        batch=batch,
        tokens=rng.choice((160, 256, 333)) // batch + 40,
        autocast=rng.random() < 0.2,
        accumulate=rng.random() < 0.2,
    )


class Model(nn.Module):
    """Words in; logits out, or hidden rows without a head."""

    def __init__(self, case: Drawn) -> None:
        super().__init__()
        self.words = nn.Embedding(case.words, WIDTH)
        nn.init.normal_(self.words.weight, std=0.1)
        self.layers = nn.ModuleList(Residual(LAYERS[name]()) for name in case.layers)
        self.head: nn.Module = nn.Identity()
        if case.head != "no head":
            linear = nn.Linear(WIDTH, case.words, bias=case.head == "bias")
            if case.head == "tied":
                linear.weight = self.words.weight
            self.head = nn.Sequential(nn.LayerNorm(WIDTH), linear) if case.head == "with a norm" else linear

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def loss_of(case: Drawn, words: Tensor) -> Callable[[Tensor], Tensor]:
    """The loss of what the model returns."""
    generator = torch.Generator().manual_seed(case.seed)
    weights = torch.rand(case.words, generator=generator)
    shares = torch.rand(*words.shape, case.words, generator=generator).softmax(-1) if case.loss == "shares" else None

    def loss(logits: Tensor) -> Tensor:
        if case.head == "no head":
            return logits.square().mean()
        wanted, parts = words.roll(-1, 1), shares
        if case.view == "shifted":
            logits, wanted = logits[:, :-1], wanted[:, :-1]
            parts = None if parts is None else parts[:, :-1]
        views = {"scaled": lambda x: x / 2.0, "capped": lambda x: torch.tanh(x / 5.0) * 5.0, "in float32": Tensor.float}
        logits = views.get(case.view, lambda x: x)(logits)
        if case.view == "classes second":
            target: Any = wanted if parts is None else parts.transpose(1, 2)
            return _loss(case, logits.transpose(1, 2), target, weights)
        target = wanted.reshape(-1) if parts is None else parts.reshape(-1, case.words)
        return _loss(case, logits.reshape(-1, case.words), target, weights)

    return loss


def _loss(case: Drawn, logits: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    if case.loss == "nll":
        return F.nll_loss(F.log_softmax(logits, 1), target)
    if case.loss == "penalty":
        return F.cross_entropy(logits, target) + 1e-3 * logits.float().logsumexp(1).square().mean()
    if case.loss == "ignored":
        return F.cross_entropy(logits, target.where(target % 3 > 0, torch.full_like(target, -100)))
    more: dict[str, dict[str, Any]] = {
        "sum": {"reduction": "sum"},
        "each": {"reduction": "none"},
        "weighted": {"weight": weights.to(logits.dtype)},
        "smoothed": {"label_smoothing": 0.1},
    }
    return F.cross_entropy(
        logits, target.to(logits.dtype) if case.loss == "shares" else target, **more.get(case.loss, {})
    ).mean()


def workload_of(case: Drawn) -> Workload:
    """The step itself."""
    torch.manual_seed(case.seed)
    model = Model(case)
    words = torch.randint(case.words, (case.batch, case.tokens))
    return Workload(
        model=model,
        inputs=words,
        loss=loss_of(case, words),
        optimizer=torch.optim.SGD(model.parameters(), 0.01),
        autocast=torch.bfloat16 if case.autocast else None,
        accumulate=case.accumulate,
    )


def judged(seed: int) -> list[dict[str, Any]]:
    """A row for each budget of a generated step."""
    torch.set_num_threads(1)
    case = drawn(seed)
    workload = workload_of(case)
    random_step = "dropout" in case.layers
    plain = _gradients(workload)
    exact = plain if random_step else _in_double(case, workload)
    profile = planner.profile(workload, numerics="rounding")
    least = min(map(least_budget_bytes, (profile, *profile.in_pieces)))
    eps = torch.finfo(torch.bfloat16 if case.autocast else torch.float32).eps
    allowed = max(_FARTHER * error(plain, exact), _ROUNDINGS * eps)
    rows = []
    for share in SHARES:
        budget = least + int(share * (profile.unplanned_peak_bytes - least))
        plan = planner.solve(profile, budget, numerics="rounding", time_limit_seconds=0.05)
        with planner.apply(workload.model, plan):
            peak = planner.measure(workload, repeats=1).peak_bytes
            found = _gradients(workload)
        farther = error(found, exact)
        verdict = "wrong" if farther > allowed else "over" if peak > budget else "fine"
        rows.append(
            {
                "case": case,
                "share": share,
                "parts": "none" if plan.pieces is None else "head" if not plan.pieces.modules else "modules",
                "verdict": verdict,
                "measured_minus_predicted_bytes": peak - plan.predicted_peak_bytes,
                "error": farther,
                "allowed_error": allowed,
            }
        )
    return rows


def _gradients(workload: Workload) -> list[Tensor]:
    torch.manual_seed(0)  # Of dropout.
    return gradients(workload)


def _in_double(case: Drawn, workload: Workload) -> list[Tensor]:
    model = copy.deepcopy(workload.model).double()
    loss = loss_of(case, map_tensors(Tensor.clone, workload.inputs))
    return gradients(Workload(model=model, inputs=workload.inputs, loss=loss, accumulate=case.accumulate))


def run(seeds: list[int], jobs: int) -> Iterator[dict[str, Any]]:
    """Rows of generated steps, as they come; a step that fails is one row, ``crash``."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for seed, future in [(seed, pool.submit(judged, seed)) for seed in seeds]:
            try:
                yield from future.result()
            except Exception as failure:  # noqa: BLE001 - whatever a generated step does is a result
                yield {"case": drawn(seed), "share": None, "parts": "none", "verdict": f"crash: {failure!r}"}


def main() -> None:
    """Generate, judge and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = []
    steps = -(-options.count // len(SHARES))
    for row in run([*range(options.seed, options.seed + steps)], options.jobs):
        rows.append(row)
        if row["verdict"] != "fine":
            print(row, file=sys.stderr, flush=True)
        if len(rows) % 100 == 0:
            print(len(rows), file=sys.stderr, flush=True)
    frame = pd.DataFrame(rows)
    frame["verdict"] = frame.verdict.str.partition(":")[0]
    frame["to_the_byte"] = frame.measured_minus_predicted_bytes == 0
    frame["as_near_as_plain"] = frame.error <= frame.allowed_error / _FARTHER
    table = frame.groupby("parts").agg(
        plans=("verdict", "size"),
        wrong=("verdict", lambda v: int((v == "wrong").sum())),
        above=("verdict", lambda v: int((v == "over").sum())),
        crashed=("verdict", lambda v: int((v == "crash").sum())),
        to_the_byte=("to_the_byte", "sum"),
        as_near_as_plain=("as_near_as_plain", "sum"),
    )
    notes = [
        f"wrong: gradients more than {_FARTHER:g} times as far from double precision as the plain step's, and more "
        f"than {_ROUNDINGS} roundings; with dropout, from the plain step's",
        "parts: what ran in pieces",
    ]
    write_result(options.out, "pieces-fuzz", "Generated steps in pieces", table.reset_index(), notes)
    sys.exit(any(verdict != "fine" for verdict in frame.verdict))


if __name__ == "__main__":
    main()
