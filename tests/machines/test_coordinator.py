"""The coordinator, message by message: who is told what in every phase, and what a death or a latecomer changes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from made import made as settings_of

from distbelief.core import events, messages, records
from distbelief.core.conversations import attendance, checkpointing, dealing, evaluating, initialising, membership
from distbelief.core.effects import Commit, Discard, Effect, End, Send, Wake, WriteRecord
from distbelief.core.events import BudgetSpent, CheckpointDue, Event, GuestsOver, HoldOver, ScriptOver
from distbelief.core.messages import Message, Version
from distbelief.core.portions import OWN, STREAM, Portion, Position, StartingPoint
from distbelief.core.records import Cause
from distbelief.core.settings import Settings
from distbelief.errors import RemoteProtocolError, UsageError
from distbelief.sharding.layout import Layout, Tensor, lay_out
from distbelief.strategies.parameter_server.players import coordinator

LAYOUT = lay_out([Tensor("weight", (1000,), "float32")])
VERSION = messages.Version(0, 0)


def made(**options: Any) -> Settings:
    """The settings of these tests, but for some."""
    usual = {"replicas": 2, "shards": 2, "batch_size": 1, "evaluate_every": 1, "checkpoint_every": 0}
    return settings_of(**{**usual, "snapshot_every": "0", **options})


SETTINGS = made()
ONE = {"replicas": 1, "shards": 1}


class Office:
    """A coordinator, and what it has said since it was last asked."""

    def __init__(self, settings: Settings = SETTINGS, evaluator: bool = False, **options: Any) -> None:
        self.coordinator = coordinator(settings, evaluator, StartingPoint(**options))
        self.effects: list[Effect] = []

    def tell(self, sender: str, *events: Event) -> Office:
        for event in events:
            self.effects += self.coordinator.handle(sender, event, None)
        return self

    def said(self, kind: type[Message], to: str | None = None) -> list[Any]:
        """The messages of a kind that were sent to a role since the last question; or to whom, where none is named."""
        sent = [effect for effect in self.effects if isinstance(effect, Send) and isinstance(effect.message, kind)]
        self.effects = [effect for effect in self.effects if effect not in sent]
        return [e.message for e in sent if e.to == to] if to else [e.to for e in sent]

    def recorded(self, kind: type[records.Record]) -> list[Any]:
        return [
            effect.record
            for effect in self.effects
            if isinstance(effect, WriteRecord) and isinstance(effect.record, kind)
        ]

    def join(self, role: str, samples: int = 8, layout: Layout = LAYOUT, **named: Any) -> Office:
        return self.tell(role, membership.Join(0, layout, samples, **named))

    def shards(self, *events: Event) -> Office:
        for i in range(self.coordinator.settings.shards):
            self.tell(f"shard {i}", *events)
        return self

    def gathered(self, role: str = "replica 0", lasts: bool = False, **options: Any) -> Office:
        """All shards are there and know their ranges, which `role` has told."""
        held = initialising.Restored(loaded=False, lasts=lasts)
        return self.shards(membership.Here()).join(role, **options).shards(held)

    def training(self, *more: str, lasts: bool = False, **options: Any) -> Office:
        """Training with replica 0 and others."""
        self.gathered(lasts=lasts, **options).tell("replica 0", initialising.Ready((0, 0)))
        for role in more:
            self.join(role, **options)
        self.said(membership.Welcome)
        return self


def progress(steps: int = 0, wants: bool = False) -> dealing.Progress:
    return dealing.Progress(steps, steps, steps, 0.0, 0, wants)


def gone(reason: str = "killed") -> events.Lost:
    return events.Lost(reason)


def test_shards_are_told_their_ranges_once_all_are_there_and_a_replica_has_told_the_layout() -> None:
    office = Office().join("replica 1").tell("shard 1", membership.Here())
    assert office.said(initialising.Restore) == []
    assert office.tell("shard 0", membership.Here()).said(initialising.Restore) == ["shard 0", "shard 1"]
    assert office.tell("shard 0", initialising.Restored(False)).said(membership.Welcome) == []
    assert office.tell("shard 1", initialising.Restored(False)).said(membership.Welcome, "replica 1")[0].initialise


def test_the_others_are_welcomed_when_the_first_has_initialised() -> None:
    office = Office().join("replica 1").join("replica 0").gathered("replica 2")
    assert office.said(membership.Welcome) == ["replica 1"]
    office.tell("replica 1", initialising.Ready((0, 0)))
    assert office.said(membership.Welcome) == ["replica 0", "replica 2"]


def test_a_replica_that_joins_when_the_one_that_initialised_has_died_is_asked_to() -> None:
    office = Office().gathered()
    assert office.tell("replica 0", gone()).said(membership.Welcome) == ["replica 0"]
    assert office.join("replica 1").said(membership.Welcome, "replica 1")[0].initialise
    before = (
        Office()
        .join("replica 0")
        .tell("replica 0", gone())
        .shards(membership.Here())
        .shards(initialising.Restored(loaded=False))
    )
    assert before.join("replica 1").said(membership.Welcome, "replica 1")[0].initialise


def test_a_replica_that_waits_takes_over_from_one_that_died_initialising() -> None:
    office = Office(made(replicas=3)).gathered().join("replica 2").join("replica 1")
    office.said(membership.Welcome)
    assert office.tell("replica 0", gone()).said(membership.Welcome, "replica 2")[0].initialise
    assert office.tell("replica 2", initialising.Ready((0, 0))).said(membership.Welcome, "replica 1") == [
        membership.Welcome(office.coordinator.plan, False, (messages.Address("", 0),) * 2)  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"samples": 9}, "has 9 training samples, but the job has 8"),
        ({"batch_size": 7}, "asks for batches of 7, but the job has 1"),
        ({"epochs": 7}, r"calls replica\.epochs\(7\), but the job has 1: all must have the same number"),
        ({"order": "sequential"}, "asks for order sequential, but the job has shuffled: all need the same"),
        ({"layout": lay_out([Tensor("weight", (1001,), "float32")])}, r"its 'weight' is parameter \[1001\]"),
    ],
    ids=["samples", "batch size", "epochs", "order", "layout"],
)
def test_a_replica_that_does_not_fit_is_refused_and_the_job_goes_on(options: dict[str, Any], says: str) -> None:
    office = Office().training().join("replica 1", **options)
    (refused,) = office.said(membership.Refused, "replica 1")
    assert re.search(says, refused.reason)
    assert office.tell("replica 0", progress(wants=True)).said(dealing.Deal) == ["replica 0"]


def test_nobody_begins_a_job_on_no_samples() -> None:
    (refused,) = Office().shards(membership.Here()).join("replica 0", samples=0).said(membership.Refused, "replica 0")
    assert refused.reason == "the training set is empty: there is nothing to train on"


OF = {"0.weight": 0, "1.weight": 1}
TWO = lay_out([Tensor(name, (500,), "float32") for name in OF], models=OF)
SINGULAR: list[dict[str, Any]] = [
    {"push_every": 2},
    {"fetch_every": 2},
    {"local_lr": 0.1},
    {"prefetch": 1},
    {"warm_start_steps": 3},
    {"standby": 1},
    {"strategy": "synchronous", "backup_workers": 1},
    {"strategy": "synchronous", "quorum": 1},
]


@pytest.mark.parametrize("options", SINGULAR, ids=str)
def test_what_several_models_cannot_have_is_refused_by_its_name(options: dict[str, Any]) -> None:
    office = Office(made(**options)).join("replica 0", layout=TWO)
    (refused,) = office.said(membership.Refused, "replica 0")
    assert refused.reason.startswith("--" + list(options)[-1].replace("_", "-"))
    assert Office(made()).shards(membership.Here()).join("replica 0", layout=TWO).said(membership.Refused) == []


def test_a_guest_has_no_part_of_an_order_that_all_share() -> None:
    office = Office(made(replicas=1, order="sequential")).training().join("replica 1")
    (refused,) = office.said(membership.Refused, "replica 1")
    assert "replica 1 would get no data: they are divided for 1 replicas" in refused.reason


@pytest.mark.parametrize("strategy", ["allreduce", "sandblaster", "hogwild", "locking", "single"])
def test_minibatches_of_a_replicas_own_are_refused_where_they_are_anybodys(strategy: str) -> None:
    for options, stream, asked in (
        ({"data": "own"}, False, "--data own"),
        ({"order": "sequential"}, False, "order sequential"),
        ({}, True, "a stream"),
    ):
        if strategy == "single" and "order" in options:
            settings_of(strategy, batch_size=1, **options).check_allotted(stream)
            continue
        with pytest.raises(UsageError, match=f"{asked} means nothing to strategy {strategy}; .*: use "):
            settings_of(strategy, batch_size=1, **options).check_allotted(stream)


def test_the_first_replicas_batch_size_is_the_jobs() -> None:
    office = Office().gathered(samples=8, batch_size=4)
    assert office.said(membership.Welcome, "replica 0")[0].plan.settings.batch_size == 4


def test_a_latecomer_is_told_that_the_job_is_over_and_goes_in_peace() -> None:
    office = Office().training().tell("replica 0", progress(wants=True))
    office.tell("replica 0", progress(wants=True), progress(wants=True), progress(wants=True))
    office.tell("supervisor", membership.Stop("enough"))
    assert office.said(membership.Finish) == ["replica 0"]
    assert office.join("replica 1").said(membership.Finish, "replica 1") == [membership.Finish("the job is ending")]
    office.tell("replica 1", membership.Leave())
    assert [(g.role, g.died) for g in office.recorded(records.Gone)] == [("replica 1", False)]


def test_a_dead_replicas_minibatches_are_dealt_to_one_that_was_told_to_drain() -> None:
    office = Office().training("replica 1")
    dealt = 0
    while office.tell("replica 0", progress(wants=True)).said(dealing.Deal):
        dealt += 1
    assert office.said(dealing.Drain) == ["replica 0"]
    office.tell("replica 1", progress(wants=True))
    assert office.said(dealing.Drain) == ["replica 1"]
    office.tell("replica 0", gone())
    assert [record.lost for record in office.recorded(records.Gone)] == [8]
    seen = len(office.said(dealing.Deal, "replica 1"))
    while not office.said(dealing.Drain):
        office.tell("replica 1", progress(wants=True))
        seen += len(office.said(dealing.Deal, "replica 1"))
    assert seen == dealt


def test_all_dead_is_failed_and_all_gone_in_peace_is_left() -> None:
    failed = Office(made(restarts=0)).training("replica 1").tell("replica 0", gone()).tell("replica 1", gone())
    left = Office().training("replica 1").tell("replica 0", membership.Leave()).tell("replica 1", membership.Leave())
    for office, outcome, cause in ((failed, "failed", Cause.REPLICAS_DIED), (left, "left", Cause.REPLICAS_LEFT)):
        office.tell("shard 0", checkpointing.SnapshotDone(1, "")).tell("shard 1", checkpointing.SnapshotDone(1, ""))
        assert any(isinstance(effect, Commit) for effect in office.effects)
        office.tell("store", events.Saved(1, "")).shards(checkpointing.Description(VERSION, 0, {}))
        assert [(record.outcome, record.cause) for record in office.recorded(records.Finished)] == [(outcome, cause)]
        assert isinstance(office.effects[-1], End)


def test_a_death_is_told_of_once_by_whomever() -> None:
    office = (
        Office()
        .training("replica 1")
        .tell("replica 0", gone("the supervisor says so"))
        .tell("replica 0", gone("the link says so"))
    )
    assert [record.reason for record in office.recorded(records.Gone)] == ["the supervisor says so"]


def test_the_next_life_of_a_dead_replica_takes_its_place_and_the_job_waits_for_it() -> None:
    office = Office(made(replicas=1, restarts=1)).training()
    office.tell("replica 0", progress(wants=True))
    [deal] = office.said(dealing.Deal, "replica 0")
    office.tell("replica 0", events.Lost("killed", 0))
    assert [record.lost for record in office.recorded(records.Gone)] == [deal.portion.count]
    assert office.said(membership.Stop) == office.said(membership.Finish) == []
    office.tell("replica 0", membership.Join(1, LAYOUT, 8, 0))
    assert not office.said(membership.Welcome, "replica 0")[0].initialise
    office.tell("replica 0", events.Lost("the first one, heard of late", 0)).tell("replica 0", progress(wants=True))
    assert office.said(dealing.Deal, "replica 0") == [deal]
    with pytest.raises(RemoteProtocolError, match="incarnation 0, which has ended"):
        office.tell("replica 0", membership.Join(0, LAYOUT, 8, 0))
    office.tell("replica 0", events.Lost("killed again", 1))
    assert office.coordinator.phase == "closing"


def test_a_guest_that_does_not_leave_is_waited_for_a_minute() -> None:
    """Nobody of this job can end it, as one whose script computes nothing."""
    office = Office().training("replica 2").tell("replica 2", progress(wants=True))
    office.tell("supervisor", membership.Stop("Ctrl-C")).tell("replica 0", membership.Leave())
    assert Wake(60.0, GuestsOver()) in office.effects
    assert office.said(checkpointing.Snapshot) == []
    assert office.tell("clock", events.Woke(GuestsOver())).said(membership.Refused) == ["replica 2"]
    assert office.said(checkpointing.Snapshot) == ["shard 0", "shard 1"]
    assert [gone.role for gone in office.recorded(records.Gone)] == ["replica 0", "replica 2"]


@pytest.mark.parametrize("again", [False, True])
def test_nobody_waits_for_a_guest_with_data_of_its_own_that_is_gone(again: bool) -> None:
    """It may have gone with its machine; where it comes again it goes on with what was left."""
    office = Office(made(replicas=1, data="own", restarts=3)).training("replica 1", samples=3)
    office.tell("replica 1", progress(wants=True), progress(steps=1), gone())
    assert [record.given_up for record in office.recorded(records.Gone)] == [2]
    if again:
        office.tell("replica 1", membership.Join(1, LAYOUT, 3, 0), progress(wants=True))
        assert office.said(dealing.Deal, "replica 1")[-1].portion.first % OWN == 1
    office.tell("replica 0", *(progress(wants=True) for _ in range(3)), progress(steps=3))
    assert office.said(membership.Finish) == ([] if again else ["replica 0"])


def test_a_replica_whose_stream_begins_otherwise_is_refused() -> None:
    """Compared are those of one epoch: who comes again says how it begins in the epoch in which that is."""
    office = Office(made(replicas=2)).training("replica 1", samples=STREAM)

    def begins(role: str, *start: int) -> list[membership.Refused]:
        told = msgspec.structs.replace(progress(), start=dealing.StreamStart(*start))
        office.tell(role, told)
        return office.said(membership.Refused, role)

    assert [begins("replica 0", 0, 7), begins("replica 1", 0, 7), begins("replica 1", 1, 8)] == [[], [], []]
    [refused] = begins("replica 0", 1, 9)
    assert "the stream of replica 0 begins with other samples than that of replica 1" in refused.reason
    assert "launch with --data own" in refused.reason


def test_a_job_says_that_it_waits_for_one_who_has_died_with_data_of_his_own() -> None:
    office = Office(made(replicas=2, data="own", restarts=1)).training("replica 1", samples=3)
    office.tell("replica 1", progress(wants=True), gone()).tell("replica 0", progress(wants=True))
    assert "replica 1 has not come back" in office.coordinator.waits()


def test_a_death_that_is_heard_of_once_the_next_life_is_there_is_not_its() -> None:
    office = Office(made(replicas=1, restarts=2)).training()
    office.tell("replica 0", membership.Join(1, LAYOUT, 8, 0), progress(wants=True))
    [held] = office.said(dealing.Deal, "replica 0")
    office.tell("replica 0", events.Lost("killed", 0))
    assert office.recorded(records.Gone) == []
    office.tell("replica 0", events.Lost("killed again", 1))
    assert [record.lost for record in office.recorded(records.Gone)] == [held.portion.count]


def test_a_shard_that_is_lost_before_there_is_a_checkpoint_ends_the_job() -> None:
    office = Office().training().tell("shard 1", gone("its disk burnt"))
    [finished] = office.recorded(records.Finished)
    assert (finished.outcome, finished.cause, finished.role) == ("failed", Cause.SHARD_UNSAVED, "shard 1")
    assert set(office.said(membership.Stop)) == {"shard 0", "shard 1", "replica 0"}


def killed(office: Office, life: int = 0) -> Office:
    """Shard 1 dies, and comes again on its memory."""
    assert office.tell("shard 1", events.Lost("killed", life)).recorded(records.Finished) == []
    office.said(checkpointing.Snapshot)
    again = initialising.Restored(loaded=True, lasts=True)
    return office.tell("shard 1", membership.Here(life + 1), again)


def test_a_job_ends_with_everything_whenever_a_shard_dies_whose_memory_outlives_it() -> None:
    office = Office(made(replicas=1, epochs=1, restarts=5)).training(samples=1, lasts=True)
    killed(office)  # there is no checkpoint yet
    epoch(office)
    assert office.said(membership.Finish) == ["replica 0"]
    office.tell("shard 1", events.Lost("killed", 1)).tell("replica 0", membership.Leave())
    assert office.recorded(records.Finished) == office.said(checkpointing.Snapshot) == [], "it waits for shard 1"
    office.tell("shard 1", membership.Here(2), initialising.Restored(loaded=True, lasts=True))
    assert office.said(checkpointing.Snapshot) == ["shard 0", "shard 1"]
    assert killed(office.tell("shard 0", checkpointing.SnapshotDone(1, "")), 2).said(checkpointing.Snapshot) == []
    office.tell("store", events.Saved(1, "shard 1 is gone"))
    assert office.said(checkpointing.Snapshot) == ["shard 0", "shard 1"], "what was given up is made"
    office.shards(checkpointing.SnapshotDone(2, "")).tell("store", events.Saved(2, "", "there"))
    office.tell("shard 0", checkpointing.Description(Version(0, 6), 8, {0: 6}))
    office.said(checkpointing.Describe)
    assert killed(office, 3).said(checkpointing.Describe) == ["shard 1"]
    office.tell("shard 1", checkpointing.Description(Version(4, 6), 8, {0: 6}))
    assert [record.cause for record in office.recorded(records.Finished)] == [Cause.EPOCHS_DONE]


def test_a_shard_whose_memory_outlives_it_is_waited_for_as_often_as_it_may_come_again() -> None:
    office = killed(Office(made(replicas=1, restarts=1)).training(lasts=True))
    office.tell("shard 1", events.Lost("killed", 1))
    assert [record.cause for record in office.recorded(records.Finished)] == [Cause.SHARD_SPENT]


def rounds(samples: int = 2, **options: Any) -> Office:
    settings = made(strategy="synchronous", epochs=9, checkpoint_every=1, **options)
    return Office(settings).training("replica 1", samples=samples)


def test_a_checkpoint_in_rounds_waits_for_those_who_hold_minibatches_but_not_for_ever() -> None:
    office = rounds().tell("replica 0", progress(wants=True)).tell("replica 1", progress(wants=True))
    office.tell("replica 0", progress(steps=1)).tell("replica 1", progress(steps=1))
    assert [effect.timer for effect in office.effects if isinstance(effect, Wake)] == [HoldOver(1)]
    assert office.said(checkpointing.Snapshot) == ["shard 0", "shard 1"], "nobody holds a minibatch"
    office = kept(samples=4).tell("replica 0", progress(wants=True)).tell("replica 1", progress(wants=True))
    office.tell("replica 0", progress(steps=1)).tell("clock", events.Woke(CheckpointDue()))
    assert office.said(checkpointing.Snapshot) == []
    assert office.tell("clock", events.Woke(HoldOver(2))).said(checkpointing.Snapshot) == ["shard 0", "shard 1"]


def kept(samples: int) -> Office:
    """In rounds, after the first checkpoint."""
    office = rounds(samples, snapshot_every="5s").shards(checkpointing.SnapshotDone(1, ""))
    office.said(checkpointing.Snapshot)
    return office.tell("store", events.Saved(1, "", "first"))


def test_rounds_are_dealt_evenly_whoever_asks_first_and_an_epoch_when_the_one_before_is_done() -> None:
    """Of five minibatches each of two replicas has two; who has none left is told so in each epoch."""
    office = Office(made(strategy="synchronous", epochs=2)).training(samples=5)
    dealt = office.tell("replica 0", progress(wants=True), progress(wants=True)).said(dealing.Deal, "replica 0")
    assert dealt == [dealing.Deal(Portion(0, 0, 2, every=2)), dealing.Deal(Portion(0, 4, 1, every=2))]
    office.join("replica 1", samples=5).tell("replica 1", progress(wants=True), progress(wants=True))
    assert office.said(dealing.Deal, "replica 1") == [dealing.Deal(Portion(0, 1, 2, every=2))]
    assert office.said(dealing.Drain, "replica 1") == [dealing.Drain(0)]
    office.tell("replica 1", progress(steps=2)).tell("replica 0", progress(steps=2, wants=True))
    assert office.said(dealing.Drain, "replica 0") == [dealing.Drain(0)]
    assert office.said(dealing.Deal) == []
    assert office.tell("replica 0", progress(steps=1)).said(dealing.Deal) == ["replica 1", "replica 0"]
    office = Office(made(strategy="synchronous", epochs=2)).training("replica 1", samples=1)
    office.tell("replica 0", progress(wants=True)).tell("replica 1", progress(wants=True))
    assert office.said(dealing.Drain, "replica 1") == [dealing.Drain(0)]
    office.tell("replica 0", progress(steps=1, wants=True))
    assert office.said(dealing.Drain, "replica 0") == [dealing.Drain(1)]
    assert office.said(dealing.Deal, "replica 1") == [dealing.Deal(Portion(1, 0, 1))]


def test_what_a_dead_replica_held_is_dealt_when_its_push_is_in_no_round_to_come() -> None:
    """Else a round might hold a minibatch twice."""
    office = rounds(samples=4).tell("replica 0", progress(wants=True)).tell("replica 1", progress(wants=True))
    office.tell("replica 1", progress(steps=2, wants=True)).tell("replica 0", events.Lost("killed", 0))
    office.said(dealing.Deal)
    assert office.said(attendance.Departed) == ["shard 0"]
    assert office.tell("replica 1", progress(wants=True)).said(dealing.Deal) == []
    told = office.tell("shard 0", attendance.Departed("replica 0", 0))
    assert told.said(dealing.Deal, "replica 1") == [dealing.Deal(Portion(0, 2, 1))]


def test_rounds_wait_for_no_replica_that_is_gone_for_good_before_it_has_come() -> None:
    """What was left for it is dealt to the others, who were told that there is nothing."""
    office = Office(made(strategy="synchronous", restarts=0)).training(samples=4)
    office.tell("replica 0", progress(wants=True), progress(wants=True))
    assert office.said(dealing.Drain, "replica 0") == [dealing.Drain(0)]
    office.said(dealing.Deal)
    assert office.tell("replica 1", events.Lost("killed", 0)).said(dealing.Deal) == []
    told = office.tell("shard 0", attendance.Departed("replica 1", 0))
    assert told.said(dealing.Deal, "replica 0") == [dealing.Deal(Portion(0, 1, 1))]


def test_what_was_dealt_ahead_in_rounds_is_given_back_for_a_checkpoint_and_dealt_next() -> None:
    office = kept(samples=200)
    dealt = office.tell("replica 0", progress(wants=True), progress(wants=True)).said(dealing.Deal, "replica 0")
    assert dealt == [dealing.Deal(Portion(0, 0, 32, every=2)), dealing.Deal(Portion(0, 64, 32, every=2))]
    dealt = office.tell("replica 1", progress(wants=True)).said(dealing.Deal, "replica 1")
    assert dealt == [dealing.Deal(Portion(0, 1, 32, every=2))]
    office.tell("replica 0", progress(steps=1)).tell("clock", events.Woke(CheckpointDue()))
    assert office.said(dealing.Recall) == ["replica 0", "replica 1"]
    returned = Portion(0, 6, 29, every=2), Portion(0, 64, 32, every=2)
    office.tell("replica 0", msgspec.structs.replace(progress(steps=1, wants=True), returned=returned))
    assert (office.said(dealing.Recall), office.said(dealing.Drain)) == ([], ["replica 0"]), "it was told once"
    office.tell(
        "replica 1", msgspec.structs.replace(progress(), returned=(Portion(0, 5, 30, every=2),)), progress(steps=2)
    )
    assert office.said(checkpointing.Snapshot, "shard 0") == [], "one is at a step still"
    office.tell("replica 0", progress(steps=1))
    assert office.said(checkpointing.Snapshot, "shard 0") == [checkpointing.Snapshot(2)]
    office.shards(checkpointing.SnapshotDone(2, ""))
    commit = [effect for effect in office.effects if isinstance(effect, Commit)][-1]
    assert commit.position == Position(0, 127, (Portion(0, 5, 122),))
    assert office.said(dealing.Deal, "replica 0") == [dealing.Deal(Portion(0, 6, 32, every=2))]


def test_what_a_hold_that_was_given_up_is_told_is_nothing_to_the_next() -> None:
    settings = made(replicas=1, epochs=9, checkpoint_every=1)
    office = Office(settings, checkpoint="somewhere", number=2)
    office.join("replica 0", samples=1).shards(membership.Here()).shards(initialising.Restored(loaded=True))
    epoch(office)
    assert office.said(checkpointing.Hold, "replica 0") == [checkpointing.Hold(1)]
    office.tell("shard 1", events.Lost("killed", 0), membership.Here(1), initialising.Restored(loaded=True))
    epoch(office)
    assert office.said(checkpointing.Hold, "replica 0") == [checkpointing.Hold(2)]
    office.tell("clock", events.Woke(HoldOver(1))).tell("replica 0", checkpointing.Held(1))
    assert office.said(checkpointing.Snapshot) == []
    assert office.tell("replica 0", checkpointing.Held(2)).said(checkpointing.Snapshot) == ["shard 0", "shard 1"]


def test_one_fall_of_all_shards_is_told_once() -> None:
    office = rounds(restarts=3)
    office.tell("replica 0", progress(wants=True)).tell("replica 1", progress(wants=True))
    office.tell("replica 0", progress(steps=1)).tell("replica 1", progress(steps=1))
    office.shards(checkpointing.SnapshotDone(1, "")).tell("store", events.Saved(1, "", "there"))
    office.tell("shard 0", events.Lost("killed", 0)).tell("shard 1", events.Lost("killed with it", 0))
    assert office.recorded(records.Rewound) == [records.Rewound(2, 1)]
    office.tell("shard 0", membership.Here(1)).tell("shard 1", membership.Here(1))
    assert [one.checkpoint for one in office.said(initialising.Restore, "shard 0")][-1] == "there"


def test_a_former_life_of_a_shard_is_told_nothing_once_another_is_granted() -> None:
    """The other shard lives when all go back, and its word that it is there may come late."""
    office = rounds(restarts=3)
    office.tell("replica 0", progress(wants=True)).tell("replica 1", progress(wants=True))
    office.tell("replica 0", progress(steps=1)).tell("replica 1", progress(steps=1))
    office.shards(checkpointing.SnapshotDone(1, "")).tell("store", events.Saved(1, "", "there"))
    office.tell("shard 0", events.Lost("killed", 0), membership.Here(1))
    office.said(initialising.Restore)
    assert office.tell("shard 1", membership.Here(0)).said(initialising.Restore) == []
    assert sorted(office.tell("shard 1", membership.Here(1)).said(initialising.Restore)) == ["shard 0", "shard 1"]


@pytest.mark.parametrize(
    ("sender", "event"),
    [
        ("shard 0", checkpointing.SnapshotDone(1, "")),
        ("shard 7", membership.Here()),
        ("shard 7", initialising.Restored(False)),
        ("replica 0", progress()),
        ("replica 0", membership.Rejoin()),
    ],
    ids=str,
)
def test_who_breaks_the_protocol_before_the_job_begins_costs_his_link_only(sender: str, event: Event) -> None:
    with pytest.raises(RemoteProtocolError):
        Office().tell(sender, event)


def test_a_replica_that_is_ready_before_the_shards_are_there_is_not_heeded() -> None:
    assert Office().tell("replica 0", initialising.Ready((0, 0))).effects == []


# warm start


def warming(steps: int = 3) -> Office:
    return Office(made(replicas=3, warm_start_steps=steps))


def test_a_warm_start_stays_with_the_replica_that_began_it() -> None:
    office = warming().gathered("replica 2").tell("replica 2", initialising.Ready((0, 0)), progress(wants=True))
    assert office.said(dealing.Deal) == ["replica 2"]
    office.join("replica 0").tell("replica 0", progress(wants=True)).tell("replica 2", progress(steps=1, wants=True))
    assert office.said(dealing.Deal) == ["replica 2"]
    assert office.said(dealing.Drain) == ["replica 0"]


def test_a_warm_start_goes_on_with_another_when_its_replica_dies() -> None:
    office = warming().training("replica 1", "replica 2")
    for role in ("replica 0", "replica 1", "replica 2"):
        office.tell(role, progress(wants=True))
    assert office.said(dealing.Deal) == ["replica 0"]
    office.tell("replica 0", progress(steps=1), gone())
    assert office.said(dealing.Deal) == ["replica 1"]
    office.tell("replica 1", progress(steps=1, wants=True), progress(steps=1))
    assert "replica 2" in office.said(dealing.Deal)
    assert office.coordinator.data.dealer.held("replica 2") == 1, "the others begin once the first steps are done"


def test_a_resumed_job_does_not_warm_up_again() -> None:
    office = Office(
        made(warm_start_steps=3, epochs=2), checkpoint="somewhere", position=Position(0, 4,
            ()), samples=4
    )  # fmt: skip
    office.join("replica 0").join("replica 1").shards(membership.Here()).shards(initialising.Restored(loaded=True))
    office.tell("replica 0", progress(wants=True)).tell("replica 1", progress(wants=True))
    assert office.said(dealing.Deal) == ["replica 0", "replica 1"]


# evaluations


def measured(number: int, accuracy: float = 0.5) -> evaluating.Evaluated:
    return evaluating.Evaluated(number, 1.0, accuracy)


def busy(epochs: int, **options: Any) -> Office:
    """Training with an evaluator, one minibatch in an epoch."""
    settings = made(replicas=1, epochs=epochs, **options)
    return Office(settings, evaluator=True).join("evaluator", samples=0).training(samples=1)


def epoch(office: Office) -> Office:
    return office.tell("replica 0", progress(wants=True)).tell("replica 0", progress(steps=1))


def test_one_evaluation_at_a_time_and_then_one_of_the_newest() -> None:
    office = epoch(busy(epochs=9))
    assert office.said(evaluating.Evaluate, "evaluator") == [evaluating.Evaluate(1)]
    epoch(epoch(office))
    assert office.said(evaluating.Evaluate) == []
    assert office.tell("evaluator", measured(1)).said(evaluating.Evaluate, "evaluator") == [evaluating.Evaluate(3)]
    assert office.tell("evaluator", measured(3)).said(evaluating.Evaluate) == []


def test_a_job_that_is_interrupted_waits_for_no_measure() -> None:
    office = epoch(busy(epochs=9))
    assert office.said(evaluating.Evaluate, "evaluator") == [evaluating.Evaluate(1)]
    office.tell("supervisor", membership.Stop("Ctrl-C")).tell("replica 0", membership.Leave())
    assert office.said(checkpointing.Snapshot) == ["shard 0", "shard 1"]
    assert office.said(evaluating.Evaluate) == []


def test_the_last_evaluation_is_of_the_end_whatever_was_owed() -> None:
    office = epoch(epoch(epoch(busy(epochs=3)))).tell("replica 0", membership.Leave())
    assert office.said(evaluating.Evaluate, "evaluator") == [evaluating.Evaluate(1)]
    assert office.tell("evaluator", measured(1)).said(evaluating.Evaluate, "evaluator") == [evaluating.Evaluate(3)]
    assert office.tell("evaluator", measured(3)).said(checkpointing.Snapshot) == ["shard 0", "shard 1"]


def test_a_target_that_is_reached_ends_the_job() -> None:
    office = epoch(epoch(busy(epochs=9, target_accuracy=0.9))).tell("evaluator", measured(1, 0.89))
    assert office.said(membership.Finish) == []
    for number, accuracy in ((2, 0.9), (3, 0.89), (4, 0.9)):
        assert epoch(office.tell("evaluator", measured(number, accuracy))).said(membership.Finish) == []
    assert office.tell("evaluator", measured(5, 0.9)).said(membership.Finish) == ["replica 0"]
    office.tell("replica 0", membership.Leave())
    assert office.said(evaluating.Evaluate, "evaluator")[-1] == evaluating.Evaluate(5)


def close(office: Office) -> Sequence[str]:
    office.shards(checkpointing.SnapshotDone(1, "")).tell("store", events.Saved(1, "")).shards(
        checkpointing.Description(VERSION, 0, {})
    )
    return [record.outcome for record in office.recorded(records.Finished)]


@pytest.mark.parametrize("when", ["before it joined", "before it was welcomed", "measuring", "idle"])
def test_a_dead_evaluator_is_not_waited_for(when: str) -> None:
    office = Office(made(replicas=1, epochs=2, restarts=0), evaluator=True)
    if when == "before it was welcomed":
        office.join("evaluator", samples=0)
    if when in ("before it joined", "before it was welcomed"):
        office.tell("evaluator", gone())
    office.training(samples=1)
    if when in ("measuring", "idle"):
        office.join("evaluator", samples=0)
    epoch(office)
    assert bool(office.said(evaluating.Evaluate)) == (when in ("measuring", "idle"))
    if when == "idle":
        office.tell("evaluator", measured(1))
    if when in ("measuring", "idle"):
        office.tell("evaluator", gone())
    epoch(office).tell("replica 0", membership.Leave())
    assert close(office) == ["done"]


def test_what_a_dead_evaluator_was_measuring_its_next_life_measures() -> None:
    office = Office(made(replicas=1, epochs=2), evaluator=True).training(samples=1)
    office.join("evaluator", samples=0)
    assert epoch(office).said(evaluating.Evaluate, "evaluator") == [evaluating.Evaluate(1)]
    office.tell("evaluator", events.Lost("killed", 0)).tell("evaluator", membership.Join(1, LAYOUT, 0, 0))
    assert office.said(evaluating.Evaluate, "evaluator") == [evaluating.Evaluate(1)]
    office.tell("evaluator", measured(1))
    epoch(office).tell("replica 0", membership.Leave()).tell("evaluator", measured(2))
    assert close(office) == ["done"]


@pytest.mark.parametrize("comes", [True, False])
def test_nothing_is_dealt_before_the_evaluator_has_come_or_is_gone(comes: bool) -> None:
    office = (
        Office(made(replicas=1, budget="3s"), evaluator=True)
        .training(samples=1)
        .tell("replica 0", progress(wants=True))
    )
    assert office.said(dealing.Deal) == []
    assert not [effect for effect in office.effects if isinstance(effect, Wake)]
    assert "(evaluator)" in office.coordinator.waits()
    office.join("evaluator", samples=0) if comes else office.tell("evaluator", gone())
    assert office.said(dealing.Deal) == ["replica 0"]
    assert office.effects.count(Wake(3.0, BudgetSpent())) == 1


def test_an_evaluator_that_comes_again_late_still_measures_the_end() -> None:
    office = busy(epochs=1).tell("evaluator", gone())
    epoch(office).tell("replica 0", membership.Leave())
    assert office.said(checkpointing.Snapshot) == []
    office.tell("evaluator", membership.Join(1, LAYOUT, 0, 0))
    assert office.said(evaluating.Evaluate, "evaluator") == [evaluating.Evaluate(1)]
    office.tell("evaluator", measured(1))
    assert close(office) == ["done"]


# checkpoints and epochs


def test_epochs_of_a_resumed_job_are_counted_with_what_was_left_of_them() -> None:
    position = Position(1, 1, (Portion(0, 1, 1),))
    office = Office(made(replicas=1, epochs=2), checkpoint="somewhere", position=position, samples=2)
    office.join("replica 0", samples=2).shards(membership.Here()).shards(initialising.Restored(loaded=True))
    office.tell("replica 0", progress(wants=True), progress(steps=1, wants=True), progress(steps=1))
    assert [record.epoch for record in office.recorded(records.EpochDone)] == [1, 2]


def test_a_job_resumed_at_its_end_ends() -> None:
    office = Office(SETTINGS, checkpoint="somewhere", position=Position(1, 0, ()), samples=8)
    office.join("replica 0").shards(membership.Here()).shards(initialising.Restored(loaded=True))
    assert office.said(membership.Finish) == ["replica 0"]


def test_a_checkpoints_position_is_of_the_moment_at_which_all_pushes_are_applied_and_an_error_is_recorded() -> None:
    office = Office(made(replicas=2, epochs=3, checkpoint_every=1)).training("replica 1", samples=2)
    office.tell("replica 0", progress(wants=True), progress(wants=True), progress(steps=2, wants=True))
    assert office.said(checkpointing.Hold) == ["replica 0", "replica 1"]
    office.tell("replica 1", checkpointing.Held(1))
    assert office.said(checkpointing.Snapshot) == []
    office.tell("replica 0", progress(), checkpointing.Held(1))
    assert office.said(checkpointing.Snapshot) == ["shard 0", "shard 1"]
    assert office.said(checkpointing.Go) == []
    office.tell("replica 0", progress(steps=1, wants=True)).shards(checkpointing.SnapshotDone(1, ""))
    assert office.said(checkpointing.Go) == ["replica 0", "replica 1"]
    (commit,) = [effect for effect in office.effects if isinstance(effect, Commit)]
    assert (commit.number, commit.position, commit.samples) == (1, Position(1, 1, (Portion(1, 0, 1),)), 2)
    office.tell("store", events.Saved(1, "the disk is full"))
    assert office.recorded(records.Checkpointed) == [records.Checkpointed(1, "the disk is full")]


def test_a_shard_that_could_not_save_keeps_the_checkpoint_from_being_the_newest() -> None:
    office = Office(made(replicas=1, epochs=3, checkpoint_every=1)).training(samples=1)
    epoch(office).tell("replica 0", checkpointing.Held(1)).tell(
        "shard 0", checkpointing.SnapshotDone(1, "the disk is full")
    ).tell("shard 1", checkpointing.SnapshotDone(1, ""))
    assert [effect for effect in office.effects if isinstance(effect, Commit | Discard)] == [Discard(1)]
    office.tell("store", events.Saved(1, ""))
    assert office.recorded(records.Checkpointed) == [records.Checkpointed(1, "the disk is full")]


# what scripts keep


def keeping(**options: Any) -> Office:
    """In training, with two replicas whose scripts keep something; one of three epochs is done, and saved."""
    office = Office(made(replicas=2, epochs=3, checkpoint_every=1, **options)).gathered(samples=2, lasts=True)
    office.tell("replica 0", initialising.Ready((0, 0)))
    for role in ("replica 0", "replica 1"):
        office.tell(role, membership.Join(0, LAYOUT, 2, keeps=True))
    return office.tell("replica 0", progress(wants=True), progress(wants=True))


def held(office: Office) -> Office:
    """An epoch is done, and both have said that they push nothing."""
    office.tell("replica 0", progress(steps=2))
    return office.tell("replica 1", checkpointing.Held(1)).tell("replica 0", checkpointing.Held(1))


def commits(office: Office) -> list[tuple[int, bool]]:
    """The checkpoints that were sealed, and whether what a script keeps is in them."""
    return [(one.number, one.script) for one in office.effects if isinstance(one, Commit)]


def test_a_checkpoint_has_what_the_lowest_replica_keeps_and_is_sealed_once_that_is_saved() -> None:
    office = held(keeping())
    assert office.said(checkpointing.SaveScript) == ["replica 0"]
    office.shards(checkpointing.SnapshotDone(1, ""))
    assert (office.said(checkpointing.Go), commits(office)) == (["replica 0", "replica 1"], [])
    office.tell("replica 1", checkpointing.ScriptSaved(1, "")).tell("replica 0", checkpointing.ScriptSaved(0, ""))
    assert commits(office) == [], "it was neither asked nor for that"
    assert commits(office.tell("replica 0", checkpointing.ScriptSaved(1, ""))) == [(1, True)]


def test_a_checkpoint_is_sealed_where_a_script_has_saved_what_it_keeps_before_the_shards() -> None:
    office = held(keeping()).tell("replica 0", checkpointing.ScriptSaved(1, ""))
    assert commits(office) == []
    assert commits(office.shards(checkpointing.SnapshotDone(1, ""))) == [(1, True)]


@pytest.mark.parametrize(
    ("sender", "event", "told"),
    [
        ("replica 0", gone(), ""),
        ("clock", events.Woke(ScriptOver(1)), "checkpoint 1 has the script's earlier state: replica 0 is busy for 60"),
        ("replica 0", checkpointing.ScriptSaved(1, "no room"), "the state of the script of replica 0 was not saved"),
    ],
    ids=["gone", "late", "failed"],
)
def test_a_checkpoint_does_without_what_a_script_keeps_that_is_not_to_be_had(
    sender: str, event: Event, told: str
) -> None:
    office = held(keeping()).shards(checkpointing.SnapshotDone(1, ""))
    assert commits(office.tell(sender, event)) == [(1, False)]
    notes = [record.text for record in office.recorded(records.Note) if "script" in record.text]
    assert [note.startswith(told) for note in notes] == [True] * bool(told)


def test_a_shard_that_dies_while_a_script_is_waited_for_has_the_checkpoint_cleared_away() -> None:
    office = held(keeping(restarts=1)).shards(checkpointing.SnapshotDone(1, ""))
    office.tell("shard 0", events.Lost("killed", 0)).tell("replica 0", checkpointing.ScriptSaved(1, ""))
    assert [effect for effect in office.effects if isinstance(effect, Commit | Discard)] == [Discard(1)]


def test_the_lowest_replica_saves_what_it_keeps_before_it_leaves_and_as_a_job_ends_no_other() -> None:
    office = keeping()
    office.tell("replica 0", membership.Leave(for_good=True))
    assert (office.said(checkpointing.SaveScript), office.said(membership.Farewell)) == (["replica 0"], [])
    office.tell("replica 0", checkpointing.ScriptSaved(0, ""), membership.Leave(for_good=True))
    assert (office.said(checkpointing.SaveScript), office.said(membership.Farewell)) == ([], ["replica 0"])
    office.tell("replica 1", membership.Leave(for_good=True, stops=True))
    assert office.said(checkpointing.SaveScript) == ["replica 1"], "it is the lowest now"
    office = keeping().tell("supervisor", membership.Stop("enough")).tell("replica 1", membership.Leave())
    assert (office.said(checkpointing.SaveScript), office.said(membership.Farewell)) == ([], ["replica 1"])
    office.tell("replica 0", membership.Leave(), checkpointing.ScriptSaved(0, ""), membership.Leave())
    assert (office.said(checkpointing.SaveScript), office.said(membership.Farewell)) == (["replica 0"], ["replica 0"])
    office = keeping().tell("supervisor", membership.Stop("enough")).tell("replica 0", membership.Leave())
    office.tell("replica 0", checkpointing.ScriptSaved(0, ""), membership.Leave()).said(checkpointing.SaveScript)
    assert office.tell("replica 1", membership.Leave()).said(checkpointing.SaveScript) == []


def test_a_script_that_begins_is_told_the_earliest_epoch_with_minibatches_left_and_the_newest_checkpoint() -> None:
    office = Office(position=Position(4, 0, (Portion(3, 1, 1),)), checkpoint="there", number=2)
    office.tell("replica 1", membership.AskReached())
    assert office.said(membership.JobReached, "replica 1") == [membership.JobReached(3, "there", True)]
    office = keeping().tell("replica 0", progress(steps=1)).tell("replica 1", membership.AskReached())
    assert office.said(membership.JobReached, "replica 1") == [membership.JobReached(0, "", False)]
    office.tell("replica 0", progress(steps=1)).tell("replica 1", membership.AskReached())
    assert office.said(membership.JobReached, "replica 1") == [membership.JobReached(1, "", False)]


# trouble


@pytest.mark.parametrize(
    ("sender", "event", "says"),
    [
        ("replica 7", progress(), "replica 7 reports progress but is no member"),
        ("replica 0", progress(steps=3), "replica 0 reports 3 more steps than it was dealt"),
        ("replica 0", dealing.Drain(), "the coordinator does not take Drain"),
        ("replica 0", membership.Stop("mine"), "replica 0 may not send Stop; it is for supervisor"),
        ("shard 0", progress(), "shard 0 may not send Progress; it is for replica"),
        ("replica 0", dealing.Progress(-1, 0, 0, 0.0, 0, False), "replica 0 reports -1 steps"),
        ("replica 0", dealing.Progress(0, (1 << 64) - 1, 0, 0.0, 0, False), "reports 18446744073709551615 samples"),
        ("shard 0", checkpointing.SnapshotDone(1, ""), "shard 0 saved checkpoint 1 without being asked"),
    ],
)
def test_who_breaks_the_protocol_is_told_apart(sender: str, event: Event, says: str) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        Office().training().tell(sender, event)


def test_a_stop_before_training_ends_the_job_at_once_and_one_at_its_end_does_nothing() -> None:
    office = Office().join("replica 0").tell("supervisor", membership.Stop("enough"))
    assert office.recorded(records.Finished) == [records.Finished.of(Cause.INTERRUPTED, "enough")]
    assert set(office.said(membership.Stop)) == {"shard 0", "shard 1", "replica 0"}
    leaving = epoch(busy(epochs=1)).tell("supervisor", membership.Stop("enough"))
    assert leaving.recorded(records.Finished) == []
