"""Minibatches of a replica's own in a script: streams, a sequential order, and data of each one's own."""

import ast
import re
from pathlib import Path
from typing import Any

import jobs
import pytest

from distbelief.core.optimizer import optim
from distbelief.errors import DistbeliefError
from distbelief.strategies import Downpour, Strategy, Synchronous

SCRIPT = """
import itertools, os, pathlib, signal, torch, distbelief as db
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

class Numbers(IterableDataset):
    def __init__(self, stop):
        self.stop = stop
    def __iter__(self):
        return (torch.tensor([float(i)]) for i in (range(self.stop) if self.stop else itertools.count()))

class Drawn(Numbers):
    def __iter__(self):
        drawn = torch.rand(self.stop, generator=torch.Generator().manual_seed(self.stop))
        return iter(drawn[:, None])

replica = db.join()
model = nn.Linear(1, 1)
nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
optimizer = replica.optimizer(model)
seen = []
folder = pathlib.Path(__file__).parent
def step(rows):
    seen.append(rows.flatten().int().tolist())
    optimizer.zero_grad()
    model(rows).mean().backward()
    optimizer.step()
    (folder / f"{{replica.role}}.{{os.getpid()}}").write_text(repr(seen))
    if {dies} and replica.index == 1 and len(seen) == 3 and (not (folder / "died").exists() or {dies} > 1):
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
{loop}
"""


PLAIN = optim("sgd", lr=0.5)
ONCE = "for rows in replica.batches({data}, 2{more}): step(rows)"
ROUNDS = Synchronous(optimizer=PLAIN)
Seen = dict[str, list[list[list[int]]]]
"""What each life of each replica has seen, in turn: its minibatches, of which each sample is its own number."""


def launch(
    folder: Path, loop: str, strategy: Strategy = ROUNDS, dies: int = 0, **options: Any
) -> tuple[dict[str, Any], Seen]:
    """Run a script with this loop; in its third step replica 1 dies so often."""
    result = jobs.launch(folder, SCRIPT.format(loop=loop, dies=dies), strategy, **options)
    seen: Seen = {}
    for path in sorted(folder.glob("replica *"), key=lambda path: path.stat().st_mtime):
        seen.setdefault(path.name.partition(".")[0], []).append(ast.literal_eval(path.read_text()))
    return result, seen


def flat(minibatches: list[list[int]]) -> list[int]:
    return [number for one in minibatches for number in one]


def test_each_replica_reads_its_part_of_a_stream_in_order_to_its_end(tmp_path: Path) -> None:
    strategy = Downpour(replicas=3, push_every=3, prefetch=1, optimizer=PLAIN)
    result, seen = launch(tmp_path, ONCE.format(data="Numbers(11)", more=""), strategy, epochs=2)
    for index in range(3):
        assert [flat(one) for one in seen[f"replica {index}"]] == [[*range(index, 11, 3)] * 2]
    assert (result["outcome"], result["epochs"], result["samples"]) == ("done", 2, 22)


@pytest.mark.parametrize(
    "data", ["DataLoader(Numbers(11), 2, collate_fn=torch.stack, num_workers=1)", "map(torch.clone, Numbers(11))"]
)
def test_streams_of_all_kinds_are_read(tmp_path: Path, data: str) -> None:
    """A `DataLoader` again in every epoch, where the loop names it anew."""
    epochs = 2 if "Loader" in data else 1
    words = f"for rows in replica.batches({data}{'' if 'Loader' in data else ', 2'}): step(rows)"
    result, seen = launch(tmp_path, f"for _ in replica.epochs({epochs}):\n    {words}")
    for index in range(2):
        assert flat(seen[f"replica {index}"][0]) == [*range(index, 11, 2)] * epochs
    assert (result["epochs"], result["samples"]) == (epochs, 11 * epochs)


