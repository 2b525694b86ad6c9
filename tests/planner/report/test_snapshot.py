"""Snapshots of predicted steps: the bytes are the plan's, no block lies in another, and torch's viewer takes them."""

from __future__ import annotations

import pickle
import pickletools

import pytest
from torch.cuda import _memory_viz

import planner
from planner.report.plan_report import predicted_steps
from planner.report.snapshot import snapshot_of, write_snapshot
from tests.support.command_line import done

# What the viewer's own reader of pickles knows, after torch/utils/viz/MemoryViz.js.
KNOWN = {
    "APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1", "LONG_BINGET",
    "MARK", "MEMOIZE", "PROTO", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE2", "APPEND", "NEWFALSE", "BINPUT",
    "BINUNICODE", "EMPTY_TUPLE", "NEWTRUE", "NONE", "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE3", "SETITEM", "DICT",
}  # fmt: skip


@pytest.fixture(scope="module", params=["stages", "offload"])
def plan(request, files):
    if request.param == "stages":
        return planner.Plan.load(files / "plan.json")
    profile = planner.Profile.load(files / "profile.json")
    return planner.solve(profile, "85%", offload=planner.Offload(link_gbps=1.0))


@pytest.fixture(scope="module")
def snapshot(plan, tmp_path_factory):
    path = tmp_path_factory.mktemp("snapshot") / "step.pickle"
    write_snapshot(plan, path)
    return pickle.loads(path.read_bytes())


def test_the_most_that_is_allocated_is_the_peak(plan, snapshot):
    (trace,) = snapshot["device_traces"]
    alive, peak = {}, 0
    for event in trace:
        if event["action"] == "alloc":
            start, end = event["addr"], event["addr"] + event["size"]
            assert all(end <= other or start >= other + size for other, size in alive.items())
            alive[start] = event["size"]
            peak = max(peak, sum(alive.values()))
        elif event["action"] == "free_completed":
            assert alive.pop(event["addr"]) == event["size"]
    assert peak == plan.predicted_peak_bytes
    left = [block for block in snapshot["segments"][0]["blocks"] if block["state"] == "active_allocated"]
    assert {block["address"]: block["requested_size"] for block in left} == alive


def test_every_action_allocates_what_it_has_alive(plan):
    step = predicted_steps(plan)[1]
    (trace,) = snapshot_of(step)["device_traces"]
    sizes, total = {}, 0
    for event in trace:
        total += {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)
        if event["action"] == "alloc":
            sizes[event["frames"][-1]["line"]] = total
    assert len(sizes) > len(step.timeline.spans) / 3
    assert all(step.timeline.spans[line - 1].peak_bytes == size for line, size in sizes.items())


def test_blocks_fill_their_segment(snapshot):
    (segment,) = snapshot["segments"]
    address = segment["address"]
    for block in segment["blocks"]:
        assert block["address"] == address
        address += block["size"]
    assert address == segment["address"] + segment["total_size"]
    assert all(event["addr"] + event["size"] <= address for event in snapshot["device_traces"][0])


def test_torch_plots_it_without_a_gpu(snapshot):
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    assert "Allocator State History" in _memory_viz.segment_plot(snapshot)
    assert "segments: 1" in _memory_viz.segsum(snapshot)
    assert "free completed" in _memory_viz.trace(snapshot)


def test_the_viewer_s_reader_knows_every_instruction(snapshot):
    instructions = {code.name for code, _, _ in pickletools.genops(pickle.dumps(snapshot, protocol=4))}
    assert instructions <= KNOWN


def test_show_writes_a_snapshot(files, tmp_path):
    done("show", files / "plan.json", "-o", tmp_path / "s.pickle")
    assert pickle.loads((tmp_path / "s.pickle").read_bytes())["device_traces"][0]
