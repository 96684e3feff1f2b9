"""What messages cost on the virtual cluster: a role does one thing at a time, and a host's cores are shared."""

from __future__ import annotations

import pytest

from distbelief.core.conversations.initialising import Ready
from distbelief.core.effects import Arrival, Payload
from distbelief.core.events import Event, Lost
from distbelief.core.messages import Message, Version
from distbelief.errors import UsageError
from distbelief.runtime.clock import VirtualClock
from distbelief.transport.cluster_model import Hosts, NetworkModel, VirtualHost
from distbelief.transport.virtual import MEMORY, VirtualNetwork

INSTANT = NetworkModel(latency=0.25, bandwidth=float("inf"))
ONE_HOST = Hosts(cores=4)


class Fixed:
    """Every message costs its receiver and its sender the same."""

    def __init__(self, taking: float, saying: float = 0.0) -> None:
        self._taking, self._saying = taking, saying

    def taking(self, event: Event, payload: Payload | None) -> float:
        return self._taking

    def saying(self, message: Message, payload: Payload | None) -> float:
        return self._saying

    def copy(self, length: int) -> float:
        return 0.0

    def update(self, length: int) -> float:
        return 0.0


class Pair:
    """Two replicas and a shard that answers each message with one; who heard what, and when."""

    def __init__(self, network: NetworkModel = INSTANT, hosts: Hosts | None = None) -> None:
        self.clock = VirtualClock()
        self.network = VirtualNetwork(self.clock, network, hosts=hosts)
        self.one, self.other, self.shard = (
            self.network.endpoint(role) for role in ("replica 0", "replica 1", "shard 0")
        )
        self.heard: list[tuple[float, str, str]] = []
        for endpoint in (self.one, self.other, self.shard):
            endpoint.deliver = lambda arrival, role=endpoint.role: self.hear(role, arrival)
        self.answers = 1

    def hear(self, role: str, arrival: Arrival) -> None:
        told = "lost" if isinstance(arrival.event, Lost) else str(arrival.event.shards[0].updates)  # type: ignore[attr-defined]
        self.heard.append((round(self.clock.time, 6), role, told))
        if role == "shard 0" and told != "lost":
            for number in range(self.answers):
                self.shard.send(arrival.sender, Ready((Version(0, int(told) + 10 * (number + 1)),)))

    def run(self) -> list[tuple[float, str, str]]:
        while self.clock.pending:
            self.clock.turn()
        return self.heard


def say(number: int) -> Ready:
    return Ready((Version(0, number),))


@pytest.mark.parametrize("hosts", [None, ONE_HOST], ids=["own machines", "one host"])
def test_a_machine_is_handed_one_message_after_the_other_and_its_answers_leave_when_its_work_is_done(
    hosts: Hosts | None,
) -> None:
    """Two messages at 0.25, each a second's work; each answer is half a second more, and on its way for a quarter."""
    pair = Pair(NetworkModel(latency=0.25, bandwidth=float("inf"), local_latency=0.25, local_bandwidth=1e18), hosts)
    pair.shard.work = Fixed(1.0, 0.5)
    pair.one.send("shard 0", say(1))
    pair.other.send("shard 0", say(2))
    assert pair.run() == [
        (0.25, "shard 0", "1"),
        (1.75, "shard 0", "2"),
        (2.0, "replica 0", "11"),
        (3.5, "replica 1", "12"),
    ]


def test_a_round_of_answers_leaves_one_by_one() -> None:
    pair = Pair()
    pair.shard.work, pair.answers = Fixed(1.0, 0.5), 3
    pair.one.send("shard 0", say(1))
    assert pair.run()[1:] == [(2.0, "replica 0", "11"), (2.5, "replica 0", "21"), (3.0, "replica 0", "31")]


@pytest.mark.parametrize("hosts", [None, ONE_HOST], ids=["own machines", "one host"])
def test_a_story_finds_what_has_arrived_at_once_and_what_it_does_next_is_later(hosts: Hosts | None) -> None:
    """Two messages reach a replica at 0.25 while it computes until 1; half a second's work each, then it speaks."""
    pair = Pair(NetworkModel(latency=0.25, bandwidth=float("inf"), local_latency=0.25, local_bandwidth=1e18), hosts)
    pair.one.work, pair.answers = Fixed(0.5), 0
    pair.one.thread.do(1.0, lambda _: pair.one.send("shard 0", say(3)), None)
    pair.other.send("replica 0", say(1))
    pair.shard.send("replica 0", say(2))
    assert pair.run() == [(0.25, "replica 0", "1"), (0.25, "replica 0", "2"), (2.25, "shard 0", "3")]


@pytest.mark.parametrize("hosts", [None, ONE_HOST], ids=["own machines", "one host"])
def test_who_dies_says_nothing_that_waited_and_hears_nothing(hosts: Hosts | None) -> None:
    pair = Pair(NetworkModel(latency=0.25, bandwidth=float("inf"), local_latency=0.25, local_bandwidth=1e18), hosts)
    """It is told the first of three, and dies before it has said the answer to it."""
    pair.shard.work = Fixed(1.0, 0.5)
    for number in (1, 2, 3):
        pair.one.send("shard 0", say(number))
    pair.clock.call_at(0.5, lambda _: pair.network.crash("shard 0"), None)
    assert pair.run() == [(0.25, "shard 0", "1"), (0.75, "replica 0", "lost")]


