"""A chain as it would be on a GPU: measured bytes of a CPU profile, a larger batch, seconds scaled to its speed."""

from __future__ import annotations

from dataclasses import replace

from solvers import Chain, Option, Stage


def repeated(chain: Chain, k: int, times: int) -> Chain:
    """The chain with stage ``k`` so many times over; no tensor of its own may be shared with other stages."""
    if any(tensor.born == k for tensor in chain.shared):
        raise ValueError(f"stage {k}: expected one whose output goes to the next stage alone, got a shared one")

    def places(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new for old in numbers for new in _copies(old, k, times))

    shared = tuple(
        replace(
            tensor,
            born=_copies(tensor.born, k, times)[0],
            forward_death=_copies(tensor.forward_death, k, times)[-1],
            readers=places(tensor.readers),
            linked_readers=places(tensor.linked_readers),
            savers=places(tensor.savers),
            held_until=_first_copy(tensor.held_until, k, times),
            early_backward_death=_first_copy(tensor.early_backward_death, k, times),
        )
        for tensor in chain.shared
    )
    again = [replace(chain.stages[k], name=f"{chain.stages[k].name} ({n + 1} of {times})") for n in range(times)]
    grown = (times - 1) * chain.stages[k].parameter_gradient_bytes
    return replace(
        chain,
        stages=(*chain.stages[:k], *again, *chain.stages[k + 1 :]),
        shared=shared,
        resident_bytes=chain.resident_bytes + grown,
        optimizer_peak_bytes=0,
    )


def _copies(old: int, k: int, times: int) -> range:
    if old == k:
        return range(k, k + times)
    return range(old, old + 1) if old < k else range(old + times - 1, old + times)


def _first_copy(old: int | None, k: int, times: int) -> int | None:
    return None if old is None else _copies(old, k, times)[0]


def on_gpu(chain: Chain, *, batch: int, seconds: float) -> Chain:
    """The chain with ``batch`` times the batch, its unplanned forward and backward taking ``seconds``.

    Activations grow with the batch; parameters, their gradients and the optimizer's states do not. All stages and
    options are scaled alike: which op is slow compared to which is as it was on the CPU, a GPU may differ there.
    """
    speed = seconds / chain.unplanned_seconds
    return replace(
        chain,
        stages=tuple(_stage(stage, batch, speed) for stage in chain.stages),
        shared=tuple(replace(tensor, size_bytes=tensor.size_bytes * batch) for tensor in chain.shared),
    )


def _stage(stage: Stage, batch: int, speed: float) -> Stage:
    return replace(
        stage,
        options=tuple(_option(option, stage, batch, speed) for option in stage.options),
        boundary_bytes=stage.boundary_bytes * batch,
        forward_seconds=stage.forward_seconds * speed,
        forward_peak_bytes=stage.forward_peak_bytes * batch,
        residue_bytes=stage.residue_bytes * batch,
        gradient_bytes=stage.gradient_bytes * batch,
        offload_units=tuple(size * batch for size in stage.offload_units),
    )


def _option(option: Option, stage: Stage, batch: int, speed: float) -> Option:
    parameters = min(stage.parameter_gradient_bytes, option.backward_peak_bytes)  # appear as it runs
    return replace(
        option,
        forward_seconds=option.forward_seconds * speed,
        backward_seconds=option.backward_seconds * speed,
        recompute_seconds=option.recompute_seconds * speed,
        kept_bytes=option.kept_bytes * batch,
        kept_output_bytes=option.kept_output_bytes * batch,
        forward_peak_bytes=option.forward_peak_bytes * batch,
        backward_peak_bytes=parameters + (option.backward_peak_bytes - parameters) * batch,
        recompute_peak_bytes=option.recompute_peak_bytes * batch,
        offload_units=tuple(size * batch for size in option.offload_units),
    )