def test_what_comes_as_minibatches_stays_so_and_counts_its_samples(tmp_path: Path) -> None:
    rows = "Numbers.__iter__ = lambda self: (torch.full((i, 1), float(i)) for i in (1, 2, 3))"
    result, seen = launch(tmp_path, f"{rows}\nfor rows in replica.batches(DataLoader(Numbers(0), None)): step(rows)")
    assert seen == {"replica 0": [[[1], [3, 3, 3]]], "replica 1": [[[2, 2]]]}
    assert result["samples"] == 6


def test_an_endless_stream_ends_with_the_job(tmp_path: Path) -> None:
    loop = (
        "batches = replica.batches(Numbers(0), 2)\ntry: len(batches)\n"
        "except TypeError as error: (folder / 'said').write_text(str(error))\n"
        "for rows in batches:\n    step(rows)\n    if len(seen) == 9: replica.stop()"
    )
    result, seen = launch(tmp_path, loop)
    assert result["cause"] == "the script stopped the job" or result["outcome"] == "done"
    assert (tmp_path / "said").read_text() == "Numbers is a stream: it has no length"
    for index in range(2):
        own = flat(seen[f"replica {index}"][0])
        assert own == [*range(index, index + 2 * len(own), 2)]


@pytest.mark.parametrize(
    ("data", "more"), [("Numbers(41)", ", num_workers=0"), ("list(Numbers(41))", ", order='sequential'")]
)
def test_a_replica_that_comes_again_goes_on_with_its_own(tmp_path: Path, data: str, more: str) -> None:
    result, seen = launch(tmp_path, ONCE.format(data=data, more=more), dies=1)
    before, after = seen["replica 1"]
    part = {"N": [*range(1, 41, 2)], "l": [*range(20, 41)]}[data[0]]
    assert result["outcome"] == "done"
    assert result["per_replica"][1]["lost"] >= 1
    assert flat(before) == part[: len(flat(before))]
    assert flat(after) == part[-len(flat(after)) :]
    assert len(flat(before)) + len(flat(after)) >= len(part)


SEQUENTIAL = "for _ in replica.epochs(2):\n    for rows in replica.batches({data}, 2, order='sequential'): step(rows)"


@pytest.mark.parametrize("said", ["", "replica.report(samples=len(rows))"])
def test_a_round_weighs_minibatches_by_what_is_left_of_them(tmp_path: Path, said: str) -> None:
    """Counted in what `collate_fn` has made, or said by the script; one of nothing is passed over."""
    few = "lambda ones: torch.stack(kept) if (kept := [one for one in ones if one % 4]) else None"
    made, left = ("torch.stack", "rows = rows[rows[:, 0] % 4 != 0]") if said else (few, "pass")
    data = f"DataLoader([torch.tensor([float(n)]) for n in (1, 4, 4, 4, 2, 3, 5, 6)], 2, collate_fn={made})"
    loop = f"for rows in replica.batches({data}, order='sequential'):\n    {left}\n"
    loop += f"    if rows is None or not len(rows): continue\n    {said or 'pass'}\n    step(rows)"
    result, seen = launch(tmp_path, loop, checkpoint_every=0)
    assert seen == {"replica 0": [[[1]]], "replica 1": [[[2, 3], [5, 6]]]}
    weight = jobs.weights(tmp_path / "run")["weight"].item()
    assert weight == pytest.approx(-0.5 * ((1 + 2 + 3) / 3 + (5 + 6) / 2))
    assert result["samples"] == 5


