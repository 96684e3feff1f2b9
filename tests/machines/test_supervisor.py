"""The supervisor's decisions: who is started, started again, ended and told what, and what the end is called."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from distbelief.core import effects, records
from distbelief.core.records import Cause
from distbelief.errors import DataError, Interrupted, JobFailed, TrainingError, UsageError
from distbelief.places.explanation import Explanation
from distbelief.places.messages import Died, Explain, Failed, Interrupt, Listening
from distbelief.places.place import (
    Deadlines,
    Effect,
    Ended,
    Event,
    Interruption,
    Kill,
    Moved,
    Said,
    Start,
    Tell,
    Tick,
    TickLater,
    Unable,
    Vacate,
)
from distbelief.places.supervisor import Supervisor

CAST = ["coordinator", "shard 0", "standby 0", "replica 0", "replica 1", "evaluator"]
SIGKILL = "its process was killed by SIGKILL"
STARTED = records.Started(2, 1, 10, 10, 1, 1)
ENDING = records.Ending.of(Cause.EPOCHS_DONE, "all epochs are done")
DONE = records.Finished.of(Cause.EPOCHS_DONE, "all epochs are done")
INTERRUPTED = records.Finished.of(Cause.INTERRUPTED, "Ctrl-C")


class Told:
    """A supervisor, and what it answers to each event."""

    def __init__(self, *cast: str, restarts: int = 1, **options: Any) -> None:
        self.supervisor = Supervisor(restarts, options.pop("explanation", None), **options)
        self.supervisor.begin(cast or CAST)
        self.now = 0.0

    def at(self, now: float, event: Event) -> list[Effect]:
        self.now = now
        return self.supervisor.handle(now, event)

    def say(self, what: Any, role: str = "coordinator", incarnation: int = 0) -> list[Effect]:
        return self.supervisor.handle(self.now, Said(role, incarnation, what))

    def training(self) -> Told:
        self.say(Listening("here"))
        self.say(STARTED)
        return self

    def kill(self, role: str, incarnation: int = 0, how: str = SIGKILL, **others: Any) -> list[Effect]:
        return self.supervisor.handle(self.now, Ended(role, incarnation, how, **{"killed": True, **others}))

    def done(self, role: str, incarnation: int = 0) -> list[Effect]:
        return self.kill(role, incarnation, "", killed=False, done=True)

    @property
    def error(self) -> str:
        return f"{type(self.supervisor.failure).__name__}: {self.supervisor.failure}"


def starts(told: list[Effect]) -> list[tuple[str, int]]:
    return [(one.role, one.incarnation) for one in told if isinstance(one, Start)]


def kills(told: list[Effect]) -> list[tuple[str, int]]:
    return [(one.role, one.incarnation) for one in told if isinstance(one, Kill)]


def words(told: list[Effect], role: str = "coordinator") -> list[Any]:
    return [one.word for one in told if isinstance(one, Tell) and one.role == role]


def notes(told: list[Effect]) -> list[str]:
    return [
        one.record.text for one in told if isinstance(one, effects.WriteRecord) and isinstance(one.record, records.Note)
    ]


def test_everybody_is_started_once_in_the_order_asked_for() -> None:
    supervisor = Supervisor(restarts=3)
    assert supervisor.begin(CAST) == [Start(role, 0) for role in CAST]
    assert supervisor._here


# after these, this life of a role dies: is there another?
AGAIN: dict[str, tuple[dict[str, Any], list[Any], str, int, bool]] = {
    "a replica": ({}, [], "replica 0", 0, True),
    "a replica before the job begins": ({}, None, "replica 0", 0, True),  # type: ignore[dict-item]
    "a replica in its last life": ({}, [], "replica 0", 1, False),
    "one that is never started anew": ({"restarts": 0}, [], "replica 0", 0, False),
    "a replica of a job that ends": ({}, [ENDING], "replica 0", 0, False),
    "a replica of a job that ends, and goes back": ({}, [ENDING, records.Rewound(0)], "replica 0", 0, True),
    "a replica of a job that is over": ({}, [ENDING, DONE], "replica 0", 0, False),
    "the evaluator": ({}, [], "evaluator", 0, True),
    "the evaluator of a job that ends": ({}, [ENDING], "evaluator", 0, True),
    "the evaluator in its last life": ({}, [], "evaluator", 1, False),
    "a shard, as long as nobody says so": ({}, [], "shard 0", 0, False),
    "a standby, as long as nobody says so": ({}, [], "standby 0", 0, False),
    "the coordinator without a journal": ({}, [], "coordinator", 0, False),
    "the coordinator with a journal": ({"lasts": True}, [], "coordinator", 0, True),
    "the coordinator in its last life": ({"lasts": True}, [], "coordinator", 1, False),
    "the coordinator of a job that is over": ({"lasts": True}, [DONE], "coordinator", 0, False),
}


def bring_to(told: Told, role: str, incarnation: int) -> None:
    """Have a role be in a later life."""
    for life in range(incarnation):
        assert starts(told.kill(role, life)) == [(role, life + 1)]
        if role == "coordinator":
            told.say(Listening("here"), incarnation=life + 1)


@pytest.mark.parametrize("case", AGAIN)
def test_who_is_started_again(case: str) -> None:
    options, said, role, incarnation, again = AGAIN[case]
    told = Told(**options)
    if said is not None:
        told.training()
    bring_to(told, role, incarnation)
    for record in said or ():
        told.say(record)
    assert starts(told.kill(role, incarnation)) == ([(role, incarnation + 1)] if again else [])


@pytest.mark.parametrize(
    ("how", "again"),
    [({}, True), ({"killed": False}, False), ({"resumable": False}, False)],
    ids=["killed", "an error of its own", "a journal that is not whole"],
)
def test_a_coordinator_comes_again_only_where_it_can_go_on(how: dict[str, Any], again: bool) -> None:
    told = Told(lasts=True).training()
    did = told.kill("coordinator", **how)
    assert starts(did) == ([("coordinator", 1)] if again else [])
    assert (told.supervisor.failure is None) is again
    assert [note[:30] for note in notes(did)] == (["coordinator is gone: its proces"[:30]] if again else [])
    refusal = "it has not begun, or its coordinator is about to be restarted"
    assert told.supervisor.refusal == (refusal, True) or not again


def test_a_coordinator_that_comes_again_is_told_what_it_has_missed() -> None:
    told = Told(lasts=True).training()
    told.at(1.0, Interruption("Ctrl-C"))
    told.done("replica 1")
    told.kill("coordinator")
    assert words(told.kill("shard 0")) == []  # its next life does not listen yet
    did = words(told.say(Listening("there"), incarnation=1))
    assert did == [
        Listening("there"),
        Died("replica 1", "it was done", 0, left=True),
        Died("shard 0", SIGKILL, 0),
        Interrupt("Ctrl-C"),
    ]


def test_everybody_is_told_where_the_coordinator_listens_also_who_comes_later() -> None:
    told = Told()
    did = told.say(Listening("here"))
    assert [(one.role, one.word) for one in did if isinstance(one, Tell)] == [
        (role, Listening("here")) for role in CAST
    ]
    assert words(told.kill("replica 0"), "replica 0") == [Listening("here")]


def test_the_coordinator_hears_of_each_death_once_and_of_none_in_peace() -> None:
    told = Told(restarts=0).training()
    assert words(told.kill("replica 0")) == [Died("replica 0", SIGKILL, 0)]
    assert words(told.kill("replica 0")) == []
    assert words(told.done("replica 1")) == []
    told.say(Failed("JobFailed", "shard 0: coordinator is gone"), "shard 0")
    assert words(told.kill("shard 0", how="its process ended with status 1", killed=False)) == [
        Died("shard 0", "its process ended with status 1: shard 0: coordinator is gone", 0)
    ]


def test_the_coordinators_own_end_is_told_to_all_once_the_job_is_over() -> None:
    told = Told("coordinator", "replica 0", "shard 0").training()
    told.say(DONE)
    over = Died("coordinator", "the job is over", 0)
    assert told.done("coordinator") == [Tell("replica 0", over), Tell("shard 0", over)]
    assert told.supervisor.failure is None


# shards and standbys


def test_who_has_no_room_on_any_host_is_told_of_once_and_begins_no_life() -> None:
    told = Told(restarts=3).training()
    gone = told.kill("replica 1", how="its host b is gone", resumable=False)
    assert words(gone) == [Died("replica 1", "its host b is gone", 3)]
    assert not starts(gone)
    split = Told("coordinator", "replica 0.0", "replica 0.1", restarts=3).training()
    first = split.kill("replica 0.0", resumable=False)
    assert kills(first) == [("replica 0.1", 0)]
    assert not starts([*first, *split.kill("replica 0.1")])


def test_a_shard_is_what_the_coordinator_says() -> None:
    told = Told().training()
    told.kill("shard 0")
    assert starts(told.say(records.Vacant("shard 0", 1))) == [("shard 0", 1)]


def test_a_shard_that_is_there_still_ends_before_another_begins() -> None:
    told = Told().training()
    assert told.say(records.Vacant("shard 0", 1)) == [Kill("shard 0", 0)]
    assert told.say(records.Vacant("shard 0", 1)) == []  # it is told once
    did = told.kill("shard 0")
    assert starts(did) == [("shard 0", 1)]
    assert "shard 0" not in told.supervisor.explanation.deaths  # it was meant to die


def test_a_standby_is_its_shard_from_the_word_of_the_coordinator_on() -> None:
    told = Told().training()
    assert told.say(records.Succeeded("shard 0", 1, "standby 0")) == []
    assert told.supervisor.moves("standby 0")
    assert told.say(records.Vacant("standby 0", 1)) == []  # its place is not free yet
    did = told.at(1.0, Moved("standby 0"))
    assert did == [Kill("shard 0", 0), Start("standby 0", 1), Tell("standby 0", Listening("here"))]
    assert words(told.kill("shard 0")) == [Died("shard 0", SIGKILL, 0)]
    assert words(told.kill("shard 0", 1)) == [Died("shard 0", SIGKILL, 1)]


def test_a_standby_that_dies_before_it_is_its_shard_dies_as_that() -> None:
    told = Told().training()
    told.kill("shard 0")
    told.say(records.Succeeded("shard 0", 1, "standby 0"))
    told.say(records.Vacant("standby 0", 1))
    did = told.kill("standby 0")
    assert words(did) == [Died("shard 0", SIGKILL, 1)]
    assert starts(did) == [("standby 0", 1)]
    assert told.at(1.0, Moved("standby 0")) == []


def test_a_standby_that_was_dead_is_no_shard() -> None:
    told = Told().training()
    told.kill("standby 0")
    assert words(told.say(records.Succeeded("shard 0", 1, "standby 0"))) == [
        Died("shard 0", "its standby has died with it", 1)
    ]


def test_a_standby_that_succeeds_takes_the_place_of_a_life_that_was_granted_before() -> None:
    told = Told(deadlines=Deadlines(pause=1.0)).training()
    told.kill("shard 0")
    told.say(records.Vacant("shard 0", 1))
    told.say(records.Succeeded("shard 0", 2, "standby 0"))
    assert starts(told.at(1.0, Tick())) == []


def test_a_shard_that_is_given_up_while_its_standby_moves_ends_by_the_name_that_the_place_knows() -> None:
    told = Told().training()
    told.kill("shard 0")
    told.say(records.Succeeded("shard 0", 1, "standby 0"))
    assert told.say(records.Vacant("shard 0", 2)) == [Kill("standby 0", 0)]
    assert starts(told.kill("standby 0")) == [("shard 0", 2)]


# time


def test_a_next_life_begins_after_the_pause_and_the_latest_word_counts() -> None:
    told = Told(deadlines=Deadlines(pause=2.0)).training()
    assert TickLater(2.0) in told.kill("replica 0")
    assert starts(told.at(1.9, Tick())) == []
    assert starts(told.at(2.0, Tick())) == [("replica 0", 1)]
    told.kill("shard 0")
    assert told.say(records.Vacant("shard 0", 1)) == [TickLater(2.0)]
    told.now = 3.0
    assert told.say(records.Vacant("shard 0", 2)) == [TickLater(2.0)]
    assert starts(told.at(4.0, Tick())) == []
    assert starts(told.at(5.0, Tick())) == [("shard 0", 2)]


def test_nobody_begins_once_the_job_is_over() -> None:
    told = Told(deadlines=Deadlines(pause=2.0)).training()
    told.kill("replica 0")
    told.say(DONE)
    assert starts(told.at(2.0, Tick())) == []


IMPATIENT: dict[str, tuple[list[Any], dict[str, int], float, list[tuple[str, int]]]] = {
    "nobody is waited for": ([], {}, 1e6, []),
    "replicas are to leave": ([ENDING], {}, 31.0, [("replica 0", 0), ("replica 1", 0)]),
    "not yet": ([ENDING], {}, 29.0, []),
    "one has left": ([ENDING, records.Gone("replica 0", 0, "it leaves", died=False)], {}, 31.0, [("replica 1", 0)]),
    "all go back": ([ENDING, records.Rewound(0)], {}, 31.0, []),
    "everybody is to end": ([DONE], {}, 31.0, [(role, 0) for role in CAST]),
    "one is stopped": ([], {"shard 0": 7}, 31.0, [("shard 0", 0)]),
    "the coordinator is stopped, and none follows it": ([], {"coordinator": 7}, 31.0, []),
}


@pytest.mark.parametrize("case", IMPATIENT)
def test_who_holds_the_job_up_too_long_is_killed_once(case: str) -> None:
    said, stopped, now, expected = IMPATIENT[case]
    told = Told().training()
    for record in said:
        told.say(record)
    assert kills(told.at(0.0, Tick(stopped))) == []
    assert kills(told.at(now, Tick(stopped))) == expected
    assert kills(told.at(now + 1, Tick(stopped))) == []


def test_a_coordinator_that_is_stopped_is_killed_where_another_follows_it() -> None:
    told = Told(lasts=True).training()
    told.at(0.0, Tick({"coordinator": 7}))
    assert kills(told.at(10.0, Tick())) == []  # it goes on
    told.at(20.0, Tick({"coordinator": 7}))
    assert kills(told.at(45.0, Tick({"coordinator": 7}))) == []
    assert kills(told.at(51.0, Tick({"coordinator": 7}))) == [("coordinator", 0)]


def test_scripts_may_take_as_long_as_they_like_to_leave() -> None:
    told = Told(script=True).training()
    told.say(ENDING)
    told.say(DONE)
    assert kills(told.at(1e6, Tick())) == []


def test_scripts_that_compute_are_no_trouble_and_told_of_less_and_less() -> None:
    told = Told("coordinator", "replica 0", deadlines=Deadlines(silence=3.0), script=True).training()
    said = {now: told.at(now, Tick({}, {"replica 0"})) for now in (2.0, 4.0, 5.0, 9.0, 10.0, 17.0)}
    assert [now for now, did in said.items() if did] == [4.0, 9.0]
    assert "no step for 4 s: the scripts of replica 0 compute" in notes(said[4.0])[0]
    assert not any(words(did) for did in said.values())
    assert words(told.at(18.0, Tick())) == [Explain()]


def test_what_a_script_raises_after_its_part_is_told_at_the_end() -> None:
    told = Told("coordinator", "replica 0", "replica 1", script=True).training()
    did = told.say(Failed("TrainingError", "replica 1: line 9 raised", "Traceback", done=True), "replica 1")
    assert notes(did) == ["replica 1: line 9 raised; its part of the training was done"]
    assert starts(told.kill("replica 1", killed=False)) == []
    assert told.supervisor.failure is None
    told.say(DONE)
    error, record = told.supervisor.conclude()
    assert isinstance(error, TrainingError)
    assert record is None
    assert "line 9 raised; that came after its part of the training" in str(error)


def test_silence_is_told_of_with_who_is_stopped() -> None:
    told = Told("coordinator", "shard 0", deadlines=Deadlines(silence=3.0)).training()
    did = told.at(4.0, Tick({"shard 0": 7}))
    assert notes(did) == [
        "nothing was heard for 3 s; still running: coordinator, shard 0; shard 0 is stopped, `kill -CONT 7` lets it "
        "go on"
    ]
    assert words(did) == [Explain()]
    assert told.at(6.0, Tick()) == []


def test_a_job_that_has_said_nothing_yet_was_not_silent_before_it_began() -> None:
    told = Told("coordinator", deadlines=Deadlines(silence=3.0))
    assert [len(notes(told.at(1000.0 + second, Tick()))) for second in (0.0, 3.0, 3.5)] == [0, 0, 1]


# how it ends


def test_an_interruption_is_told_to_whoever_ends_the_job_and_the_second_ends_it() -> None:
    for head in ("coordinator", "single"):
        told = Told(head, "replica 0")
        told.say(Listening(""), head)
        assert words(told.at(1.0, Interruption("Ctrl-C")), head) == [Interrupt("Ctrl-C")]
        assert kills(told.at(600.0, Tick())) == [], "a replica may hold what is to be kept"
        assert (head, 0) in kills(told.at(602.0, Tick()))
        told.at(603.0, Interruption("SIGTERM"))
        assert told.error.startswith(
            "Interrupted: interrupted twice: ended at once, without a checkpoint; there is no checkpoint"
        )


def test_who_measures_as_an_interrupted_job_is_over_is_not_waited_for() -> None:
    told = Told("coordinator", "replica 0", "evaluator").training()
    told.at(1.0, Interruption("Ctrl-C"))
    assert kills(told.say(records.Finished.of(Cause.INTERRUPTED, "Ctrl-C"))) == [("evaluator", 0)]


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_script_that_is_asked_to_leave_an_interrupted_job_has_as_long_as_any_replica(order: str) -> None:
    told = Told("coordinator", "replica 0", script=True)
    told.say(Listening(""), "coordinator")
    acts = [lambda: told.at(1.0, Interruption("Ctrl-C")), lambda: told.say(ENDING, "coordinator")]
    for act in acts if order == "before" else reversed(acts):
        act()
    assert kills(told.at(29.0, Tick())) == []
    assert kills(told.at(32.0, Tick())) == [("replica 0", 0)]


def test_what_several_hosts_are_told_at_once_is_told_once() -> None:
    """A launcher tells all of its processes to end, in any order; the same one told again ends the job."""
    told = Told("coordinator", "replica 0")
    told.say(Listening(""), "coordinator")
    assert words(told.at(1.0, Interruption("SIGTERM", "n1")), "coordinator") == [Interrupt("SIGTERM")]
    assert told.at(1.1, Interruption("SIGTERM")) == []
    assert told.at(1.2, Interruption("SIGTERM", "n2")) == []
    assert told.supervisor.failure is None
    told.at(2.0, Interruption("SIGTERM", "n1"))
    assert told.error.startswith("Interrupted: interrupted twice")


HOLDS = records.StandbyReady("standby 0")
GOES = Interruption("SIGTERM on host n1", "n1", (("replica 1", 0), ("shard 0", 0)), within=5.0)


def test_a_host_that_is_told_to_go_leaves_and_the_job_goes_on() -> None:
    """Its replica is asked, what serves there does so until it has left, and its end is no death."""
    told = Told().training()
    told.say(HOLDS)
    did = told.at(1.0, GOES)
    assert did[1:3] == [Vacate("n1"), Tell("replica 1", Interrupt("host n1 was told to leave"))]
    assert notes(did) == ["host n1 leaves within 5 s (SIGTERM on host n1): replica 1, shard 0; the others go on"]
    assert kills(did) == []
    assert told.at(1.1, GOES) == [], "who is told again has its time all the same"
    told.say(records.Gone("replica 1", 0, "it was done", died=False))
    did = told.done("replica 1")
    assert (kills(did), words(did)) == ([("shard 0", 0)], [])
    assert starts(told.at(7.0, Tick())) == []
    assert told.supervisor.failure is None
    did = told.at(8.0, Interruption("Ctrl-C"))
    assert words(did) == [Interrupt("Ctrl-C")], "the first of the job itself"


def test_what_a_host_has_not_finished_in_time_is_cut_short_and_is_no_death() -> None:
    told = Told().training()
    told.say(HOLDS)
    told.at(1.0, GOES)
    assert told.at(5.9, Tick()) == []
    did = told.at(6.0, Tick())
    [word] = words(did)
    assert (word.role, word.incarnation, word.left) == ("replica 1", 0, True)
    assert kills(did) == [("shard 0", 0), ("replica 1", 0)]
    did = told.kill("replica 1")
    assert (words(did), starts(did)) == ([], [])


@pytest.mark.parametrize("ends", [ENDING, Interruption("SIGTERM")], ids=["by itself", "since all were told"])
def test_what_serves_on_a_host_that_leaves_is_there_to_the_end_of_a_job_that_ends_first(ends: Any) -> None:
    told = Told().training()
    told.say(HOLDS)
    told.at(1.0, GOES)
    told.at(1.1, ends) if isinstance(ends, Interruption) else told.say(ends)
    told.say(records.Gone("replica 1", 0, "it was done", died=False))
    assert kills(told.done("replica 1")) == []
    assert kills(told.at(7.0, Tick())) == []


def test_what_dies_on_a_host_that_leaves_comes_again_elsewhere() -> None:
    told = Told().training()
    told.say(HOLDS)
    told.at(1.0, GOES)
    assert starts(told.kill("replica 1")) == [("replica 1", 1)]


SPLIT = ["coordinator", "shard 0", "replica 0.0", "replica 0.1", "replica 1.0", "replica 1.1"]


def test_a_partition_that_dies_again_before_another_of_its_replica_has_ended_begins_the_same_life_as_that() -> None:
    told = Told(*SPLIT, restarts=3).training()
    assert (kills(first := told.kill("replica 0.1")), starts(first)) == ([("replica 0.0", 0)], [("replica 0.1", 1)])
    assert starts(told.kill("replica 0.1", 1)) == [("replica 0.1", 2)]
    assert starts(told.kill("replica 0.0", 0)) == [("replica 0.0", 2)]


def test_a_life_that_one_partition_has_died_in_is_begun_by_none_that_waits_to_begin_it() -> None:
    told = Told(*SPLIT, restarts=2, deadlines=Deadlines(pause=1.0)).training()
    told.kill("replica 0.1")
    told.at(0.5, Ended("replica 0.0", 0, SIGKILL, killed=True))
    assert starts(told.at(1.0, Tick())) == [("replica 0.1", 1)]
    told.kill("replica 0.1", 1)
    assert sorted(starts(told.at(2.0, Tick()))) == [("replica 0.0", 2), ("replica 0.1", 2)]


def test_no_partition_begins_a_life_of_a_replica_that_has_no_more() -> None:
    told = Told(*SPLIT, restarts=1).training()
    told.kill("replica 0.1")
    told.kill("replica 0.1", 1)
    assert starts(told.kill("replica 0.0", 0)) == []


def test_no_partition_comes_again_where_another_of_its_life_has_ended_in_peace() -> None:
    """As where a host leaves, and the lead is killed after it has let the others go: alone it would wait for them."""
    told = Told(*SPLIT, restarts=3).training()
    told.done("replica 1.1")
    did = told.kill("replica 1.0")
    assert starts(did) == []
    assert [word.role for word in words(did)] == ["replica 1.0"]


def test_a_replica_that_was_let_go_is_no_death_whichever_of_its_partitions_ends_how() -> None:
    """A script goes on after its part, at each partition by itself."""
    told = Told(*SPLIT, script=True).training()
    told.say(records.Gone("replica 0.0", 0, "it was done", died=False))
    assert told.kill("replica 0.1") == []
    assert told.kill("replica 0.0") == []
    assert kills(told.kill("replica 1.1")) == [("replica 1.0", 0)]


def test_the_partitions_of_a_replica_leave_together_whichever_of_their_hosts_goes() -> None:
    told = Told("coordinator", "replica 0.0", "replica 0.1", "replica 1.0", "replica 1.1").training()
    did = told.at(1.0, Interruption("SIGTERM", "n1", (("replica 1.1", 0),), within=5.0))
    assert words(did, "replica 1.0") == [Interrupt("host n1 was told to leave")]
    assert words(did, "replica 1.1") == []
    did = told.at(6.0, Tick())
    assert [word.role for word in words(did)] == ["replica 1.0"]
    assert kills(did) == [("replica 1.0", 0), ("replica 1.1", 0)]


@pytest.mark.parametrize(
    ("before", "event"),
    [
        ((), Interruption("SIGTERM", "n1", GOES.lives)),
        ((), Interruption("SIGTERM", "n1", (("replica 0", 0), ("replica 1", 0)), 5.0)),
        (
            (Interruption("SIGTERM", "n0", (("replica 0", 0),), 5.0),),
            Interruption("SIGTERM", "n1", (("replica 1", 0),), 5.0),
        ),
        ((ENDING,), GOES),
    ],
    ids=["it may not", "nobody else computes", "all others leave too", "the job ends already"],
)
def test_without_a_host_that_cannot_be_spared_the_job_ends_in_peace(
    before: tuple[Any, ...], event: Interruption
) -> None:
    told = Told().training()
    told.say(HOLDS)
    for one in before:
        told.at(0.5, one) if isinstance(one, Interruption) else told.say(one)
    assert words(told.at(1.0, event)) == [Interrupt(event.why)]


def test_neither_the_rest_of_a_replica_that_goes_nor_a_standby_on_the_same_host_spares_it() -> None:
    alone = Told("coordinator", "replica 0.0", "replica 0.1").training()
    event = Interruption("SIGTERM", "n1", (("replica 0.0", 0),), within=5.0)
    assert words(alone.at(1.0, event)) == [Interrupt("SIGTERM")]
    told = Told().training()
    told.say(HOLDS)
    event = msgspec.structs.replace(GOES, lives=(*GOES.lives, ("standby 0", 0)))
    assert words(told.at(1.0, event)) == [Interrupt(GOES.why)]


@pytest.mark.parametrize(
    ("case", "saved", "standby", "replaceable", "restarts", "leaves"),
    [
        ("a checkpoint", 1, (), True, 1, True),
        ("a standby", 0, (HOLDS,), False, 0, True),
        ("a standby that holds nothing yet", 0, (), True, 1, False),
        ("no other host could take it", 1, (), False, 1, False),
        ("it has had its last life", 1, (), True, 0, False),
        ("a standby of a life that is gone", 0, (HOLDS, records.Vacant("shard 0", 1)), True, 1, False),
    ],
)
def test_a_shard_leaves_that_has_a_standby_or_comes_again_elsewhere_from_a_checkpoint(
    case: str, saved: int, standby: tuple[Any, ...], replaceable: bool, restarts: int, leaves: bool
) -> None:
    told = Told(restarts=restarts, explanation=Explanation(saved)).training()
    for record in standby:
        told.say(record)
    did = told.at(1.0, msgspec.structs.replace(GOES, replaceable=replaceable))
    assert (Vacate("n1") in did) == leaves, case
    assert bool(words(did)) != leaves, "else the job ends in peace"


def test_a_standby_that_has_just_succeeded_is_a_shard_of_the_host_that_is_told_to_go() -> None:
    told = Told().training()
    told.kill("shard 0")
    told.say(records.Succeeded("shard 0", 1, "standby 0"))
    event = Interruption("SIGTERM", "n1", (("replica 1", 0), ("standby 0", 0)), within=5.0)
    assert words(told.at(1.0, event)) == [Interrupt("SIGTERM")]


def test_a_replica_whose_hosts_all_go_has_the_time_of_the_first() -> None:
    """Each host's servers are there until what is on that host has left."""
    split = ["coordinator", "shard 0", "standby 0", "replica 0.0", "replica 0.1", "replica 1.0", "replica 1.1"]
    told = Told(*split).training()
    told.at(1.0, Interruption("SIGTERM", "n1", (("replica 1.0", 0), ("standby 0", 0)), within=5.0))
    did = told.at(2.0, Interruption("SIGTERM", "n2", (("replica 1.1", 0),), within=50.0))
    assert (Vacate("n2") in did, kills(did)) == (True, [])
    assert told.at(5.9, Tick()) == []
    assert kills(told.at(6.0, Tick())) == [("standby 0", 0), ("replica 1.0", 0), ("replica 1.1", 0)]