@pytest.mark.parametrize("hosts", [None, ONE_HOST], ids=["own machines", "one host"])
def test_who_ends_is_heard_out(hosts: Hosts | None) -> None:
    """What was said while there was work to be done arrives, and then the end."""
    pair = Pair(NetworkModel(latency=0.25, bandwidth=float("inf"), local_latency=0.25, local_bandwidth=1e18), hosts)
    pair.shard.thread.owe(1.0)
    pair.shard.work = Fixed(0.0)
    pair.shard.send("replica 0", say(1))
    pair.shard.close()
    assert [what[1:] for what in pair.run()] == [("replica 0", "1"), ("replica 0", "lost")]


def done_at(host: VirtualHost, clock: VirtualClock, pieces: list[tuple[float, float]]) -> list[float]:
    """When each of several roles, which begins at a moment with so much work, is done."""
    found: dict[int, float] = {}
    for number, (begins, seconds) in enumerate(pieces):
        thread = host.thread()
        clock.call_at(
            begins,
            lambda what: what[0].do(what[1], lambda who: found.__setitem__(who, round(clock.time, 9)), what[2]),
            (thread, seconds, number),
        )
    while clock.pending:
        clock.turn()
    return [found[number] for number in range(len(pieces))]


@pytest.mark.parametrize(
    ("cores", "together", "pieces", "ends"),
    [
        (2, 1.0, [(0, 2), (0, 2)], [2, 2]),
        (1, 1.0, [(0, 2), (0, 2)], [4, 4]),
        (2, 1.0, [(0, 4), (0, 4), (1, 1)], [4.5, 4.5, 2.5]),  # from 1 s on at two thirds each: 1 s of work takes 1.5
        (2, 0.5, [(0, 2), (1, 2)], [3, 4]),  # at half the speed while both work
        (4, 0.7, [(0, 0.9), (0, 0.9)], [1, 1]),  # two of four: a third of the way to 0.7
        (1, 1.0, [(0, 1), (2, 1)], [1, 3]),
    ],
)
def test_those_who_work_share_the_cores_evenly(
    cores: int, together: float, pieces: list[tuple[float, float]], ends: list[float]
) -> None:
    clock = VirtualClock()
    assert done_at(VirtualHost(clock, cores, together), clock, pieces) == pytest.approx(ends)


def test_who_dies_leaves_the_cores_to_the_others() -> None:
    clock = VirtualClock()
    host = VirtualHost(clock, 1)
    dead, alive = host.thread(), host.thread()
    ends: list[float] = []
    dead.do(4.0, lambda _: ends.append(-1.0), None)
    alive.do(4.0, lambda _: ends.append(clock.time), None)
    clock.call_at(2.0, lambda _: dead.stop(), None)
    while clock.pending:
        clock.turn()
    assert ends == [5.0]


@pytest.mark.parametrize(("busy", "ends"), [(0.0, 2.0), (0.25, 1.0), (0.5, 1.0), (0.8, 1.6), (3.0, 2.0)])
def test_steps_that_are_partly_slept_share_a_core_for_the_rest(busy: float, ends: float) -> None:
    """Two steps of a second on one core; what comes after a step begins when it is over, slept or not."""
    clock, said = VirtualClock(), []
    threads = [(host := VirtualHost(clock, 1, busy=busy)).thread(), host.thread()]
    for thread in threads:
        thread.step(1.0, lambda _: said.append(clock.time), None)
        thread.do(0.5, lambda _: said.append(clock.time), None)
    while clock.pending:
        clock.turn()
    assert said == pytest.approx([ends, ends, ends + 1.0, ends + 1.0])


def test_who_dies_asleep_does_not_wake() -> None:
    clock, said = VirtualClock(), []
    thread = VirtualHost(clock, 1, busy=0.25).thread()
    thread.step(1.0, said.append, "over")
    clock.call_at(0.5, lambda _: thread.stop(), None)
    while clock.pending:
        clock.turn()
    assert not said


def test_links_inside_a_host_are_those_of_its_memory() -> None:
    def arrives(hosts: Hosts | None, **local: float) -> float:
        pair = Pair(NetworkModel(latency=0.25, bandwidth=1e3, **local), hosts)
        pair.one.send("shard 0", say(1))
        return pair.run()[0][0]

    assert arrives(None) == 0.25 + 0.064
    assert arrives(ONE_HOST) == MEMORY.latency
    assert arrives(ONE_HOST, local_latency=0.5, local_bandwidth=1e2) == 1.14
    assert arrives(Hosts(replicas=1)) == MEMORY.latency


def test_roles_are_placed_on_hosts() -> None:
    hosts = Hosts(cores=1, replicas=2)
    placed = {
        role: hosts.place(role, 5)
        for role in (*(f"replica {i}" for i in range(5)), "shard 0", "shard 2", "shard 3", "standby 2", "coordinator")
    }
    assert list(placed.values()) == [0, 0, 1, 1, 2, 0, 2, 0, 0, 0]
    assert {Hosts().place(role, 5) for role in placed} == {0}


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        (Hosts(cores=0), "hosts with 0 cores: must be 1 or more"),
        (Hosts(replicas=-1), "hosts with -1 replicas"),
        (Hosts(cores=2, together=0.0), "together have 0.0 of their speed"),
        (Hosts(cores=2, together=1.5), "together have 1.5 of their speed"),
        (Hosts(cores=1, together=0.5), "have one core"),
        (Hosts(busy=-1.0), "a step is busy for -1.0 s"),
    ],
)
def test_impossible_hosts_are_refused(hosts: Hosts, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        hosts.check()
