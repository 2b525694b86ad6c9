"""What tests of graph problem files share: documents, and a replay that knows nothing of the repository's own."""

from __future__ import annotations

from typing import Any


def node(name: str, inputs: str = "", *, output_bytes: int = 100, **fields: Any) -> dict[str, Any]:
    """A node; ``inputs`` are names with spaces between them."""
    plain = {"name": name, "seconds": 1.0, "output_bytes": output_bytes, "transient_bytes": 0, "side": "forward"}
    return {**plain, "inputs": inputs.split(), **fields}


def document(*nodes: dict, outputs: str = "", resident_bytes: int = 0) -> dict[str, Any]:
    return {
        "format": "planner-graph", "version": 1, "resident_bytes": resident_bytes,
        "nodes": list(nodes), "outputs": outputs.split(),
    }  # fmt: skip


def training_step() -> dict[str, Any]:
    """Unplanned peak 361 of which 10 are resident, at gm, in 11 s; nothing below 220: gm reads m and l."""
    return document(
        node("e", seconds=1),
        node("w", "e", seconds=2, output_bytes=50),
        node("m", "w", seconds=2),
        node("l", "m", output_bytes=1),
        node("gm", "l m", seconds=2, side="backward"),
        node("gw", "gm w e", seconds=3, output_bytes=9, side="backward"),
        outputs="gw",
        resident_bytes=10,
    )


def replayed(problem: dict[str, Any], actions: list[dict[str, str]]) -> tuple[int, float]:
    """Peak and seconds of a plan's actions as the problem file's rules say."""
    nodes = {n["name"]: n for n in problem["nodes"]}
    alive: set[str] = set()
    peak, seconds = 0, 0.0
    for action in actions:
        n = nodes[action["node"]]
        if action["op"] == "free":
            alive.remove(n["name"])
            continue
        assert set(n["inputs"]) <= alive and n["name"] not in alive
        alive.add(n["name"])
        held = sum(nodes[name]["output_bytes"] for name in alive)
        peak = max(peak, problem["resident_bytes"] + held + n["transient_bytes"])
        seconds += n["seconds"]
    assert set(problem["outputs"]) <= alive
    return peak, seconds
