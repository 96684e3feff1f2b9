"""The recorder: the contract of result.json, metrics.jsonl, resuming, a full disk, the curves."""

import errno
import json
import math
import subprocess
import sys
import threading

import pytest

from distbelief.core import records as r
from distbelief.core.records import Cause
from distbelief.record.curves import TensorBoardEvents
from distbelief.record.folder import RunFolder
from distbelief.record.metrics import line, read_metrics
from distbelief.record.recorder import Recorder

JOB = {
    "task": "mnist",
    "strategy": "downpour",
    "settings": {"target_accuracy": 0.8, "replicas": 2},
    "seed": 1,
    "device": "cpu",
}
STARTED = r.Started(replicas=2, shards=2, parameters=100, samples_per_epoch=40, batch_size=10, epochs=2)
CONTRACT = [
    "task", "strategy", "settings", "seed", "device", "replicas", "shards", "epochs", "steps", "samples", "pushes",
    "updates", "seconds",
    "samples_per_second", "evaluating_seconds", "test_accuracy", "test_loss", "test_metrics", "target", "staleness",
    "bytes", "per_replica", "overflows", "dropped", "forgotten", "history", "versions",
]  # fmt: skip


NOTHING = {"push": 0, "fetch": 0, "all_reduce": 0, "partitions": 0, "control": 0}


def step(replica=0, steps=1, loss=None, losses=None):
    return r.Stepped(f"replica {replica}", steps, 10 * steps, steps, loss, 0, losses if losses is not None else steps)


RUN = [
    (0.5, r.Joined("replica 0")),
    (1.0, STARTED),
    (2.0, step(0, 1, 4.0)),
    (3.0, step(0, 3, 2.0)),
    (3.0, r.EpochDone(1)),
    (3.5, r.Tested(1, 0.7, 0.85)),
    (4.0, r.Gone("replica 1", 2, "killed by signal 9", True)),
    (5.0, step(0, 4, 1.0)),
    (5.0, r.EpochDone(2)),
    (5.5, r.Tested(2, 0.5, 0.95, {}, 0.25)),
    (5.6, r.Applied("shard 0", 8, 80, {0: 6, 1: 2})),
    (5.6, r.Applied("shard 1", 7, 80, {0: 4, 3: 3})),
    (5.6, r.BytesCounted("replica 0", {"push": 800}, {}, {})),
    (5.6, r.BytesCounted("replica 0", {"push": 400, "control": 7}, {"fetch": 900}, {"all_reduce": 40})),
    (5.6, r.StepsTimed("replica 0", 7, 1.0, 0.0, 0.5, 1.5, waited={"shard 0": 1.5})),
    (5.7, r.Finished.of(Cause.EPOCHS_DONE, "all 2 epochs are trained")),
]


def played(folder, records=RUN, job=JOB, **options):
    recorder = Recorder(folder, job, **options)
    for seconds, record in records:
        recorder.take(seconds, record)
    return recorder.finish()


