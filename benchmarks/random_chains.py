"""Random chains of realistic sizes: the same seed gives the same chain on every machine."""

from __future__ import annotations

from random import Random

from solvers import Chain, Option, Stage


def large_chain(seed: int, count: int, menu: int = 1) -> Chain:
    """A heterogeneous chain of realistic sizes, all linked and recomputable."""
    random = Random(seed)
    stages = []
    for k in range(count):
        boundary, forward = random.randint(100_000, 4_000_000), random.uniform(0.5, 2)
        options = []
        for o in range(menu):
            kept, transient = random.randint(200_000, 8_000_000) // (o + 1), random.randint(0, 3_000_000)
            options.append(
                Option(
                    name=f"option {o}",
                    forward_seconds=forward,
                    backward_seconds=2 * forward * (1 + 0.2 * o),
                    kept_bytes=kept,
                    forward_peak_bytes=kept + boundary + transient,
                    backward_peak_bytes=boundary + transient,
                    recompute_seconds=forward * 0.95,
                    recompute_peak_bytes=kept + transient,
                )
            )
        stages.append(
            Stage(
                name=f"stage {k}",
                options=tuple(options),
                boundary_bytes=boundary,
                forward_seconds=forward,
                forward_peak_bytes=boundary + 1_000_000,
                parameter_gradient_bytes=random.randint(0, 1_000_000),
                gradient_bytes=boundary,
            )
        )
    return Chain(stages=tuple(stages), resident_bytes=10_000_000)
