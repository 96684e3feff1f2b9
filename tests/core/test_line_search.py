"""Line searches, held against the conditions that they promise, on functions of one step."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distbelief.strategies.sandblaster.methods import TRIALS, Search, SearchPoint, SearchStart, wolfe

Function = Callable[[float], tuple[float, float]]

FUNCTIONS: dict[str, Function] = {
    "bowl": lambda t: ((t - 3) ** 2, 2 * (t - 3)),
    "quartic": lambda t: ((t - 1) ** 4 + 0.1 * (t - 1) ** 2, 4 * (t - 1) ** 3 + 0.2 * (t - 1)),
    "waves": lambda t: (math.cos(3 * t) - t, -3 * math.sin(3 * t) - 1),
    "wall": lambda t: (-t if t < 2 else math.inf, -1.0 if t < 2 else math.nan),
    "valley far away": lambda t: (math.log1p((t - 500) ** 2), 2 * (t - 500) / (1 + (t - 500) ** 2)),
}


def run(search: Search, function: Function) -> tuple[SearchPoint | None, list[float]]:
    tried = [next(search)]
    while True:
        try:
            tried.append(search.send(function(tried[-1])))
        except StopIteration as end:
            return end.value, tried


@pytest.mark.parametrize("name", ["bowl", "quartic", "waves", "valley far away"])
@given(first=st.floats(1e-3, 10.0))
def test_a_step_of_wolfe_satisfies_the_strong_conditions_and_is_the_last_tried(name: str, first: float) -> None:
    function = FUNCTIONS[name]
    loss, slope = function(0.0)
    found, tried = run(wolfe(SearchStart(loss, slope, first)), function)
    assert found.step == tried[-1]
    assert len(tried) <= TRIALS + 1
    assert function(found.step)[0] <= loss + 1e-4 * found.step * slope
    assert abs(function(found.step)[1]) <= 0.9 * abs(slope)


def test_a_loss_that_is_no_number_is_stepped_back_from() -> None:
    found, _ = run(wolfe(SearchStart(0.0, -1.0, 64.0)), FUNCTIONS["wall"])
    assert 0 < found.step < 2
    assert found.loss < 0


def test_a_direction_that_leads_nowhere_down_is_given_up() -> None:
    """The loss is what rounding leaves of it: the same everywhere, though the slope says otherwise."""
    found, tried = run(wolfe(SearchStart(1.0, -1.0, 1.0)), lambda _: (1.0, -1.0))
    assert found is None
    assert len(tried) <= TRIALS


@pytest.mark.parametrize("loss", [0.5, -0.5e-4])
def test_a_level_place_that_is_not_low_enough_is_not_taken(loss: float) -> None:
    """The slope there would do: what is missing is the decrease, of which 1e-4 was to be had at a step of 1."""
    search = wolfe(SearchStart(0.0, -1.0, 1.0))
    assert next(search) == 1.0
    assert 0 < search.send((loss, 0.0)) < 1.0
