"""The supervisor of a simulated job: lives follow each other, and each death is told once."""

from __future__ import annotations

from typing import Any

import pytest
from drawn import SEEDS, some
from oracles import classes, mlp
from watching.observed import Observed

from distbelief.core import records
from distbelief.job import Job
from distbelief.places.messages import Died
from distbelief.places.place import Effect, Ended, Event, Kill, Moved, Said, Start, Tell
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.strategies import Allreduce, Downpour, Hogwild, Sandblaster, Synchronous
from distbelief.transport.cluster_model import NetworkModel

WAYS: dict[str, Any] = {
    "downpour": Downpour(2, 2, standby=1, restarts=2),
    "synchronous": Synchronous(2, 2, restarts=2),
    "sandblaster": Sandblaster(2, 2, 2, portion_size=8, standby=1, restarts=2),
    "allreduce": Allreduce(2, restarts=2),
    "hogwild": Hogwild(2, restarts=2),
}
VICTIMS = ["replica 0", "shard 0", "standby 0", "coordinator"]
RESTARTS, PAUSE = 2, 0.01


class Lives:
    """Stands beside the supervisor of a run, and holds every event and every answer against what was before."""

    def __init__(self, run: Observed) -> None:
        self.there: set[tuple[str, int]] = set()
        self.begun: dict[str, int] = {}
        self.granted: set[tuple[str, int]] = set()
        self.deaths: list[tuple[str, int]] = []
        self.told: list[tuple[str, int]] = []
        self._moving: dict[str, tuple[str, int]] = {}
        simulation = run.simulation
        self._supervisor, self._handle = simulation.supervisor, simulation.supervisor.handle
        for role, endpoint in simulation.network.endpoints.items():
            self.there.add((role, endpoint.incarnation))
            self.begun[role] = endpoint.incarnation
        simulation.supervisor.handle = self.handle  # type: ignore[method-assign]

    def handle(self, now: float, event: Event) -> list[Effect]:
        if isinstance(event, Ended):
            assert (event.role, event.incarnation) in self.there, f"{event} is told of one who is not there"
            self.there.remove((event.role, event.incarnation))
            if event.killed:
                self.deaths.append(self._moving.pop(event.role, (event.role, event.incarnation)))
        elif isinstance(event, Moved):
            [former] = [life for life in self.there if life[0] == event.standby]
            self.there.remove(former)
            self.there.add(self._moving.pop(event.standby))
        elif isinstance(event, Said) and isinstance(event.what, records.Vacant):
            self.granted.add((event.what.role, event.what.incarnation))
        elif isinstance(event, Said) and isinstance(event.what, records.Succeeded):
            succeeds = event.what.role, event.what.incarnation
            if any(role == event.what.standby for role, _ in self.there):
                self._moving[event.what.standby] = succeeds
            else:
                self.deaths.append(succeeds)
        effects = self._handle(now, event)
        for effect in effects:
            self.look(effect)
        return effects

    def look(self, effect: Effect) -> None:
        if isinstance(effect, Start):
            role, incarnation = effect.role, effect.incarnation
            assert self._supervisor.finished is None, f"{effect} once the job is over"
            assert role not in {one for one, _ in self.there}, f"{effect}, and a life before it is there"
            if role.startswith(("shard", "standby")):
                assert (role, incarnation) in self.granted, f"{effect} that the coordinator has not granted"
            else:
                assert incarnation == self.begun[role] + 1 <= RESTARTS, f"{effect} after life {self.begun[role]}"
            self.begun[role] = incarnation
            self.there.add((role, incarnation))
        elif isinstance(effect, Kill):
            assert (effect.role, effect.incarnation) in self.there, f"{effect} of one who is not there"
        elif (
            isinstance(effect, Tell)
            and isinstance(effect.word, Died)
            and effect.word.role != "coordinator"
            and not effect.word.left
        ):
            self.told.append((effect.word.role, effect.word.incarnation))


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.long
def test_lives_follow_each_other_whoever_dies_at_whichever_message(way: str, victim: str) -> None:
    strategy = WAYS[way]
    if (victim.startswith("s") and way in ("allreduce", "hogwild")) or (
        victim == "standby 0" and not getattr(strategy, "standby", 0)
    ):
        pytest.skip(f"{way} has no {victim}")
    again = 0
    messages = some(range(1, 25), SEEDS // 4)
    for message in messages:
        crashes = (Crash(victim, message), Crash(victim, 1 + message % 7))
        cluster = Simulated(network=NetworkModel(latency=1e-3), crashes=crashes, restart_seconds=PAUSE)
        fit = {} if way == "sandblaster" else {"epochs": 2, "batch_size": 4}
        run = Observed(Job(classes(mlp, samples=24), strategy, snapshot_every="0", **fit), cluster)
        lives = Lives(run)
        run.simulation.run()
        again += lives.begun[victim] > 0
        deaths = {life for life in lives.deaths if life[0] != "coordinator"}
        assert {*lives.told} <= deaths, f"message {message}: deaths are told of that were none"
        if victim != "coordinator":
            assert len(lives.told) == len({*lives.told}), f"message {message}: a death is told of twice"
        over = run.simulation.supervisor.finished
        assert over is not None
    assert again >= len(messages) // 12, f"{victim} came again in {again} of {len(messages)} jobs"
