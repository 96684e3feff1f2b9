"""The join server of a job: only who has shown its ticket is given a part."""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from distbelief.errors import JobFailed
from distbelief.places.join import join_server, ticket
from distbelief.places.join.authority import Authority
from distbelief.places.join.join_server import JoinServer
from distbelief.places.join.ticket import GUEST, Ticket, read_ticket
from distbelief.places.messages import JoinGrant, JoinRefusal, JoinRequest
from distbelief.transport.addresses import cut
from distbelief.transport.tls import Identity, context

AUTHORITY = Authority("job")
PART = JoinGrant("replica 1", 0, "tcp:127.0.0.1:1", 0, b"")


class Opened:
    """A join server that gives one part to everybody it lets in, and whom it has let in."""

    def __init__(self, run: Path, authority: Authority | None) -> None:
        self.admitted: list[JoinRequest] = []
        self.server = JoinServer("job", ("127.0.0.1", 0), "127.0.0.1", authority, self._admit, run)

    @property
    def ticket(self) -> Ticket:
        return self.server.ticket

    def _admit(self, request: JoinRequest) -> JoinGrant:
        self.admitted.append(request)
        return PART


@pytest.fixture(params=[None, AUTHORITY], ids=["plain", "tls"])
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Opened]:
    opened = Opened(tmp_path, request.param)
    yield opened
    opened.server.close()


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Opened]:
    opened = Opened(tmp_path, AUTHORITY)
    yield opened
    opened.server.close()


def test_who_has_the_ticket_is_let_in_and_who_guesses_or_is_of_another_job_is_not(opened: Opened) -> None:
    assert join_server.ask(opened.ticket, JoinRequest("job", opened.ticket.secret)) == PART
    for wrong in (
        JoinRequest("job", ""),
        JoinRequest("job", "0" * 32),
        JoinRequest("job", opened.ticket.secret[:-1]),
        JoinRequest("another", opened.ticket.secret),
    ):
        assert join_server.ask(opened.ticket, wrong) == JoinRefusal("the ticket is of another job")
    assert len(opened.admitted) == 1


@pytest.mark.parametrize("opened", [None], indirect=True)
def test_who_runs_another_version_is_not_let_in(opened: Opened) -> None:
    for version, called in (("", "older"), ("0.0.1", "0.0.1")):
        with socket.create_connection(cut(opened.ticket.where[0]), 10) as link:
            ticket.say(link, JoinRequest("job", opened.ticket.secret, version=version))
            answer = join_server._answers.decode(ticket.hear(link, 1000))
        told = f"it runs distbelief {ticket.VERSION}, this is {called}: install the same everywhere"
        assert answer == JoinRefusal(told)
    assert opened.admitted == []


def test_of_more_than_may_be_served_at_once_who_has_taken_longest_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticket, "CROWD", 2)
    monkeypatch.setattr(ticket, "PATIENCE", 60.0)
    opened = Opened(tmp_path, None)
    with contextlib.ExitStack() as closing:
        closing.callback(opened.server.close)
        where = cut(opened.ticket.where[0])
        first, *others = [closing.enter_context(socket.create_connection(where, 10)) for _ in range(3)]
        assert first.recv(1) == b""
        for one in others:
            one.setblocking(False)
            with pytest.raises(BlockingIOError):
                one.recv(1)


def test_no_word_is_longer_than_its_limit() -> None:
    for length, why in ((8, "the link was closed"), (9, "a message of 9 bytes is over the limit of 8")):
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                theirs.sendall(ticket._LENGTH.pack(length))
            with pytest.raises(ConnectionError, match=why):
                ticket.hear(ours, 8)


OTHERS = Authority("job").issue(GUEST)
WRONG: dict[str, Identity] = {
    "the certificate of a replica": AUTHORITY.issue("replica 1"),
    "a certificate of another authority": Identity(AUTHORITY.issue(GUEST).authority, OTHERS.certificate, OTHERS.key),
}


@pytest.mark.parametrize("name", WRONG)
def test_where_links_are_tls_a_secret_alone_lets_nobody_in(secret: Opened, name: str) -> None:
    wrong = msgspec.structs.replace(secret.ticket, identity=WRONG[name])
    with pytest.raises(JobFailed, match="does not answer"):
        join_server.ask(wrong, JoinRequest("job", wrong.secret))
    with pytest.raises(JobFailed, match="does not answer"):
        join_server.ask(msgspec.structs.replace(wrong, identity=None), JoinRequest("job", wrong.secret))
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(cut(wrong.where[0]), 10) as plain,
        contextlib.suppress(OSError),
        bare.wrap_socket(plain) as link,
    ):
        ticket.say(link, JoinRequest("job", wrong.secret))
        assert link.recv(1) == b""
    assert secret.admitted == []


def test_a_guest_gives_its_ticket_to_nobody_but_the_gate_of_its_job(secret: Opened) -> None:
    """Whoever else listens there, were he a role of the job, is not told the secret."""
    secret.server._server._context = context(ssl.PROTOCOL_TLS_SERVER, AUTHORITY.issue("replica 1"))
    with pytest.raises(JobFailed, match="the certificate there is of 'replica 1'"):
        join_server.ask(secret.ticket, JoinRequest("job", secret.ticket.secret))
    assert secret.admitted == []


def test_the_ticket_is_its_owners_only_and_goes_with_the_server(opened: Opened) -> None:
    assert opened.server.path.stat().st_mode & 0o777 == 0o600
    assert read_ticket(str(opened.server.path)) == opened.ticket
    opened.server.close()
    assert not list(opened.server.path.parent.iterdir())