def test_an_interruption_before_anybody_listens_ends_the_job() -> None:
    told = Told()
    told.at(0.0, Interruption("Ctrl-C"))
    assert told.error == "Interrupted: interrupted before the job began"
    again = Told(explanation=Explanation(3, "run"))
    again.at(0.0, Interruption("Ctrl-C"))
    assert again.error == "Interrupted: interrupted; go on from checkpoint 3 with --resume"


def test_an_interruption_once_the_job_is_over_waits_for_nobody() -> None:
    told = Told("coordinator", "replica 0").training()
    told.say(DONE)
    assert told.at(1.0, Interruption("Ctrl-C")) == []
    assert kills(told.at(2.0, Tick())) == [("coordinator", 0), ("replica 0", 0)]


def test_the_end_is_called_by_what_it_is() -> None:
    cases: list[tuple[list[Any], type | None, str, Cause | None]] = [
        ([STARTED, DONE], None, "", None),
        ([STARTED, INTERRUPTED], None, "", None),
        ([INTERRUPTED], Interrupted, "interrupted before the job began", Cause.CUT_SHORT),
        ([STARTED], JobFailed, "the job ended without a result", Cause.PROCESS_DIED),
        (
            [STARTED, records.Finished.of(Cause.REPLICAS_DIED, "every replica is gone")],
            JobFailed,
            "every replica is gone",
            None,
        ),
        ([STARTED, Failed("DataError", "no data")], DataError, "no data", Cause.WRONG_DATA),
        (
            [STARTED, Failed("JobFailed", "replica 0: shard 0 is gone")],
            JobFailed,
            "replica 0: shard 0 is gone",
            Cause.PROCESS_DIED,
        ),
    ]
    for said, kind, text, cause in cases:
        told = Told(restarts=0)
        for one in said:
            told.say(one)
        error, record = told.supervisor.conclude()
        assert (type(error) if error else None, str(error or "")) == (kind, text)
        assert (record.cause if record else None) == cause


