"""Role links as a fabric: what it promises, that what is on its way is bounded, and how a wait for a peer ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic, sleep

import jobs
import pytest
import torch
from patience import SECONDS
from ranks import in_threads

from distbelief.core.conversations.grouping import Assemble, ChunkBack, Member
from distbelief.core.messages import Address
from distbelief.core.settings import Plan, Settings
from distbelief.fabric import role_links
from distbelief.fabric.buckets import Bucket
from distbelief.fabric.role_links import RoleLinks
from distbelief.places.join.authority import Authority
from distbelief.places.processes.local import Local
from distbelief.schedules.allreduce import ALGORITHMS
from distbelief.sharding.layout import Tensor, lay_out
from distbelief.strategies import Allreduce
from distbelief.testing import Side, check_fabric
from distbelief.transport import tcp
from distbelief.transport.tcp import TcpEndpoint
from distbelief.transport.tls import TlsEndpoint

AUTHORITY = Authority("job")
IDENTITIES = {role: AUTHORITY.issue(role) for role in ("replica 0", "replica 1", "replica 2", "replica 3")}
PLAN = Plan(Settings(), lay_out([Tensor("weight", (4,), "float32")]), (), 0)
LENGTH = 3 * role_links.WINDOW // 4
"""Elements of a vector that takes three windows."""


def never() -> bool:
    return False


Make = Callable[..., RoleLinks]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes role links of replicas by number; all are closed at the end."""
    made: list[RoleLinks] = []

    def links(
        index: int, replicas: int, algorithm: str = "ring", incarnation: int = 0, clear: bool = False
    ) -> RoleLinks:
        role, per_host = f"replica {index}", 2 * algorithm.startswith("hierarchical")
        secret = TlsEndpoint(role, "job", incarnation, identity=IDENTITIES[role])
        endpoint = TcpEndpoint(role, "job", incarnation) if clear else secret
        lines = role_links.ChunkedLinks(endpoint, index, replicas)
        made.append(RoleLinks(lines, index, torch.device("cpu"), algorithm, per_host, endpoint.listen()))
        return made[-1]

    yield links
    for one in made:
        one.close()


def group_of(number: int, several: Sequence[RoleLinks], incarnations: Sequence[int] = ()) -> Assemble:
    lives = incarnations or [0] * len(several)
    members = tuple(Member(f"replica {i}", Address("", lives[i]), False, one.store) for i, one in enumerate(several))
    return Assemble(number, PLAN, members, 0, 0, 0)


def form(number: int, several: Sequence[RoleLinks], incarnations: Sequence[int] = ()) -> None:
    """All take their places in a group."""
    group = group_of(number, several, incarnations)

    def take_place(rank: int, _: Callable[[], object]) -> None:
        assert several[rank].form(group, never), several[rank].fault

    in_threads(len(several), take_place)


def until(reached: Callable[[], bool]) -> None:
    end = monotonic() + SECONDS
    while not reached():
        assert monotonic() < end
        sleep(0.001)


def reduced(one: RoleLinks) -> bool:
    """Whether a round could be made."""
    end = monotonic() + SECONDS
    while (done := one.reduce()) is None:
        assert monotonic() < end
    return done


