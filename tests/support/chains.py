"""Chains for tests: a stage to work out by hand, and seeded random chains that use every field."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from solvers import Action, Chain, Option, Schedule, Stage
from solvers.problem.chain import Shared
from solvers.problem.examples import equal_stages

UNIT = equal_stages(1).stages[0]


def actions(*rows: tuple) -> Schedule:
    """The schedule of these actions, each as kind, stage and option or unit."""
    return Schedule(actions=tuple(Action(*row) for row in rows))


def random_chain(seed: int, most_stages: int = 4, odd: bool = False, shared: bool = False) -> Chain:
    """A chain of small integers; ``odd`` allows peaks below what a phase leaves and strongly negative kept bytes."""
    random = Random(seed)
    count = random.randint(1, most_stages)
    stages = tuple(_stage(random, k, odd) for k in range(count))
    tensors = tuple(_tensor(random, count) for _ in range(random.randint(1, 2))) if shared else ()
    other = random.choice([0, 5])
    return Chain(stages=stages, shared=tensors, resident_bytes=random.randint(0, 3), optimizer_peak_bytes=other)


def with_offload_units(chain: Chain, random: Random, most: int = 4) -> Chain:
    """The chain with parts of what stages keep, and of the inputs of those that wait, that may travel."""
    stages = []
    for k, stage in enumerate(chain.stages):
        options = tuple(replace(o, offload_units=_parts(random, o.kept_bytes, most)) for o in stage.options)
        before = chain.stages[k - 1].boundary_bytes if k else 0
        stages.append(replace(stage, options=options, offload_units=_parts(random, before, 1)))
    return replace(chain, stages=tuple(stages))


def _parts(random: Random, size_bytes: int, most: int) -> tuple[int, ...]:
    """Up to ``most`` parts of at most the whole."""
    parts = []
    for _ in range(random.randint(1, most) if size_bytes > 0 else 0):
        parts.append(random.randint(0, size_bytes))
        size_bytes -= parts[-1]
    return tuple(part for part in parts if part)


def _stage(random: Random, k: int, odd: bool) -> Stage:
    boundary, residue = random.randint(0, 4), random.choice([0, 0, random.randint(0, 2)])
    least = 0 if odd else boundary + residue
    return Stage(
        name=f"s{k}",
        options=tuple(_option(random, o, boundary, odd) for o in range(random.randint(1, 2))),
        boundary_bytes=boundary,
        forward_seconds=random.randint(1, 4),
        forward_peak_bytes=least + random.randint(0, 4),
        residue_bytes=residue,
        parameter_gradient_bytes=random.choice([0, random.randint(0, 3)]),
        gradient_bytes=random.randint(0, 3),
        recomputable=random.random() > 0.15,
        linked=random.random() > 0.2,
    )


def _option(random: Random, index: int, boundary: int, odd: bool) -> Option:
    kept = random.randint(-2, 6)
    leaves = 0 if odd else max(0, kept + boundary)
    return Option(
        name=f"option {index}",
        forward_seconds=random.randint(1, 5),
        backward_seconds=random.randint(1, 8),
        kept_bytes=kept,
        kept_output_bytes=random.randint(0, boundary) if random.random() < 0.4 else 0,
        forward_peak_bytes=leaves + random.randint(0, 5),
        backward_peak_bytes=random.randint(0, 5),
        recompute_seconds=random.randint(1, 5),
        recompute_peak_bytes=(0 if odd else max(0, kept)) + random.randint(0, 5),
    )


def _tensor(random: Random, count: int) -> Shared:
    born = random.randrange(count)
    return Shared(
        size_bytes=random.randint(0, 4),
        born=born,
        forward_death=random.randrange(born, count),
        readers=_later(random, born, count),
        linked_readers=_later(random, born, count),
        savers=_later(random, born, count),
        held_until=random.choice([None, born]),
        early_backward_death=random.choice([None, random.randrange(born, count)]),
        forward_death_is_early=random.random() < 0.5,
    )


def _later(random: Random, born: int, count: int) -> tuple[int, ...]:
    return tuple(sorted({random.randrange(born, count) for _ in range(random.randint(0, 2))}))
