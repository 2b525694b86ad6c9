"""Draws programs: the source of a model and of its loss, and how it is trained. A seed names a program."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from benchmarks.fuzz.verdicts import loaded
from benchmarks.graph_fuzz.lines import LINES

TRIES = 40  # of one line: most fit no value that is there
MOST_ELEMENTS = 2**15
_DTYPES = {"float32": 6, "float64": 1, "bfloat16": 1}

_HEAD = """\
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import planner

def rows(t):
    return t.detach().flatten(0, -2)
"""
_NAMES: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "rows": lambda t: t.detach().flatten(0, -2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A model, a batch, a loss and an optimizer.

    Attributes:
        seed: that it was drawn from.
        attempt: how many programs of this seed failed without a plan, and were drawn again.
        source: its module, with a function ``workload``.
        kinds: of its lines, and of how it is trained.
    """

    seed: int
    attempt: int
    source: str
    kinds: tuple[str, ...]

    def workload(self) -> Any:
        """The training step, made anew."""
        return loaded(self.source).workload()


def drawn(seed: int, runs: Callable[[Program], bool]) -> Program:
    """The first program of a seed that runs without a plan.

    Args:
        seed: of the draws.
        runs: whether it does.
    """
    for attempt in range(100):
        program = _Writer(random.Random(f"{seed} {attempt}")).program(seed, attempt)
        if program is not None and runs(program):
            return program
    raise AssertionError(f"seed {seed}: expected a program that runs, got none in 100 draws")


