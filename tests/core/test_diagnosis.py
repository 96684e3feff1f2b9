"""Rules of what is wrong, over records that are made up: of every strategy, of every beginning of a run, and of runs of
earlier versions.
"""

from __future__ import annotations

import msgspec
import pytest

import distbelief as db
from distbelief.cli.options import arguments
from distbelief.core import records as r
from distbelief.core.records import Cause
from distbelief.core.settings import flat
from distbelief.record.diagnosis import GRACE, Diagnosis, Level, diagnose
from distbelief.record.live import summary as lines
from distbelief.record.summary import Summary
from distbelief.record.timeline import Timeline

SETTINGS = {
    "downpour": db.Downpour(4, 2),
    "downpour, momentum": db.Downpour(4, 2, db.optim("momentum")),
    "local steps": db.Downpour(4, 2, db.optim("delayed-nesterov"), local_optimizer=db.optim("adamw")),
    "bounded": db.Bounded(4, 2),
    "softsync": db.Softsync(4, 2),
    "synchronous": db.Synchronous(4, 2),
    "synchronous, backup": db.Synchronous(4, 2, backup_workers=1),
    "synchronous, quorum": db.Synchronous(4, 2, quorum=0.5),
    "allreduce": db.Allreduce(4),
    "hogwild": db.Hogwild(4),
    "locking": db.Locking(4),
    "sandblaster": db.Sandblaster(4, 2),
    "single": db.Single(),
    "split": db.Downpour(4, 2, partitions=2),
}
SAMPLES = 10_000
Records = list[tuple[float, r.Record]]


def started(strategy: db.Strategy) -> list[r.Record]:
    replicas = getattr(strategy, "replicas", 1)
    shards = 0 if isinstance(strategy, db.Allreduce | db.Single) else strategy.parts
    begun = r.Started(replicas, shards, 10**6, SAMPLES, 10, 100, unit=strategy.unit)
    names = [f"replica {i}" for i in range(replicas)] if replicas > 1 else ["single"]
    return [begun, *map(r.Joined, names)]


def steps(who: int, loss: float, count: int = 100, of: int = 4) -> r.Stepped:
    return r.Stepped("single" if of == 1 else f"replica {who}", count, 10 * count, count, loss, 0, count)


def times(who: int, compute: float = 0.0, update: float = 0.0, wait: float = 0.0, load: float = 0.0) -> r.StepsTimed:
    return r.StepsTimed(f"replica {who}", 10, compute, update, 0.0, wait, load, {"shard 0": wait})


def trained(of: int, losses: list[float], idle: tuple[int, ...] = (), slow: int = -1) -> list[r.Record]:
    return [
        steps(who, loss, 2 if who == slow else 100, of)
        for loss in losses
        for who in range(of)
        if who not in idle or of == 1
    ]


def cases(of: int) -> dict[str, list[r.Record]]:
    """What happened to jobs of so many replicas."""
    falls = [2.0, 1.5, 1.0, 0.8, 0.7, 0.6, 0.5, 0.4]
    late = {2: 1000, 90: 50}
    everyone = range(of)
    return {
        "nothing": trained(of, falls),
        "rises": [
            *trained(of, [2.0, 1.0, 0.5, 2.0, 3.0, 4.0, 5.0, 6.0]),
            r.Applied("shard 0", 1000, SAMPLES, {3: 1000}),
        ],
        "not finite": [*trained(of, falls[:2]), r.Finished.of(Cause.LOSS_NOT_FINITE, "the loss is inf")],
        "slow": [*trained(of, falls, slow=1), r.Applied("shard 0", 1000, SAMPLES, late)],
        "silent": trained(of, falls, idle=(1,)),
        "idle": trained(of, falls, idle=(1, 2)),
        "starved": [*trained(of, falls), *(times(i, compute=1.0, load=3.0) for i in everyone)],
        "shards": [
            *trained(of, falls),
            *(times(i, compute=1.0, wait=9.0) for i in everyone),
            r.Applied("shard 0", 1, 1, {}, busy=1e3),
        ],
        "network": [
            *trained(of, falls),
            *(times(i, compute=1.0, wait=20.0) for i in everyone),
            r.BytesCounted("replica 0", {"push": 10**9}, {}, {}),
            r.Resources(9, 1, 10**9, 10**10, 10**12, 10**12),
        ],
        "alone": [*trained(of, falls), *(times(i, compute=1e-3) for i in everyone)],
        "evaluations": [r.Tested(1, 0.5, 0.9, {}, 50.0), *trained(of, falls)],
        "checkpoints": [r.Checkpointed(1, "", 50.0), *trained(of, falls)],
        "enough": [*trained(of, falls), r.Resources(9, 9, 10**9, 10**10, 10**12, 10**12)],
        "no folder": [*trained(of, falls), r.Resources(9, 9, 10**9, 10**10, 0, 0)],
        "machine": [*trained(of, falls), r.Resources(1, 9, 10**6, 10**10, 10**6, 10**12)],
    }


def played(strategy: db.Strategy, happened: list[r.Record], seconds: float = 40.0) -> tuple[Records, Summary, Timeline]:
    """The records of a job, spread over so many seconds, and their sums."""
    settings = flat(db.Job("digits", strategy).unchecked)
    sums, timeline = Summary({"strategy": strategy.name, "settings": settings}), Timeline.of({})
    everything = [*started(strategy), *happened]
    timed = [(i * seconds / len(everything), one) for i, one in enumerate(everything)]
    for second, record in timed:
        sums.take(second, record)
        timeline.take(second, record, sums)
    return timed, sums, timeline


