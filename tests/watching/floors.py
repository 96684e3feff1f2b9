"""Floors of a sweep: how often each way of ending must have been gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from distbelief.core.records import Cause


def hold_floors(found: Counter[str], floors: Mapping[str, int]) -> None:
    """Hold that each way was gone at least so often, and that no job ended for a cause that has no floor, but for rare
    ones.

    >>> hold_floors(Counter(EPOCHS_DONE=9, REPLICAS_DIED=1), {"EPOCHS_DONE": 5, "REPLICAS_DIED": 1})
    """
    rare = {Cause.SHARD_CLOSING.name, Cause.SHARD_DESERTED.name}
    assert found.keys() & Cause.__members__.keys() <= floors.keys() | rare, f"nobody expected all of {dict(found)}"
    few = {name: f"{found[name]} of {floor}" for name, floor in floors.items() if found[name] < floor}
    assert not few, f"these ways are gone too seldom: {few}; all: {dict(found)}"
