"""Sizes: what people write is read exactly, and what is nonsense is refused with a remedy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from planner.units import format_bytes, format_seconds, parse_bytes, show_sizes_like


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1234567", 1234567),
        (1234567, 1234567),
        (np.int64(7), 7),
        ("3KiB", 3072),
        ("3KB", 3000),
        ("2TiB", 2 * 2**40),
        ("2TB", 2 * 10**12),
        ("17B", 17),
        ("1.5 gib", 3 * 2**29),
        ("  .5MIB ", 2**19),
        ("0.1GB", 10**8),  # exact: 0.1 in floating point times 10**9 need not be
        ("1.9999B", 1),  # rounded down
        ("90M", 90 * 10**6),  # as SI says: the smaller of the two that people mean
        ("0.09G", 90 * 10**6),
        ("3k", 3000),
    ],
)
def test_reads_a_size(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(("text", "size"), [("70%", 700), ("150 %", 1500), ("33.33%", 333), ("100%", 1000)])
def test_reads_a_part_of_the_unplanned_peak(text, size):
    assert parse_bytes(text, whole_bytes=1000) == size


@pytest.mark.parametrize(
    "text",
    [
        *("", "   ", "-8GiB", "-1", "0", "0GiB", "0%", "0.2B", "nan", "inf", "NaNGiB", "8 bananas", "GiB", "%"),
        *("8GiB8", "1e9", "8,5GiB", "1.5", "0x10", "٣GiB", "9" * 5000, 0, -5, True, 1.5, math.nan, None),
    ],
)
def test_refuses_nonsense_and_says_what_to_write(text):
    with pytest.raises(ValueError, match=r"expected .*, got .*; \w+"):
        parse_bytes(text, whole_bytes=1000)


def test_a_percentage_needs_a_whole():
    with pytest.raises(ValueError, match=r"got '70%'.*; give the size in bytes"):
        parse_bytes("70%")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 2**20, "10.0 MiB"),
        (2**20 - 1, "1.00 MiB"),
        (999 * 2**30, "999 GiB"),
        (5000 * 2**40, "5000 TiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_writes_bytes(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("like", "text"),
    [
        ("90M", "1.61 GB"),
        ("0.09 gb", "1.61 GB"),
        ("70%", "1.50 GiB"),
        ("1610612736", "1.50 GiB"),
        ("8GiB", "1.50 GiB"),
        ("no size", "1.50 GiB"),
    ],
)
def test_sizes_are_shown_in_the_family_of_units_that_was_given(like, text):
    try:
        show_sizes_like(like)
        assert format_bytes(1610612736) == text
        assert format_bytes(999_600) == ("1.00 MB" if text.endswith(" GB") else "976 KiB")
    finally:
        show_sizes_like("")


@pytest.mark.parametrize("size", [1, 1000, 4097, 123456789, 98765432109876])
def test_what_is_written_can_be_read_back_within_its_digits(size):
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.005)  # three digits


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2.5e-6, "2.50 µs"),
        (0.0123, "12.3 ms"),
        (0.9996, "1.00 s"),
        (59.96, "1 min 0 s"),
        (125, "2 min 5 s"),
        (-0.5, "-500 ms"),
        (math.inf, "inf s"),
    ],
)
def test_writes_seconds(seconds, text):
    assert format_seconds(seconds) == text
