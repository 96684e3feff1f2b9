"""Who may take part: by the user of his process, by his certificate, and by the first message of his link."""

from __future__ import annotations

import os
import ssl
import struct
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from distbelief.core.conversations.checkpointing import Go
from distbelief.core.messages import Hello, Message
from distbelief.errors import RemoteProtocolError
from distbelief.places.join import authority
from distbelief.places.join.authority import Authority
from distbelief.places.join.join_server import Guests, JoinRefusal, JoinRequest
from distbelief.transport.link import SLOTS_LIMIT, VECTOR_LIMIT, acceptable
from distbelief.transport.secure import Identity, check_user, context

OWN = os.getuid()


@pytest.mark.parametrize("uid", [OWN, OWN + 1, 0 if OWN else 1000])
def test_at_a_unix_socket_only_a_process_of_the_same_user_is_let_in(uid: int) -> None:
    said: Any = SimpleNamespace(getsockopt=lambda *_: struct.pack("3i", os.getpid(), uid, OWN))
    if uid == OWN:
        assert check_user(said) == os.getpid()
        return
    with pytest.raises(PermissionError, match=f"runs as user {uid}, this one as {OWN}; run both as one user"):
        check_user(said)


def greet(client: Identity, server: Identity) -> tuple[str, str]:
    """A handshake in memory; returns whom each end has at the other one.

    Raises:
        SSLError: one of them refuses the other.
    """
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends: Any = [
        context(ssl.PROTOCOL_TLS_CLIENT, client).wrap_bio(back, there),
        context(ssl.PROTOCOL_TLS_SERVER, server).wrap_bio(there, back, server_side=True),
    ]
    for _ in range(3):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    first, second = (dict(part[0] for part in end.getpeercert()["subject"])["commonName"] for end in ends)
    return first, second


ROLES = Authority("job")
SHARD, REPLICA = ROLES.issue("shard 0"), ROLES.issue("replica 0")
OTHERS = Authority("job").issue("shard 0")


def test_each_end_has_the_role_of_the_other() -> None:
    assert greet(REPLICA, SHARD) == ("shard 0", "replica 0")


def test_neither_end_believes_a_certificate_that_is_not_of_the_jobs_authority() -> None:
    wrong = Identity(SHARD.authority, OTHERS.certificate, OTHERS.key)
    for client, server in ((wrong, SHARD), (REPLICA, wrong)):
        with pytest.raises(ssl.SSLError, match=r"certificate verify failed|unknown ca"):
            greet(client, server)


@pytest.mark.parametrize(("days", "valid"), [(-1.1, False), (-0.9, True), (0, True), (29.9, True), (30.1, False)])
def test_a_certificate_holds_from_a_day_ahead_for_30_days(
    days: float, valid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a machine whose clock is so many days behind, which has made it now."""
    then = datetime.now(UTC) - timedelta(days=days)
    monkeypatch.setattr(authority, "datetime", SimpleNamespace(now=lambda _: then))
    made = Authority("job")
    one, other = made.issue("shard 0"), made.issue("replica 0")
    if valid:
        assert greet(one, other)
        return
    with pytest.raises(ssl.SSLError, match="certificate"):
        greet(one, other)


HELLO = Hello("job", "replica 0", 2, 64, 1, 1, 5, 0)


def changed(**fields: Any) -> Hello:
    return Hello(**{**{name: getattr(HELLO, name) for name in HELLO.__struct_fields__}, **fields})


LINKS: Any = {
    role: SimpleNamespace(hello=Hello("job", role, incarnation))
    for role, incarnation in (("replica 1", 2), ("shard 1", -1))
}
"""Of a peer's second restart, and one that was opened from here, whose incarnation nobody knows."""
MOST = {"size": VECTOR_LIMIT, "start": VECTOR_LIMIT, "gradients": SLOTS_LIMIT, "parameters": SLOTS_LIMIT}


@pytest.mark.parametrize(
    "hello",
    [
        HELLO,
        changed(peer=-1),
        changed(**MOST),
        changed(**dict.fromkeys(MOST, 0)),
        changed(role="replica 1", incarnation=3),
    ],
)
def test_who_may_link_is_let_in(hello: Hello) -> None:
    assert acceptable(hello, "job", "shard 0", 5, LINKS) is hello


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (Go(), "the first message of a link was a Go, not a Hello"),
        (changed(job="another"), "replica 0 is of job 'another', but this is 'job'"),
        (changed(role=""), "cannot come from incarnation 2 of ''"),
        (changed(role="shard 0"), "cannot come from incarnation 2 of 'shard 0'"),
        (changed(incarnation=-1), "cannot come from incarnation -1 of 'replica 0'"),
        (changed(peer=4), "replica 0 looks for incarnation 4 of shard 0, but this is 5"),
        (changed(peer=6), "replica 0 looks for incarnation 6 of shard 0, but this is 5"),
        *((changed(**{name: most + 1}), "of each kind and .* bytes are allowed") for name, most in MOST.items()),
        *((changed(**{name: -1}), "of each kind and .* bytes are allowed") for name in MOST),
        (changed(role="replica 1", incarnation=1), "as incarnation 2; only a higher one may replace it"),
        (changed(role="replica 1"), "as incarnation 2; only a higher one may replace it"),
        (changed(role="shard 1"), "as incarnation -1; only a higher one may replace it"),
    ],
)
def test_who_may_not_link_is_refused_with_the_reason(first: Message, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        acceptable(first, "job", "shard 0", 5, LINKS)


@pytest.mark.parametrize(
    ("request_", "given"),
    [
        (JoinRequest("", ""), ("replica 4", 0)),
        (JoinRequest("", "", "replica 3", 1), JoinRefusal("replica 3 has no life left")),
        (JoinRequest("", "", "replica 3", 0), JoinRefusal("replica 3 is not this guest's")),
        (JoinRequest("", "", "replica 3", 2), JoinRefusal("replica 3 is not this guest's")),
        (JoinRequest("", "", "replica 0", 0), JoinRefusal("replica 0 is not this guest's")),
        (JoinRequest("", "", "replica 4", 0), JoinRefusal("replica 4 is not this guest's")),
        (JoinRequest("", "", "replica 2", 0), ("replica 2", 1)),
    ],
)
def test_a_guest_is_given_a_replica_that_nobody_has_had_or_the_next_life_of_its_own(
    request_: JoinRequest, given: tuple[str, int] | JoinRefusal
) -> None:
    guests = Guests(replicas=2, restarts=1, most=3)
    assert [guests.give(JoinRequest("", "")) for _ in range(2)] == [("replica 2", 0), ("replica 3", 0)]
    assert guests.give(JoinRequest("", "", "replica 3", 0)) == ("replica 3", 1)
    assert guests.give(request_) == given
    if not request_.role:
        assert guests.give(request_) == JoinRefusal("it has had 5 replicas")
