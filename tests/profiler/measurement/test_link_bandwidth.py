"""The link meter: what has no link."""

from __future__ import annotations

import torch

from profiler.measurement.link_bandwidth import measure_link


def test_a_cpu_has_no_link() -> None:
    assert measure_link(torch.device("cpu")) is None
