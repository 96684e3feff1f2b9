"""A coordinator that dies at any message comes again: nothing is lost, made twice, or begun anew."""

from __future__ import annotations

import io
from collections import Counter
from itertools import product
from typing import Any

import pytest
from drawn import SEEDS, some
from oracles import classes, mlp
from watching.observed import Observed

from distbelief.core import events, records, roles
from distbelief.core.conversations import linking, membership
from distbelief.core.effects import Arrival
from distbelief.core.messages import Message
from distbelief.core.portions import ANEW
from distbelief.core.records import Record
from distbelief.core.settings import Settings
from distbelief.errors import JobFailed
from distbelief.job import Job
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.simulation import Simulation
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.record.journal import Journal
from distbelief.runtime import lasting
from distbelief.runtime.clock import VirtualClock
from distbelief.strategies import Allreduce, Bounded, Downpour, Hogwild, Sandblaster, Softsync, Strategy, Synchronous
from distbelief.strategies.parameter_server.options import Served
from distbelief.strategies.parameter_server.players import coordinator
from distbelief.testing.accounting import Accounting
from distbelief.transport.virtual import VirtualNetwork

SAMPLES = 43
STRATEGIES: dict[str, Strategy] = {
    "downpour": Downpour(3, 2, push_every=2), "bounded": Bounded(3, 2, staleness=0), "softsync": Softsync(3, 2),
    "synchronous": Synchronous(3, 2),
    "backup workers": Synchronous(3, 2, backup_workers=1), "standby": Synchronous(2, 2, standby=1),
    "allreduce": Allreduce(3), "hogwild": Hogwild(3),
    "sandblaster": Sandblaster(2, 2, 3, portion_size=8), "sandblaster with standbys": Sandblaster(2, 2, 3,
        portion_size=8, standby=1),
}  # fmt: skip


@pytest.fixture(params=["told again", "remembers"])
def _memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator is told everything since it was made, or remembers its last message and is told what came since."""
    if request.param == "remembers":
        monkeypatch.setattr(Journal, "long", True)


def observe(strategy: Strategy, cluster: Simulated | None = None, **options: Any) -> Observed:
    task = classes(mlp, samples=SAMPLES)
    fit = {"batch_size": 4, "epochs": 2} if strategy.name != "sandblaster" else {}
    return Observed(Job(task=task, strategy=strategy, **{"snapshot_every": "3", **fit, **options}), cluster)


def told(run: Observed) -> list[Record]:
    """What was written down that may not be written twice, or never."""
    kinds = (records.Started, records.EpochDone, records.Ending, records.Finished, records.Rewound)
    return run.told(*kinds)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_coordinator_may_die_at_any_message(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    strategy, said = STRATEGIES[name], Counter[str]()
    calm = observe(strategy)
    calm.look(lambda sender, *_: said.update([sender]))
    calm.run()
    assert calm.outcome == "done"
    for long, message in some(product((False, True), range(1, said[roles.COORDINATOR] + 1)), SEEDS // 3):
        monkeypatch.setattr(Journal, "long", long)
        run = observe(strategy, Simulated(crashes=(Crash(roles.COORDINATOR, message),), restart_seconds=0.3))
        accounting = Accounting(run) if isinstance(strategy, Served) and strategy.name != "sandblaster" else None
        run.run()
        if accounting is not None:
            accounting.finish(run.outcome, [])  # each minibatch was applied once at each shard
        assert run.simulation.killed == [roles.COORDINATOR], f"message {message}: another had to die"
        # once it has said how the job ended, it need not come again
        stops = message > said[roles.COORDINATOR] - len(run.simulation.network.endpoints)
        assert run.simulation.network.endpoints[roles.COORDINATOR].incarnation == 1 or stops, (
            f"message {message}: none came again"
        )
        assert run.outcome == "done", f"message {message}"
        assert not [record for record in run.told(records.Gone) if record.died], f"message {message}"
        samples = {
            sum(record.samples for record in one.told(records.Stepped) if not record.dropped) for one in (run, calm)
        }
        if not getattr(strategy, "backup_workers", 0) and strategy.name != "sandblaster":
            assert samples == {2 * SAMPLES}, f"message {message}"
        assert told(run) == told(calm), f"message {message}"
        assert not [record for record in run.told(records.Checkpointed) if record.error], f"message {message}"


@pytest.mark.parametrize("strategy", [Downpour(2, 2, standby=1), Synchronous(2, 2, standby=1)], ids=lambda s: s.name)
def test_a_standby_takes_over_whatever_the_coordinator_was_saying_as_it_died(
    monkeypatch: pytest.MonkeyPatch, strategy: Strategy
) -> None:
    """All go back only where the shard died before its standby held everything."""
    shard, said = Crash("shard 0", 30), Counter[str]()
    calm = observe(strategy, Simulated(crashes=(shard,), restart_seconds=0.3))
    calm.look(lambda sender, *_: said.update([sender]))
    assert calm.run().outcome == "done"
    deaths = some(product((False, True), range(1, said[roles.COORDINATOR] + 1)), SEEDS // 2)
    taken_over = 0
    for long, message in deaths:
        monkeypatch.setattr(Journal, "long", long)
        run = observe(strategy, Simulated(crashes=(shard, Crash(roles.COORDINATOR, message)), restart_seconds=0.3))
        accounting = Accounting(run)
        run.run()
        accounting.finish(run.outcome, ["shard 0"])
        assert run.outcome == "done", f"message {message}"
        assert run.trained() == 2 * SAMPLES, f"message {message}"
        notes = [record for record in run.told(records.Note) if "shard 0" in record.text]
        succeeded = any("its standby takes its place" in note.text for note in notes)
        held = records.StandbyReady("standby 0") in run.records[: run.records.index(notes[0])]
        assert succeeded or not held, f"message {message}: {notes}"
        taken_over += succeeded
    assert taken_over > len(deaths) / 2


@pytest.mark.usefixtures("_memory")
def test_it_may_die_again_and_again() -> None:
    crashes = tuple(Crash(roles.COORDINATOR, message) for message in (5, 1, 9))
    run = observe(Synchronous(3, 2, restarts=3), Simulated(crashes=crashes)).run()
    assert run.simulation.killed == [roles.COORDINATOR] * 3
    assert run.outcome == "done"
    assert run.trained() == 2 * SAMPLES


@pytest.mark.usefixtures("_memory")
def test_who_dies_while_it_is_away_is_told_of() -> None:
    crashes = (Crash(roles.COORDINATOR, 12), Crash("replica 0", 12), Crash("shard 1", 12))
    run = observe(Downpour(3, 2, restarts=2), Simulated(crashes=crashes, restart_seconds=0.5)).run()
    assert run.outcome == "done"
    assert {*run.simulation.killed} == {roles.COORDINATOR, "replica 0", "shard 1"}


def test_one_that_does_not_come_again_is_given_up() -> None:
    run = observe(
        Downpour(2, 2), Simulated(crashes=(Crash(roles.COORDINATOR, 9),), restart_seconds=lasting.AWAY_SECONDS + 1)
    )
    with pytest.raises(JobFailed, match=r"replica \d: coordinator is gone"):
        run.run()
    assert run.simulation.clock.now() < lasting.AWAY_SECONDS + 1


def test_a_guest_that_does_not_come_back_is_gone_and_one_whose_death_is_told_of_is_waited_for() -> None:
    """Whoever starts a job tells of the deaths of those whom he has started; of a guest's, nobody does."""
    files = io.BytesIO(), io.BytesIO()
    for life in range(2):
        network = VirtualNetwork(VirtualClock())
        machine = coordinator(Settings(strategy=Downpour(1)), True, ANEW)
        host = lasting.LastingHost(
            network.endpoint(roles.COORDINATOR, life), machine, {}, Journal(*files), {"replica 0"}
        )
        if not life:
            for role in ("replica 0", "replica 1"):
                network.endpoint(role).connect(roles.COORDINATOR, "")
                assert list(host.takes(Arrival(role, membership.Leave())))
    assert len(list(host.replay())) == 2
    assert host.missing() == [("replica 1", 0)]