def test_who_is_needed_and_who_has_died_are_named() -> None:
    told = Told(restarts=0).training()
    told.say(records.Checkpointed(2, ""))
    told.kill("coordinator")
    error, record = told.supervisor.conclude()
    assert str(error) == f"coordinator is gone: {SIGKILL}; go on from checkpoint 2 with --resume"
    assert record.cause is Cause.COORDINATOR_DIED
    told = Told(restarts=0).training()
    told.kill("replica 0")
    told.kill("replica 1")
    told.say(records.Finished.of(Cause.REPLICAS_DIED, "every replica is gone"))
    assert str(told.supervisor.conclude()[0]).startswith(
        f"every replica is gone (replica 0: {SIGKILL}; replica 1: {SIGKILL}); "
    )
    told = Told(restarts=0).training()
    told.kill("replica 0")
    told.say(records.Finished.of(Cause.REPLICAS_DIED, f"every replica is gone; the last was replica 0: {SIGKILL}"))
    assert str(told.supervisor.conclude()[0]).count(SIGKILL) == 1
    told = Told(restarts=0).training()
    told.kill("shard 0")
    told.say(records.Finished.of(Cause.SHARD_SPENT, "shard 0 died in its last life", "shard 0"))
    assert str(told.supervisor.conclude()[0]).startswith(f"shard 0 is gone: {SIGKILL}; ")