def found(strategy: db.Strategy, case: str) -> dict[str, Diagnosis]:
    _, sums, timeline = played(strategy, cases(getattr(strategy, "replicas", 1))[case])
    return {one.rule: one for one in diagnose(sums, timeline)}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_remedy_is_an_option_of_the_strategy(name: str) -> None:
    strategy = SETTINGS[name]
    known = {argument.option for argument in arguments("train", strategy.name)}
    for case in cases(4).keys() - ({"shards"} if name == "hogwild" else set()):  # its replicas wait for no shard
        for one in found(strategy, case).values():
            options = {word for word in one.remedy.split() if word.startswith("--")}
            assert options <= known, (case, one.rule)
            assert one.remedy or one.rule == "starved", (case, one.rule)


def test_every_rule_finds_something_in_some_of_these() -> None:
    everything = {rule for strategy in SETTINGS.values() for case in cases(4) for rule in found(strategy, case)}
    assert everything == {
        "rate", "momentum", "staleness", "silent", "idle", "starved", "shards", "network", "beside", "alone", "cores",
        "memory", "disk",
    }  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("case", ["nothing", "enough", "no folder"])
def test_nothing_is_wrong_with_a_job_to_which_nothing_happened(name: str, case: str) -> None:
    assert found(SETTINGS[name], case) == {}


def test_loading_is_a_part_of_the_time_of_steps() -> None:
    told = found(SETTINGS["downpour"], "starved")["starved"]
    assert told.evidence == {"share": 0.75, "load": 0.3, "compute": 0.1, "starved": 4}
    assert "loading a minibatch takes 300 ms, and computing it 100 ms" in told.sentence


def test_replicas_of_one_machine_do_not_wait_for_a_network() -> None:
    strategy, happened = SETTINGS["downpour"], cases(4)["network"]
    assert [one.rule for one in diagnose(played(strategy, happened)[1])] == ["network"]
    happened[-1] = r.Resources(9, 4, 10**9, 10**10, 10**12, 10**12)
    assert diagnose(played(strategy, happened)[1]) == []


def test_evaluations_count_where_they_hold_the_training_up() -> None:
    assert found(SETTINGS["single"], "evaluations")["beside"].remedy == "--evaluate-every 2"
    assert found(SETTINGS["allreduce"], "evaluations").keys() == {"beside"}
    assert found(SETTINGS["downpour"], "evaluations") == {}
    assert found(SETTINGS["downpour"], "checkpoints").keys() == {"beside"}


def test_a_short_job_is_advised_of_what_a_long_one_does_wrong() -> None:
    for seconds, level in ((4.0, Level.ADVICE), (6.0, Level.WRONG)):
        happened = [*trained(4, [2.0, 1.5]), r.Checkpointed(1, "", seconds), steps(0, 1.0)]
        _, sums, _ = played(SETTINGS["downpour"], happened)
        sums.seconds = 20.0
        assert [one.level for one in diagnose(sums)] == [level]


@pytest.mark.parametrize("name", SETTINGS)
def test_every_beginning_of_a_run_can_be_diagnosed_and_nothing_is_found_in_its_first_seconds(name: str) -> None:
    for case, happened in cases(getattr(SETTINGS[name], "replicas", 1)).items():
        timed, sums, timeline = played(SETTINGS[name], [])
        for seconds, record in timed + [(i * 0.5, one) for i, one in enumerate(happened)]:
            sums.take(seconds, record)
            timeline.take(seconds, record, sums)
            early = diagnose(sums, timeline) + diagnose(sums)
            assert sums.seconds >= GRACE or sums.cause or not early, case


def test_a_run_of_an_earlier_version_can_be_read() -> None:
    """Its records have fewer fields, and its sums too."""
    read = msgspec.json.Decoder(r.AnyRecord).decode
    sums = Summary({"settings": {}})
    sums.take(
        0.0,
        read(
            b'{"event":"Started","replicas":2,"shards":1,"parameters":9,"samples_per_epoch":40,"batch_size":4,"epochs":2}'
        ),
    )
    sums.take(9.0, read(b'{"event":"Checkpointed","number":1,"error":""}'))
    sums.take(9.0, read(b'{"event":"Stepped","role":"replica 0","steps":9,"samples":36,"pushes":9,"loss":0.5}'))
    kept = msgspec.to_builtins(sums)
    for name in ("beside", "_last_beside", "busy", "resources", "_ending", "_older"):
        del kept[name]
    for replica in kept["replicas"].values():
        del replica["joined"]
    assert diagnose(msgspec.convert(kept, Summary, strict=False)) == []


def test_what_is_wrong_stands_in_the_last_lines_of_a_run_with_its_remedy() -> None:
    _, sums, timeline = played(SETTINGS["downpour"], cases(4)["machine"])
    told = msgspec.to_builtins(diagnose(sums, timeline))
    text = lines({**sums.result(), "diagnosis": told}).splitlines()
    assert "wrong       memory is nearly full: 0.001 of 10 GB are free; try --replicas 2 or --batch-size 5" in text
    assert "advice      9 threads compute gradients on 1 cores; try --threads 1" in text


def test_replicas_that_leave_at_the_end_took_part_and_those_that_left_before_did_not() -> None:
    leaves = [r.Gone(f"replica {i}", 0, "it was done", died=False) for i in (1, 2)]
    ends = r.Ending.of(Cause.EPOCHS_DONE, "all epochs are done")
    idle = trained(4, [1.0] * 8, idle=(1, 2))
    for happened, rules in (([*idle, ends, *leaves], {"idle"}), ([*leaves, *idle, ends], set())):
        _, sums, timeline = played(SETTINGS["downpour"], happened)
        assert {one.rule for one in diagnose(sums, timeline)} == rules
