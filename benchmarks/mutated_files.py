"""Feeds every reader of files spoilt ones, and counts how the commands end: in words, never in a traceback.

``python -m benchmarks.mutated_files --count 2000`` takes some minutes. The files are small ones that the commands write
themselves; what is spoilt is drawn from a seed: types, huge numbers, markup, control characters, nesting, indices out
of range, parts that are missing, double, in another order, truncated.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from planner.cli.commands import app
from solvers import Chain, Option, Stage
from solvers.problem.graph import Graph, Node

FINE = (0, 2, 3)  # exit codes
JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 0.5, -0.5, 2**31, 2**49, 2**63, 10**30, -(10**30), 1e308, -1e308, 1e-308, float("nan"),
    float("inf"), "", "x", "[/]", "[bold red]a[/bold red]", "\x1b[31mred", "\u202eabc", "\ud800", "$x^$", "<b>b</b>",
    "a\nb", "..", "/dev/zero", "x" * 5000, [], {}, [[]], [None], {"a": 1}, [1, 2, 3], "os:system", "cuda:99", "meta",
)  # fmt: skip
# What is run on each kind of file.
COMMANDS = {
    "profile": ("show {file}", "show {file} --json", "solve {file} --budget 80% --solver chen_greedy -o {out}"),
    "plan": ("show {file} --ops", "show {file} --json", "show {file} -o {out}", "train --plan {file} --steps 1"),
    "chain": ("solve {file} --budget 90 --solver rotor --time-limit 1 -o {out}",),
    "graph": ("solve {file} --budget 90 --solver demand --time-limit 1 -o {out}",),
    "chain-solution": ("show {file}", "show {file} --json", "show {file} -o {out}"),
    "graph-solution": ("show {file}", "show {file} --json"),
    "rules": ("solve {profile} --rules {file}",),
}
NESTED = "nested"
TINY = ["--set", "layers=2", "hidden=4", "batch=2"]


def whole_files(folder: Path) -> dict[str, Path]:
    """One whole file for each reader, by the names in ``COMMANDS``."""
    paths = {name: folder / f"{name}.json" for name in COMMANDS}
    option = Option(
        kept_bytes=10, forward_seconds=1.0, backward_seconds=2.0, forward_peak_bytes=15, backward_peak_bytes=10,
        recompute_seconds=1.0, recompute_peak_bytes=15,
    )  # fmt: skip
    stages = tuple(
        Stage(name=f"s{k}", options=(option,), boundary_bytes=5, forward_seconds=1.0, forward_peak_bytes=5)
        for k in range(4)
    )
    paths["chain"].write_text(json.dumps(Chain(stages=stages).to_dict()))
    nodes = [Node(name="n0", seconds=1.0, output_bytes=4)]
    for k in range(1, 6):
        side = "forward" if k < 3 else "backward"
        nodes.append(Node(name=f"n{k}", seconds=1.0, output_bytes=4, inputs=(f"n{k - 1}",), side=side))
    paths["graph"].write_text(json.dumps(Graph(nodes=tuple(nodes), outputs=("n5",)).to_dict()))
    paths["rules"].write_text(json.dumps({"rest": "solve", "rules": [{"modules": "*", "action": "keep"}]}))
    for arguments in (
        ["profile", "zoo:mlp", *TINY, "-o", paths["profile"]],
        ["solve", paths["profile"], "--budget", "100%", "-o", paths["plan"]],
        ["solve", paths["chain"], "--budget", "90", "-o", paths["chain-solution"]],
        ["solve", paths["graph"], "--budget", "90", "-o", paths["graph-solution"]],
    ):
        result = CliRunner().invoke(app, [str(each) for each in arguments], prog_name="planner")
        if result.exit_code:
            raise RuntimeError(f"{arguments}: {result.output}")
    return paths


def spoilt(text: str, draw: random.Random) -> str:
    """The text of a JSON file with one to three things changed."""
    document = json.loads(text)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        _spoil(document, draw)
    deep = draw.choice([10, 100, 900])
    text = json.dumps(document).replace(json.dumps(NESTED), "[" * deep + "]" * deep)
    kind = draw.random()
    if kind < 0.05:
        return text[: draw.randrange(len(text))]
    if kind < 0.1:
        at = draw.randrange(len(text))
        return text[:at] + draw.choice(["[", "{", '"', "\x00", ",", "9" * 5000, "\\u", "}"]) + text[at + 1 :]
    return text


def _spoil(document: Any, draw: random.Random) -> None:
    holder, key = draw.choice(list(_places(document)))
    do = draw.randrange(11)
    if do == 0:
        del holder[key]
    elif do == 1 and isinstance(holder, list):
        holder.insert(key, deepcopy(draw.choice(holder)))
    elif do == 2 and isinstance(holder, list):
        draw.shuffle(holder)
    elif do == 3 and isinstance(holder, dict):
        holder[draw.choice(["unknown", "[/]", "\x1b[0m", ""])] = 1
    elif do == 4:
        holder[key] = NESTED
    elif do >= 5 and isinstance(holder[key], (int, float)):
        holder[key] = holder[key] * draw.choice([-1, 0, 1, 1, 2, 1000, 10**9]) + draw.choice([-1, 0, 1, 2])
    else:
        holder[key] = draw.choice(JUNK)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every holder in a document with each of its keys, so that all that it holds can be changed."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def ends_badly(command: str, out: Path) -> tuple[int, str]:
    """The exit code of a command, and what is wrong with how it ends; empty where nothing is."""
    result = CliRunner().invoke(app, command.split(), prog_name="planner")
    code, said = result.exit_code, result.stderr
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return code, "".join(traceback.format_exception(result.exception)[-4:])
    if code not in FINE:
        return code, f"exit code {code}: {result.output}"
    if code == 2 and ("error: " not in said or "Traceback" in said):
        return code, f"no sentence: {result.output}"
    if "\x1b" in result.output or "\u202e" in result.output:
        return code, f"control characters: {result.output!r}"
    if list(out.parent.glob("*.part")) or (code != 0 and out.exists()):
        return code, "something half-written"
    out.unlink(missing_ok=True)
    return code, ""


def feed(
    count: int, seed: int, readers: tuple[str, ...] = tuple(COMMANDS), tell: Callable[[str], None] = lambda text: None
) -> tuple[dict[str, Counter[int]], list[str]]:
    """So many spoilt files for each reader: how often it ended with which code, and each bad end."""
    codes: dict[str, Counter[int]] = {}
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = whole_files(folder)
        out = folder / "out" / "out.csv"
        out.parent.mkdir()
        for reader in readers:
            draw, codes[reader] = random.Random(f"{seed} {reader}"), Counter()
            whole, path = files[reader].read_text(), folder / "spoilt.json"
            for number in range(count):
                path.write_text(spoilt(whole, draw), encoding="utf-8")
                command = draw.choice(COMMANDS[reader]).format(file=path, out=out, profile=files["profile"])
                code, wrong = ends_badly(command, out)
                codes[reader][code] += 1
                if wrong:
                    bad.append(f"{reader}, file {number}, {command}: {wrong}")
            tell(f"{reader}: {dict(sorted(codes[reader].items()))}, bad ends so far {len(bad)}")
    return codes, bad


def main() -> None:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--readers", nargs="*", default=list(COMMANDS))
    given = parser.parse_args()
    _, bad = feed(given.count, given.seed, tuple(given.readers), print)
    print("\n\n".join(bad[:20]))
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
