"""A long run goes on from what lies beside its checkpoint: the sums of all its records, of which none is held."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from distbelief.core import records as r
from distbelief.core.records import Cause
from distbelief.record import recorder
from distbelief.record.diagnosis import diagnose
from distbelief.record.folder import RunFolder
from distbelief.record.metrics import BLOCK, behind, goes_back, in_effect, line, read_metrics
from distbelief.record.recorder import RECENT, SUMS, Recorder
from distbelief.record.summary import ROWS, Summary

JOB: dict[str, Any] = {"settings": {"target_accuracy": 0.8, "replicas": 2}}
Taken = tuple[float, r.Record]


def started(samples: int = 0) -> r.Started:
    return r.Started(2, 1, 100, 40, 10, 1000, samples)


def stepped(steps: int = 1, loss: float | None = 0.5, replica: int = 0) -> r.Stepped:
    return r.Stepped(f"replica {replica}", steps, 10 * steps, steps, loss, 0, steps)


def kept(taken: Iterable[Taken]) -> list[Taken]:
    """Those that were not gone back on, told by holding them all: whoever goes on takes away what came after."""
    held: list[tuple[int, Taken]] = []
    total = 0
    for seconds, record in taken:
        if isinstance(record, r.Started | r.Rewound):
            total = record.samples
            while held and held[-1][0] > total:
                held.pop()
        elif isinstance(record, r.Stepped):
            total += record.samples
        held.append((total, (seconds, record)))
    return [one for _, one in held]


HAPPENS = st.lists(
    st.one_of(
        st.builds(stepped, st.integers(0, 4), st.sampled_from([None, 0.25]), st.integers(0, 1)),
        st.builds(lambda epoch, held: r.Tested(epoch, 0.5, held), st.integers(0, 9), st.sampled_from([0.1, 0.9])),
        st.builds(r.Gone, st.just("replica 1"), st.integers(0, 3), st.just("killed"), st.booleans()),
        st.builds(lambda last: r.Forgotten("shard 0", "replica 0", 0, 1, last), st.integers(1, 9)),
        st.builds(lambda updates: r.Applied("shard 0", updates, 10 * updates, {0: updates}), st.integers(0, 9)),
        st.sampled_from(["checkpoint", "rewound", "started", "gone back further"]),
    ),
    max_size=40,
)


def write(path: Path, taken: Iterable[Taken]) -> None:
    path.write_bytes(b"".join(line(*one) for one in taken))


@given(samples=st.lists(st.one_of(st.integers(0, 5), st.just("step")), max_size=30), last=st.integers(0, 60))
def test_what_was_gone_back_on_is_left_out_without_holding_the_rest(
    tmp_path_factory: pytest.TempPathFactory, samples: list[Any], last: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "metrics.jsonl"
    happened: list[r.Record] = [stepped() if one == "step" else r.Rewound(10 * one) for one in samples]
    taken = [(float(number), record) for number, record in enumerate(happened)]
    write(path, taken)
    assert [*in_effect(path, [*goes_back(path), last])] == kept([*taken, (99.0, r.Rewound(last))])[:-1]


class Run:
    """A run whose checkpoints are sealed a while after they were begun."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.saved = RunFolder(path), dict[int, int]()
        path.mkdir()
        monkeypatch.setattr(recorder, "read_manifest", lambda at: SimpleNamespace(samples=self.saved[int(at.name)]))
        self.recorder, self.at = Recorder(self.folder, JOB), 0.0
        self.take(started())

    def take(self, record: r.Record) -> None:
        self.at += 1.0
        self.recorder.take(self.at, record)

    def checkpoint(self, samples: int) -> None:
        number = len(self.saved) + 1
        self.saved[number] = samples
        (self.folder.checkpoints / f"{number:06d}").mkdir(parents=True)
        self.take(r.Checkpointed(number, ""))

    def go_on(self, more: Iterable[r.Record] = ()) -> Any:
        self.end()
        self.recorder = Recorder(self.folder, JOB)
        self.take(started(max(self.saved.values(), default=0)))
        for record in more:
            self.take(record)
        return self.end()

    def end(self) -> Any:
        """Close its file, as a process that is killed does."""
        assert self.recorder._file is not None
        self.recorder._file.close()
        return self.recorder.result()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(happened=HAPPENS, late=st.integers(0, 3))
@example(happened=[stepped(2), "checkpoint", stepped(1), "gone back further", stepped(4), "started"], late=1)
def test_a_run_goes_on_from_the_sums_of_its_checkpoint_as_from_all_its_metrics(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, happened: list[Any], late: int
) -> None:
    path = tmp_path_factory.mktemp("runs") / "run"
    run = Run(path, monkeypatch)
    for one in happened:
        newest = max(run.saved.values(), default=0)
        if one == "checkpoint":
            samples = run.recorder.summary.samples
            for _ in range(late):
                run.take(stepped())
            if samples >= newest:
                run.checkpoint(samples)
        elif one == "gone back further":
            run.take(r.Rewound(0))
            run.saved.clear()
            for checkpoint in run.folder.checkpoints.glob("*"):
                checkpoint.rename(path / f"{checkpoint.name}-{run.at}")
        elif isinstance(one, str):
            run.take(started(newest) if one == "started" else r.Rewound(newest))
        else:
            run.take(one)
    taken = kept([*read_metrics(run.folder.metrics), (run.at, started(max(run.saved.values(), default=0)))])
    result = run.go_on()
    expected = Summary(JOB)
    for record in [*taken[:-1], (run.at, taken[-1][1])]:
        expected.take(*record)
    assert result == {**expected.result(), "diagnosis": msgspec.to_builtins(diagnose(expected, run.recorder.timeline))}
    for sums in path.glob(f"checkpoints/*/{SUMS}"):
        sums.unlink()
    assert run.go_on() == result


