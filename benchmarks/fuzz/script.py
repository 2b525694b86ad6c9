"""A case as the text of a script: what the fuzz runs is what it prints."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable

from benchmarks.fuzz import blocks, loop, observed, stateful_blocks
from benchmarks.fuzz.cases import CROSS_KINDS, SETTING_KINDS, Case, Layer, Model
from benchmarks.fuzz.habits import HABITS

_IMPORTS = """\
from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import random
import tempfile
import threading

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import planner

WIDTH = 16
"""

_OPTIMIZERS = {
    "sgd": "torch.optim.SGD(trained, lr=0.05)",
    "momentum": "torch.optim.SGD(trained, lr=0.05, momentum=0.9)",
    "adam": "torch.optim.Adam(trained, lr=0.01)",
    "adamw": "torch.optim.AdamW(trained, lr=0.01)",
}
_INPUTS = {
    "vector": "(torch.randn({batch}, 8, 8),)",
    "raw": "(torch.randn({batch}, 8, WIDTH),)",
    "tokens": "(torch.randint(0, 20, ({batch}, 8)),)",
    "sparse_tokens": "(torch.randint(0, 20, ({batch}, 8)),)",
    "image": "(torch.randn({batch}, 3, 4, 8),)",
    "pair": "(torch.randn({batch}, 8, 8), torch.randn({batch}, 4, 8))",
    "leaf": "(torch.randn({batch}, 8, 8, requires_grad=True),)",
    "object": "InFields((torch.randn({batch}, 8, 8),))",
    "named": '{{"x": torch.randn({batch}, 8, 8)}}',
}
_STEMS = {
    "tokens": "nn.Embedding(20, WIDTH)",
    "sparse_tokens": "nn.Embedding(20, WIDTH, sparse=True)",
    "image": "nn.Sequential(nn.Conv2d(3, WIDTH, 2, stride=2), nn.BatchNorm2d(WIDTH), nn.Flatten(2))",
}
_OUTPUTS = {
    "tensor": "return self.head(h)",
    "tuple": "return self.head(h), h.mean()",
    "named": 'return {"logits": self.head(h)}',
    "loss": 'logits = self.head(h)\nreturn {"loss": (logits.float() ** 2).mean(), "logits": logits}',
}

_AUTOCAST_CALL = """
def call(model, inputs):
    with torch.autocast("cpu", torch.bfloat16):
        return model(*args_of(inputs), **kwargs_of(inputs))
"""

_RUN = """\
def run(plan, metered=True):
    random.seed(1)
    np.random.seed(1)
    watch = Watch(metered=metered)
    model, inputs, optimizer, scaler = build()
    handle = None
    try:
        handle = None if plan is None else planner.apply(model, plan)
        train(model, inputs, optimizer, scaler, watch, plan, handle)
    finally:
        watch.end()
        if handle is not None:
            handle.remove()
    return watch.records, watch.peak_bytes
"""

_MAIN = """\
if __name__ == "__main__":
    torch.set_num_threads(1)
    expected, _ = run(None, metered=False)
    work = workload()
    before = left_by(work)
    profile = planner.profile(work)
    assert not differences(before, left_by(work)), "profiling left something changed"
    try:
        planner.solve(profile, 1, solver="rotor")
    except planner.Infeasible as none:
        smallest = none.minimum_budget_bytes
    budget = smallest + int({share} * (profile.unplanned_peak_bytes - smallest))
    plan = planner.solve(profile, budget, solver="{solver}", time_limit_seconds=0.02)
    got, peak = run(plan)
    different = differences(expected, got)
    print(f"budget {{budget}}, measured peak {{peak}}; different: {{different[:5]}}")
    assert not different, "the planned model did not do what the unplanned one does"
    assert peak <= budget or not {promised}, "the peak is above the budget"
"""


def source(case: Case) -> str:
    """The module of a case: its model, its training loop, and ``run(plan)``, which returns records and the peak."""
    parts = [net(case.model), build(case.model), train(case), _RUN]
    needed = "\n".join(["left_by differences", *parts, *(HABITS[name].setup for name in case.habits)])
    return "\n\n".join([_IMPORTS, *library(needed), *parts])


def script(case: Case) -> str:
    """A module that also holds the planned run to the unplanned one, and fails where the case fails."""
    return f"{source(case)}\n\n{_MAIN.format(share=case.share, solver=case.solver, promised=promised(case))}"


def promised(case: Case) -> bool:
    """Whether the budget holds in the case's loop."""
    return all(HABITS[name].promised for name in case.habits)


