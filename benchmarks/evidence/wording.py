"""Numbers in sentences, as several tables need them."""

from __future__ import annotations

from typing import Any

Frame = Any  # of pandas; the stubs call every column a Series or an array, and every sum a scalar of any kind


def of(count: int, total: int) -> str:
    """A count of a total.

    >>> of(3, 4)
    '3 of 4'
    """
    return f"{count} of {total}"


def percent(share: float, digits: int = 2) -> str:
    """A share, with so many significant digits, and all before the point.

    >>> percent(0.01304), percent(0.5), percent(0), percent(8.15)
    ('1.3 %', '50 %', '0 %', '815 %')
    """
    value = 100 * share
    return f"{value:.0f} %" if abs(value) >= 10**digits else f"{value:.{digits}g} %"


def span(values: Frame, form: str = ".2g") -> str:
    """The least and the most of a column.

    >>> import pandas
    >>> span(pandas.Series([2.0, 1.0]))
    '1 to 2'
    """
    least, most = f"{values.min():{form}}", f"{values.max():{form}}"
    return least if least == most else f"{least} to {most}"


def against_plain(ratios: Frame) -> str:
    """Ratios to a plain step, as what is added or saved at the ends.

    >>> import pandas
    >>> against_plain(pandas.Series([0.99, 1.021]))
    'from 1 % faster to 2.1 % slower'
    """
    ends = [(value - 1) * 100 for value in (ratios.min(), ratios.max())]
    words = [f"{abs(end):.1f} % {'faster' if end < 0 else 'slower'}".replace(".0 %", " %") for end in ends]
    return f"from {words[0]} to {words[1]}"


def predicted_peaks(frame: Frame) -> str:
    """Predicted against measured peaks of plans, in a table of the columns that several benchmarks share."""
    known = frame[frame.measured_peak_bytes.notna()] if "measured_peak_bytes" in frame else frame
    equal = int((known.error_percent == 0).sum())
    over = int(known.over_budget.astype(str).eq("True").sum())
    worst = known.error_percent.abs().max()
    rest = "" if equal == len(known) else f", the others within {worst:.2g} %"
    return f"{of(equal, len(known))} plans equal to the byte{rest}; {over or 'none'} above the budget"