@pytest.mark.usefixtures("_memory")
@pytest.mark.parametrize("strategy", [Downpour(2, 2), Synchronous(2, 2), Hogwild(2)], ids=lambda s: s.name)
def test_the_next_life_of_a_guest_says_that_the_one_before_is_gone(
    monkeypatch: pytest.MonkeyPatch, strategy: Strategy
) -> None:
    """It dies while the coordinator is away, and nobody tells of it; what it held is dealt again."""
    monkeypatch.setattr(Simulation, "tell", lambda *_: None)
    run = observe(strategy, Simulated(crashes=(Crash(roles.COORDINATOR, 14),), restart_seconds=0.3), snapshot_every="0")
    simulation = run.simulation
    kill = simulation.kill

    def kill_both(role: str) -> None:
        kill(role)
        if role == roles.COORDINATOR:
            simulation.clock.call_later(0.2, kill, "replica 1")

    monkeypatch.setattr(simulation, "kill", kill_both)
    run.run()
    assert run.simulation.killed == [roles.COORDINATOR, "replica 1"]
    assert run.outcome == "done"
    [gone] = [record for record in run.told(records.Gone) if record.died]
    assert gone.reason == "replica 1 came again, as incarnation 1"


def test_a_life_that_the_coordinator_has_buried_is_told_so() -> None:
    heard: list[events.Event] = []

    class Link:
        def __init__(self) -> None:
            self.sent: list[Message] = []

        def send(self, to: str, message: Message, payload: object = None) -> None:
            self.sent.append(message)

        def connect(self, role: str, address: str, incarnation: int = -1) -> None:
            """It is there."""

    class Clock:
        def __init__(self) -> None:
            self.due: list[Any] = []

        def now(self) -> float:
            return 0.0

        def call_later(self, delay: float, function: Any, argument: object) -> None:
            self.due.append((delay, function, argument))

    link, clock = Link(), Clock()
    caller = lasting.Caller(link, clock, lambda: "", lambda arrival: heard.append(arrival.event))  # type: ignore[arg-type]
    assert not caller.takes(events.Lost("it ended", 0))
    clock.due[-1][1](None)
    assert link.sent == [linking.Resume(0)]
    assert not caller.takes(linking.Resumed(-1))
    assert heard == [events.Lost("it goes on without this life of the role")]


@pytest.mark.usefixtures("_memory")
def test_the_model_is_that_of_a_calm_run() -> None:
    calm = observe(Downpour(1, 2)).run().vector()
    run = observe(Downpour(1, 2), Simulated(crashes=(Crash(roles.COORDINATOR, 11),))).run()
    assert run.vector() == calm
