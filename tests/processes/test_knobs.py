"""The options of allreduce on real processes, over role links: each is seen in what the replicas play."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

import jobs
import pytest

from distbelief.places.processes.local import Local
from distbelief.strategies import Allreduce

REPLICAS = 3
USUAL: dict[str, Any] = {"algorithm": "hierarchical"}
Seen = dict[str, list[list[str]]]
"""The lines of each replica, by their first word."""


def play(folder: Path, transport: str, patch: pytest.MonkeyPatch, **options: Any) -> Seen:
    """What the replicas of a short job wrote down."""
    folder.mkdir()
    patch.setenv("SPIED", str(folder))
    strategy = Allreduce(REPLICAS, **{**USUAL, **options})
    result = jobs.run(
        folder / "run", strategy, on=Local(transport=transport), task="spied:spied", epochs=1, evaluate_every=0
    )
    assert (result["outcome"], result["samples"]) == ("done", jobs.SAMPLES)
    seen: defaultdict[str, list[list[str]]] = defaultdict(lambda: [[] for _ in range(REPLICAS)])
    for index in range(REPLICAS):
        for line in (folder / str(index)).read_text().splitlines():
            word, _, rest = line.partition(" ")
            seen[word][index].append(rest)
    return seen


def test_who_adds_what_of_whom_is_as_the_algorithm_and_the_hosts_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"usual": {}, "naive": {"algorithm": "naive"}, "hosts": {"per_host": 2}}
    seen = {name: play(tmp_path / name, "tcp", monkeypatch, **change) for name, change in changes.items()}
    turns = [[set(lines) for lines in one["turns"]] for one in seen.values()]
    assert all(one != other for one, other in combinations(turns, 2))


def test_smaller_buckets_are_more_of_them_and_buffers_are_the_first_ones_or_each_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = play(tmp_path / "usual", "tcp", monkeypatch)
    after = play(tmp_path / "changed", "tcp", monkeypatch, bucket_mb=0.0003, buffers="local")
    assert [len(set(lines)) for lines in after["bucket"]] > [len(set(lines)) for lines in before["bucket"]]
    assert len(set(after["turns"][0])) > len(set(before["turns"][0]))
    rounds = min(map(len, before["buffers"]))
    assert rounds > 3
    assert len({tuple(lines[:rounds]) for lines in before["buffers"]}) == 1
    first, *others = after["buffers"]
    assert all(lines[0] == first[0] and not set(lines[1:]) & set(first[1:]) for lines in others), (
        "after the same start, each has its own"
    )