@dataclass(slots=True)
class _Writer:
    """Writes lines that meta tensors take: their shapes are known then."""

    rng: random.Random
    module: nn.Module = field(default_factory=nn.Module)
    values: dict[str, Tensor] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)  # of these what the forward has made
    unread: set[str] = field(default_factory=set)  # and of these what no line has read
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    count: int = 0

    def program(self, seed: int, attempt: int) -> Program | None:
        rng = self.rng
        dtype = rng.choices([*_DTYPES], [*_DTYPES.values()])[0]
        if rng.random() < 0.15:
            dtype = "autocast bfloat16"
        self.kinds.add(dtype)
        batch, time, width = rng.choice([4, 8]), rng.choice([8, 16]), rng.choice([16, 32])
        held = getattr(torch, dtype, torch.float32)
        made = {"x": (batch, time, width), "ids": (batch, time)}
        if rng.random() < 0.3:
            made["z"] = (batch, 4, 8, 8)
        for name, shape in made.items():
            kind = torch.long if name == "ids" else held
            self.values[name] = torch.zeros(shape, dtype=kind, device="meta")
        trained_input = rng.random() < 0.1
        if trained_input:
            self.kinds.add("input with a gradient")
            self.values["x"].requires_grad_()
        for _ in range(rng.randint(8, 30)):
            self._line(held)
        returned, loss = self._ends(held)
        if not loss:
            return None
        source = self._source(made, held, dtype, returned, loss, trained_input)
        return Program(seed=seed, attempt=attempt, source=source, kinds=tuple(sorted(self.kinds)))

    def _line(self, held: torch.dtype) -> None:
        kinds = [*LINES]
        kind = self.rng.choices(kinds, [LINES[each][0] for each in kinds])[0]
        for _ in range(TRIES):
            if self._tried(self.rng.choice(LINES[kind][1]), held):
                self.kinds.add(kind)
                return

    def _tried(self, template: str, held: torch.dtype) -> bool:
        """Write a line if it runs."""
        names = self._filled(template)
        if names is None:
            return False
        init, _, line = template.rpartition(";;")
        init, line = init.format(**names), line.strip().format(**names)
        frozen = f"self.{names['m']}.requires_grad_(False)" if self.rng.random() < 0.1 else ""
        if init and "register_buffer" not in init and frozen:
            init += f"; {frozen}"
        scope: dict[str, Any] = {**_NAMES, **self.values, "self": self.module}
        known = {*self.module._modules, *self.module._parameters, *self.module._buffers}
        try:
            with torch.device("meta"):
                exec(init, scope)
                self.module.to(held)
                exec(line, scope)
        except Exception:  # noqa: BLE001 - a line may fit nothing that is there
            self._forget(known)
            return False
        new = [name for name in (names["v"], names["w"]) if isinstance(scope.get(name), Tensor)]
        if any(not 0 < scope[name].numel() <= MOST_ELEMENTS for name in new):
            self._forget(known)
            return False
        if "requires_grad_(False)" in init:
            self.kinds.add("frozen")
        self.init += [init] if init else []
        self.body.append(line)
        self.unread -= {names["a"], names["b"]} if new else set()
        self.unread |= {*new}
        self.made += [name for name in new if name not in self.values]
        self.values.update({name: scope[name] for name in new})
        self.count += 1
        return True

    def _filled(self, template: str) -> dict[str, Any] | None:
        """Names and sizes for a line; None where a value that it needs is not there."""
        floats = [name for name, tensor in self.values.items() if tensor.is_floating_point()]
        pool = self.made if "{o}" in template else floats
        if not pool:
            return None
        unread = [name for name in pool if name in self.unread]
        first = self.rng.choice(unread if unread and self.rng.random() < 0.6 else pool)
        tensor = self.values[first]
        alike = [name for name in floats if self.values[name].shape == tensor.shape]
        linear = [name for name, each in self.module.named_children() if isinstance(each, nn.Linear)]
        if ("{old}" in template and not linear) or not alike or not tensor.dim():
            return None
        other = self.rng.choice([name for name in alike if name in self.unread - {first}] or alike)
        return {
            "a": first,
            "o": first,
            "b": other,
            "d": tensor.shape[-1],
            "c": tensor.shape[1] if tensor.dim() > 1 else 1,
            "h": max(1, tensor.shape[-1] // 2),
            "v": f"v{self.count}",
            "w": f"w{self.count}",
            "m": f"m{self.count}",
            "old": self.rng.choice(linear or [""]),
        }

    def _forget(self, known: set[str]) -> None:
        for held in (self.module._modules, self.module._parameters, self.module._buffers):
            for name in [name for name in held if name not in known]:
                del held[name]

    def _ends(self, held: torch.dtype) -> tuple[str, str]:
        """What the forward returns, and the loss of it, ``None`` where the forward makes it; empty where none can."""
        rng = self.rng
        trained = [name for name in self.made if self.values[name].requires_grad]
        if not trained:
            return "", ""
        chosen = [rng.choice([name for name in trained if name in self.unread] or trained[-4:])]
        chosen += [
            rng.choice([*(name for name in trained if name in self.unread), *trained[-2:]])
            for _ in range(rng.choice([0, 1, 3]))
        ]
        form = rng.choices(["one", "several", "dict", "own loss", "dict with loss"], [5, 6, 3, 2, 2])[0]
        self.kinds.add(f"returns {form}")
        first = chosen[0]
        if form == "one":
            return first, "y.float().square().mean()"
        total = " + ".join(f"{name}.float().square().mean()" for name in dict.fromkeys(chosen))
        if form == "own loss":
            return total, "None"
        parts = [*chosen, *self._beside(first)]
        if form == "dict with loss":
            return f"{{'loss': {total}, 'parts': [{', '.join(parts)}]}}", "None"
        if rng.random() < 0.3:
            self.kinds.add("outputs without use")
            chosen = chosen[:1]
        if form == "dict":
            keys = [f"'k{k}': {part}" for k, part in enumerate(parts)]
            return f"{{{', '.join(keys)}}}", " + ".join(
                f"y['k{k}'].float().square().mean()" for k in range(len(chosen))
            )
        order = list(range(len(parts)))
        rng.shuffle(order)
        used = [order.index(k) for k in range(len(chosen))]
        returned = ", ".join(parts[k] for k in order)
        return f"({returned},)", " + ".join(f"y[{k}].float().square().mean()" for k in used)

    def _beside(self, first: str) -> Sequence[str]:
        """Outputs of other kinds."""
        weights = [f"self.{name}" for name, _ in self.module.named_parameters()]
        buffers = [f"self.{name}" for name, _ in self.module.named_buffers()]
        offered = {
            "output is a view of another": [f"{first}[0]", f"{first}.view(-1)", f"{first}.detach()"],
            "output twice": [first],
            "output is an input": ["x", "ids", "x[0]"],
            "output is a parameter": [*weights, *(f"{name}[:1]" for name in weights)],
            "output is a buffer": buffers,
            "output is a constant": ["None", "3", "x.shape[0]"],
            "output is detached": [f"{first}.detach().exp()"],
            "output is an integer": [f"{first}.argmax(-1)"],
        }
        kinds = [kind for kind, each in offered.items() if each]
        chosen = self.rng.sample(kinds, self.rng.choice([0, 1, 1, 2]))
        self.kinds.update(chosen)
        return [self.rng.choice(offered[kind]) for kind in chosen]

    def _source(
        self,
        inputs: dict[str, tuple[int, ...]],
        held: torch.dtype,
        dtype: str,
        returned: str,
        loss: str,
        trained_input: bool,
    ) -> str:
        rng, moved = self.rng, f".to({held})"
        optimizer = rng.choice(["SGD(p, lr=0.01)", "SGD(p, lr=0.01, momentum=0.9)", "AdamW(p, lr=0.01)"])
        self.kinds.add(optimizer.partition("(")[0])
        given = ", autocast=torch.bfloat16" if dtype.startswith("autocast") else ""
        for option, share in {"keeps_output=False": 0.2, "accumulate=True": 0.1, "clip_norm=1.0": 0.1}.items():
            if rng.random() < share:
                given += f", {option}"
                self.kinds.add(option)
        tensors = [
            f"torch.randint(0, 20, {shape})" if name == "ids" else f"torch.randn{shape}{moved}"
            for name, shape in inputs.items()
        ]
        if trained_input:
            tensors[0] += ".requires_grad_()"
        lines = [
            *_HEAD.splitlines(),
            "",
            "class Net(nn.Module):",
            "    def __init__(self):",
            *(f"        {line}" for line in ["super().__init__()", *self.init]),
            "",
            f"    def forward(self, {', '.join(inputs)}):",
            *(f"        {line}" for line in [*self.body, f"return {returned}"]),
            "",
            "def workload():",
            "    torch.manual_seed(0)",
            f"    model = Net(){moved}",
            "    p = [each for each in model.parameters() if each.requires_grad]",
            f"    inputs = ({', '.join(tensors)},)",
            f"    optimizer = torch.optim.{optimizer} if p else None",
            f"    loss = {loss if loss == 'None' else 'lambda y: ' + loss}",
            f"    return planner.Workload(model=model, inputs=inputs, loss=loss, optimizer=optimizer{given})",
            "",
        ]
        return re.sub(r"[ ]+\n", "\n", "\n".join(lines))
