"""The gate of a job: only who has shown its ticket is given a part."""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from distbelief.cluster import gate
from distbelief.cluster.authority import Authority
from distbelief.cluster.gate import Gate, Knock, Part, Sorry, Ticket, knock
from distbelief.errors import JobFailed
from distbelief.transport.tls import Identity, context

AUTHORITY = Authority("job")
PART = Part("replica 1", 0, "tcp:127.0.0.1:1", 0, b"")


class Opened:
    """A gate that gives one part to everybody it lets in, and whom it has let in."""

    def __init__(self, run: Path, authority: Authority | None) -> None:
        self.admitted: list[Knock] = []
        self.gate = Gate("job", ("127.0.0.1", 0), "127.0.0.1", authority, self._admit, run)

    @property
    def ticket(self) -> Ticket:
        return self.gate.ticket

    def _admit(self, knock: Knock) -> Part:
        self.admitted.append(knock)
        return PART


@pytest.fixture(params=[None, AUTHORITY], ids=["plain", "tls"])
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Opened]:
    opened = Opened(tmp_path, request.param)
    yield opened
    opened.gate.close()


def test_who_has_the_ticket_is_let_in_and_who_guesses_or_is_of_another_job_is_not(opened: Opened) -> None:
    assert knock(opened.ticket, Knock("job", opened.ticket.secret)) == PART
    for wrong in (Knock("job", ""), Knock("job", "0" * 32), Knock("job", opened.ticket.secret[:-1]), Knock("another", opened.ticket.secret)):
        assert knock(opened.ticket, wrong) == Sorry("the ticket is of another job")
    assert len(opened.admitted) == 1


OTHERS = Authority("job").issue(gate.GUEST)
WRONG: dict[str, Identity] = {
    "the certificate of a replica": AUTHORITY.issue("replica 1"),
    "a certificate of another authority": Identity(AUTHORITY.issue(gate.GUEST).authority, OTHERS.certificate, OTHERS.key),
}


@pytest.mark.parametrize("name", WRONG)
def test_where_links_are_tls_a_secret_alone_opens_no_gate(tmp_path: Path, name: str) -> None:
    opened = Opened(tmp_path, AUTHORITY)
    try:
        ticket = msgspec.structs.replace(opened.ticket, identity=WRONG[name])
        with pytest.raises(JobFailed, match="does not answer"):
            knock(ticket, Knock("job", ticket.secret))
        with pytest.raises(JobFailed, match="does not answer"):
            knock(msgspec.structs.replace(ticket, identity=None), Knock("job", ticket.secret))
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
        with socket.create_connection((ticket.host, ticket.port), 10) as plain, contextlib.suppress(OSError), bare.wrap_socket(plain) as link:
            gate._say(link, Knock("job", ticket.secret))
            assert link.recv(1) == b""
        assert opened.admitted == []
    finally:
        opened.gate.close()


def test_a_guest_gives_its_ticket_to_nobody_but_the_gate_of_its_job(tmp_path: Path) -> None:
    """Whoever else listens there, were he a role of the job, is not told the secret."""
    opened = Opened(tmp_path, AUTHORITY)
    opened.gate._context = context(ssl.PROTOCOL_TLS_SERVER, AUTHORITY.issue("replica 1"))
    try:
        with pytest.raises(JobFailed, match="the certificate there is of 'replica 1'"):
            knock(opened.ticket, Knock("job", opened.ticket.secret))
        assert opened.admitted == []
    finally:
        opened.gate.close()


def test_the_ticket_is_its_owners_only_and_goes_with_the_gate(opened: Opened) -> None:
    assert opened.gate.path.stat().st_mode & 0o777 == 0o600
    assert gate.read_ticket(str(opened.gate.path)) == opened.ticket
    opened.gate.close()
    assert not list(opened.gate.path.parent.iterdir())
