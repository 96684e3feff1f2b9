"""The stories, effect by effect: what a replica and the evaluator do when the job ends, or ends before them."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import pytest
from made import made

from distbelief.core import events, messages
from distbelief.core.conversations import checkpointing, dealing, evaluating, membership, pushing
from distbelief.core.effects import (
    GLANCE,
    PAUSE,
    RECEIVE,
    Arrival,
    Attach,
    Compute,
    Computed,
    Connect,
    Effect,
    Measure,
    Measured,
    Payload,
    Save,
    Send,
    Story,
)
from distbelief.core.events import Event
from distbelief.core.messages import Version
from distbelief.core.portions import Portion
from distbelief.core.settings import Plan, Settings
from distbelief.errors import JobFailed, LayoutError, LocalProtocolError, TrainingError, UsageError
from distbelief.replica.downpour import DownpourTraining
from distbelief.replica.evaluator import Evaluator
from distbelief.replica.served_replica import LoopRequest, ServedReplica
from distbelief.replica.vectors import PhantomVectors
from distbelief.sharding.assignments import cut
from distbelief.sharding.layout import Tensor, lay_out
from distbelief.strategies import Downpour

PLACES = (messages.Address("unix:@a", 0), messages.Address("unix:@b", 0))
LAYOUT = lay_out([Tensor("weight", (100,), "float32")])


def plan(**settings: Any) -> Plan:
    return Plan(made(**{"shards": 1, **settings}), LAYOUT, cut(LAYOUT, 1, 1), samples=8)


class Reader:
    """Reads a story up to its next wait."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.done: list[Effect] = []
        self.waits: Effect | None = None
        self.asked: dict[tuple[str, int, int], int] = {}
        """By shard, slot and start, the number of the fetch that was asked last."""
        self.go_on(None)

    def go_on(self, answer: Any) -> Reader:
        while True:
            try:
                self.waits = effect = self.story.send(answer)
            except StopIteration:
                self.waits = None
                return self
            if effect is RECEIVE or isinstance(effect, Compute | Measure):
                return self
            if effect is not GLANCE:
                self.done.append(effect)
            if isinstance(effect, Send) and isinstance(asked := effect.message, pushing.Fetch):
                self.asked[effect.to, asked.slot, asked.start] = asked.number
            answer = True if isinstance(effect, Connect) else events.Saved(1, "") if isinstance(effect, Save) else None

    def tell(self, sender: str, event: Event) -> Reader:
        """Tell it something; an answer to the last question, where it has no number."""
        assert self.waits is RECEIVE
        if isinstance(event, pushing.Fetched) and not event.number:
            number = self.asked.get((sender, event.slot, event.start), 0)
            event = msgspec.structs.replace(event, number=number)
        return self.go_on(Arrival(sender, event))

    def sent(self) -> list[messages.Message]:
        sent = [effect.message for effect in self.done if isinstance(effect, Send)]
        self.done.clear()
        return sent


def replica(**settings: Any) -> Reader:
    """A replica that computes its first minibatch of three."""
    reader = Reader(ServedReplica(DownpourTraining, "replica 0", PhantomVectors(LAYOUT), 8).story())
    reader.tell("coordinator", membership.Welcome(plan(**settings), False, PLACES[:1]))
    reader.tell("shard 0", pushing.Fetched(0, 0, 400, Version(0, 5)))
    reader.tell("coordinator", dealing.Deal(Portion(0, 0, 3)))
    while reader.waits is RECEIVE:
        reader.tell("shard 0", pushing.Fetched(0, 0, 400, Version(0, 5)))
    assert isinstance(reader.waits, Compute)
    return reader


COMPUTED = Computed(1.0, 1, 0.0)


def test_a_replica_that_is_too_late_leaves_in_peace() -> None:
    reader = Reader(ServedReplica(DownpourTraining, "replica 0", PhantomVectors(LAYOUT), 8).story()).tell(
        "coordinator", membership.Finish("the job is ending")
    )
    assert reader.waits is None
    assert reader.sent() == [membership.Join(0, LAYOUT, 8, 0), membership.Leave(for_good=True)]


