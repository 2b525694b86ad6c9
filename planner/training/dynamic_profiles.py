"""Profiles of one model on several example batches, cut into the same stages, with the same programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from planner.capacity.scaling import same_programs
from planner.distributed.ranks import planning_among
from planner.plans.profiling import profile
from planner.runtime.applier import split_name
from planner.training.input_signatures import ReadsSignatures, Signature
from profiler.measurement import profiling
from profiler.records import Profile, is_of_whole_model
from profiler.trace.partition import Stages
from profiler.workload.optimizers import Optimizers
from profiler.workload.tensor_trees import tensors_in
from profiler.workload.workload import LossFunction, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a model is trained, whatever the batch; the fields are those of ``Workload``."""

    loss: LossFunction | None = None
    optimizer: Optimizers = None
    autocast: torch.dtype | str | None = None
    accumulate: bool = False
    scaler: torch.amp.GradScaler | None = None
    clip_norm: float | None = None
    keeps_output: bool = True

    @classmethod
    def of(cls, workload: Workload) -> Training:
        """How the model of a workload is trained."""
        return cls(**{field.name: getattr(workload, field.name) for field in dataclasses.fields(cls)})

    def on(self, model: nn.Module, inputs: Any) -> Workload:
        """The training step on this batch; a ``Workload`` of the model is taken as it is.

        Raises:
            ValueError: a workload of another model, or no batch.
        """
        if not isinstance(inputs, Workload):
            arguments = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
            return Workload(model=model, inputs=inputs, **arguments)
        if inputs.model is not model:
            raise ValueError("sizes: expected workloads of the planned model, got one of another; pass the same model")
        return inputs


def profiles_of(
    workloads: Sequence[Workload],
    reader: ReadsSignatures,
    stages: Stages,
    known: Mapping[Signature, Profile],
) -> dict[Signature, Profile]:
    """Profile each workload whose signature is new, the largest of each kind first.

    What stages there are, and which programs are worth having of them, is found at the first profile of a kind,
    or taken from ``known`` ones; the others are cut and measured in the same way.

    Raises:
        ProfileError: a step fails.
        StagesError: a stage did not run on another batch.
    """
    measured = dict(known)
    for workload in sorted(workloads, key=_elements, reverse=True):
        signature = reader.of_batch(workload.inputs)
        alike = next((p for s, p in measured.items() if s.kind == signature.kind), None)
        if signature in measured:
            continue
        with planning_among(None):  # Batches of other ranks have other shapes.
            measured[signature] = (
                profile(workload, stages=stages) if alike is None else _profile_like(alike, workload, stages)
            )
    return {signature: p for signature, p in measured.items() if signature not in known}


def _profile_like(alike: Profile, workload: Workload, stages: Stages) -> Profile:
    names = list(dict.fromkeys(split_name(s.name)[0] for s in alike.stages if s.kind == "stage"))
    like = "whole" if is_of_whole_model(alike.stages) else names or None
    return profiling.profile(workload, stages=stages or like, programs=same_programs(alike))


def _elements(workload: Workload) -> int:
    return sum(tensor.numel() for tensor in tensors_in(workload.inputs))