@pytest.mark.parametrize("hosts", [("", ""), ("a", "b")])
def test_words_that_every_life_would_repeat_end_a_job_that_has_not_begun(hosts: tuple[str, str]) -> None:
    """On whichever host it is."""
    told = Told(restarts=5)
    for life, host in enumerate(hosts):
        assert told.supervisor.failure is None
        told.say(Failed("JobFailed", "there is no way", host=host), "replica 1", life)
        told.kill("replica 1", life, "its process ended with status 1", killed=False)
    assert told.error.startswith(f"JobFailed: {'host b: ' * bool(hosts[1])}there is no way; ")


def test_a_place_that_cannot_go_on_ends_the_job() -> None:
    told = Told()
    told.at(0.0, Unable(JobFailed("no more processes")))
    assert told.error == "JobFailed: no more processes; there is no checkpoint yet to go on from: start anew"
    told = Told()
    told.at(0.0, Unable(UsageError("the run folder is gone")))
    assert told.error == "UsageError: the run folder is gone"
    assert starts(told.kill("replica 0")) == []


# a guest


def test_a_guest_comes_again_until_its_lives_are_spent() -> None:
    told = Told("replica 5", restarts=1, guest=True)
    told.say(Failed("JobFailed", "replica 5: shard 0 is gone"), "replica 5")
    did = told.kill("replica 5", how="its process ended with status 1", killed=False)
    assert (notes(did), starts(did)) == (
        ["replica 5: shard 0 is gone", "replica 5 died: its process ended with status 1; another takes its place"],
        [("replica 5", 1)],
    )
    assert starts(told.kill("replica 5", 1)) == []
    assert (
        told.error
        == "JobFailed: replica 5 died in each of its 2 lives: look for the reason above, or in this machine's log"
    )


