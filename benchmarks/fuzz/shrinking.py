"""Makes a failing case smaller while it fails in the same way: fewer layers, habits, features and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks.fuzz.cases import Case, Layer, Model
from benchmarks.fuzz.verdicts import Outcome

_PLAIN = Model(layers=())
_FEATURES = ("inputs", "output", "optimizer", "autocast", "scaler", "clip", "accumulate", "tied", "wrapped", "lets_go")
MOST_TRIES = 120


def shrunk(outcome: Outcome, judge: Callable[[Case], Outcome], most_tries: int = MOST_TRIES) -> Outcome:
    """The smallest case found that gets the same verdict; the outcome itself where nothing smaller does.

    Args:
        judge: gives the outcome of one case.
        most_tries: cases that are judged at most.
    """
    tries = 0
    found = True
    while found and tries < most_tries:
        found = False
        for smaller in smaller_cases(outcome.case):
            tries += 1
            again = judge(smaller)
            if again.verdict == outcome.verdict:
                outcome, found = again, True
                break
            if tries >= most_tries:
                break
    return outcome


def smaller_cases(case: Case) -> Iterator[Case]:
    """Cases that lack one thing of this one, the largest things first."""
    for name in case.habits:
        yield replace(case, habits=tuple(other for other in case.habits if other != name))
    if case.steps > 1:
        yield replace(case, steps=1)
        yield replace(case, steps=case.steps - 1)
    if case.solver != "auto":
        yield replace(case, solver="auto")
    if case.share != 0.0:
        yield replace(case, share=0.0)
    for model in smaller_models(case.model):
        yield replace(case, model=model)


def smaller_models(model: Model) -> Iterator[Model]:
    """Models with a layer less, or one that is plainer, or without a feature."""
    plain = replace(_PLAIN, layers=model.layers, batch=model.batch)
    if plain != model:
        yield plain
    for size in {1, len(model.layers) // 2} - {0, len(model.layers)}:
        for begin in range(len(model.layers) - size + 1):
            yield replace(model, layers=_only(model.layers, begin, begin + size))
    if len(model.layers) > 1:
        for number in range(len(model.layers)):
            yield replace(model, layers=without(model.layers, number))
    for feature in _FEATURES:
        if getattr(model, feature) != getattr(_PLAIN, feature):
            yield replace(model, **{feature: getattr(_PLAIN, feature)})
    for number, layer in enumerate(model.layers):
        for plainer in _plainer(layer):
            yield replace(model, layers=(*model.layers[:number], plainer, *model.layers[number + 1 :]))


def _plainer(layer: Layer) -> Iterator[Layer]:
    if layer.call != "plain":
        yield replace(layer, call="plain")
    if layer.frozen:
        yield replace(layer, frozen=False)
    if layer.module_of is not None:
        yield replace(layer, module_of=None)
    elif layer.kind != "Plain":
        yield Layer(kind="Plain")


def _only(layers: tuple[Layer, ...], begin: int, end: int) -> tuple[Layer, ...]:
    for number in reversed(range(len(layers))):
        if not begin <= number < end:
            layers = without(layers, number)
    return layers


def without(layers: tuple[Layer, ...], number: int) -> tuple[Layer, ...]:
    """The layers but one; what shared its module, or read beside it, takes what is left."""
    heir = next((k for k, layer in enumerate(layers) if layer.module_of == number), None)

    def moved(k: int) -> int:
        return k - (k > number)

    kept: list[Layer] = []
    for k, layer in enumerate(layers):
        of = heir if layer.module_of == number else layer.module_of
        if k != number:
            own = of is None or of == k
            kept.append(replace(layer, module_of=None if own else moved(of), reads=moved(layer.reads)))  # type: ignore[arg-type]
    return tuple(kept)
