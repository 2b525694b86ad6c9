"""The largest step of a model that draws at random what it runs: layers dropped, experts, an early exit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from profiler.agreement import agreed, any_rank, first_failure
from profiler.tensors.storages import storage_key, storage_of
from profiler.trace.drawn_values import DrawnValues, Number, Site, read_instead
from profiler.trace.step_trace import first_forward
from profiler.workload.compiled_forwards import leave_uncompiled, uncompiled
from profiler.workload.host_numbers import LEVELS
from profiler.workload.sharded_units import unsharded_tensors
from profiler.workload.snapshot import RandomState, left_as_before
from profiler.workload.workload import Workload

leave_uncompiled(__name__)

ModuleCall = tuple[nn.Module, int]  # a module, and how many calls of it come before


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnStep:
    """One of the steps that a model may draw.

    Attributes:
        randomness: the random states that it begins from.
        instead: what its Python code reads of random tensors, by place, where not what was drawn.
        calls: of modules, in its forward.
        saved_bytes: for its backward, each storage once.
    """

    randomness: RandomState
    instead: Mapping[Site, Number] = field(default_factory=dict)
    calls: frozenset[ModuleCall] = frozenset()
    saved_bytes: int = 0

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Inside, every step that begins from these random states is this one."""
        with read_instead(self.instead):
            yield

    @property
    def size(self) -> tuple[int, int]:
        """The larger, the more memory it takes."""
        return self.saved_bytes, len(self.calls)


def largest_steps(workload: Workload, randomness: RandomState, *, keeps: bool = True) -> list[DrawnStep]:
    """The largest step that a workload was found to draw, and before it smaller ones that run what it does not.

    Forwards are run, one where nothing that is drawn decides what runs. Otherwise each place where Python reads a
    random tensor reads small and large numbers instead, and numpy's and Python's own generators give small and large
    ones; what makes the forward save the most is taken.

    Args:
        workload: whose steps they are; the caller preserves it.
        randomness: that steps are run from.
        keeps: whether forwards may keep what autograd saves.
    """
    search = _Search(workload, randomness, keeps=keeps)
    search.vary_reads()
    search.vary_host()
    return [*search.needed_beside_the_largest(), search.largest]


class _Search:
    def __init__(self, workload: Workload, randomness: RandomState, *, keeps: bool) -> None:
        self._workload = workload
        self._keeps = keeps
        self._modules = set(workload.model.modules())
        self._choices: dict[Site, tuple[Number, ...]] = {}
        self._seen: list[DrawnStep] = []
        first = self._run(DrawnStep(randomness=randomness))
        self._choices = agreed(self._choices)
        self._seen.append(first)
        self.largest = first
        self._host_moved = any_rank(randomness.host_differs())

    def vary_reads(self) -> None:
        """Try each value at all places together, then at each place by itself; new places may turn up meanwhile."""
        tried: set[Site] = set()
        for extreme in (0, -1) if self._choices else ():
            self._try(replace(self.largest, instead={site: values[extreme] for site, values in self._choices.items()}))
        while waiting := [site for site in self._choices if site not in tried]:
            tried.add(waiting[0])
            for value in self._choices[waiting[0]]:
                self._try(replace(self.largest, instead={**self.largest.instead, waiting[0]: value}))

    def vary_host(self) -> None:
        """Try what generators of the host may give: only the smallest and the largest where that changes nothing.

        And one below a half: by it Python's generator draws the second of two things.
        """
        if not self._host_moved:
            return
        calls, randomness = self.largest.calls, self.largest.randomness
        first = (0, LEVELS // 2 - 1, LEVELS - 1)
        for number, level in enumerate(sorted(range(LEVELS), key=lambda level: level not in first)):
            if number == len(first) and not any_rank(any(step.calls != calls for step in self._seen[-len(first) :])):
                return
            self._try(replace(self.largest, randomness=randomness.with_host_numbers(level)))

    def needed_beside_the_largest(self) -> list[DrawnStep]:
        """As few of the steps that were tried as run, with the largest, all modules that any of them ran."""
        missing = {module for step in self._seen for module, _ in step.calls} - {m for m, _ in self.largest.calls}
        needed: list[int] = []
        for number, step in sorted(enumerate(self._seen), key=lambda pair: -len(pair[1].calls)):
            ran = {module for module, _ in step.calls}
            if missing & ran:
                needed.append(number)
                missing -= ran
        return [self._seen[number] for number in agreed(needed)]

    def _try(self, step: DrawnStep) -> None:
        run, raised = None, None
        try:
            run = self._run(step)
        except Exception as error:  # noqa: BLE001 - user code runs here; numbers at which it fails are none it draws.
            raised = error
        failed = first_failure("" if raised is None else "failed", raised)
        self._choices = agreed(self._choices)
        if run is None or failed:
            return
        self._seen.append(run)
        if agreed(run.size > self.largest.size):
            self.largest = run

    def _run(self, step: DrawnStep) -> DrawnStep:
        """The step with what its forward calls and saves."""
        following, counts, calls = DrawnValues(step.instead), dict[nn.Module, int](), list[ModuleCall]()
        saved: dict[int, int] = {}
        model = self._workload.model
        persistent = {storage_key(tensor) for tensor in (*model.parameters(), *unsharded_tensors(model))}

        def count(module: nn.Module, _: object) -> None:
            if module in self._modules and torch.is_grad_enabled():
                counts[module] = counts.get(module, -1) + 1
                calls.append((module, counts[module]))

        def pack(tensor: Tensor) -> Tensor | None:
            # Storages that have gone leave their place in memory to others: counted by number, too.
            if tensor.layout is torch.strided:
                key = storage_key(tensor) if self._keeps else len(saved)
                saved[key] = storage_of(tensor).nbytes() if storage_key(tensor) not in persistent else 0
            return tensor.detach() if self._keeps else None

        step.randomness.restore()
        hook = register_module_forward_pre_hook(count)
        try:
            which = left_as_before(self._workload) if self._keeps else first_forward(self._workload)
            with which, following.following(), torch.autograd.graph.saved_tensors_hooks(pack, _kept):
                uncompiled(self._workload.step)(until="backward")
        finally:
            hook.remove()
        self._choices.update(following.choices)
        saved_bytes = sum(saved.values())
        return replace(step, calls=frozenset(calls), saved_bytes=saved_bytes)


def _kept(saved: Tensor | None) -> Tensor:
    if saved is None:
        raise ValueError("the forward goes backward through itself, which keeps what no limit leaves room for")
    return saved
