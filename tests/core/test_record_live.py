"""What a person sees: plain lines, JSON lines, nothing, a terminal's table, and the lines at the end."""

import io
import json

import pytest

from distbelief.core import records as r
from distbelief.core.records import Cause
from distbelief.record.live import Live, summary
from distbelief.record.metrics import line
from distbelief.record.summary import Summary

RUN = [
    (0.1, r.Joined("replica 0")),
    (0.1, r.Joined("replica 1")),
    (1.0, r.Started(2, 1, 266610, 40, 10, 2)),
    (2.0, r.Stepped("replica 0", 4, 40, 4, 0.5, 0, 4)),
    (2.0, r.EpochDone(1)),
    (2.5, r.Tested(1, 0.25, 0.925)),
    (3.0, r.Gone("replica 1", 2, "killed by signal [9]", True)),
    (3.1, r.Checkpointed(1, "checkpoint 1 was not written: No space left on device")),
    (3.1, r.Checkpointed(2, "checkpoint 2 was not written: No space left on device")),
    (3.1, r.Checkpointed(3, "shard 0 is gone (killed)")),
    (3.2, r.Note("a sentence")),
    (4.0, r.Stepped("replica 0", 3, 30, 3, 0.25, 0, 3)),
    (4.0, r.Stepped("replica 1", 1, 10, 1, 0.25, 0, 1)),
    (5.0, r.Gone("replica 0", 0, "nothing more to do", False)),
    (5.0, r.Applied("shard 0", 8, 80, {0: 4, 1: 4})),
    (5.0, r.Finished.of(Cause.EPOCHS_DONE, "all 2 epochs are trained")),
]


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    """A wall whose seconds pass one at each look."""

    def __init__(self, step=0.0):
        self.time, self.step = 0.0, step

    def __call__(self):
        self.time += self.step
        return self.time


class Folded(Live):
    """One that is told records alone: their sums are a summary's."""

    def fold(self, seconds, record):
        self._summary.take(seconds, record)
        self.take(seconds, record, self._summary)


def shown(stream, records=RUN, **options):
    with Folded(stream, title="downpour on mnist", now=options.pop("now", Clock()), **options) as live:
        for seconds, record in records:
            live.fold(seconds, record)
    return stream.getvalue()


def test_plain_lines_tell_each_event_once():
    assert shown(io.StringIO()).splitlines() == [
        "joined: replica 0, replica 1",
        "downpour on mnist: 2 replicas, 1 shard, 266,610 parameters; 2 epochs of 40 samples in batches of 10",
        "epoch 1/2 done: 40/80 samples, 1.00 s, 40 samples/s, train loss 0.5000",
        "tested after 1 epoch at 1.50 s: accuracy 92.50 %, loss 0.2500",
        "replica 1 died: killed by signal [9]; its 2 minibatches are dealt again",
        "checkpoint 1 was not written: No space left on device",
        "checkpoint 3 failed: shard 0 is gone (killed)",
        "a sentence",
        "done: all 2 epochs are trained",
    ]


def test_a_measure_within_an_epoch_is_not_told_as_that_of_its_end():
    ended = [
        (4.5, r.Ending.of(Cause.INTERRUPTED, "Ctrl-C")),
        (4.6, r.Tested(1, 0.5, 0.5)),
        (4.7, r.Finished.of(Cause.INTERRUPTED, "Ctrl-C")),
    ]
    lines = shown(io.StringIO(), [*RUN[:6], (4.0, r.Stepped("replica 0", 1, 10, 1, 0.5, 0, 1)), *ended]).splitlines()
    assert lines[-2] == "tested at the end, after 50 samples, at 3.60 s: accuracy 50.00 %, loss 0.5000"


def test_one_lost_minibatch_is_one_and_a_replica_that_lost_nothing_leaves_in_silence():
    gone = [(1.0, r.Gone("replica 0", 1, "gone", True)), (2.0, r.Gone("replica 1", 0, "it was done", False))]
    assert shown(io.StringIO(), gone).splitlines() == ["replica 0 died: gone; its 1 minibatch is dealt again"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 s"), (0.0234, "23.4 ms"), (1.234, "1.23 s"), (59.04, "59.0 s"), (61.0, "1:01"), (3725.0, "1:02:05")],
)
def test_a_time_has_three_figures(seconds, text):
    played = [(0.0, r.Started(1, 1, 1, 10, 1, 1)), (seconds, r.Tested(1, 0.0, 0.5))]
    assert f" at {text}: " in shown(io.StringIO(), played)


def test_progress_between_epochs_is_told_every_ten_seconds():
    many = [RUN[2], *((2.0 + number, r.Stepped("replica 0", 1, 1, 1, 0.5, 0, 1)) for number in range(35))]
    lines = shown(io.StringIO(), many, now=Clock(1.0)).splitlines()[1:]
    assert len(lines) == 3
    assert lines[0].startswith("epoch 1/2: ")


def test_what_was_sent_and_what_was_read_in_memory_are_told_with_progress_and_at_the_end():
    counted = r.BytesCounted("replica 0", {"push": 2_000_000, "control": 500_000}, {}, {"fetch": 1_250_000_000})
    told = "2.5 MB sent, 1,250.0 MB read in shared memory"
    lines = shown(io.StringIO(), [*RUN[:3], (1.5, counted), *RUN[3:5]]).splitlines()
    assert lines[-1].endswith(f"train loss 0.5000, {told}")
    whole = Summary({})
    for seconds, record in [*RUN, (5.0, counted)]:
        whole.take(seconds, record)
    assert f"bytes       {told}" in summary(whole.result()).splitlines()


