"""The benchmarks against peers: peers compute the same, save what they say, and rows keep their promises."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import planner
from benchmarks import peer_methods, peer_packages, peers
from benchmarks.peer_methods import AOT_EAGER, Peer, blocks_of, compiled_peers, eager_peers, missing
from benchmarks.peer_packages import package_peers
from benchmarks.peer_turns import Turns, in_turns
from planner.zoo import build

SMALL: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 2, "seq": 16, "batch": 4, "vocab": 64}
PEERS = {peer.name: peer for peer in eager_peers()}
PRODUCTS = {"aten.mm", "aten.addmm", "aten.bmm"}


class CountedOps(TorchDispatchMode):
    """How often each op runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def ops_of_a_step(peer: Peer) -> Counter[str]:
    workload = build("gpt2", **SMALL)
    with peer.installed(workload), CountedOps() as mode:
        workload.step()
    return mode.counts


def peak_of(peer: Peer, workload: planner.Workload) -> int:
    with peer.installed(workload):
        return planner.measure(workload, repeats=1).peak_bytes


class TestTurns:
    def test_every_round_runs_every_way_and_the_first_does_not_count(self):
        ran: list[str] = []
        clock = iter([9.0, 9.0, 1.0, 2.0, 2.0, 6.0, 3.0, 3.0])

        def way(name: str) -> float:
            ran.append(name)
            return next(clock)

        turns = in_turns({"a": lambda: way("a"), "b": lambda: way("b")}, rounds=3)
        assert ran == ["a", "b"] * 4
        assert turns.seconds == {"a": (1.0, 2.0, 3.0), "b": (2.0, 6.0, 3.0)}

    def test_ratios_are_taken_round_by_round(self):
        turns = Turns(seconds={"a": (1.0, 2.0, 10.0), "b": (2.0, 6.0, 10.0)})
        assert turns.ratio("b", "a") == 2.0  # of 2, 3 and 1; the medians' ratio would be 3
        assert turns.median("b") == 6.0


class TestEagerPeers:
    @pytest.mark.parametrize("name", PEERS)
    def test_a_peer_computes_the_same_gradients(self, name):
        plain, peer = build("gpt2", **SMALL), build("gpt2", **SMALL)
        for workload, way in ((plain, PEERS["plain"]), (peer, PEERS[name])):
            torch.manual_seed(3)  # the dropout masks
            with way.installed(workload):
                workload.step()
        for one, two in zip(plain.model.parameters(), peer.model.parameters(), strict=True):
            assert one.grad is not None and two.grad is not None
            assert torch.equal(one.grad, two.grad)

    def test_checkpointing_runs_products_again_and_the_selective_one_none(self):
        runs = {name: ops_of_a_step(peer) for name, peer in PEERS.items()}
        products = {name: sum(counts[op] for op in PRODUCTS) for name, counts in runs.items()}
        assert products["checkpoint"] > products["plain"] == products["selective checkpoint"]
        assert runs["selective checkpoint"]["aten.native_layer_norm"] > runs["plain"]["aten.native_layer_norm"]

    def test_peaks_lie_in_the_order_of_what_is_kept(self):
        peaks = [peak_of(peer, build("gpt2", **SMALL)) for peer in PEERS.values()]
        plain, checkpointed, selective = peaks
        assert checkpointed < selective < plain

    def test_blocks_are_what_the_outermost_lists_hold(self):
        assert [type(block).__name__ for block in blocks_of(build("gpt2", **SMALL).model)] == ["GPT2Block"] * 2
        block = nn.Sequential(nn.ModuleList([nn.Linear(1, 1)]))
        assert blocks_of(nn.Sequential(nn.ModuleList([block]))) == [block]

    def test_a_model_without_blocks_is_refused(self):
        with pytest.raises(ValueError, match="expected a model with a ModuleList, got Linear; take another model"):
            blocks_of(nn.Linear(1, 1))


