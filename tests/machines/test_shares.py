"""Shares of links are max-min fair, and messages go in order, in the time of bytes, shares and cables."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distbelief.core.conversations.initialising import Ready
from distbelief.core.effects import Arrival, Phantom
from distbelief.core.events import Lost
from distbelief.core.messages import Version
from distbelief.core.settings import Settings
from distbelief.network.graph import Routes
from distbelief.network.shapes import shape
from distbelief.network.shares import FEW, FairShares, Flow
from distbelief.runtime.clock import VirtualClock
from distbelief.sharding.layout import Range
from distbelief.testing import Pair, check_transport
from distbelief.transport.cluster_model import NetworkModel
from distbelief.transport.routed import RoutedNetwork
from distbelief.transport.virtual import HEADER, MEMORY

FLOWS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1, max_size=FEW)
CAPACITIES = st.lists(st.sampled_from([1.0, 2.0, 3.0, 10.0]), min_size=6, max_size=6)


def rates(paths: Sequence[Sequence[int]], capacities: Sequence[float]) -> list[float]:
    """Fill all flows alike until a link is full, and go on with the others: from the definition."""
    found = [0.0] * len(paths)
    growing = set(range(len(paths)))
    while growing:
        room = {
            link: (capacity - sum(found[f] for f, path in enumerate(paths) if link in path), crossing)
            for link, capacity in enumerate(capacities)
            if (crossing := sum(link in paths[f] for f in growing))
        }
        step = min(left / crossing for left, crossing in room.values())
        for f in growing:
            found[f] += step
        full = {link for link, (left, crossing) in room.items() if left / crossing <= step * (1 + 1e-12)}
        growing = {f for f in growing if not full & set(paths[f])}
    return found


@given(FLOWS, CAPACITIES)
def test_shares_are_max_min_fair(paths: list[list[int]], capacities: list[float]) -> None:
    clock = VirtualClock()
    shares = FairShares(clock, capacities, lambda _: 0)
    flows = [Flow(tuple(path)) for path in paths]
    for flow in flows:
        shares.begin(flow, 1e9)
    while clock.pending and clock._coming[0][0] == 0.0:
        clock.turn()
    given_ = [flow.held_by.rate for flow in flows if flow.held_by]
    assert given_ == pytest.approx(rates(paths, capacities))
    for path, rate in zip(paths, given_, strict=True):  # the definition itself, of which the other is one reading
        through = {link: [r for p, r in zip(paths, given_, strict=True) if link in p] for link in path}
        full = [link for link in path if sum(through[link]) >= capacities[link] * (1 - 1e-9)]
        assert any(max(through[link]) <= rate * (1 + 1e-9) for link in full)
    for link, capacity in enumerate(capacities):
        assert sum(r for p, r in zip(paths, given_, strict=True) if link in p) <= capacity * (1 + 1e-9)


Sent = list[tuple[float, list[int], float]]
"""When each begins, its links and its bytes."""


def naive_ends(sent: Sent, capacities: Sequence[float]) -> list[float]:
    """When each has passed, where all rates are made anew at each beginning and end."""
    left = [size for _, _, size in sent]
    ends, now, flowing, waiting = [0.0] * len(sent), 0.0, set[int](), sorted(range(len(sent)), key=lambda i: sent[i][0])
    while flowing or waiting:
        order = sorted(flowing)
        each = dict(zip(order, rates([sent[i][1] for i in order], capacities), strict=True))
        done = min((now + left[i] / each[i] for i in order), default=float("inf"))
        moment = min(done, sent[waiting[0]][0] if waiting else float("inf"))
        for i in order:
            left[i] -= each[i] * (moment - now)
            if left[i] <= 1e-6:
                ends[i] = moment
                flowing.discard(i)
        now = moment
        while waiting and sent[waiting[0]][0] <= now:
            flowing.add(waiting.pop(0))
    return ends


def simulated_ends(sent: Sent, capacities: Sequence[float]) -> list[float]:
    clock = VirtualClock()
    ends, flows = [0.0] * len(sent), [Flow(tuple(path)) for _, path, _ in sent]

    def passed(flow: Flow) -> float:
        ends[flows.index(flow)] = clock.time
        return 0

    shares = FairShares(clock, capacities, passed)
    for i, (moment, _, _) in enumerate(sent):
        clock.call_at(moment, lambda at: shares.begin(flows[at], sent[at][2]), i)
    while clock.pending:
        clock.turn()
    return ends


@given(st.data())
def test_flows_end_when_a_naive_simulation_says(data: st.DataObject) -> None:
    moments, sizes = st.floats(0, 5, allow_subnormal=False), st.floats(1, 50)
    sent = [(data.draw(moments), path, data.draw(sizes)) for path in data.draw(FLOWS)]
    capacities = data.draw(CAPACITIES)
    assert simulated_ends(sent, capacities) == pytest.approx(naive_ends(sent, capacities), rel=1e-2, abs=0.05)


def test_flows_end_also_where_the_clock_cannot_tell_their_last_bytes() -> None:
    """At 400 Gbit/s a tick of its floats, some hours into a job, is longer than the last hundredth of a byte."""
    clock, begun, passed, draw = VirtualClock(), 1e5, list[Flow](), random.Random(0)
    shares = FairShares(clock, [5e10] * 3, lambda flow: passed.append(flow) or 0)
    for number in range(20):
        clock.call_at(
            begun + draw.random(), lambda link: shares.begin(Flow((link, 2)), draw.uniform(1e9, 9e9)), number % 2
        )
    for _ in range(1000):
        if clock.pending:
            clock.turn()
    assert len(passed) == 20


@pytest.mark.parametrize("seed", range(4))
def test_among_many_flows_shares_are_late_and_ends_hardly(seed: int) -> None:
    draw = random.Random(seed)
    sent = [(draw.uniform(0, 20), draw.sample(range(12), 3), draw.uniform(1e3, 9e3)) for _ in range(80)]
    ours, theirs = simulated_ends(sent, [1e4] * 12), naive_ends(sent, [1e4] * 12)
    assert max(ours) == pytest.approx(max(theirs), rel=0.03)
    took = [[end - one[0] for end, one in zip(ends, sent, strict=True)] for ends in (ours, theirs)]
    assert sum(took[0]) == pytest.approx(sum(took[1]), rel=0.06)


def network(text: str, model: NetworkModel | None = None, hosts: int = 0) -> tuple[VirtualClock, RoutedNetwork]:
    clock, topology = VirtualClock(), shape(text)
    places = topology.first(hosts or len(topology.hosts), "the test")
    routed = Routes(topology), places
    return clock, RoutedNetwork(clock, model or NetworkModel(1e-3, 1e6), Settings(), True, None, routed)


class Sites:
    """Replicas, one a host, which send each other messages; what comes, with its moment."""

    def __init__(self, text: str, model: NetworkModel | None = None) -> None:
        self.clock, self.network = network(text, model)
        self.came: list[tuple[float, str, object]] = []
        self.ends = {
            name: self.network.endpoint(name) for name in (f"replica {i}" for i in range(len(self.network.places)))
        }
        for name, end in self.ends.items():
            end.deliver = lambda arrival, name=name: self.take(name, arrival)  # type: ignore[misc]

    def take(self, name: str, arrival: Arrival) -> None:
        event = arrival.event
        self.came.append((self.clock.time, name, event.shards[0].updates if isinstance(event, Ready) else event))

    def send(self, source: int, target: int, number: int, size: int = 0) -> None:
        payload = Phantom(size - HEADER) if size else None
        self.ends[f"replica {source}"].send(f"replica {target}", Ready((Version(0, number),)), payload)

    def run(self) -> list[tuple[float, str, object]]:
        while self.clock.pending:
            self.clock.turn()
        return self.came


def test_a_message_takes_its_bytes_once_and_the_latency_of_each_cable() -> None:
    """Cut-through: two switches more cost two cables' latency, and no bytes again."""
    for text, target, latency in (("tree:2x2", 1, 1e-3), ("tree:2x2", 3, 2e-3), ("tree:2x2x2", 7, 3e-3)):
        sites = Sites(text)
        sites.send(0, target, 1, 500_000)
        assert sites.run() == [(pytest.approx(0.5 + latency), f"replica {target}", 1)]


