"""The colours of pictures: those of one picture are told apart, with colour-blind eyes too."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from planner import pictures

# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
SEEN = {
    "all": np.eye(3),
    "protan": np.array([[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]),
    "deutan": np.array([[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]),
}  # fmt: skip
LEAST = 10  # difference in CIELAB; about 2 are just told apart side by side
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour: str, eyes: str) -> np.ndarray:
    shares = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    xyz = XYZ @ np.clip(SEEN[eyes] @ linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eyes", SEEN)
@pytest.mark.parametrize(
    "colours",
    [
        {**pictures.CURVES, "budget": pictures.BUDGET},
        {name: colour for name, colour in pictures.ACTIONS.items() if not name.startswith("to ")},
        {name: pictures.ACTIONS[name] for name in ("to host", "to device")},
        {str(number): pictures.part_look(number)[0] for number in range(9)},
        {"fits": pictures.FITS, "misses": pictures.MISSES, "budget": pictures.BUDGET},
    ],
    ids=["curves", "actions", "copies", "parts", "levers"],
)
def test_colours_of_one_picture_differ(colours: dict[str, str], eyes: str) -> None:
    for (one, first), (other, second) in combinations(colours.items(), 2):
        assert np.linalg.norm(lab(first, eyes) - lab(second, eyes)) >= LEAST, (one, other, eyes)


def test_no_two_of_many_parts_look_alike() -> None:
    assert len({pictures.part_look(number) for number in range(72)}) == 72