def test_a_guest_leaves_when_asked_and_at_once_when_asked_twice() -> None:
    told = Told("replica 5", guest=True)
    did = told.at(0.0, Interruption("Ctrl-C"))
    assert words(did, "replica 5") == [Interrupt("this replica was asked to leave")]
    assert notes(did) == ["leaving once its unfinished work is applied"]
    assert told.done("replica 5") == []
    assert told.supervisor.failure is None
    told = Told("replica 5", guest=True)
    told.at(0.0, Interruption("Ctrl-C"))
    assert starts(told.kill("replica 5")) == []
    assert told.error == f"JobFailed: replica 5 died as it was about to leave: {SIGKILL}"
    told = Told("replica 5", guest=True)
    told.at(0.0, Interruption("Ctrl-C"))
    told.at(0.0, Interruption("Ctrl-C"))
    assert told.error == "Interrupted: interrupted twice: ended at once, and what this replica held is dealt to others"


def test_a_guest_has_as_long_as_it_was_given() -> None:
    told = Told("replica 5", guest=True)
    told.at(0.0, Interruption("SIGTERM", within=5.0))
    assert told.at(4.9, Tick()) == []
    assert told.supervisor.failure is None
    told.at(5.0, Tick())
    assert told.error.startswith("Interrupted: its unfinished work took longer than --leave-within")


