"""The virtual network keeps the promises of transports, in fair weather and in foul."""

from __future__ import annotations

import pytest

from distbelief.runtime.clock import VirtualClock
from distbelief.testing import Pair, check_transport
from distbelief.transport.virtual import VirtualNetwork, Weather


@pytest.mark.parametrize(
    "weather",
    [Weather(), Weather(jitter=5.0), Weather(delay_chance=0.2, delay=0.5), Weather(latency=0.0, bandwidth=1e4)],
    ids=["fair", "jitter", "delays", "narrow"],
)
def test_conformance(weather: Weather) -> None:
    def make_pair(size: int, gradients: int, parameters: int) -> Pair:
        clock = VirtualClock()
        network = VirtualNetwork(clock, weather, seed=size)
        a, b = network.endpoint("replica 0"), network.endpoint("shard 0")
        a.allocate(size, gradients, parameters)

        def pump() -> None:
            if clock.pending:
                clock.turn()

        return Pair(a, b, pump)

    check_transport(make_pair)