def test_the_rate_of_a_round_is_the_mean_of_what_replicas_bring_by_their_samples(tmp_path: Path) -> None:
    """The gradient of the bias is one: it moves by the rates alone."""
    halved = "optimizer.param_groups[0]['lr'] *= 0.5 ** replica.index\n"
    loop = halved + ONCE.format(data="list(Numbers(3 + 8 * replica.index))", more=", order='sequential'")
    launch(tmp_path, loop, data="own", checkpoint_every=0)
    rates = [(2 * 1.0 + 2 * 0.5) / 4, (1 * 1.0 + 2 * 0.5) / 3, 0.5, 0.5, 0.5, 0.5]
    assert jobs.weights(tmp_path / "run")["bias"].item() == pytest.approx(-0.5 * sum(rates))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "streams that differ": (
        ONCE.format(data="Numbers(9 + replica.index)", more="").replace("Numbers", "Drawn"),
        {},
        "begins with other samples than that of replica",
    ),
    "too few": (
        ONCE.format(data="list(Numbers(2))", more=", order='sequential'"),
        {},
        "the 1 minibatches of an epoch cannot be cut into parts for 2 replicas: lower --batch-size",
    ),
    "other data": (
        ONCE.format(data="list(Numbers(40 + replica.index)) * 1000", more=""),
        {},
        "training samples: give every replica the same data, or launch with --data own",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_meaning_is_refused(tmp_path: Path, what: str) -> None:
    loop, options, told = REFUSED[what]
    with pytest.raises(DistbeliefError, match=re.escape(told)):
        launch(tmp_path, loop, **options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"strategy": Downpour(warm_start_steps=3)}, "--warm-start-steps 3 has one replica take the first minibatches"),
        ({"lr_schedule": "cosine"}, "a stream: the number of samples, which --lr-schedule"),
        ({"order": "sequential"}, "order sequential of a stream: it has one order, which is kept"),
        ({"order": "shuffle"}, "unknown order 'shuffle'; did you mean"),
    ],
    ids=["a warm start", "a schedule", "an order of a stream", "no such order"],
)
def test_what_has_no_meaning_with_a_stream_is_refused(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(DistbeliefError, match=re.escape(told)):
        jobs.job(tmp_path, **options).settings().check_allotted(stream=True)


def test_a_run_goes_on_where_each_replica_was(tmp_path: Path) -> None:
    loop = SEQUENTIAL.format(data="list(Numbers(41))").replace(
        "step(rows)", "\n        step(rows)\n        if {stops} and len(seen) == 15: replica.stop()"
    )
    launch(tmp_path, loop.format(stops=1))
    result, seen = launch(tmp_path, loop.format(stops=0), resume=True)
    assert result["outcome"] == "done"
    for role, part in ("replica 0", [*range(20)]), ("replica 1", [*range(20, 41)]):
        before, after = map(flat, seen[role])
        assert len(before) > len(part)
        assert before + after == part * 2


def test_what_a_replica_has_left_undone_a_resumed_run_takes_up(tmp_path: Path) -> None:
    loop = ONCE.format(data="list(Numbers(41))", more=", order='sequential'").replace(": step", ":\n    step")
    result, _ = launch(tmp_path, f"{loop}\n    if replica.index and len(seen) == 3: break")
    assert (result["outcome"], result["per_replica"][1]["given_up"]) == ("done", 8)
    again, seen = launch(tmp_path, loop, resume=True)
    assert again["outcome"] == "done"
    assert flat(seen["replica 1"][0]) + flat(seen["replica 1"][1]) == [*range(20, 41)]


def test_who_stops_a_job_in_its_last_minibatch_may_come_too_late(tmp_path: Path) -> None:
    loop = ONCE.format(data="list(Numbers(8))", more="") + "; len(seen) == 4 and replica.stop()"
    result, _ = launch(tmp_path, loop, Downpour(replicas=1, optimizer=PLAIN))
    assert (result["outcome"], result["steps"]) == ("done", 4)


def test_a_stream_does_not_go_on_with_other_parts(tmp_path: Path) -> None:
    """Of three replicas, one would read again what another has read, and some would be read by nobody."""
    loop = "for rows in replica.batches(Numbers(41), 2, num_workers=0):\n    step(rows)\n    {}"
    launch(tmp_path, loop.format("if replica.index == 0 and len(seen) == 3: replica.stop()"))
    with pytest.raises(DistbeliefError, match="made with 2 replicas, each with a part of the data, but this job has 3"):
        launch(tmp_path, loop.format(""), Synchronous(replicas=3, optimizer=PLAIN), resume=True)