class Products(nn.Module):
    """Two square products and a sum."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(side, side))
        self.two = nn.Parameter(torch.randn(side, side))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.one @ self.two).sum()


class TestCompiledPeers:
    def test_the_measured_peak_is_that_of_the_compiled_step(self):
        side = 64
        workload = planner.Workload(model=Products(side), inputs=torch.randn(side, side))
        # Input and weights; then the first product with two of the gradients, or two gradients of weights and one of
        # the first product. Scalars come on top.
        squares = 6 * 4 * side**2
        assert squares <= peak_of(next(compiled_peers(AOT_EAGER, (), ())), workload) <= squares + 64

    def test_a_budget_saves_memory_and_leaves_the_gradients_alone(self):
        plain, peer = compiled_peers(AOT_EAGER, ("greedy",), (0.1,))
        assert (plain.setting, peer.setting) == ("", "greedy 0.1")
        settings: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 2, "batch": 16, "optimizer": "none"}
        eager, compiled, saving = (build("vit", **settings) for _ in range(3))  # it has no dropout
        most = peak_of(plain, compiled)
        with peer.installed(saving):
            assert planner.measure(saving, repeats=1).peak_bytes < most
            saving.step()
        eager.step()
        for one, two in zip(eager.model.parameters(), saving.model.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad)

    def test_a_solver_whose_package_is_absent_is_named_and_left_out(self, monkeypatch):
        monkeypatch.setattr(peer_methods.importlib.util, "find_spec", lambda name: None)
        assert missing(("dp", "ilp")) == {"ilp": "scipy"}
        settings = [peer.setting for peer in compiled_peers(AOT_EAGER, ("dp", "ilp"), (0.5,))]
        assert settings == ["", "dp 0.5"]


@pytest.mark.nightly
def test_a_plan_within_a_peers_peak_stays_within_it():
    rows = list(peers.rows_of("gpt2", list(eager_peers())[1:], 1, SMALL))
    assert [row["peer"] for row in rows] == ["checkpoint", "selective checkpoint"]
    for row in rows:
        assert row["plan_peak_MiB"] <= row["peer_peak_MiB"]
        assert row["plan_over_peer"] > 0 and row["peer_slowdown"] > 0
    assert "plans above their peer's peak: 0; no plan fits (nan): 0" in peers.summary(rows, ())[1]


def test_a_peer_below_all_plans_is_said_to_be():
    workload = build("gpt2", **SMALL)
    assert peers.plan_within(planner.profile(workload), 1) is None
    row = peers.against(workload, workload, workload, None, 1)
    assert math.isnan(row["plan_over_peer"]) and row["peer_slowdown"] > 0


class TestPackagePeers:
    """Of torch_remat and ckptplan what is installed is run; what is not is said."""

    def test_checkpointing_of_transformers_computes_the_same_in_less(self):
        (peer,) = (peer for peer in package_peers() if peer.name == "transformers")
        plain, theirs = build("llama", **SMALL), build("llama", **SMALL)
        most = planner.measure(plain, repeats=1).peak_bytes
        with peer.installed(theirs):
            assert planner.measure(theirs, repeats=1).peak_bytes < most
            theirs.step()
        plain.step()
        pairs = zip(plain.model.parameters(), theirs.model.parameters(), strict=True)
        assert all(torch.equal(one.grad, two.grad) for one, two in pairs)  # type: ignore[arg-type]

    def test_what_does_not_work_is_left_out_with_its_reason(self, monkeypatch):
        monkeypatch.setattr(peer_packages.importlib.util, "find_spec", lambda name: name == "ckptplan" or None)
        fit, notes = peers.fitting("unet", package_peers(), {"hidden": 4, "image": 16, "batch": 1})
        assert fit == []
        assert notes == [
            "unet: transformers not run: the model is none of transformers, or does not support it",
            "unet: torch_remat not run: torch_remat is not installed",
            "unet: ckptplan not run: it plans on CUDA alone",
        ]

    def test_random_numbers_of_a_second_run_are_those_of_the_first(self):
        state = peer_packages._RandomState()
        taken = state.snapshot()
        first = torch.rand(4)
        state.restore(taken)
        assert torch.equal(torch.rand(4), first)

    def test_blocks_of_a_model_without_lists_are_its_parts(self):
        names = [type(block).__name__ for block in blocks_of(build("unet", hidden=4, image=16, batch=1).model)]
        assert len(names) >= 9
