"""The options of allreduce on real processes, in shared memory and over torch.distributed: each is seen in what the
replicas play.
"""

from __future__ import annotations

from collections import defaultdict
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


@pytest.fixture(scope="module", params=["shared", "tcp"])
def usual(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Seen]:
    """A carrier, and what is written down with it where no option is changed."""
    with pytest.MonkeyPatch.context() as patch:
        return request.param, play(tmp_path_factory.mktemp(request.param) / "usual", request.param, patch)


@pytest.mark.parametrize("change", [{"algorithm": "naive"}, {"algorithm": "native"}, {"per_host": 2}], ids=str)
def test_who_adds_what_of_whom_is_as_the_algorithm_and_the_hosts_have_it(
    usual: tuple[str, Seen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    transport, before = usual
    after = play(tmp_path / "changed", transport, monkeypatch, **change)
    assert [set(lines) for lines in after["turns"]] != [set(lines) for lines in before["turns"]]


def test_smaller_buckets_are_more_of_them(
    usual: tuple[str, Seen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, before = usual
    after = play(tmp_path / "changed", transport, monkeypatch, bucket_mb=0.0003)
    assert [len(set(lines)) for lines in after["bucket"]] > [len(set(lines)) for lines in before["bucket"]]
    assert len(set(after["turns"][0])) > len(set(before["turns"][0]))


def test_buffers_are_the_first_ones_or_each_ones_own(
    usual: tuple[str, Seen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, before = usual
    rounds = min(map(len, before["buffers"]))
    assert rounds > 3
    assert len({tuple(lines[:rounds]) for lines in before["buffers"]}) == 1
    after = play(tmp_path / "changed", transport, monkeypatch, buffers="local")
    first, *others = after["buffers"]
    assert all(lines[0] == first[0] and not set(lines[1:]) & set(first[1:]) for lines in others), (
        "after the same start, each has its own"
    )
