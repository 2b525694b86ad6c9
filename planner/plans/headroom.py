"""The headroom of a budget: the part that no plan may use, left to what the device's allocator wastes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from planner.units import parse_bytes_or_zero
from profiler.records import Profile

_SHARE = re.compile(r"(0*[0-9]{1,2}(?:\.[0-9]{1,30})?)\s*%")  # two digits: below 100
AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """Bytes, and a share of the budget; one of them is 0."""

    fixed_bytes: int = 0
    share: Fraction = Fraction(0)

    def of(self, budget_bytes: int) -> int:
        """Bytes of this budget that are left free; parts of a byte count as one.

        >>> headroom_from("5%").of(1000)
        50
        """
        return self.fixed_bytes + math.ceil(self.share * budget_bytes)

    def left_of(self, budget_bytes: int) -> int:
        """Bytes of this budget that a plan may use.

        Raises:
            ValueError: nothing is left.

        >>> headroom_from("5%").left_of(1000)
        950
        """
        left_bytes = budget_bytes - self.of(budget_bytes)
        if left_bytes < 1:
            raise ValueError(
                f"headroom: {self.of(budget_bytes)} bytes leave nothing of the budget of {budget_bytes} bytes; "
                "lower the headroom or raise the budget"
            )
        return left_bytes

    def budget_above(self, planned_bytes: int) -> int:
        """The smallest budget that leaves ``planned_bytes`` to the plan.

        >>> headroom_from("5%").budget_above(950)
        1000
        """
        budget_bytes = math.ceil((planned_bytes + self.fixed_bytes) / (1 - self.share))
        return budget_bytes + 1 if budget_bytes - self.of(budget_bytes) < planned_bytes else budget_bytes


def headroom_from(text: str | int, profile: Profile | None = None) -> Headroom:
    """Reads a headroom.

    Args:
        text: bytes, a share of the budget, or ``auto``: bytes that the allocator took beside the tensors in profiling.
        profile: the profile that ``auto`` refers to.

    Raises:
        ValueError: neither bytes nor a share below 100 %; or ``auto``, and what the allocator takes was not measured.
    """
    if text == AUTO and profile is not None:
        if profile.device != "cpu" and not profile.allocator_bytes:
            raise ValueError(
                "headroom: the profile does not say what the allocator takes, since no plain step was measured; "
                "give bytes or a share, or profile again where a plain step fits"
            )
        return Headroom(fixed_bytes=profile.allocator_bytes)
    if isinstance(text, str) and (match := _SHARE.fullmatch(text.strip())):
        return Headroom(share=Fraction(match[1]) / 100)
    try:
        return Headroom(fixed_bytes=parse_bytes_or_zero(text))
    except ValueError as error:
        raise ValueError(
            f"headroom: {text!r} is neither bytes nor a share of the budget below 100 %; "
            "write 512MiB, 1234567, 0, 5%, or auto where one profile is planned"
        ) from error
