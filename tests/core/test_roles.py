"""Roles: each has one text, which names it and no other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distbelief.core import roles
from distbelief.core.roles import Kind, Role
from distbelief.errors import RemoteProtocolError

NUMBERED = (Kind.REPLICA, Kind.SHARD, Kind.STANDBY)
numbers = st.integers(0, 10**6)
any_role = st.one_of(
    st.builds(Role, st.sampled_from([kind for kind in Kind if kind not in NUMBERED])),
    st.builds(Role, st.sampled_from(NUMBERED), numbers),
    st.builds(Role, st.just(Kind.REPLICA), numbers, numbers),
)


@given(any_role)
def test_a_role_is_what_its_text_names(role: Role) -> None:
    assert roles.parse(str(role)) == role
    assert roles.kind(str(role)) is role.kind
    assert roles.index_of(str(role)) == role.index
    assert roles.is_replica(str(role)) is (role.kind is Kind.REPLICA)


@given(any_role, any_role)
def test_two_roles_have_two_texts(one: Role, other: Role) -> None:
    assert (one == other) is (str(one) == str(other))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "replica",
        "replica ",
        "replica -1",
        "replica 01",
        "replica 1 ",
        "replica 1.",
        "replica 1.x",
        "replica\u0661",
        "replica \u0661",
        "shard 1.0",
        "shard",
        "coordinator 0",
        "evaluator.1",
        "Replica 1",
        "process 7",
        "replica 1\n",
        "replica " + "9" * 99,
    ],
)
def test_what_names_no_role_is_the_peers_error(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match="is no role: "):
        roles.parse(text)


@given(numbers)
def test_a_standby_and_its_shard_name_each_other(index: int) -> None:
    assert roles.standby_of(roles.shard(index)) == roles.standby(index)
    assert roles.shard_of(roles.standby(index)) == roles.shard(index)