def test_the_result_holds_the_contract_and_the_right_sums(tmp_path):
    folder = RunFolder.create(tmp_path, "x")
    result = played(folder)
    assert list(result) == [*CONTRACT, "outcome", "cause", "reason", "diagnosis"]
    assert json.loads(folder.result.read_text()) == result
    expected = {
        "replicas": 2, "shards": 2, "epochs": 2, "steps": 8, "samples": 80, "pushes": 8, "updates": 8, "seconds": 4.0,
        "samples_per_second": 20.0, "evaluating_seconds": 0.25,
        "test_accuracy": 0.95, "test_loss": 0.5, "dropped": 0, "forgotten": 0, "outcome": "done",
        "cause": "all epochs are done",
        "reason": "all 2 epochs are trained", "task": "mnist", "seed": 1,
        "target": {"accuracy": 0.8, "loss": None, "reached": True, "seconds": 2.5, "epochs": 1},
        "staleness": {"mean": 11 / 15, "max": 3, "histogram": {"0": 10, "1": 2, "3": 3}},
        "bytes": {"pushed": 1200, "fetched": 900, "sent": {**NOTHING, "push": 1200, "control": 7},
            "received": {**NOTHING, "fetch": 900}, "shared_memory": {**NOTHING, "all_reduce": 40},
            "per_step": {"push": 1200 / 8, "fetch": 0.0, "all_reduce": 40 / 8, "partitions": 0.0}},
        "per_replica": [{"id": 0, "steps": 8, "samples": 80, "pushes": 8, "lost": 0, "participation": 1.0,
            "times": {"steps": 7,
            "compute": 1.0, "update": 0.0, "communicate": 0.5, "wait": 1.5, "load": 0.0, "waits_for": "shard"}},
            {"id": 1, "steps": 0, "samples": 0, "pushes": 0, "lost": 2, "participation": 0.0, "times": None}],
        "history": [
            {"seconds": 2.5, "epoch": 1, "samples": 40, "updates": 4, "train_loss": 2.5, "test_loss": 0.7,
                "test_accuracy": 0.85},
            {"seconds": 4.5, "epoch": 2, "samples": 80, "updates": 8, "train_loss": 1.0, "test_loss": 0.5,
                "test_accuracy": 0.95},
        ],
    }  # fmt: skip
    assert {key: result[key] for key in expected} == expected
    assert set(result["versions"]) == {"distbelief", "torch", "python"}


def test_the_batch_size_of_the_result_is_the_one_that_the_script_named():
    assert played(None, job={**JOB, "settings": {"batch_size": 64, "replicas": 2}})["settings"] == {
        "batch_size": 10,
        "replicas": 2,
    }


def test_a_loss_weighs_as_many_steps_as_it_is_the_mean_of():
    """A report may bring the losses of steps whose pushes are not acknowledged yet, and then the pushes without a
    loss.
    """
    run = [
        (0.0, STARTED),
        (1.0, step(0, 0, 4.0, losses=3)),
        (2.0, step(0, 4, 1.0, losses=1)),
        (3.0, r.EpochDone(1)),
        (3.5, r.Tested(1, 0.7, 0.85)),
    ]
    assert played(None, run)["history"][0]["train_loss"] == 3.25


@pytest.mark.parametrize(
    ("aims", "accuracies", "losses", "reached"),
    [
        ({"target_accuracy": 0.9}, [0.9, 0.8, 0.9, 0.95, 0.7], [1.0] * 5, 3),
        ({"target_accuracy": 0.9}, [0.9, 0.8, 0.9, 0.8, 0.9], [0.0] * 5, None),
        ({"target_loss": 0.5}, [None] * 5, [0.5, 0.6, 0.5, 0.4, 0.3], 3),
        ({"target_loss": 0.5}, [1.0] * 5, [math.nan, 0.5, math.inf, 0.6, 0.4], None),
        ({"target_accuracy": 0.9, "target_loss": 0.5}, [0.9] * 5, [0.6, 0.6, 0.6, 0.5, 0.5], 4),
    ],
)
def test_a_target_is_reached_at_the_first_of_two_evaluations_in_a_row_that_hold_it(aims, accuracies, losses, reached):
    tested = [r.Tested(at, *one) for at, one in enumerate(zip(losses, accuracies, strict=True), 1)]
    target = played(None, [(0.0, STARTED), *((float(one.epoch), one) for one in tested)], {**JOB, "settings": aims})[
        "target"
    ]
    assert (target["reached"], target["epochs"]) == (reached is not None, reached)
    assert target["seconds"] == (None if reached is None else float(reached))


def test_what_held_a_target_before_all_went_back_holds_nothing():
    run = [(0.0, STARTED), (1.0, r.Tested(1, 0.1, 0.9)), (2.0, r.Rewound(0)), (3.0, r.Tested(1, 0.1, 0.9))]
    assert not played(None, run)["target"]["reached"]


def test_a_job_that_ends_before_it_starts_has_the_contract_too():
    result = played(None, [(0.0, r.Finished.of(Cause.REPLICAS_DIED, "no replica came"))])
    assert list(result) == [*CONTRACT, "outcome", "cause", "reason", "diagnosis"]
    assert (result["seconds"], result["samples_per_second"], result["test_accuracy"], result["history"]) == (
        0.0,
        0.0,
        None,
        [],
    )
    assert result["target"] == {"accuracy": 0.8, "loss": None, "reached": False, "seconds": None, "epochs": None}
    assert result["staleness"] == {"mean": None, "max": None, "histogram": {}}


