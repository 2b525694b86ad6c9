"""Writes docs/dependencies.md: what the package requires, and under which licences, as its packages' metadata say.

``python -m docs.hooks.dependencies_page`` after a change of the requirements, in an environment that has all of them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docs.hooks.rooms_table import ROOT

PAGE = ROOT / "docs" / "dependencies.md"
INTRO = """# Dependencies

What the package requires, and the licence of each as its own metadata say it; the planner itself is under Apache-2.0.
`python -m docs.hooks.dependencies_page` writes this page from pyproject.toml and the installed packages.

`pip install .` takes the first table alone: profiling, solving and training models of your own. Extras add the others:
`zoo` the models of the zoo that are made with transformers, the others what their frameworks need. Without `zoo`
targets such as `zoo:gpt2` are refused with what to install; `zoo:mlp`, `zoo:unet`, `zoo:densenet` and
`zoo:mindspore_blocks` need nothing more.
"""
VERSIONS = """## Versions tried

On 2026-11-29, on two CPU cores: the wheel with its extra `zoo` in an environment of its own, and the three tests of
`make release-check`, which build the sdist and the wheel from it. The other packages are those of constraints.txt. The
package index has a CPU build of torch 2.13.0 for Python 3.11 at most; the others are CUDA builds, which ran without a
GPU, with empty stand-ins for the libraries of CUDA. With torch 2.14 and 2.15, the newest of the index, the sources ran
in place of the wheel.

| Python | torch | README's commands, zoo models | tests |
| --- | --- | --- | --- |
| 3.11.7 | 2.13.0+cpu | all | the environment of all tests and of most [results](results.md) |
| 3.11.7 | 2.11.0+cu130 | all | the quick ones of the three packages, release, 120 generated models |
| 3.11.7 | 2.15.0+cu132 | all | the quick ones of the three packages but integrations, 42 of whole models, release |
| 3.11.7 | 2.14.1+cu130 | seventeen | programs, plans carried out, estimates, recomputation (521) |
| 3.12.1 | 2.12.1+cu130 | eight | programs, plans carried out, pieces, offloading, estimates (246), release |
| 3.12.1 | 2.13.0+cu130 | five | the same 246 |
| 3.13.0 | 2.11.0+cu130 | five | the same 246 |
| 3.13.0 | 2.13.0+cu130 | five | the quick ones of the three packages, release |

Before torch 2.13, models under `fully_shard` [are refused](distributed.md#fully_shard), and their tests fail; and
a stage's backward cannot let go of the gradients that it begins with before it ends, which profiles measure. On a GPU,
Python 3.12.3 with torch 2.11.0+cu130 ran [what was measured there](results.md#on-a-gpu). Other combinations were not
tried.

With torch 2.15 a stage is not captured that calls `resize_` on a tensor which began empty and was enlarged by an op
(`out=torch.empty(0)`): torch refuses to trace it ("Attempted to resize a view tensor to a larger size"). Each of the
two alone is captured. The test of such a stage, a slow one, fails there; on 2.13 and 2.14 it passes.
"""


def dependencies_page() -> str:
    """The page's text.

    Raises:
        PackageNotFoundError: something that is required is not installed.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    mine = [Requirement(text) for text in project["dependencies"]]
    parts = [INTRO, "## Required", "", *_table(mine, ""), ""]
    rows = [(name, Requirement(text)) for name in extras if name not in ("dev", "docs") for text in extras[name]]
    wanted = {each.name: each for _, each in rows}
    needed = {each: [name for name, other in rows if other.name == each] for each in wanted}
    parts += ["## Extras", "", *_head()]
    parts += [*(_row(each, f"`{'`, `'.join(needed[name])}`") for name, each in wanted.items()), ""]
    others = [Requirement(text) for text in extras["dev"]]
    parts += ["## Tests and checks", "", "Beside the extras; `make docs` needs MkDocs and its plugins, too.", ""]
    parts += [*_table([each for each in others if each.name not in wanted], ""), ""]
    parts += [VERSIONS]
    parts += ["## What these require in turn", "", *_head()]
    parts += [_row(Requirement(each.name), by) for each, by in in_turn(mine)]
    return "\n".join([*parts, ""])


def licence_of(found: Distribution) -> str:
    """By its expression, its classifiers, or the first line of its licence field."""
    meta = found.metadata
    if expressions := meta.get_all("License-Expression"):
        return expressions[0]
    classifiers = [
        text.split(" :: ")[-1] for text in meta.get_all("Classifier") or () if text.startswith("License :: ")
    ]
    if named := [text for text in classifiers if text != "OSI Approved"]:
        return ", ".join(named)
    return (meta.get_all("License") or ["not said"])[0].strip().splitlines()[0][:60]


def in_turn(requirements: Iterable[Requirement]) -> Iterator[tuple[Requirement, str]]:
    """What is required by what is required, on this platform, and by which of them; sorted by name."""
    direct = {canonicalize_name(each.name) for each in requirements}
    found: dict[str, tuple[Requirement, list[str]]] = {}
    waiting = list(requirements)
    while waiting:
        by = waiting.pop()
        for text in distribution(by.name).requires or ():
            each = Requirement(text)
            name = canonicalize_name(each.name)
            if name in direct or (each.marker is not None and not each.marker.evaluate({"extra": ""})):
                continue
            if name not in found:
                waiting.append(each)
            found.setdefault(name, (each, []))[1].append(by.name)
    return iter((each, ", ".join(sorted(by, key=str.lower))) for _, (each, by) in sorted(found.items()))


def _head() -> list[str]:
    return ["| package | for | licence |", "| --- | --- | --- |"]


def _table(requirements: Iterable[Requirement], needed_by: str) -> list[str]:
    return ["| package | licence |", "| --- | --- |", *(_row(each, needed_by) for each in requirements)]


def _row(requirement: Requirement, needed_by: str) -> str:
    cells = [f"{requirement.name}{requirement.specifier}", *([needed_by] if needed_by else [])]
    try:
        return "| " + " | ".join([*cells, licence_of(distribution(requirement.name))]) + " |"
    except PackageNotFoundError as error:
        raise PackageNotFoundError(f"{requirement.name}: expected to be installed; run make venv") from error


if __name__ == "__main__":
    PAGE.write_text(dependencies_page(), encoding="utf-8")