# Read once: files may change while the fuzz runs.
_SOURCES = {
    name: inspect.getsource(value)
    for module in (blocks, stateful_blocks, loop, observed)
    for name, value in vars(module).items()
    if getattr(value, "__module__", None) == module.__name__
}


def library(text: str) -> Iterable[str]:
    """Sources of the blocks and functions that ``text`` names, and of those that they need, in a fitting order."""
    chosen: dict[str, str] = {}

    def choose(words: str) -> None:
        for name in re.findall(r"\b[A-Za-z_]\w*\b", words):
            if name in _SOURCES and name not in chosen:
                chosen[name] = ""  # begun
                choose(_SOURCES[name])
                chosen[name] = chosen.pop(name) or _untyped(_SOURCES[name])

    choose(text)
    return list(chosen.values())


def _untyped(text: str) -> str:
    """Without comments for the type checker."""
    return re.sub(r"  # (type: ignore|noqa).*", "", text).rstrip()


def net(model: Model) -> str:
    """The class of the model."""
    own = {k: layer for k, layer in enumerate(model.layers) if layer.module_of is None}
    made = [f'"{k}": {layer.kind}(),' for k, layer in own.items()]
    joins = [f'"{k}": nn.Linear(2 * WIDTH, WIDTH),' for k, layer in enumerate(model.layers) if layer.call == "concat"]
    stem = f"self.stem = {_STEMS.get(model.inputs, 'nn.Linear(8, WIDTH)')}"
    lines = ["super().__init__()", stem if model.inputs != "raw" else "self.shift = nn.Parameter(torch.zeros(WIDTH))"]
    if model.inputs == "pair":
        lines.append("self.memory = nn.Linear(8, WIDTH)")
    lines += ["self.blocks = nn.ModuleDict({", *(f"    {each}" for each in made), "})"]
    if joins:
        lines += ["self.joins = nn.ModuleDict({", *(f"    {each}" for each in joins), "})"]
    tied = model.tied and model.inputs == "tokens"
    lines.append(f"self.head = nn.Linear(WIDTH, {20 if tied else 3}{', bias=False' if tied else ''})")
    lines += ["self.head.weight = self.stem.weight"] if tied else []
    lines += [f'self.blocks["{k}"].requires_grad_(False)' for k, layer in own.items() if layer.frozen]
    arguments = "x, y" if model.inputs == "pair" else "x"
    return "\n".join(
        [
            "class Net(nn.Module):",
            "    def __init__(self):",
            textwrap.indent("\n".join(lines), 8 * " "),
            "",
            f"    def forward(self, {arguments}):",
            textwrap.indent("\n".join(_forward(model)), 8 * " "),
            "",
        ]
    )


# Ops without gradients between two calls, which need more than blocks do.
_WATCH = ["with torch.no_grad():", "    seen = h.detach().float().repeat(1, 1, 9).square().mean()"]


def _forward(model: Model) -> list[str]:
    first = {"image": "h = self.stem(x).transpose(1, 2)", "raw": "h = x + self.shift", "object": "h = self.stem(x.x)"}
    lines = [first.get(model.inputs, "h = self.stem(x)")]
    if model.inputs == "pair":
        lines.append("memory = torch.tanh(self.memory(y))")
    read = {layer.reads for layer in model.layers if _reads(layer, model)}
    if any(layer.kind in SETTING_KINDS for layer in model.layers):
        lines.append("cond = h.mean(1, keepdim=True)")
    for k, layer in enumerate(model.layers):
        if k in read:
            lines.append(f"h{k} = h")
        lines += _call(k, layer, model)
        if model.lets_go:
            later = {layer.reads for layer in model.layers[k + 1 :] if _reads(layer, model)}
            lines += [f"del h{j}" for j in sorted(read) if layer.reads == j and _reads(layer, model) and j not in later]
    return [*lines, *_OUTPUTS[model.output].splitlines()]


def _reads(layer: Layer, model: Model) -> bool:
    crosses = layer.kind in CROSS_KINDS and model.inputs != "pair"
    return crosses or layer.call in ("skip", "concat", "branch", "added_in_place")


