"""Cases as plain data: a model, the habits of its training loop, a budget and a solver; drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.fuzz import blocks, habits, stateful_blocks

KINDS = tuple(
    name
    for module in (blocks, stateful_blocks)
    for name, value in vars(module).items()
    if isinstance(value, type) and value.__module__ == module.__name__ and hasattr(value, "forward")
    if name not in ("Square", "Mlp")
)
PLAIN_KINDS = ("Mlp", "Plain", "Dropping", "Norms", "Attends", "Convolves")  # half of all layers
CROSS_KINDS = ("CrossReads", "Gates")
SETTING_KINDS = ("Conditioned",)  # the parent sets ``cond`` on them
CALLS = (
    *("skip", "concat", "branch", "drop", "autocast", "checkpoint", "added_in_place", "twice", "no_grad", "keyword"),
    *("watched", "watched_before"),
)
INPUTS = ("vector", "raw", "tokens", "sparse_tokens", "image", "pair", "leaf", "named", "object")
OUTPUTS = ("tensor", "tensor", "tuple", "named", "loss")
OPTIMIZERS = ("momentum", "sgd", "adam", "adamw")
SOLVERS = ("auto",) * 12 + ("rotor", "recompute_all", "chen_greedy", "revolve")
BELOW = -0.02  # of the way from the smallest feasible budget to the unplanned peak: infeasible
SHARES = (0.0, 0.0, 0.0, 0.1, 0.25, 0.5, 0.75, 1.0, BELOW)
CASES_OF_A_MODEL = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One call of a block.

    Attributes:
        kind: the name of its class.
        call: how the model calls it; ``plain`` or one of ``CALLS``.
        reads: which earlier layer's output it takes beside its input, where ``call`` or ``kind`` takes one.
        module_of: an earlier layer whose module is called again here; None for a module of its own.
        frozen: its parameters take no gradients.
    """

    kind: str
    call: str = "plain"
    reads: int = 0
    module_of: int | None = None
    frozen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model, its batch, loss and optimizer: all that is profiled.

    Attributes:
        layers: called one after another.
        inputs, output: what it takes and returns; of ``INPUTS`` and ``OUTPUTS``.
        batch: samples.
        optimizer: of ``OPTIMIZERS``.
        autocast: whether forward and loss run in bfloat16.
        scaler: whether a GradScaler scales the loss.
        clip: whether gradients are clipped.
        accumulate: gradients are set to zeros, not to None.
        tied: the head's weight is the first layer's, where shapes fit (tokens in and out).
        wrapped: the model is held by another module, which is what is profiled.
        lets_go: forward deletes what later layers read once the last of them has run.
    """

    layers: tuple[Layer, ...]
    inputs: str = "vector"
    output: str = "tensor"
    batch: int = 16
    optimizer: str = "momentum"
    autocast: bool = False
    scaler: bool = False
    clip: bool = False
    accumulate: bool = False
    tied: bool = False
    wrapped: bool = False
    lets_go: bool = False

    @property
    def sparse(self) -> bool:
        """Whether some gradients are sparse."""
        return self.inputs == "sparse_tokens" or any(layer.kind == "LooksUpSparsely" for layer in self.layers)

    @property
    def free_input(self) -> bool:
        """Whether autograd saves nothing of the batch, so that it may be overwritten before backward."""
        return self.inputs == "raw"

    @property
    def leaf_input(self) -> bool:
        """Whether the batch takes a gradient."""
        return self.inputs == "leaf"

    @property
    def takes_more_than_tensors(self) -> bool:
        """Whether the batch comes by names or as an object with tensors, through which ``vmap`` does not go."""
        return self.inputs in ("named", "object")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is tried.

    Attributes:
        habits: names of ``habits.HABITS``.
        share: the budget, on the way from the smallest feasible one (0) to the unplanned peak (1).
        steps: of training.
    """

    model: Model
    habits: tuple[str, ...] = ()
    share: float = 0.0
    solver: str = "auto"
    steps: int = 3

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def case_from(data: dict[str, Any]) -> Case:
    """The case that ``as_dict`` gave."""
    model = dict(data["model"])
    model["layers"] = tuple(Layer(**layer) for layer in model["layers"])
    return Case(**{**data, "model": Model(**model), "habits": tuple(data["habits"])})


def drawn(count: int, seed: int) -> Iterator[list[Case]]:
    """``count`` cases in groups of one model each; group n is the same for every count."""
    for number in range(-(-count // CASES_OF_A_MODEL)):
        rng = random.Random(f"{seed} {number}")
        model = drawn_model(rng)
        cases = [drawn_case(rng, model) for _ in range(CASES_OF_A_MODEL)]
        yield cases[: count - number * CASES_OF_A_MODEL]


def drawn_case(rng: random.Random, model: Model) -> Case:
    """A case of a model: mostly one habit, at times none, or two of them."""
    fitting = [habit.name for habit in habits.HABITS.values() if habit.fits(model)]
    number = rng.choice((0, 1, 1, 1, 1, 1, 2))
    chosen: list[str] = []
    for name in rng.sample(fitting, min(len(fitting), 6)):
        if len(chosen) < number and habits.go_together([*chosen, name]):
            chosen.append(name)
    return Case(model=model, habits=tuple(chosen), share=rng.choice(SHARES), solver=rng.choice(SOLVERS))


def drawn_model(rng: random.Random) -> Model:
    """A model of three to seven layers."""
    layers: list[Layer] = []
    odd = rng.choice((0.0, 0.3, 0.6))  # so many calls and kinds are not the plain ones
    same = rng.choice(KINDS) if rng.random() < 0.3 else None  # a stack of one kind
    for position in range(rng.randint(3, 7)):
        layers.append(_drawn_layer(rng, layers, position, odd, same))
    plain = rng.random() < 0.6
    optimizer = rng.choice(OPTIMIZERS)
    model = Model(
        layers=tuple(layers),
        inputs=rng.choice(INPUTS),
        output=rng.choice(OUTPUTS),
        batch=rng.choice((4, 16, 16, 48)),
        optimizer=optimizer,
        autocast=not plain and rng.random() < 0.25,
        scaler=not plain and rng.random() < 0.25,
        clip=not plain and rng.random() < 0.25,
        accumulate=not plain and rng.random() < 0.25,
        tied=not plain and rng.random() < 0.2,
        wrapped=rng.random() < 0.1,
        lets_go=rng.random() < 0.5,
    )
    return legal(model)


def legal(model: Model) -> Model:
    """The model without what torch itself refuses: sparse gradients in Adam, in clipping and in a scaler."""
    if not model.sparse:
        return model
    optimizer = model.optimizer if model.optimizer in ("sgd", "momentum") else "momentum"
    return replace(model, optimizer=optimizer, scaler=False, clip=False, accumulate=False, tied=False)


def _drawn_layer(rng: random.Random, before: list[Layer], position: int, odd: float, same: str | None) -> Layer:
    if before and rng.random() < 0.12:
        return replace(before[of := rng.randrange(position)], module_of=_owner(before, of), call="plain")
    kind = same or (rng.choice(PLAIN_KINDS) if rng.random() > odd else rng.choice(KINDS))
    call = rng.choice(CALLS) if rng.random() < odd * 0.7 else "plain"
    if kind in CROSS_KINDS:
        call = "plain"
    return Layer(kind=kind, call=call, reads=rng.randint(0, position), frozen=rng.random() < 0.07)


def _owner(layers: list[Layer], number: int) -> int:
    owner = layers[number].module_of
    return number if owner is None else owner