@pytest.mark.parametrize(("ranks", "clear"), [(1, False), (3, False), (3, True)])
def test_role_links_are_a_fabric(make: Make, ranks: int, clear: bool) -> None:
    made: dict[tuple[str, int], RoleLinks] = {}

    def rank(own: int, meet: Callable[[], object]) -> None:
        def side(algorithm: str, size: int, found: Sequence[Bucket]) -> Side:
            one = made[algorithm, own] = make(own, ranks, algorithm, clear=clear)
            meet()
            several = [made[algorithm, other] for other in range(ranks)]
            slot, total = one.open(size, found)
            assert one.form(group_of(0, several), never), one.fault
            return Side(one, slot, total, one.close)

        check_fabric(side, own, ranks, meet, [*ALGORITHMS, "auto"])

    in_threads(ranks, rank)


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_each_rank_sends_and_receives_its_share_of_the_least(make: Make, algorithm: str) -> None:
    """2 (p - 1) / p of a vector, as the table of the algorithms says, and no more than 1 % of headers beside it."""
    ranks, size = 4, 8 << 20
    several = [make(i, ranks, algorithm, clear=True) for i in range(ranks)]
    for one in several:
        one.open(size, [Bucket(0, size, "float32")])
    form(0, several)
    ends = [one._links._endpoint.traffic for one in several]
    before = [(sum(end.sent.values()), sum(end.received.values())) for end in ends]
    for one in several:
        one.ready(0)
    assert all(map(reduced, several))
    least = 2 * (ranks - 1) * size // ranks
    for end, (sent, received) in zip(ends, before, strict=True):
        assert least <= sum(end.sent.values()) - sent < 1.01 * least
        assert least <= sum(end.received.values()) - received < 1.01 * least


@pytest.fixture
def pair(make: Make) -> list[RoleLinks]:
    """Two replicas with one long vector each, in a group; the tree has the second send all of it to the first."""
    both = [make(i, 2, "tree") for i in range(2)]
    for i, one in enumerate(both):
        slot, _ = one.open(4 * LENGTH, [Bucket(0, 4 * LENGTH, "float32")])
        slot.view(torch.float32).fill_(i + 1.0)
    form(0, both)
    return both


def sums(one: RoleLinks) -> set[float]:
    return {*one._views[0].unique().tolist()}


def arrived(one: RoleLinks) -> int:
    """Chunks that have come to the first of a pair, which it has not taken."""
    return len(one._links._links["replica 1"].arrived)