def test_partitions_that_build_their_parts_for_long_say_how_many_have():
    """Every ten seconds, until the job begins, and never of one that begins at once."""
    clock = Clock(step=4.0)
    built = [(0.0, r.PartBuilt(f"replica 0.{partition}", 20)) for partition in range(6)]
    told = [f"{done} of 20 partitions have built their part of the model" for done in (3, 6)]
    assert shown(io.StringIO(), built, now=clock).splitlines() == told
    assert shown(io.StringIO(), built).splitlines() == []
    later = shown(io.StringIO(), [(0.0, r.Started(1, 1, 10, 40, 10, 2)), *built], now=Clock(step=4.0))
    assert "partitions" not in later


def test_json_prints_the_metrics_and_nothing_else():
    text = shown(Terminal(), json=True)
    assert text.encode() == b"".join(line(seconds, record) for seconds, record in RUN)
    assert [json.loads(one)["event"] for one in text.splitlines()][:3] == ["Joined", "Joined", "Started"]


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_quiet_shows_nothing(stream):
    assert shown(stream(), quiet=True) == ""


def test_a_terminal_shows_a_table_with_who_is_gone(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    text = shown(Terminal(), now=Clock(1.0))
    for part in (
        "80/80 samples",
        "loss 0.2500",
        "accuracy 92.50 %",
        "staleness 0.50",
        "replica 0",
        "7 steps",
        "gone: killed by signal [9]",
        "lost 2",
        "a sentence",
    ):
        assert part in text


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_the_staleness_is_shown_while_the_job_runs(stream, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    shows = stream()
    with Folded(shows, now=Clock(1.0)) as live:
        live.fold(*RUN[2])
        live.fold(1.0, r.Applied("shard 0", 3, 96, {0: 1, 1: 1, 4: 1}))
        live.fold(1.0, r.Applied("shard 1", 3, 96, {0: 1}))
        live.fold(*RUN[3])
        live.fold(*RUN[4])
        assert "staleness 1.25" in shows.getvalue()
        live.fold(*RUN[-2])
        live.fold(5.0, r.EpochDone(2))
        assert "staleness 0.44" in shows.getvalue(), "what the shards tell of the whole job"


@pytest.mark.parametrize("options", [{}, {"json": True}])
def test_a_closed_pipe_ends_the_view_and_not_the_job(options):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    assert shown(Closed(), **options) == ""


def test_the_summary_is_a_few_lines():
    sums = Summary({"settings": {"target_accuracy": 0.9}})
    for seconds, record in [*RUN[:-2], (4.5, r.Tested(2, 0.25, 0.925)), *RUN[-2:]]:
        sums.take(seconds, record)
    assert summary(sums.result(), "runs/x").splitlines() == [
        "outcome     done: all 2 epochs are trained",
        "accuracy    92.50 %, loss 0.2500",
        "target      90.00 % reached after 1.50 s, 1 epoch",
        "time        3.00 s, 27 samples/s (80 samples, 8 steps, 8 pushes)",
        "staleness   mean 0.50, max 1",
        "dealt again 2 minibatches of replica 1",
        "run folder  runs/x",
    ]


def test_the_summary_of_a_job_that_never_started_is_short():
    assert summary(Summary({}).result()).splitlines() == [
        "outcome     unknown",
        "time        0.0 s, 0 samples/s (0 samples, 0 steps, 0 updates)",
    ]


def test_the_end_of_a_simulation_says_so_and_what_its_cluster_costs() -> None:
    cluster = {"compute": {"step": 1e-3}, "handling": {"message": 6e-6, "memory": 26e9}, "hosts": {"cores": 2}}
    whole = Summary({"cluster": cluster, "settings": {"target_accuracy": 0.5}})
    whole.take(0.0, r.Started(1, 1, 10, 100, 10, 1))
    whole.take(2.0, r.Stepped("replica 0", 10, 100, 10, None))
    for seconds in (2.0, 3.0):
        whole.take(seconds, r.Tested(1, 0.5, 0.9))
    text = summary(whole.result())
    assert "reached after 2.00 s simulated, 1 epoch" in text
    assert "2.00 s simulated, 50 samples/s simulated (" in text
    assert "steps of 1.0 ms, 6 us a message, 26 GB/s for memory access, hosts of 2 cores" in text
    assert "simulated" not in summary({name: value for name, value in whole.result().items() if name != "cluster"})
    alone = whole.result() | {"cluster": cluster | {"hosts": None}}
    assert "a machine for each role" in summary(alone)
    assert "all roles on one machine" in summary(alone | {"path": "direct"})


def test_a_job_without_a_server_tells_of_no_shards_and_no_pushes():
    records = [
        (1.0, r.Started(2, 0, 650, 40, 10, 2)),
        (2.0, r.Stepped("replica 0", 4, 40, 4, 0.5, 0, 4)),
        (2.0, r.Applied("replica 0", 2, 40, {})),
    ]
    told = Summary({})
    for seconds, record in records:
        told.take(seconds, record)
    lines = shown(io.StringIO(), records) + summary(told.result())
    assert "2 replicas, 650 parameters" in lines
    assert "4 steps, 2 updates" in lines
    assert "shard" not in lines
    assert "push" not in lines