def _call(k: int, layer: Layer, model: Model) -> list[str]:
    module, other = f'self.blocks["{k if layer.module_of is None else layer.module_of}"]', f"h{layer.reads}"
    setting = [f"{module}.cond = cond"] if layer.kind in SETTING_KINDS else []
    if layer.kind in CROSS_KINDS:
        return [f"h = {module}(h, {'memory' if model.inputs == 'pair' else other})"]
    plain = f"h = {module}(h)"
    calls = {
        "plain": [plain],
        "skip": [f"h = {module}(h + {other})"],
        "concat": [f'h = {module}(self.joins["{k}"](torch.cat([h, {other}], -1)))'],
        "branch": [f"h = {module}(h) + 0.5 * {other}"],
        "drop": ["if torch.rand(()) > 0.3:", f"    {plain}"],
        "autocast": ['with torch.autocast("cpu", torch.bfloat16):', f"    {plain}", "h = h.float()"],
        "checkpoint": [f"h = checkpoint({module}, h, use_reentrant=False)"],
        "added_in_place": [plain, f"h += {other}"],
        "twice": [plain, plain],
        "no_grad": ["with torch.no_grad():", f"    extra = {module}(h)", "h = h + extra"],
        "keyword": [f"h = {module}(x=h)"],
        "watched": [plain, *_WATCH],
        "watched_before": [*_WATCH, plain],
    }
    return [*setting, *calls[layer.call]]


def build(model: Model) -> str:
    """The function that makes model, batch, optimizer and scaler, and the workload that is profiled."""
    inputs = _INPUTS[model.inputs].format(batch=model.batch)
    scaler = 'torch.amp.GradScaler("cpu", init_scale=64.0)' if model.scaler else "None"
    settings = ["loss=loss_fn", "optimizer=optimizer", "scaler=scaler"]
    settings += ["autocast=torch.bfloat16"] * model.autocast + ["accumulate=True"] * model.accumulate
    settings += ["clip_norm=0.5"] * model.clip
    return f"""\
def build():
    torch.manual_seed(0)
    model = {"Holder(Net())" if model.wrapped else "Net()"}.train()
    inputs = {inputs}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = {_OPTIMIZERS[model.optimizer]}
    return model, inputs, optimizer, {scaler}


def workload():
    model, inputs, optimizer, scaler = build()
    return planner.Workload(model=model, inputs=kwargs_of(inputs) or args_of(inputs), {", ".join(settings)})
"""


def train(case: Case) -> str:
    """The function that trains, with the case's habits at their places."""
    model = case.model

    def at(place: str, otherwise: str = "") -> str:
        found = [text for name in case.habits if (text := getattr(HABITS[name], place))]
        return "\n".join(found) or otherwise

    around = [at("around")] * bool(at("around")) + ['torch.autocast("cpu", torch.bfloat16)'] * model.autocast
    around = [part for text in around for part in text.splitlines()]
    update = "\n".join(_update(model))
    calls = textwrap.indent(_AUTOCAST_CALL, 4 * " ") if model.autocast else ""
    step = [
        "refill(inputs)",
        f"optimizer.zero_grad(set_to_none={not model.accumulate})",
        at("begin"),
        *_within(around, at("forward", "loss = loss_fn(call(model, inputs))")),
        at("between"),
        *_within(at("during").splitlines(), at("backward", "backward(loss)")),
        at("after"),
        "losses.append(float(loss.detach()))",
        "del loss",
        at("update", update),
        "watch.step(model, optimizer, losses)",
    ]
    body = textwrap.indent("\n".join(line for line in step if line), 8 * " ")
    return f"""\
def train(model, inputs, optimizer, scaler, watch, plan, handle):
    def backward(loss):
        (loss if scaler is None else scaler.scale(loss)).backward()
{calls}
    losses = []
{textwrap.indent(at("setup"), 4 * " ")}
    watch.begin(model, inputs, optimizer)
    for step in range({case.steps}):
{body}
"""


def _update(model: Model) -> list[str]:
    clip = ["torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)"] * model.clip
    if not model.scaler:
        return [*clip, "optimizer.step()"]
    return ["scaler.unscale_(optimizer)"] * model.clip + clip + ["scaler.step(optimizer)", "scaler.update()"]


def _within(contexts: list[str], text: str) -> list[str]:
    if not contexts:
        return [text]
    return [f"with {', '.join(contexts)}:", textwrap.indent(text, 4 * " ")]