def test_those_who_share_a_link_have_equal_parts_of_it() -> None:
    """Both through one uplink, one of them for half the time."""
    sites = Sites("tree:2x2")
    sites.send(0, 2, 1, 500_000)
    sites.send(1, 3, 2, 250_000)
    assert sites.run() == [(pytest.approx(0.5 + 2e-3), "replica 3", 2), (pytest.approx(0.75 + 2e-3), "replica 2", 1)]


def test_messages_of_one_link_leave_one_after_another_and_take_one_share() -> None:
    sites = Sites("tree:3")
    for number in range(3):
        sites.send(0, 2, number, 100_000)
    sites.send(1, 2, 9, 100_000)
    moments = {number: moment for moment, _, number in sites.run()}
    assert [moments[n] for n in (0, 9, 1, 2)] == pytest.approx([0.201, 0.201, 0.301, 0.401])
    assert [number for _, _, number in sites.came if number != 9] == [0, 1, 2]


def test_what_fits_a_packet_waits_for_nobody_but_its_own_link() -> None:
    sites = Sites("tree:3")
    sites.send(0, 2, 1, 1_000_000)
    sites.send(0, 1, 2)
    sites.send(1, 2, 3)
    sites.send(0, 2, 4)
    sites.run()
    assert [number for _, _, number in sites.came] == [2, 3, 1, 4]
    assert sites.came[0][0] == pytest.approx(HEADER / 1e6 + 1e-3)


