"""What replicas without locks count, and the turns of those with one."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from distbelief.core.consistency import Key, RoundRobin
from distbelief.server.passed import ROW
from distbelief.server.unlocked import SAMPLES, STALENESS, UPDATES, Counts


def test_high_stalenesses_are_counted_together_and_what_was_done_before_counts() -> None:
    memory = [0] * 3 * ROW
    one, other, shard = (Counts(memory, 2, index) for index in range(3))
    shard.begin(5, 50, {1: 4, 1000: 1})
    one.look()
    for _ in range(100):
        other.look()
        other.add(1)
    one.add(1)
    assert (shard.total(UPDATES), shard.total(SAMPLES)) == (106, 151)
    assert shard.staleness() == {0: 100, 1: 4, ROW - 1 - STALENESS: 2}


@given(st.lists(st.tuples(st.sampled_from(["attend", "leave", "push"]), st.integers(0, 3)), max_size=60))
def test_by_turns_one_pushes_and_nobody_waits_for_who_takes_no_part(asked: list[tuple[str, int]]) -> None:
    """There is one whose turn it is, of those who take part; and nobody is overtaken twice."""
    policy, members = RoundRobin(4), set[int]()
    overtaken = dict.fromkeys(permutations(range(4), 2), 0)
    """Of a replica by another: how many pushes that has made since the one came, or pushed."""

    def begin(replica: int) -> None:
        overtaken.update(((replica, other), 0) for other in range(4) if other != replica)

    for what, who in asked:
        role = f"replica {who}"
        if what == "attend":
            policy.attend(role, 0, -1)
            begin(who)
            members.add(who)
        elif what == "leave":
            policy.leave(role, 0)
            members.discard(who)
        elif who in members and policy.may_push(role):
            policy.push(Key(role, 0, 1), 0, 8, 0)
            for other in members - {who}:
                overtaken[other, who] += 1
            begin(who)
        assert sum(policy.may_push(f"replica {one}") for one in members) == bool(members)
        assert max(overtaken.values()) <= 1
