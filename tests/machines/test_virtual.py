"""The virtual network keeps the promises of transports, in fair model and in foul."""

from __future__ import annotations

import pytest

from distbelief.core.conversations.initialising import Ready
from distbelief.core.effects import Arrival
from distbelief.core.events import Lost
from distbelief.core.messages import Version
from distbelief.core.settings import Settings
from distbelief.runtime.clock import VirtualClock
from distbelief.sharding.layout import Range
from distbelief.testing import Pair, check_transport
from distbelief.transport.cluster_model import NetworkModel, Outage
from distbelief.transport.virtual import HEADER, VirtualNetwork

STORMS = tuple(Outage(start, start + 0.3, ("replica 0",)) for start in (0.0, 1e-3, 0.1, 0.25, 1.0, 2.0, 2.3, 10.0))


@pytest.mark.parametrize(
    "model",
    [
        NetworkModel(),
        NetworkModel(jitter=5.0),
        NetworkModel(delay_chance=0.2, delay=0.5),
        NetworkModel(latency=0.0, bandwidth=1e4),
        NetworkModel(outages=STORMS),
        NetworkModel(delay_chance=0.2, delay=0.5, bandwidth=1e4, outages=STORMS),
    ],
    ids=["fair", "jitter", "delays", "narrow", "outages", "outages and delays"],
)
@pytest.mark.long
def test_conformance(model: NetworkModel) -> None:
    def make_pair(held: Range, gradients: int, parameters: int) -> Pair:
        clock = VirtualClock()
        network = VirtualNetwork(clock, model, Settings(seed=held.size))
        a, b = network.endpoint("replica 0"), network.endpoint("shard 0")
        a.allocate(held, gradients, parameters)

        def pump() -> None:
            if clock.pending:
                clock.turn()

        return Pair(a, b, pump)

    check_transport(make_pair)


class Line:
    """A replica that sends to a shard; what arrives, with its moments."""

    def __init__(self, model: NetworkModel, seed: int = 0) -> None:
        self.clock = VirtualClock()
        network = VirtualNetwork(self.clock, model, Settings(seed=seed))
        self.replica, self.shard = network.endpoint("replica 0"), network.endpoint("shard 0")
        self.came: list[tuple[float, object]] = []
        self.shard.deliver, self.replica.deliver = self.take, lambda _: None
        self.sent = 0

    def take(self, arrival: Arrival) -> None:
        event = arrival.event
        self.came.append((self.clock.time, event.shards[0].updates if isinstance(event, Ready) else event))

    def send(self, _: object = None) -> None:
        self.replica.send("shard 0", Ready((Version(0, self.sent),)))
        self.sent += 1

    def run(self) -> list[tuple[float, object]]:
        while self.clock.pending:
            self.clock.turn()
        return self.came


@pytest.mark.parametrize("side", ["replica 0", "shard 0"])
def test_what_a_partition_meets_arrives_once_it_heals_in_order_and_what_it_does_not_at_its_time(side: str) -> None:
    """Latency 0.1: one sent before that has arrived, one under way, two during it, one as it heals."""
    line = Line(NetworkModel(latency=0.1, bandwidth=float("inf"), outages=(Outage(1.0, 2.0, (side,)),)))
    for moment in (0.5, 0.95, 1.2, 1.9, 2.0):
        line.clock.call_at(moment, line.send, None)
    assert line.run() == [(0.6, 0), (2.1, 1), (2.1, 2), (2.1, 3), (2.1, 4)]


def test_what_is_sent_during_a_partition_waits_though_nothing_was_under_way_before_it() -> None:
    line = Line(NetworkModel(latency=0.1, bandwidth=float("inf"), outages=(Outage(1.0, 2.0, ("replica 0",)),)))
    line.clock.call_at(1.2, line.send, None)
    assert line.run() == [(2.1, 0)]


def test_a_partition_is_between_its_sides_only() -> None:
    """Within one side nothing is cut, nor within the other."""
    for side in (("replica 0", "shard 0"), ("replica 1",)):
        line = Line(NetworkModel(latency=0.1, bandwidth=float("inf"), outages=(Outage(1.0, 2.0, side),)))
        line.clock.call_at(1.5, line.send, None)
        assert line.run() == [(1.6, 0)]


def test_partitions_follow_upon_each_other() -> None:
    """Those that overlap are one; what is sent again between two, but too late to arrive, is sent once more."""
    cuts = tuple(Outage(start, stop, ("replica 0",)) for start, stop in ((2.05, 3.0), (1.5, 2.0), (1.0, 1.7)))
    line = Line(NetworkModel(latency=0.1, bandwidth=float("inf"), outages=cuts))
    line.clock.call_at(1.1, line.send, None)
    assert line.run() == [(3.1, 0)]


def test_after_a_partition_a_backlog_takes_the_time_of_its_bytes() -> None:
    line = Line(NetworkModel(latency=0.0, bandwidth=HEADER / 0.25, outages=(Outage(1.0, 5.0, ("replica 0",)),)))
    for moment in (1.5, 2.0, 2.5):
        line.clock.call_at(moment, line.send, None)
    assert line.run() == [(5.25, 0), (5.5, 1), (5.75, 2)]


@pytest.mark.parametrize("how", ["dies", "drops"])
def test_the_news_of_an_end_comes_after_the_heal_and_after_all_that_was_sent(how: str) -> None:
    line = Line(NetworkModel(latency=0.1, outages=(Outage(1.0, 2.0, ("shard 0",)),)))
    line.clock.call_at(0.5, line.send, None)
    line.clock.call_at(1.5, line.send, None)
    line.clock.call_at(
        1.6, lambda _: line.replica.close() if how == "dies" else line.replica.drop("shard 0", "enough"), None
    )
    *before, (moment, last) = line.run()
    assert [number for _, number in before] == [0, 1]
    assert isinstance(last, Lost)
    assert moment >= before[-1][0] > 2.1


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_network_does_a_link_keeps_its_order_and_loses_nothing(seed: int) -> None:
    line = Line(NetworkModel(jitter=20.0, delay_chance=0.2, delay=0.5, bandwidth=1e4, outages=STORMS), seed)
    for number in range(300):
        line.clock.call_at(number * 0.01, line.send, None)
    line.clock.call_at(3.0, lambda _: line.replica.close(), None)
    came = line.run()
    assert [number for _, number in came[:-1]] == list(range(300))
    assert isinstance(came[-1][1], Lost)
    # replica 0 is cut off in each of them
    assert not [moment for moment, _ in came for cut in STORMS if cut.start < moment < cut.stop]
