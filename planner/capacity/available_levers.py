"""Which levers a workload has, which do not apply to it and why, and what each makes of the training result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from planner.capacity.levers import Exactness, Lever
from planner.capacity.optimizer_variants import OptimizerVariant, replacements_for
from planner.capacity.workload_variants import WorkloadVariants
from planner.plans.offload_request import Offload
from planner.plans.solving import why_no_offload
from profiler.records import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverOptions:
    """What a search over levers may choose from.

    Attributes:
        variants: of the workload.
        budget_bytes: the most bytes alive at once.
        offload: what may be sent to host memory.
        profile: of the workload as it is.
        no_offload: why nothing can be sent; empty where something can.
        optimizers: the other optimizers, measured.
        micro_batch_result: what becomes of the result with micro-batches.
    """

    variants: WorkloadVariants
    budget_bytes: int
    offload: Offload
    profile: Profile
    no_offload: str
    optimizers: tuple[OptimizerVariant, ...]
    micro_batch_result: Exactness

    @property
    def can_recompute(self) -> bool:
        """Whether any stage, or ops inside one, can run again."""
        profile = self.profile
        return any(s.recomputable for s in profile.stages) or any(menu.options for menu in profile.menus)


def lever_options(variants: WorkloadVariants, budget_bytes: int, offload: Offload) -> LeverOptions:
    """Profile the workload as it is, and measure other optimizers on its parameters."""
    profile = variants.profile("", 1)
    no_offload = why_no_offload(offload, profile)
    variants.report("other optimizers")
    return LeverOptions(
        variants=variants,
        budget_bytes=budget_bytes,
        offload=offload,
        profile=profile,
        no_offload=no_offload,
        optimizers=tuple(replacements_for(variants.runnable(), profile.resident.optimizer)),
        micro_batch_result=result_of_micro_batches(variants.workload.model, profile),
    )


def precision_levers(variants: WorkloadVariants) -> list[Lever]:
    """bfloat16, and on CUDA float16: the first one that the device computes in comes first."""
    why_not = variants.why_no_precision()
    names = ["bfloat16"]
    if variants.workload.device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        names = ["bfloat16", "float16"] if fast else ["float16", "bfloat16"]
    scalers = {"float16": ", scaler=torch.amp.GradScaler()"}
    return [
        Lever(
            kind="precision",
            name=f"autocast {name}",
            applies=not why_not,
            reason=why_not,
            result="other",
            change=f'Workload(..., autocast="{name}"{scalers.get(name, "")})',
        )
        for name in names
    ]


def micro_batch_lever(options: LeverOptions) -> Lever:
    """Parts of the batch one after the other before one optimizer's step."""
    why_not = options.variants.no_micro_batches
    return Lever(
        kind="micro-batches",
        name="micro-batches",
        applies=not why_not,
        reason=why_not,
        result=options.micro_batch_result,
        change="Workload(..., accumulate=True) on a part of the batch, its loss divided by their number, and the "
        "optimizer's step after the last one",
    )


def recipe_levers(options: LeverOptions) -> tuple[Lever, ...]:
    """Running parts in pieces, recomputing activations, and sending them to host memory."""
    recompute = Lever(
        kind="recompute",
        name="recompute",
        applies=options.can_recompute,
        reason="" if options.can_recompute else "no stage can run again",
        result="same",
        change="planner.solve(profile, budget, offload='never'), planner.apply(model, plan)",
    )
    offload = Lever(
        kind="offload",
        name="offload",
        applies=not options.no_offload,
        reason=options.no_offload,
        result="same",
        change="planner.solve(profile, budget), planner.apply(model, plan)",
    )
    return pieces_lever(options), recompute, offload


def pieces_lever(options: LeverOptions) -> Lever:
    """The head and its loss, and modules, a few rows at a time."""
    fits = options.profile.unplanned_peak_bytes <= options.budget_bytes
    applies = bool(options.profile.heads) if fits else bool(options.variants.in_pieces)
    return Lever(
        kind="in pieces",
        name="in pieces",
        applies=applies,
        reason="" if applies else "no large part of the model takes its rows one by one",
        result="rounding",
        change="planner.profile(workload, numerics='rounding'), planner.solve(profile, budget, numerics='rounding')",
    )


def result_of_micro_batches(model: nn.Module, profile: Profile) -> Exactness:
    """Gradients are sums over samples unless a module looks at the whole batch, or changes its buffers by it."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    # Without running statistics it takes the batch's own in evaluation, too.
    batch_wise = any(norm.training or norm.running_mean is None for norm in norms)
    return "other" if batch_wise or any(stage.mutated_buffers for stage in profile.stages) else "rounding"