def test_a_rank_that_is_late_is_sent_no_more_than_a_window(
    pair: list[RoleLinks], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    link, rest, rests = second._links._links["replica 0"], second._links.rest, threading.Event()
    monkeypatch.setattr(second._links, "rest", lambda: (rests.set(), rest()))
    second.ready(0)
    assert rests.wait(SECONDS)  # all that it sends for now is sent
    until(lambda: arrived(first) == role_links.CHUNKS)
    assert link.posted - len(link.waiting) == role_links.CHUNKS
    assert second.reduce() is None
    first.ready(0)
    assert reduced(first)
    assert reduced(second)
    assert sums(first) == sums(second) == {3.0}


def test_a_round_ends_when_the_others_have_taken_all_that_was_sent(
    pair: list[RoleLinks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it may be read where it lies."""
    first, second = pair
    take, held = second._links._take_move, threading.Event()
    held.set()
    monkeypatch.setattr(
        second._links,
        "_take_move",
        lambda vector, step, move, at: at if held.is_set() else take(vector, step, move, at),
    )
    for one in pair:
        one.ready(0)
    until(lambda: len(second._links._links["replica 0"].arrived) == role_links.CHUNKS)
    assert [first.reduce() for _ in range(9)] == [None] * 9
    held.clear()
    second._links.wake()
    assert reduced(first)
    first._views[0].fill_(9.0)
    assert reduced(second)
    assert sums(second) == {3.0}


def test_what_is_on_its_way_in_a_group_is_in_no_sum_of_the_next(pair: list[RoleLinks]) -> None:
    first, second = pair
    second.ready(0)
    until(lambda: arrived(first) == role_links.CHUNKS)
    form(1, pair)
    for i, one in enumerate(pair):
        one._views[0].fill_(10.0 * (i + 1))
        one.ready(0)
    assert reduced(first)
    assert reduced(second)
    assert sums(first) == sums(second) == {30.0}


def test_what_comes_for_a_group_before_this_rank_is_in_it_is_kept(pair: list[RoleLinks]) -> None:
    first, second = pair
    end = second._links._endpoint
    second._thread.do(lambda: end.send("replica 0", *CHUNK))
    until(lambda: arrived(first) == 1)
    link = first._links._links["replica 1"]
    first._thread.do(lambda: link.begin(1)).wait()
    assert arrived(first) == 1
    first._thread.do(lambda: link.begin(2)).wait()
    assert arrived(first) == 0


CHUNK = ChunkBack(0, role_links.WINDOW, role_links.WINDOW + 4, 1, 0, 0, 0), torch.ones(1)
"""One of group 1, from the second of a pair to the first."""


def test_a_peer_that_closes_its_links_ends_the_wait_with_its_name(pair: list[RoleLinks]) -> None:
    first, second = pair
    first.ready(0)
    assert first.reduce() is None
    second.close()
    assert not reduced(first)
    assert first.fault.startswith("its link to replica 1 is gone (")


def test_a_peer_whose_host_is_silent_ends_the_wait_with_its_name(
    pair: list[RoleLinks], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = pair
    first.ready(0)
    assert first.reduce() is None
    own = [link.socket for link in first._links._endpoint._links.values()]
    monkeypatch.setattr(tcp, "silence_of", lambda connection: 1000.0 if connection in own else 0.0)
    assert not reduced(first)
    assert "nothing came from the host of replica 1 for 1000 s" in first.fault


def test_another_life_of_a_peer_is_linked_anew_in_the_next_group(make: Make, pair: list[RoleLinks]) -> None:
    first, second = pair
    first.ready(0)
    second.close()
    assert not reduced(first)
    again = make(1, 2, "tree", incarnation=1)
    slot, _ = again.open(4 * LENGTH, [Bucket(0, 4 * LENGTH, "float32")])
    slot.view(torch.float32).fill_(2.0)
    form(1, [first, again], [0, 1])
    first._views[0].fill_(1.0)
    for one in (first, again):
        one.ready(0)
    assert reduced(first)
    assert reduced(again)
    assert sums(first) == sums(again) == {3.0}


def test_a_meeting_ends_as_soon_as_another_group_is_named(make: Make) -> None:
    """One that waits for who never comes; and the group after it is formed."""
    both = [make(i, 2) for i in range(2)]
    for one in both:
        one.open(64, [])
    asked: list[bool] = []
    assert not both[1].form(group_of(0, both), lambda: asked.append(True) or len(asked) == 3)  # type: ignore[func-returns-value]
    assert len(asked) == 3
    form(1, both)


def test_a_meeting_with_one_who_is_dead_ends_at_once_with_his_name(make: Make) -> None:
    both = [make(i, 2) for i in range(2)]
    both[1].close()
    assert not both[0].form(group_of(0, both), never)
    assert "cannot reach replica 1" in both[0].fault


def test_a_peer_that_goes_by_another_schedule_is_told_of(make: Make) -> None:
    both = [make(0, 2, "ring"), make(1, 2, "tree")]
    for one in both:
        one.open(4096, [Bucket(0, 4096, "float32")])
    form(0, both)
    for one in both:
        one.ready(0)
    assert not reduced(both[0])
    assert "replica 1 has sent elements from 0 on" in both[0].fault
    assert "another schedule" in both[0].fault


def test_a_peer_that_sends_more_than_the_window_holds_loses_its_link(pair: list[RoleLinks]) -> None:
    first, second = pair
    first.ready(0)

    def flood() -> None:
        for _ in range(2 * role_links.CHUNKS + 1):
            second._links._endpoint.send("replica 0", *CHUNK)

    second._thread.do(flood)
    assert not reduced(first)
    assert "more than the window" in first.fault


def test_a_job_whose_links_are_encrypted_has_no_process_group(tmp_path: Path) -> None:
    place = Local(transport="tcp", tls=True)
    result = jobs.run(tmp_path / "run", Allreduce(replicas=2), on=place, task="jobs:without_process_groups")
    assert (result["outcome"], result["carrier"]) == ("done", "tls")


def test_a_thread_that_ends_leaves_nobody_waiting(pair: list[RoleLinks], monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = pair

    def fail() -> None:
        raise ValueError("broken")

    monkeypatch.setattr(first._thread, "_rest", fail)
    first._links.wake()
    first._thread.join(SECONDS)
    first.ready(0)
    assert not reduced(first)
    assert "broken" in first.fault
