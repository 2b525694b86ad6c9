"""Programs written with PuLP: what a row without variables says, constants, and what HiGHS answers."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from solvers.pulp_program import PulpProgram, chosen, scaled, times


def program() -> PulpProgram:
    return PulpProgram("test", budget_bytes=10, unplanned_seconds=4.0, byte_scale=1e5)


def test_the_number_one_stands_on_either_side_of_a_row() -> None:
    made = program()
    first, second = made.variable("x", 0), made.variable("x", 1)
    made.minimise([(first, -1.0), (second, -3.0), (None, 100.0)])
    made.at_most([(None, 1.0), *times([first, second], 1.0)], 2.0)
    assert made.solve(10.0)[:2] == (True, pytest.approx(-3.0))
    assert [chosen(first), chosen(second), chosen(None)] == [False, True, False]


def test_a_variable_that_stands_twice_counts_twice_and_one_that_cancels_out_not_at_all() -> None:
    made = program()
    x, y = made.variable("x"), made.variable("y")
    made.minimise([(x, -1.0), (y, -1.0)])
    made.at_most([(x, 1.0), (x, 1.0), *scaled([(y, 1.0)], 5.0), (y, -5.0)], 1.0)
    made.solve(10.0)
    assert [chosen(x), chosen(y)] == [False, True]


def test_bytes_are_counted_to_the_last_one() -> None:
    large = 80_000_000_001
    for room, kept in ((large, True), (large - 1, False)):
        made = PulpProgram("test", budget_bytes=room, unplanned_seconds=1.0, byte_scale=1e5)
        x = made.variable("x")
        made.minimise([(x, -1.0)])
        made.fit([(x, large)], room)
        made.solve(10.0)
        assert chosen(x) == kept


def test_a_row_without_variables_that_does_not_hold_makes_the_program_infeasible() -> None:
    made = program()
    made.minimise([(made.variable("x"), 1.0)])
    made.fit([], 0)
    assert not made.infeasible and made.solve(10.0).found
    made.fit([(None, 11)], 10)
    assert made.infeasible and made.solve(10.0)[:2] == (False, math.inf)


def test_rows_that_exclude_each_other_bound_nothing() -> None:
    made = program()
    x = made.variable("x")
    made.minimise([(x, 1.0)])
    made.equal([(x, 1.0)], 1.0)
    made.at_most([(x, 1.0)])
    assert made.solve(10.0)[:2] == (False, math.inf)


def test_importing_it_keeps_nothing_of_the_function_that_does():
    """A model in such a function would never be freed."""
    code = (
        "import gc, importlib, weakref\n"
        "class Model: pass\n"
        "def training():\n"
        "    model = Model()\n"
        "    importlib.import_module('solvers.chain.ilp')\n"
        "    return weakref.ref(model)\n"
        "model = training()\n"
        "gc.collect()\n"
        "raise SystemExit(model() is not None)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