def test_both_directions_of_a_cable_are_links_of_their_own() -> None:
    sites = Sites("tree:2")
    sites.send(0, 1, 1, 500_000)
    sites.send(1, 0, 2, 500_000)
    assert [moment for moment, _, _ in sites.run()] == pytest.approx([0.501, 0.501])


@pytest.mark.parametrize("ends", ["close", "die"])
def test_whoever_ends_is_heard_of_after_all_that_has_left(ends: str) -> None:
    sites = Sites("tree:2x2")
    sites.send(0, 3, 1, 100_000)
    sites.send(0, 3, 2, 100_000)
    getattr(sites.ends["replica 0"], ends)()
    came = [what for _, name, what in sites.run() if name == "replica 3"]
    assert came[:2] == [1, 2]
    assert isinstance(came[2], Lost)


def test_roles_of_one_host_have_its_memory_between_them() -> None:
    sites = Sites("tree:2x2")
    shard = sites.network.endpoint("shard 0")
    shard.deliver = lambda arrival: sites.take("shard 0", arrival)
    assert shard.host == 0
    sites.ends["replica 0"].send("shard 0", Ready((Version(0, 5),)), Phantom(10_000_000))
    assert sites.run() == [(pytest.approx(MEMORY.latency), "shard 0", 5)]
    assert sites.network.link_loads() == {}


def test_shards_and_standbys_are_spread_over_switches() -> None:
    _, spread = network("tree:4x4")
    hosts = [spread.host_of(f"shard {index}") for index in range(4)]
    assert {host // 4 for host in hosts} == {0, 1, 2, 3}
    assert [spread.host_of(f"replica {index}") for index in range(16)] == list(range(16))
    for text, count in (("tree:4x4", 16), ("tree:2x3", 4), ("tree:3x3", 7)):  # also where switches have unlike numbers
        _, spread = network(text, hosts=count)
        below = int(text[-1])
        at = [[spread.host_of(f"{role} {i}") // below for role in ("shard", "standby")] for i in range(2 * count)]
        assert all(shard != standby for shard, standby in at)


def test_loads_are_the_bytes_that_were_sent() -> None:
    sites = Sites("tree:2x2")
    sites.send(0, 3, 1, 100_000)
    sites.send(0, 3, 2)
    sites.send(1, 3, 3, 50_000)
    sites.run()
    name, loads = sites.network.routes.topology.link_name, sites.network.link_loads()
    assert {name(link): dict(flows) for link, flows in loads.items()}["switch 1 to switch 0"] == {
        ("replica 0", "replica 3"): 100_000 + HEADER, ("replica 1", "replica 3"): 50_000,
    }  # fmt: skip


@pytest.mark.parametrize("model", [NetworkModel(), NetworkModel(jitter=5.0), NetworkModel(delay_chance=0.2, delay=0.5)])
@pytest.mark.long
def test_conformance(model: NetworkModel) -> None:
    def make_pair(held: Range, gradients: int, parameters: int) -> Pair:
        clock = VirtualClock()
        topology = shape("tree:2x2")
        where = Routes(topology), topology.walk
        routed = RoutedNetwork(clock, model, Settings(seed=held.size), False, None, where)
        a, b = routed.endpoint("replica 0"), routed.endpoint("shard 0")
        b.host = 3  # not beside the replica, where nothing is sent over cables
        a.allocate(held, gradients, parameters)

        def pump() -> None:
            if clock.pending:
                clock.turn()

        return Pair(a, b, pump)

    check_transport(make_pair)
