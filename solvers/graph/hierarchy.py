"""Treats a graph as a chain of blocks: a menu of options for each block, combined by the dynamic program for chains.

Formulation: the forward nodes are cut where little is read across, each block gets a menu of what to keep for its
backward (both in ``solvers.graph.blocks``), and a table for chains chooses per block and
budget: keep one of the menu's sets, or nothing but the block's entry and run it again later. The table's answers are
written out as orders of the graph's own nodes and checked against the exact profile; several near the last answer that
fits are offered. Finer and coarser blocks are tried in turn.

Guarantee: none; every order is a valid schedule, its peak and seconds are exact. Complexity: a table of O(L^3 M) for
L blocks of at most 60 and M memory levels, and ten small programs per distinct block. Units: bytes and seconds.

Paper: Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont, "Rockmate: an efficient, fast, automatic and generic tool for
re-materialization in PyTorch" (2023), sections 3.1 to 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from solvers.graph.blocks import Block, BlockMenus, BlockOption, cut_into_blocks, node_of, peak_bytes, runs_to_make
from solvers.graph.orders import Incumbent, IndexedGraph, fits, seconds_of
from solvers.problem.chain import Chain, Option, Stage
from solvers.problem.schedule import Action, Schedule

SHARES = (0.03, 0.1, 0.3)  # the largest block's share of the forward's bytes: small ones fit tight budgets
_NEIGHBOURS = 3  # answers on either side of the last that fits: the model is not exact, and orders are repaired
_HOPEFUL = 1.05  # of the best order's seconds: a repair takes seconds on long orders and saves less than this


class ChainTable(Protocol):
    """All answers for one chain, by rising peak: ``solvers.chain.rotor.Table``."""

    def points(self) -> Sequence[object]: ...

    def schedule(self, point, /) -> Schedule: ...


def solve(incumbent: Incumbent, make_table: Callable[[Chain], ChainTable]) -> None:
    """Offer orders to the search; nothing where the graph has no cuts.

    >>> from solvers.chain.rotor import Table
    >>> from solvers.problem.examples import training_graph
    >>> indexed = IndexedGraph(training_graph(4))
    >>> incumbent = Incumbent(indexed, 4, gap=1e-9)
    >>> solve(incumbent, Table)
    >>> incumbent.seconds
    13.0
    """
    menus, tried_cuts = BlockMenus(incumbent.indexed, lambda: incumbent.left_seconds), set()
    for share in SHARES:
        blocks = cut_into_blocks(incumbent.indexed, share)
        cuts = tuple(block.forward.start for block in blocks)
        if len(blocks) > 1 and cuts not in tried_cuts and not incumbent.done:
            tried_cuts.add(cuts)
            model = BlockChain(incumbent.indexed, blocks, menus)
            _offer_near_budget(incumbent, model, make_table(model.chain))


def _offer_near_budget(incumbent: Incumbent, model: BlockChain, table: ChainTable) -> None:
    """Bisect for the last answer whose order fits; offer it and those next to it that fit too."""
    points, fitting_orders = table.points(), {}

    def point_fits(k: int) -> bool:
        order = model.order(table.schedule(points[k]))
        if not fits(incumbent.indexed, order, incumbent.budget_bytes):
            return False
        fitting_orders[k] = order
        return True

    low, high = -1, len(points)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if point_fits(middle) else (low, middle)
    for k in range(max(0, low - _NEIGHBOURS), min(len(points), low + _NEIGHBOURS + 1)):
        if incumbent.left_seconds == 0 or not (k in fitting_orders or point_fits(k)):
            continue
        if seconds_of(incumbent.indexed, fitting_orders[k]) <= incumbent.seconds * _HOPEFUL:
            incumbent.offer(fitting_orders[k], "hierarchy")


class BlockChain:
    """A graph's blocks as a chain, and the chain's schedules as orders of the graph's nodes.

    Attributes:
        chain: one stage per block, one option per option of the block.
    """

    def __init__(self, indexed: IndexedGraph, blocks: Sequence[Block], menus: BlockMenus) -> None:
        self._indexed = indexed
        self._blocks = blocks
        self._menus = [menus.menu(block) for block in blocks]
        self._boundary_runs = [runs_to_make(indexed, block, block.boundary) for block in blocks]
        self.chain = Chain(
            stages=tuple(self._stage(k) for k in range(len(blocks))), resident_bytes=indexed.graph.resident_bytes
        )

    def order(self, schedule: Schedule) -> list[int]:
        """The order of runs in which the chain's schedule is carried out."""
        order: list[int] = []
        options: dict[int, BlockOption] = {}
        begun: set[int] = set()
        for action in schedule.actions:
            k = action.stage
            if action.option is not None:
                options[k] = self._menus[k][action.option]
            if action.kind != "free":
                order += self._runs(action, options, first=k not in begun)
                begun.add(k)
        return order

    def _runs(self, action: Action, options: dict[int, BlockOption], first: bool) -> list[int]:
        k, block = action.stage, self._blocks[action.stage]
        if action.kind == "backward":
            return [node_of(block, place) for place in options[k].backward_runs]
        if action.kind == "forward" and first:
            return list(block.forward)
        rerun = set(self._boundary_runs[k]) if action.kind == "forward" else set()
        if action.option is not None:
            rerun |= {node_of(block, place) for place in options[k].kept_runs}
        return sorted(rerun)

    def _stage(self, k: int) -> Stage:
        indexed, block = self._indexed, self._blocks[k]
        output_bytes = indexed.output_bytes
        staying = {v for v in block.lasting if indexed.readers[v] or indexed.is_output[v]}
        return Stage(
            name=indexed.graph.nodes[block.forward.start].name,
            options=tuple(self._option(k, option) for option in self._menus[k]),
            boundary_bytes=int(output_bytes[list(block.boundary)].sum()),
            forward_seconds=self._forward_seconds(k),
            forward_peak_bytes=peak_bytes(indexed, block.forward, set(), {*block.boundary, *staying}),
            residue_bytes=block.lasting_bytes,
            parameter_gradient_bytes=sum(int(output_bytes[t]) for t in block.backward if indexed.is_output[t]),
            gradient_bytes=self._gradient_bytes(block),
        )

    def _forward_seconds(self, k: int) -> float:
        """Seconds of a first run; a recomputation may leave out nodes that nothing needs then."""
        return float(self._indexed.seconds[list(self._blocks[k].forward)].sum())

    def _gradient_bytes(self, block: Block) -> int:
        """Bytes that backward nodes hand to this block's backward or beyond it, without the graph's outputs."""
        indexed, start = self._indexed, block.backward.start
        backward_start = self._blocks[-1].backward.start
        earlier = [t for t in range(backward_start, start) if not indexed.is_output[t]]
        return sum(int(indexed.output_bytes[t]) for t in earlier if max(indexed.readers[t], default=t) >= start)

    def _option(self, k: int, option: BlockOption) -> Option:
        block, seconds = self._blocks[k], self._indexed.seconds
        return Option(
            name=f"keep {option.kept_bytes + option.kept_output_bytes} bytes",
            forward_seconds=self._forward_seconds(k),
            backward_seconds=float(sum(seconds[node_of(block, place)] for place in option.backward_runs)),
            kept_bytes=option.kept_bytes + block.lasting_bytes - self._unread_entry_bytes(k, option),
            kept_output_bytes=option.kept_output_bytes,
            forward_peak_bytes=option.forward_peak_bytes,
            backward_peak_bytes=option.backward_peak_bytes,
            recompute_seconds=float(sum(seconds[node_of(block, place)] for place in option.kept_runs)),
            recompute_peak_bytes=option.recompute_peak_bytes,
        )

    def _unread_entry_bytes(self, k: int, option: BlockOption) -> int:
        """Bytes of the block's entry that nothing reads after its forward: they are freed there."""
        if k == 0:
            return 0
        block, indexed = self._blocks[k], self._indexed
        runs = [*(node_of(block, place) for place in option.backward_runs), *self._blocks[k - 1].backward]
        read = {u for v in runs for u in indexed.inputs[v]}
        return sum(int(indexed.output_bytes[v]) for v in block.entry if v not in read)