@pytest.mark.parametrize(("late", "lost"), [(0, 2), (1, 0)])
def test_only_what_came_after_the_checkpoint_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int, lost: int
) -> None:
    """Whatever stands before it, and however much; and it is gone back on where steps came while it was sealed."""
    run = Run(tmp_path / "run", monkeypatch)
    for record in (stepped(4), r.EpochDone(1), r.Tested(1, 0.5, 0.9), stepped(4), stepped(late)):
        run.take(record)
    run.checkpoint(80)
    run.take(r.Gone("replica 1", 2, "killed", True))
    head, tail = run.folder.metrics.read_bytes().split(b'{"seconds":7', 1)
    run.folder.metrics.write_bytes(head + 9 * line(1.0, stepped(4)) + b"garbage\n" + b'{"seconds":7' + tail)
    result = run.go_on([stepped(2)])
    assert (result["steps"], result["samples"], result["per_replica"][1]["lost"]) == (10, 100, lost)
    assert [row["samples"] for row in result["history"]] == [40]
    run.folder.metrics.write_bytes(b"")
    assert run.go_on()["steps"] == 8, "they are lost, and what lies beside the checkpoint is not"


@pytest.mark.parametrize("spoil", [b"", b"\x00" * 100, b"x"], ids=["empty", "zeros", "garbage"])
def test_sums_that_are_spoilt_are_made_anew_of_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: bytes
) -> None:
    run = Run(tmp_path / "run", monkeypatch)
    run.take(stepped(4))
    run.checkpoint(40)
    run.take(stepped(4))
    (run.folder.checkpoints / "000001" / SUMS).write_bytes(spoil)
    assert run.go_on()["steps"] == 4


def test_a_checkpoint_that_is_sealed_too_late_has_no_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run", monkeypatch)
    for _ in range(RECENT + 3):
        run.take(stepped())
    run.checkpoint(10)
    assert not list(tmp_path.rglob(SUMS))
    assert run.go_on()["steps"] == 1


def test_all_metrics_are_read_without_being_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run", monkeypatch)
    with run.folder.metrics.open("ab") as file:
        file.write(line(1.0, stepped()) * 3000)
    run.saved[1] = 30_000
    tracemalloc.start()
    try:
        result = run.go_on()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result["steps"] == 3000
    assert most < 300_000


@pytest.mark.parametrize("rows", [1, ROWS, ROWS + 1, 3 * ROWS + 1, 5 * ROWS])
def test_a_long_history_is_thinned_and_has_its_first_and_its_last(rows: int) -> None:
    summary = Summary(JOB)
    summary.take(0.0, started())
    again = Summary(JOB)
    for epoch in range(1, rows + 1):
        summary.take(float(epoch), r.Tested(epoch, 0.5, 0.9))
        if epoch == rows // 2:
            again = msgspec.msgpack.decode(msgspec.msgpack.encode(summary), type=Summary)
    epochs = [row["epoch"] for row in summary.history]
    apart = {after - before for before, after in pairwise(epochs[:-1])}
    assert (epochs[0], epochs[-1], len(apart) < 2) == (1, rows, True)
    assert min(rows, ROWS // 2) <= len(epochs) <= ROWS
    for epoch in range(rows // 2 + 1, rows + 1):
        again.take(float(epoch), r.Tested(epoch, 0.5, 0.9))
    assert rows == 1 or again.result() == summary.result()


@pytest.mark.parametrize("ahead", range(BLOCK - 60, BLOCK + 60, 7))
def test_the_last_line_with_a_mark_is_found_wherever_blocks_begin(tmp_path: Path, ahead: int) -> None:
    path, mark = tmp_path / "file", line(1.0, r.Checkpointed(2, ""))
    before = line(0.0, r.Note("x" * ahead)) + mark
    path.write_bytes(before + line(1.0, r.Note("y" * (BLOCK - 100))))
    assert behind(path, b'"number":2,') == len(before)
    assert behind(path, b'"number":3,') == 0


def test_what_a_run_had_done_is_known_to_the_end_of_a_job_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run", monkeypatch)
    for record in (stepped(4), r.StepsTimed("replica 0", 4, 1.0, 0.0, 0.5, 1.5)):
        run.take(record)
    run.checkpoint(40)
    for record in (r.Applied("shard 0", 4, 40, {1: 4}), r.Finished.of(Cause.INTERRUPTED, "Ctrl-C")):
        run.take(record)
    result = run.go_on([stepped(4), r.StepsTimed("replica 0", 4, 1.0, 0.0, 0.5, 1.5)])
    assert (result["steps"], result["outcome"], result["per_replica"][0]["times"]["steps"]) == (8, "", 8)
