"""Over TLS only roles of the job take part, each as itself; whoever else comes costs nobody but himself."""

import contextlib
import json
import multiprocessing
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import jobs
import pytest
import torch
from ends import AUTHORITY, IDENTITIES, Target, client_hello, closed, end_of, meet, stranger
from patience import SECONDS
from wire_tap import BEFORE, BEHIND, TLS_1_3, agreed, tap

from distbelief.core import records, wire
from distbelief.core.conversations.initialising import Ready
from distbelief.core.conversations.pushing import Fetched, Pushed
from distbelief.core.effects import Arrival
from distbelief.core.messages import Hello, Version
from distbelief.errors import JobFailed
from distbelief.places.join import join_server, ticket
from distbelief.places.join.authority import Authority
from distbelief.places.processes.local import Local
from distbelief.sharding.layout import Range
from distbelief.strategies import Downpour
from distbelief.transport import sockets
from distbelief.transport.secure import Identity, _chunks


@pytest.fixture
def shard() -> Iterator[Target]:
    shard = Target()
    yield shard
    shard.close()


OTHERS = Authority("job").issue("replica 0")
MIXED = Identity(OTHERS.authority, IDENTITIES["replica 0"].certificate, IDENTITIES["replica 0"].key)
STRANGERS: dict[str, tuple[Identity | None, str]] = {
    "no certificate": (None, "replica 0"),
    "a certificate of another authority": (OTHERS, "replica 0"),
    "the certificate of another role": (IDENTITIES["replica 1"], "replica 0"),
    "a replica that says it is a shard": (IDENTITIES["replica 0"], "shard 1"),
    "a replica that says it is the coordinator": (IDENTITIES["replica 0"], "coordinator"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_who_cannot_prove_his_role_is_refused(shard: Target, name: str) -> None:
    identity, role = STRANGERS[name]

    def speak(plain: socket.socket) -> None:
        with contextlib.suppress(OSError), stranger(identity).wrap_socket(plain) as speaker:
            speaker.sendall(wire.encode(Hello("job", role, 7)) + wire.encode(Ready(())))
            speaker.recv(1)

    speaking = threading.Thread(target=speak, args=(shard.raw(),))
    speaking.start()
    shard.until(lambda: not speaking.is_alive() or shard.got)
    shard.goes_on()
    speaking.join()


def test_a_role_of_the_job_that_speaks_tls_1_2_only_is_refused(shard: Target) -> None:
    old = stranger(IDENTITIES["replica 0"])
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    failed: list[Exception] = []

    def speak(plain: socket.socket) -> None:
        try:
            old.wrap_socket(plain).close()
        except ssl.SSLError as error:
            failed.append(error)
        finally:
            plain.close()

    speaking = threading.Thread(target=speak, args=(shard.raw(),))
    speaking.start()
    shard.until(lambda: not speaking.is_alive())
    speaking.join()
    assert "version" in str(failed[0])
    shard.goes_on()


def test_a_role_that_proves_itself_is_heard(shard: Target) -> None:
    replica = end_of("replica 0")
    meet(replica, shard.endpoint, shard.address)
    replica.send("shard 0", Ready(()))
    replica.poll(0)
    shard.until(lambda: shard.got)
    assert (shard.got[0].sender, shard.got[0].event) == ("replica 0", Ready(()))
    replica.close()


@pytest.mark.parametrize(
    ("role", "first"), [("guest", "supervisor"), ("replica 0", "supervisor"), ("guest", "replica 1")]
)
def test_only_who_has_the_ticket_of_a_start_meets_its_first_process_and_nobody_who_says_to_be_that(
    role: str, first: str
) -> None:
    let_in: list[socket.socket] = []
    listener = socket.create_server(("127.0.0.1", 0))
    where = f"127.0.0.1:{listener.getsockname()[1]}"
    server = ticket.TicketServer(listener, AUTHORITY.issue(first), let_in.append, keeps=True, crowd=2)
    with contextlib.ExitStack() as closing:
        closing.callback(server.close)
        if first == "supervisor":
            there = closing.enter_context(ticket.connect(where, AUTHORITY.issue(role)))
            if role != ticket.GUEST:
                assert there.recv(1) == b""
        else:
            with pytest.raises(PermissionError, match="the certificate there is of 'replica 1'"):
                ticket.connect(where, AUTHORITY.issue(role))
    assert len(let_in) <= (role == ticket.GUEST)
    for one in let_in:
        one.close()


def test_who_opens_a_link_is_not_fooled_by_another_role_or_another_authority(shard: Target) -> None:
    with pytest.raises(JobFailed, match=r"cannot reach shard 1 at .*the certificate there is of 'shard 0'"):
        meet(end_of("replica 0"), shard.endpoint, shard.address, "shard 1")
    with pytest.raises(JobFailed, match=r"cannot reach shard 0 at .*certificate verify failed"):
        meet(end_of("replica 0", MIXED), shard.endpoint, shard.address)
    shard.goes_on()


@pytest.mark.parametrize(
    "said",
    [
        wire.encode(Hello("job", "replica 0", 0)) + wire.encode(Ready(())),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\xff\xff" * 9,
    ],
)
def test_plain_bytes_to_a_port_of_tls_cost_their_link(shard: Target, said: bytes) -> None:
    with shard.raw() as link:
        link.sendall(said)
        shard.until(lambda: closed(link))
    shard.goes_on()


@pytest.mark.parametrize(
    "said", [b"", client_hello()[:9], client_hello()], ids=["nothing", "half a greeting", "a greeting"]
)
def test_who_stays_silent_in_his_handshake_is_dropped_in_time(
    shard: Target, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shard.raw() as link:
        link.sendall(said)
        shard.until(lambda: shard.endpoint._strangers)
        shard.endpoint.poll(0.001)
        assert not closed(link)
        now = monotonic()
        for passed, gone in ((4.8, False), (5.1, True)):
            monkeypatch.setattr(sockets, "monotonic", lambda passed=passed: now + passed)
            shard.endpoint.poll(0)
            assert closed(link) is gone
    monkeypatch.undo()
    shard.goes_on()


def test_a_handshake_that_trickles_gains_no_time(shard: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    with shard.raw() as link:
        shard.until(lambda: shard.endpoint._strangers)
        start, passed = monotonic(), 0.0
        monkeypatch.setattr(sockets, "monotonic", lambda: start + passed)
        for byte in client_hello()[: 5 * 20]:
            assert not closed(link)
            link.sendall(bytes([byte]))
            shard.endpoint.poll(0)
            passed += 0.05
        passed += 0.1
        shard.endpoint.poll(0)
        assert closed(link)
    monkeypatch.undo()
    shard.goes_on()


def test_of_strangers_in_their_handshakes_there_are_at_most_64(shard: Target) -> None:
    strangers = []
    for _ in range(66):
        strangers.append(shard.raw())
        strangers[-1].sendall(client_hello())
        shard.endpoint.poll(0)
    shard.until(lambda: closed(strangers[0]) and closed(strangers[1]))
    assert not any(map(closed, strangers[2:]))
    for one in strangers:
        one.close()
    shard.until(lambda: not shard.endpoint._strangers)
    shard.goes_on()


def test_every_role_has_a_key_of_its_own_and_none_is_shown() -> None:
    assert IDENTITIES["shard 0"].key not in repr(IDENTITIES["shard 0"])
    assert len({identity.key for identity in IDENTITIES.values()}) == len(IDENTITIES)
    assert {identity.authority for identity in IDENTITIES.values()} == {IDENTITIES["shard 0"].authority}


@pytest.mark.parametrize(
    "sizes", [(60,), (60, 20), (60, 1 << 20), (60, 4096, 60, 300_000), (1 << 20, 60), (16 << 10, 1), (0, 5)]
)
def test_what_is_written_at_once_begins_the_same_when_it_is_tried_again(sizes: tuple[int, ...]) -> None:
    queue = [bytes([at]) * size for at, size in enumerate(sizes)]
    chunks = [bytes(chunk) for chunk in _chunks(queue)]
    assert b"".join(chunks) == b"".join(queue)
    for count in range(len(chunks)):
        rest = b"".join(queue)[sum(map(len, chunks[:count])) :]
        whole = [rest[: len(rest) - sum(sizes[1:])], *queue[1:]] if len(rest) > sum(sizes[1:]) else [rest]
        assert bytes(next(iter(_chunks([*whole, b"more"])))).startswith(chunks[count])


def test_an_answer_settled_while_its_record_waits_arrives_as_it_was(shard: Target) -> None:
    """OpenSSL holds half a record when the socket is full; the copy that `settle` makes goes on where it left off."""
    size = 32 << 20
    replica = end_of("replica 0")
    arena = replica.allocate(Range(0, size), 0, 1)
    meet(replica, shard.endpoint, shard.address)
    replica.send("shard 0", Ready(()))
    replica.poll(0)
    shard.until(lambda: shard.got)
    parameters = torch.arange(size // 4, dtype=torch.int32).view(torch.uint8)
    was = parameters.clone()
    shard.endpoint.send("replica 0", Fetched(0, 0, size, Version(0, 1)), parameters)
    shard.endpoint.poll(0)
    shard.endpoint.settle()
    parameters.zero_()
    got: list[Arrival] = []
    replica.deliver = got.append
    shard.endpoint.send("replica 0", Pushed(0, 1, Version(0, 1)))
    end = monotonic() + SECONDS
    while len(got) < 2 and monotonic() < end:
        shard.endpoint.poll(0)
        replica.poll(0.001)
    assert torch.equal(arena.parameters[0], was)
    assert [type(arrival.event) for arrival in got] == [Fetched, Pushed]
    replica.close()


# jobs


CIPHERS = {0x1301, 0x1302, 0x1303}
"""Those of TLS 1.3: AES-128 with GCM, AES-256 with GCM, ChaCha20 with Poly1305."""


def test_whatever_the_roles_of_a_job_say_to_each_other_is_tls_1_3_on_the_wire(tmp_path: Path) -> None:
    with tap(3) as wire:
        place = Local("tcp", f"{BEHIND}:{wire.port}", BEFORE, tls=True)
        result = jobs.run(tmp_path / "run", Downpour(replicas=2, shards=2), place, epochs=1)
    assert (result["outcome"], result["samples"]) == ("done", jobs.SAMPLES)
    talks = [talk for talk in wire.talks if talk.said]
    # replicas with shards and coordinator, the evaluator too, shards with the coordinator
    assert len(talks) >= 2 * 3 + 3 + 2
    for talk in talks:
        version, cipher = agreed(talk)
        assert version == TLS_1_3
        assert cipher in CIPHERS
    said = b"".join(bytes(part) for talk in talks for part in (talk.said, talk.answered))
    assert b"replica 1" not in said


def test_a_job_beyond_loopback_is_encrypted_unasked(tmp_path: Path, watch: jobs.Watch) -> None:
    with socket.create_server(("0.0.0.0", 0)) as free:
        port = free.getsockname()[1]
    seen: list[tuple[str | None, str]] = []

    def look() -> None:
        with socket.create_connection(("127.0.0.1", port), SECONDS) as plain, stranger(None).wrap_socket(plain) as link:
            cipher = link.cipher()
            assert cipher
            seen.append((link.version(), cipher[0]))

    watch.once(records.EpochDone, look)
    assert jobs.run(tmp_path / "run", on=Local("tcp", f"0.0.0.0:{port}"), epochs=5)["outcome"] == "done"
    [(version, cipher)] = seen
    assert version == "TLSv1.3"
    assert cipher.startswith(("TLS_AES_", "TLS_CHACHA20_"))


def test_keys_and_tickets_are_in_no_file_on_no_command_line_and_in_no_environment(
    tmp_path: Path, watch: jobs.Watch, monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    issued: list[Identity] = []
    issue = Authority.issue
    monkeypatch.setattr(Authority, "issue", lambda self, role: (issued.append(issue(self, role)), issued[-1])[1])
    monkeypatch.chdir(tmp_path)
    seen: dict[str, bytes] = {}
    ticket = tmp_path / "run" / join_server.TICKET

    def look() -> None:
        processes = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
        places = [Path(f"/proc/{pid}/{what}") for pid in processes for what in ("cmdline", "environ")]
        places += [
            path for folder in (tmp_path, temporary) for path in folder.rglob("*") if path.is_file() and path != ticket
        ]
        for path in places:
            with contextlib.suppress(FileNotFoundError):  # an old checkpoint is removed meanwhile
                seen[str(path)] = path.read_bytes()
        seen["ticket"] = ticket.read_bytes()

    watch.once(records.EpochDone, look)
    place = Local(listen="127.0.0.1", tls=True)
    assert jobs.run(tmp_path / "run", Downpour(replicas=2, shards=2), place, epochs=3)["outcome"] == "done"
    assert len(issued) == 6 + 2  # the roles', the join server's, and the ticket's
    held = json.loads(seen.pop("ticket"))
    secrets = [held["secret"], *(line for identity in issued for line in identity.key.splitlines()[1:-1])]
    assert len(seen) > 2 * 7
    assert not [place for place, text in seen.items() for secret in secrets if secret.encode() in text]
    after = [path for folder in (tmp_path, temporary) for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in after for secret in secrets if secret.encode() in path.read_bytes()]