def test_without_evaluation_the_history_has_a_row_for_each_epoch_and_no_test():
    run = [item for item in RUN if not isinstance(item[1], r.Tested)]
    result = played(None, run, {**JOB, "settings": {"evaluate_every": 0}})
    assert result["test_accuracy"] is result["test_loss"] is None
    assert [(row["epoch"], row["train_loss"], row["test_loss"], row["test_accuracy"]) for row in result["history"]] == [
        (1, 2.5, None, None),
        (2, 1.0, None, None),
    ]


def test_metrics_hold_every_record_as_it_was_taken(tmp_path):
    folder = RunFolder.create(tmp_path, "x")
    played(folder)
    assert list(read_metrics(folder.metrics)) == RUN
    assert all({"seconds", "event"} <= set(json.loads(text)) for text in folder.metrics.read_text().splitlines())


def test_a_measure_that_is_not_a_number_is_null_and_read_back(tmp_path):
    folder = RunFolder.create(tmp_path, "x")
    result = played(folder, [(0.0, STARTED), (1.0, step()), (2.0, r.Tested(1, math.nan, 0.5))])
    assert result["test_loss"] is None
    assert json.loads(folder.result.read_text())["history"] == result["history"]
    assert math.isnan(list(read_metrics(folder.metrics))[-1][1].loss)


@pytest.mark.parametrize(
    "torn", [b"", b'{"seconds":5.1,"event":"Step', b"x" * 200_000, b"\xff\xff\n"], ids=["", "torn", "long", "garbage"]
)
def test_a_resumed_run_is_as_if_it_had_never_stopped(tmp_path, torn):
    """The second attempt goes on from 40 samples; what the first did after that is forgotten, its training time too."""
    folder = RunFolder.create(tmp_path, "x")
    undone = [(7.0, step(1, 1, 9.0)), (7.5, r.BytesCounted("replica 1", {"push": 50}, {}, {}))]
    played(folder, [*RUN[:6], *undone, (8.0, r.Finished.of(Cause.INTERRUPTED, "Ctrl-C"))])
    with folder.metrics.open("ab") as file:
        file.write(torn)
    again = r.Started(2, 2, 100, 40, 10, 2, samples=40)
    result = played(
        folder, [(0.2, r.Joined("replica 0")), (1.0, again), *((then - 2.0, record) for then, record in RUN[6:])]
    )
    expected = played(None)
    expected["bytes"]["sent"]["push"] += 50  # what was sent stays sent
    expected["bytes"]["pushed"] += 50
    expected["bytes"]["per_step"]["push"] += 50 / expected["steps"]
    assert result == expected
    assert len(list(read_metrics(folder.metrics))) == 9 + 2 + 10
    whole = 9 + 2 + 10 + torn.count(b"\n")
    assert len(folder.metrics.read_bytes().splitlines()) == whole, "a line that is empty or torn is left"


def test_members_and_failures_are_of_this_attempt_even_those_before_its_start(tmp_path):
    folder = RunFolder.create(tmp_path, "x")
    played(folder, [*RUN[:7], (5.0, r.StandbyReady("standby 0")), (6.0, r.Checkpointed(1, "the disk is full"))])
    resumed = Recorder(folder, JOB)
    for record in (r.Vacant("shard 0", 1), r.Started(2, 2, 100, 40, 10, 2, samples=40), r.Joined("replica 1")):
        resumed.take(1.0, record)
    assert resumed.summary.failures == {"replica": 0, "shard": 1, "standby": 0, "checkpoint": 0}
    assert resumed.summary.members == {"replica 1"}
    resumed.finish()


