"""Signatures of the batches that a framework hands to its own step, by which plans for changing shapes are chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.training.input_signatures import Signature, signature_of


class BatchSignatures:
    """Reads the signature of a call of the model off the batch under way, whatever the step makes of it for the model.

    Attributes:
        now: of the batch under way.
    """

    def __init__(self) -> None:
        self.now = signature_of({})

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
        """The signature of any call while that batch is under way."""
        return self.now

    def of_batch(self, inputs: Any) -> Signature:
        """The signature of a batch."""
        return signature_of({"batch": inputs})
