"""The conformance suite of places refuses each kind of broken one, and the simulation passes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from oracles import classes, mlp

from distbelief.core import roles
from distbelief.job import Job
from distbelief.places.messages import ChannelMessage
from distbelief.places.place import Effect, Ended, Event
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.simulation import Simulation
from distbelief.places.supervisor import Supervisor
from distbelief.strategies import Downpour
from distbelief.testing import Site, check_place

Happens = Callable[[Event], None]


class Fake:
    """A place in memory, which keeps every promise but the one that is named."""

    def __init__(self, happens: Happens, flaw: str = "") -> None:
        self._happens, self._flaw = happens, flaw
        self.lives: set[tuple[str, int]] = set()
        self.news: list[Ended] = []

    def start(self, role: str, incarnation: int) -> None:
        if self._flaw != "starts nobody":
            self.lives.add((role, incarnation))
        if self._flaw == "starts another too":
            self.lives.add((role, incarnation + 1))

    def strike(self, role: str, incarnation: int) -> None:
        self.lives.discard((role, incarnation))
        killed, done = self._flaw != "does not say who was killed", self._flaw == "calls a death done"
        told = Ended(role, incarnation, "struck", killed=killed, done=done)
        self.news += [told] * {"tells nothing": 0, "tells twice": 2}.get(self._flaw, 1)
        if self._flaw == "a death takes others with it":
            self.lives.clear()

    def end(self, role: str, incarnation: int) -> None:
        if self._flaw == "ends any life of a role":
            incarnation = max((life for one, life in self.lives if one == role), default=incarnation)
        if self._flaw == "an end is told of again" or (
            (role, incarnation) in self.lives and self._flaw != "ends nobody"
        ):
            self.strike(role, incarnation)
        if self._flaw == "ends all":
            self.lives.clear()

    def tell(self, role: str, word: ChannelMessage) -> None:
        """Nobody listens."""

    def pump(self) -> None:
        while self.news:
            self._happens(self.news.pop(0))

    def close(self) -> None:
        if self._flaw != "leaves somebody":
            self.lives.clear()


def fake(flaw: str = "") -> Callable[[Happens], Site]:
    def make(happens: Happens) -> Site:
        place = Fake(happens, flaw)
        return Site(place, ("one", "other"), place.strike, lambda: place.lives, place.pump, place.close)

    return make


REFUSED = {
    "starts nobody": "were started but are not running",
    "starts another too": "other lives are running",
    "tells nothing": "are not reported",
    "tells twice": "once each",
    "does not say who was killed": "is not reported as killed",
    "calls a death done": "before it was done",
    "a death takes others with it": "has ended with",
    "ends nobody": "was to be ended, but still runs",
    "an end is told of again": "once each",
    "ends all": "has ended with",
    "ends any life of a role": "but life 1 was",
    "leaves somebody": "it was closed, but these still run",
}


@pytest.mark.parametrize("flaw", REFUSED)
def test_a_broken_place_is_refused(monkeypatch: pytest.MonkeyPatch, flaw: str) -> None:
    monkeypatch.setattr("distbelief.testing.places.PATIENCE_SECONDS", 0.0)
    with pytest.raises(AssertionError, match=REFUSED[flaw]):
        check_place(fake(flaw))


def test_a_place_that_keeps_its_promises_passes() -> None:
    check_place(fake())


class _Told(Supervisor):
    """Hands on what a place tells, and asks for nothing."""

    happens: Happens

    def handle(self, now: float, event: Event) -> list[Effect]:
        if isinstance(event, Ended):
            self.happens(event)
        return []


class _Empty(Downpour):
    """A strategy of which nobody but the coordinator is there yet."""

    def roles(self, measured: bool) -> tuple[str, ...]:
        return (roles.COORDINATOR,)


@pytest.mark.parametrize("kind", ["shard", "replica"])
def test_the_simulation_is_a_place(kind: str) -> None:
    def make(happens: Happens) -> Site:
        job, cluster = Job(classes(mlp), _Empty(2, 2)), Simulated()
        simulation = Simulation(job, cluster.settings(job), cluster, lambda *_: None)
        simulation.supervisor = _Told(0)
        simulation.supervisor.happens = happens
        both = f"{kind} 0", f"{kind} 1"
        endpoints: Any = simulation.network.endpoints

        def there() -> list[tuple[str, int]]:
            return [
                (role, endpoints[role].incarnation) for role in both if role in endpoints and not endpoints[role].closed
            ]

        def strike(role: str, incarnation: int) -> None:
            assert endpoints[role].incarnation == incarnation
            simulation.kill(role)

        def pump() -> None:
            if simulation.clock.pending:
                simulation.clock.turn()

        return Site(simulation, both, strike, there, pump, simulation.close)

    check_place(make)
