"""States of Python's and numpy's generators from which they give small, middling or large numbers for a while.

Both are a Mersenne Twister (Matsumoto and Nishimura 1998): 624 words, given out one by one after an invertible mixing.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

LEVELS = 16
_WORDS = 624
# The others are random: what draws until a number fits would never end.
_LEVEL_WORDS = 400


def host_states(level: int) -> tuple[Any, Any]:
    """States for ``numpy.random.set_state`` and ``random.setstate``, from which both give the same numbers.

    Args:
        level: from 0, where fractions come out as 0, to ``LEVELS - 1``, where they come out as almost 1. Each half
            byte is the level, so that small whole numbers follow it, whichever bits are taken for them.
    """
    others = random.Random(level)
    words = [_unmixed(0x11111111 * level)] * _LEVEL_WORDS
    words += [others.getrandbits(32) for _ in range(_WORDS - _LEVEL_WORDS)]
    return ("MT19937", np.array(words, dtype=np.uint32), 0, 0, 0.0), (3, (*words, 0), None)


def _unmixed(output: int) -> int:
    """The word that is given out as ``output``."""
    word = output ^ (output >> 18)
    word ^= (word << 15) & 0xEFC60000
    mixed = word
    for _ in range(4):  # Each round makes seven more bits right.
        word = mixed ^ ((word << 7) & 0x9D2C5680)
    mixed = word
    for _ in range(2):  # And here eleven.
        word = mixed ^ (word >> 11)
    return word & 0xFFFFFFFF