@pytest.mark.parametrize(("push_every", "computes"), [(1, 2), (2, 3), (3, 3), (9, 3)])
def test_a_replica_told_to_finish_pushes_what_it_has_and_leaves_the_rest_of_its_portion(
    push_every: int, computes: int
) -> None:
    reader = replica(push_every=push_every, fetch_every=9)
    reader.sent()
    computed = 0
    while isinstance(reader.waits, Compute):
        reader.go_on(COMPUTED)
        computed += 1
    assert computed == computes
    reader.tell("coordinator", membership.Finish("the target is reached"))
    sent = reader.sent()
    for message in sent:
        if isinstance(message, pushing.Push):
            assert reader.waits is RECEIVE, "it leaves before all its pushes are acknowledged"
            reader.tell("shard 0", pushing.Pushed(message.slot, message.clock, Version(0, 5 + message.clock)))
            sent += reader.sent()  # which may push what is left
    *_, report, leave = sent
    assert isinstance(report, dealing.Progress)
    assert (report.steps, leave) == (computed, membership.Leave())
    assert reader.tell("coordinator", membership.Farewell()).waits is None


def test_a_push_names_the_version_it_was_computed_from_though_a_newer_has_arrived() -> None:
    """While one shard is slow to acknowledge, the other's answer to the next fetch is here already."""
    two = Plan(Settings(strategy=Downpour(2, 2, prefetch=1, fetch_every=3)), LAYOUT, cut(LAYOUT, 1, 2), samples=8)
    parts = [(f"shard {i}", a.moving.start, a.moving.stop) for i, a in enumerate(two.assignments)]
    reader = Reader(ServedReplica(DownpourTraining, "replica 0", PhantomVectors(LAYOUT), 8).story()).tell(
        "coordinator", membership.Welcome(two, False, PLACES[:2])
    )
    for role, start, stop in parts:
        reader.tell(role, pushing.Fetched(0, start, stop, Version(0, 5)))
    reader.tell("coordinator", dealing.Deal(Portion(0, 0, 5)))
    for role, start, stop in parts:
        reader.tell(role, pushing.Fetched(1, start, stop, Version(0, 5)))
    reader.go_on(COMPUTED).go_on(COMPUTED).go_on(COMPUTED)
    assert reader.waits is RECEIVE, "both slots are out"
    reader.tell("shard 1", pushing.Pushed(0, 1, Version(0, 8))).tell("shard 1", pushing.Pushed(1, 2, Version(0, 9)))
    reader.tell("shard 1", pushing.Fetched(0, *parts[1][1:], Version(0, 9)))
    reader.sent()
    reader.tell("shard 0", pushing.Pushed(0, 1, Version(0, 8)))
    assert [(m.clock, m.version) for m in reader.sent() if isinstance(m, pushing.Push)] == [(3, Version(0, 5))] * 2


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_names_replica_step_minibatch_and_remedy(loss: float) -> None:
    with pytest.raises(
        TrainingError, match=r"replica 0: the loss is (nan|inf) at step 0 \(epoch 1, minibatch 0\); lower --lr"
    ):
        replica().go_on(Computed(loss, 1, 0.0))