# any history


class History:
    """A place that does what it is asked for, and whose roles die at random; holds what must hold of any job."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.restarts = self.chance.randint(0, 3)
        lasts, deadlines = self.chance.random() < 0.5, Deadlines(pause=self.chance.choice((0.0, 1.0)))
        self.supervisor = Supervisor(self.restarts, lasts=lasts, deadlines=deadlines)
        self.now, self.over = 0.0, False
        self.there: list[tuple[str, int]] = []
        self.begun: dict[str, int] = {}
        self.granted = {"shard 0": 0, "standby 0": 0}
        self.moving: list[tuple[str, int, int]] = []
        self.doomed: list[tuple[str, int]] = []
        self.told: list[tuple[str, int]] = []
        self.do(self.supervisor.begin(CAST))
        self.tell(Said("coordinator", 0, Listening("")))

    def tell(self, event: Event) -> None:
        asked = self.supervisor.handle(self.now, event)
        self.supervisor.validate()
        self.do(asked)

    def do(self, asked: list[Effect]) -> None:
        for one in asked:
            if isinstance(one, Start):
                assert not self.supervisor.over, "nobody begins once the job is over"
                assert one.role not in {role for role, _ in self.there}, "two lives of a role are there at once"
                assert one.incarnation > self.begun.get(one.role, -1), "a life begins twice"
                if one.role in self.granted:
                    assert one.incarnation == self.granted[one.role], "a shard begins that nobody has granted"
                else:
                    assert one.incarnation == self.begun.get(one.role, -1) + 1 <= self.restarts, "a life too many"
                self.begun[one.role] = one.incarnation
                self.there.append((one.role, one.incarnation))
                if one.role == "coordinator" and one.incarnation:
                    self.tell(Said("coordinator", one.incarnation, Listening("")))
            elif isinstance(one, Kill):
                assert (one.role, one.incarnation) in self.there, "one is killed who is not there"
                self.doomed.append((one.role, one.incarnation))
            elif (
                isinstance(one, Tell)
                and isinstance(one.word, Died)
                and one.word.role != "coordinator"
                and not one.word.left
            ):
                self.told.append((one.word.role, one.word.incarnation))

    def end(self, life: tuple[str, int]) -> None:
        self.there.remove(life)
        self.doomed = [one for one in self.doomed if one != life]
        self.moving = [one for one in self.moving if one[:2] != life]
        if life[0] == "coordinator":
            self.moving = []
        self.tell(Ended(*life, SIGKILL, killed=True))

    def life_of(self, role: str) -> int | None:
        return max((life for one, life in self.there if one == role), default=None)

    def step(self) -> None:
        self.now += self.chance.random()
        coordinator = self.life_of("coordinator") is not None
        match self.chance.randrange(6):
            case 0 if self.there:
                self.end(self.chance.choice(self.there))
            case 1 if self.doomed:
                self.end(self.chance.choice(self.doomed))
            case 2 if coordinator:
                role = self.chance.choice(("shard 0", "standby 0"))
                self.granted[role] += 1
                self.tell(Said("coordinator", 0, records.Vacant(role, self.granted[role])))
            case 3 if coordinator and self.life_of("standby 0") == self.granted["standby 0"] and not self.moving:
                self.granted["shard 0"] += 1
                self.moving.append(("standby 0", self.granted["standby 0"], self.granted["shard 0"]))
                self.tell(Said("coordinator", 0, records.Succeeded("shard 0", self.granted["shard 0"], "standby 0")))
            case 4 if self.moving:
                standby, life, shard = self.moving.pop()
                self.there[self.there.index((standby, life))] = ("shard 0", shard)
                self.doomed = [("shard 0", shard) if one == (standby, life) else one for one in self.doomed]
                self.tell(Moved(standby))
            case _:
                self.tell(Tick())


@pytest.mark.parametrize("seed", range(60))
def test_any_history_keeps_what_must_hold(seed: int) -> None:
    history = History(seed)
    for _ in range(200):
        history.step()
        if history.supervisor.over or not history.there:
            break
    else:
        history.tell(Said("coordinator", 0, DONE))
    while history.there:
        history.end(history.there[0])
    assert not history.supervisor._here
    assert len(history.told) == len(set(history.told)) or history.supervisor._lasts, "a death is told twice"