def test_a_resumed_run_whose_metrics_are_gone_counts_its_samples_and_not_their_time(tmp_path):
    result = played(
        RunFolder.create(tmp_path, "x"), [(1.0, r.Started(2, 2, 100, 40, 10, 2, samples=40)), (3.0, step())]
    )
    assert (result["samples"], result["samples_per_second"], result["epochs"]) == (50, 5.0, 1)


class FullDisk:
    """A file on a disk that is full for a while, and takes half of a line before."""

    def __init__(self, file):
        self.file, self.writes = file, 0

    def write(self, data):
        self.writes += 1
        if self.writes == 2:
            return self.file.write(data[: len(data) // 2])
        if self.writes in (3, 4):
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def close(self):
        self.file.close()


def test_a_full_disk_is_told_once_and_the_job_goes_on(tmp_path):
    folder, told = RunFolder.create(tmp_path, "x"), []
    recorder = Recorder(folder, JOB, warn=told.append)
    recorder._file = FullDisk(recorder._file)
    for seconds, record in RUN:
        recorder.take(seconds, record)
    assert recorder.finish()["samples"] == 80
    assert len(told) == 1
    assert "No space left on device; the job continues" in told[0]
    assert list(read_metrics(folder.metrics)) == [RUN[0], *RUN[4:]]


def test_a_result_that_cannot_be_written_is_told_and_returned(tmp_path, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    folder, told = RunFolder.create(tmp_path, "x"), []
    recorder = Recorder(folder, JOB, warn=told.append)
    monkeypatch.setattr("os.fsync", full)
    assert recorder.finish()["task"] == "mnist"
    assert "result is only shown" in told[0]
    assert not folder.result.exists()


def test_the_curves_are_events_over_samples(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    played(RunFolder.create(tmp_path, "x"))
    events = EventAccumulator(str(tmp_path)).Reload()
    curves = {
        tag: [(point.step, round(point.value, 4)) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }
    assert curves == {
        "train/loss": [(10, 4.0), (40, 2.0), (80, 1.0)],
        "samples_per_second": [(10, 10.0), (40, 30.0), (80, 20.0)],
        "test/loss": [(40, 0.7), (80, 0.5)],
        "test/accuracy": [(40, 0.85), (80, 0.95)],
        "staleness/mean": [(80, round(11 / 15, 4))],
    }


def test_a_job_does_not_wait_without_end_for_its_curves(tmp_path, monkeypatch):
    folder, told, stuck = RunFolder.create(tmp_path / "run", "x"), [], threading.Event()
    recorder = Recorder(folder, JOB, warn=told.append)
    monkeypatch.setattr("distbelief.record.curves.CLOSE_SECONDS", 0.5)
    monkeypatch.setattr("distbelief.record.curves.SILENT", 0.01)
    monkeypatch.setattr(TensorBoardEvents, "write", lambda *_: stuck.wait())
    for seconds, record in RUN:
        recorder.take(seconds, record)
    assert recorder.finish()["outcome"] == "done"
    assert told[0].startswith("waits 0.5 s at most until TensorBoard events in")
    assert "were not written within" in told[1]
    stuck.set()


@pytest.mark.long
def test_neither_tensorboard_nor_rich_is_imported_before_it_is_needed():
    code = """
import sys, tempfile
from distbelief.core import records
from distbelief.record import checkpoints, folder, live, recorder, restore
run = recorder.Recorder(folder.RunFolder(__import__("pathlib").Path(tempfile.mkdtemp())), {})
shown = live.Live(sys.stderr)
stepped = records.Stepped("replica 0", 1, 1, 1, 0.5, 0, 1)
for one in (records.Started(1, 1, 1, 10, 1, 1), stepped, records.EpochDone(1)):
    run.take(1.0, one), shown.take(1.0, one, run.summary)
print([name for name in ("tensorboard", "torch.utils.tensorboard", "rich") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout == "[]\n"


def test_a_line_is_flat_json():
    assert json.loads(line(1.25, r.Applied("shard 0", 3, 30, {0: 2, 1: 1}))) == {
        "seconds": 1.25, "event": "Applied", "role": "shard 0", "updates": 3, "samples": 30, "staleness": {"0": 2,
            "1": 1}, "busy": 0.0,
    }  # fmt: skip