@pytest.mark.parametrize(
    ("sender", "event", "error", "says"),
    [
        ("coordinator", membership.Refused("its 'weight' differs", layout=True), LayoutError, "its 'weight' differs"),
        ("coordinator", membership.Refused("there is nothing to train on"), UsageError, "nothing to train on"),
        ("coordinator", membership.Stop("enough"), JobFailed, "replica 0: the job was ended: enough"),
        ("coordinator", events.Lost("killed"), JobFailed, r"replica 0: coordinator is gone \(killed\)"),
        ("coordinator", membership.Here(), LocalProtocolError, "replica 0 cannot take Here from coordinator"),
    ],
)
def test_a_replica_that_cannot_take_part_says_why(sender: str, event: Event, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Reader(ServedReplica(DownpourTraining, "replica 0", PhantomVectors(LAYOUT), 8).story()).tell(sender, event)


def evaluator() -> Reader:
    reader = Reader(Evaluator(PhantomVectors(LAYOUT)).story()).tell(
        "coordinator", membership.Welcome(plan(), False, PLACES[:1])
    )
    assert any(isinstance(effect, Attach) for effect in reader.done)
    return reader


def test_the_evaluator_fetches_when_it_is_to_measure_and_not_before_and_says_whom_it_waits_for() -> None:
    player = Evaluator(PhantomVectors(LAYOUT))
    reader = Reader(player.story())
    assert player.waits() == "to be welcomed by the coordinator"
    reader.tell("coordinator", membership.Welcome(plan(), False, PLACES[:1]))
    assert player.waits() == "to be told to measure"
    assert not any(isinstance(message, pushing.Fetch) for message in reader.sent()), (
        "a shard may hold a fetch, and answers each once"
    )
    reader.tell("coordinator", evaluating.Evaluate(3))
    assert player.waits() == "for parameters from shard 0"
    reader.tell("shard 0", events.Lost("killed", 0))
    assert player.waits() == "for the next life of shard 0"


def test_an_answer_to_what_was_asked_of_a_life_before_counts_for_nothing() -> None:
    """As one that a shard in memory gives after its process has come again."""
    reader = replica()
    reader.go_on(COMPUTED).tell("shard 0", events.Lost("killed", 0))
    reader.sent()
    before = reader.asked["shard 0", 0, 0]
    again = messages.Address("unix:@a", 1)
    reader.tell("coordinator", membership.Welcome(plan(), False, (again,)))
    push, fetch = (one for one in reader.sent() if isinstance(one, pushing.Push | pushing.Fetch))
    assert isinstance(push, pushing.Push)
    assert fetch.number > before
    reader.tell("shard 0", pushing.Fetched(0, 0, 400, Version(1, 6), number=before))
    assert reader.waits is RECEIVE
    reader.tell("shard 0", pushing.Pushed(0, 1, Version(1, 6))).tell(
        "shard 0", pushing.Fetched(0, 0, 400, Version(1, 6), number=fetch.number)
    )
    assert isinstance(reader.waits, Compute)


def test_the_evaluator_measures_what_it_fetched_since_it_was_told_to() -> None:
    reader = evaluator()
    assert reader.waits is RECEIVE
    reader.sent()
    reader.tell("coordinator", evaluating.Evaluate(3))
    assert reader.sent() == [pushing.Fetch(0, 0, 400, number=1)]
    reader.tell("shard 0", pushing.Fetched(0, 0, 400, Version(0, 9)))
    assert isinstance(reader.waits, Measure)
    reader.go_on(Measured(0.5, 0.9))
    assert reader.sent() == [evaluating.Evaluated(3, 0.5, 0.9)]
    assert reader.tell("coordinator", membership.Stop("done")).waits is None


def test_the_evaluator_waits_for_the_coordinators_word_when_a_shard_has_ended_first() -> None:
    reader = evaluator().tell("shard 0", events.Lost("it ended"))
    assert reader.waits is RECEIVE
    assert reader.tell("coordinator", membership.Stop("done")).waits is None


def test_the_evaluator_may_be_stopped_before_it_is_welcomed() -> None:
    assert Reader(Evaluator(PhantomVectors(LAYOUT)).story()).tell("coordinator", membership.Stop("done")).waits is None


@pytest.mark.parametrize(
    ("event", "error"),
    [(events.Lost("killed"), JobFailed), (membership.Refused("it differs", layout=True), LayoutError)],
    ids=str,
)
def test_an_evaluator_without_a_coordinator_says_why(event: Event, error: type[Exception]) -> None:
    with pytest.raises(error):
        evaluator().tell("coordinator", event)


class Swapped(PhantomVectors):
    """Vectors that count into which of them the model was moved."""

    def __init__(self) -> None:
        super().__init__(LAYOUT)
        self.landings: list[int] = []

    def swap(self, landing: int) -> None:
        self.landings.append(landing)


@pytest.mark.parametrize(("prefetch", "landings"), [(0, [0, 0, 0, 0, 0]), (1, [0, 1, 0, 1, 1])])
def test_the_model_moves_to_what_was_fetched_each_time_and_a_loop_that_keeps_it_ends_with_the_servers(
    prefetch: int, landings: list[int]
) -> None:
    vectors = Swapped()
    reader = Reader(ServedReplica(DownpourTraining, "replica 0", vectors, 8, loop=LoopRequest()).story())
    reader.tell("coordinator", membership.Welcome(plan(prefetch=prefetch), False, PLACES[:1]))
    mail: deque[tuple[str, Event]] = deque([("coordinator", dealing.Deal(Portion(0, 0, 3)))])
    clock = 0
    while reader.waits is not None:
        for message in reader.sent():
            if isinstance(message, membership.Leave):
                mail.append(("coordinator", membership.Farewell()))
            elif isinstance(message, pushing.Push):
                clock += 1
                mail.append(("shard 0", pushing.Pushed(message.slot, message.clock, Version(0, clock))))
            elif isinstance(message, pushing.Fetch):
                mail.append(("shard 0", pushing.Fetched(message.slot, 0, 400, Version(0, clock))))
        if isinstance(reader.waits, Compute):
            reader.go_on(COMPUTED)
        else:
            reader.tell(*(mail.popleft() if mail else ("coordinator", membership.Finish("done"))))
    assert clock == 3
    assert vectors.landings == landings


class Keeping:
    """A script that keeps something."""

    in_step = False

    def part(self) -> dict[str, Payload]:
        return {}


def keeps(in_step: bool = False) -> Reader:
    """A replica whose script keeps something, that has pushed the first minibatch of three."""
    script = Keeping()
    reader = Reader(
        ServedReplica(DownpourTraining, "replica 0", PhantomVectors(LAYOUT), 8, loop=LoopRequest(script=script)).story()
    )
    reader.tell("coordinator", membership.Welcome(plan(), False, PLACES[:1]))
    reader.tell("shard 0", pushing.Fetched(0, 0, 400, Version(0, 5)))
    reader.tell("coordinator", dealing.Deal(Portion(0, 0, 3)))
    reader.tell("shard 0", pushing.Fetched(0, 0, 400, Version(0, 5))).go_on(COMPUTED)
    script.in_step = in_step
    reader.done.clear()
    return reader


def asked(reader: Reader, number: int) -> list[type]:
    """What it does when it is asked for what its script keeps, up to its next wait."""
    reader.done.clear()
    reader.tell("coordinator", checkpointing.SaveScript(number))
    return done(reader)


def done(reader: Reader) -> list[type]:
    """Since it was last asked: what it has saved or sent."""
    kinds = [type(one.message if isinstance(one, Send) else one) for one in reader.done]
    reader.done.clear()
    return kinds


def test_what_a_script_keeps_is_saved_when_it_has_done_with_what_is_pushed_and_before_the_next_push() -> None:
    reader = keeps()
    assert asked(reader, 1) == [], "the script is in the step whose push is on its way"
    reader.tell("shard 0", pushing.Pushed(0, 1, Version(0, 6)))
    reader.tell("shard 0", pushing.Fetched(0, 0, 400, Version(0, 6)))
    assert done(reader) == []
    reader.go_on(COMPUTED)
    assert done(reader)[:3] == [Save, checkpointing.ScriptSaved, pushing.Push]


def test_a_replica_that_is_held_saves_what_its_script_keeps_before_it_pushes() -> None:
    reader = keeps()
    reader.tell("coordinator", checkpointing.Hold(1)).tell("shard 0", pushing.Pushed(0, 1, Version(0, 6)))
    reader.tell("shard 0", pushing.Fetched(0, 0, 400, Version(0, 6))).go_on(COMPUTED)
    assert pushing.Push not in done(reader)
    assert asked(reader, 1) == [Save, checkpointing.ScriptSaved]
    reader.tell("coordinator", checkpointing.Go())
    assert done(reader) == [pushing.Push, pushing.Fetch]


def test_a_replica_without_work_has_its_script_come_to_the_end_of_its_minibatch_first() -> None:
    reader = keeps(in_step=True)
    reader.tell("shard 0", pushing.Pushed(0, 1, Version(0, 6)))
    reader.tell("shard 0", pushing.Fetched(0, 0, 400, Version(0, 6)))
    for clock in (2, 3):
        reader.go_on(COMPUTED).tell("shard 0", pushing.Pushed(0, clock, Version(0, 5 + clock)))
        if clock == 2:
            reader.tell("shard 0", pushing.Fetched(0, 0, 400, Version(0, 7)))
    assert pushing.Push in done(reader)
    reader.tell("coordinator", dealing.Drain())
    assert asked(reader, 1) == [pushing.Fetch], "the script may look at its model"
    reader.tell("shard 0", pushing.Fetched(0, 0, 400, Version(0, 8)))
    assert (reader.waits, done(reader)) == (Compute(PAUSE), [])
    reader.go_on(None)
    assert done(reader) == [Save, checkpointing.ScriptSaved]
    reader.tell("coordinator", membership.Finish("done"))
    assert done(reader) == [dealing.Progress, pushing.Fetch]
    reader.tell("shard 0", pushing.Fetched(0, 0, 400, Version(0, 8)))
    assert (reader.waits, done(reader)) == (Compute(PAUSE), [])
    reader.go_on(None)
    assert done(reader) == [membership.Leave]
    assert asked(reader, checkpointing.LEAVING) == [Save, checkpointing.ScriptSaved, membership.Leave]
    assert asked(reader, 2) == [Save, checkpointing.ScriptSaved], "a checkpoint is no reason to leave again"
    assert reader.tell("coordinator", membership.Farewell()).waits is None
