"""Whatever comes by the wire or lies in a file, it is taken or it is the error that is promised for it, and nothing
else.

`DISTBELIEF_FRAMES` says how many spoilt frames and files each test tries; the seed of one that fails is in its message.
"""

import contextlib
import dataclasses
import gzip
import os
import socket
import ssl
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import pytest
import torch
from patience import SECONDS
from spoil import LAYOUT, PLAN, Spoiler

from distbelief.coordination.coordinator import Coordinator
from distbelief.core import messages, wire
from distbelief.core.conversations import (
    checkpointing,
    dealing,
    evaluating,
    initialising,
    membership,
    operations,
    pushing,
)
from distbelief.core.conversations.initialising import Ready
from distbelief.core.effects import Arrival, Send
from distbelief.core.events import Lost
from distbelief.core.messages import Hello, Message
from distbelief.core.portions import ANEW, Portion, Position
from distbelief.core.protocol import MESSAGES
from distbelief.errors import CheckpointError, DataError, RemoteProtocolError
from distbelief.places.join.authority import Authority
from distbelief.record.checkpoints import MANIFEST, Checkpoints, read_manifest
from distbelief.record.folder import RunFolder
from distbelief.record.metrics import goes_back, in_effect, read_metrics
from distbelief.record.restore import load_part, load_weights
from distbelief.record.summary import Summary
from distbelief.server.shard import Shard
from distbelief.server.slice import TorchSlice
from distbelief.sharding.layout import Range
from distbelief.strategies import Sandblaster
from distbelief.strategies.parameter_server.players import coordinator as portion_coordinator
from distbelief.strategies.sandblaster.players import coordinator as batch_coordinator
from distbelief.strategies.sandblaster.shard import shard as batch_shard
from distbelief.strategies.sandblaster.vectors import TorchVectorSlice
from distbelief.tasks.data_files import read_idx
from distbelief.transport.base import outside
from distbelief.transport.shared import SharedEndpoint
from distbelief.transport.sockets import SocketEndpoint
from distbelief.transport.tcp import TcpEndpoint
from distbelief.transport.tls import TlsEndpoint

COUNT = int(os.environ.get("DISTBELIEF_FRAMES", "200"))
BURST = 16
"""Spoilt frames on one link, of which those behind the one that costs the link are not read; they are not counted
either.
"""


@contextlib.contextmanager
def told(seed: int) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


def test_a_spoilt_frame_is_a_message_or_the_peers_error() -> None:
    taken = 0
    for seed in range(COUNT):
        frame = Spoiler(seed).frame()
        with (
            told(seed),
            contextlib.suppress(
                RemoteProtocolError, struct.error if len(frame) < wire.PREFIX.size else RemoteProtocolError
            ),
        ):
            length = wire.length(frame[: wire.PREFIX.size])
            assert length <= wire.MESSAGE_LIMIT
            message = wire.decode(frame[wire.PREFIX.size :][:length])
            assert isinstance(message, MESSAGES)
            assert isinstance(wire.decode(wire.encode(message)[wire.PREFIX.size :]), type(message))
            taken += 1
    assert COUNT / 50 < taken < COUNT, "frames are spoilt too much, or not at all"


def shard() -> Shard:
    one = Shard(0, TorchSlice)
    one.handle("coordinator", initialising.Restore(PLAN, ""), None)
    for part in (PLAN.assignments[0].moving, PLAN.assignments[0].frozen):
        one.handle(
            "replica 0", initialising.Initialise(0, part.start, part.stop), torch.zeros(part.size, dtype=torch.uint8)
        )
    return one


DESCENT = msgspec.structs.replace(PLAN, settings=dataclasses.replace(PLAN.settings, strategy=Sandblaster()))


def descending_shard() -> Shard:
    one = batch_shard(0, TorchVectorSlice)
    one.handle("coordinator", initialising.Restore(DESCENT, ""), None)
    for part in (PLAN.assignments[0].moving, PLAN.assignments[0].frozen):
        one.handle(
            "replica 0", initialising.Initialise(0, part.start, part.stop), torch.zeros(part.size, dtype=torch.uint8)
        )
    one.handle("coordinator", operations.Operate(1, (operations.Gather(1, ("g",), True),)), None)
    return one


def coordinator() -> Coordinator:
    return _begun(portion_coordinator(PLAN.settings, True, ANEW))


def descending_coordinator() -> Coordinator:
    return _begun(batch_coordinator(DESCENT.settings, True, ANEW))


def _begun(one: Coordinator) -> Coordinator:
    for index in range(2):
        one.handle(f"shard {index}", membership.Here(), None)
    one.handle("replica 0", membership.Join(0, LAYOUT, 100), None)
    for index in range(2):
        one.handle(f"shard {index}", initialising.Restored(False), None)
    one.handle("replica 0", initialising.Ready((0, 0)), None)
    return one


OWN = PLAN.assignments[0].moving
SAID = [
    wire.encode(message)
    for message in (
        pushing.Push(0, OWN.start, OWN.stop, 0, 1, messages.Version(0, 0), 1, 16, ranges=(OWN,)),
        pushing.Fetch(0, OWN.start, OWN.stop), membership.Leave(),
        initialising.Initialise(0, OWN.start, OWN.stop), dealing.Progress(0, 16, 1, 0.5, 1, True),
        membership.Join(0, LAYOUT, 100, 64),
    Ready(()),
        evaluating.Evaluated(1, 0.5, 0.9), initialising.Restored(True), checkpointing.SnapshotDone(1, ""),
        operations.Contribute(0, OWN.start, OWN.stop, 0, 1, 1, 0), operations.Done(1, 0, 20.0),
        operations.Operated(2, (1.0, 1.0, 1.0)),
        operations.Operate(2, (operations.Copy("x", "y"), operations.Dots((("x", "y"),)), operations.Combine(((0.5,
            "x"), (1.0, "g")), "x"))),
    )
]  # fmt: skip
SENDERS = {initialising.Restored: "shard 0", checkpointing.SnapshotDone: "shard 0", evaluating.Evaluated: "evaluator",
           operations.Operated: "shard 0", operations.Operate: "coordinator"}  # fmt: skip


@pytest.mark.parametrize("make", [shard, coordinator, descending_shard, descending_coordinator])
def test_a_spoilt_message_is_taken_or_the_peers_error(make: Callable[[], Shard | Coordinator]) -> None:
    machine = make()
    for seed in range(COUNT):
        frame = Spoiler(seed).frame(SAID)
        try:
            message = wire.decode(frame[wire.PREFIX.size :][: wire.length(frame[: wire.PREFIX.size])])
        except (RemoteProtocolError, struct.error):
            continue
        payload = None
        if isinstance(message, messages.Bulk):
            if outside(message, 2, Range(0, LAYOUT.total)):
                continue  # the endpoint has refused it
            payload = torch.zeros(message.stop - message.start, dtype=torch.uint8)
        with told(seed), contextlib.suppress(RemoteProtocolError):
            for effect in machine.handle(SENDERS.get(type(message), "replica 0"), message, payload):
                if isinstance(effect, Send):
                    wire.encode(effect.message)
        if seed % 40 == 0:
            machine = make()


class Target:
    """A shard's endpoint with one good link, and what was delivered to it."""

    def __init__(self, carrier: str) -> None:
        authority = Authority("job") if carrier == "tls" else None
        self.identity = authority.issue if authority else None
        self.shard, good = self.end(carrier, "shard 0"), self.end(carrier, "evaluator")
        self.got: list[Arrival] = []
        self.shard.deliver = self.got.append
        self.address = self.shard.listen()
        self.meet(good, self.shard)
        self.good = good

    def end(self, carrier: str, role: str) -> SocketEndpoint:
        if self.identity:
            return TlsEndpoint(role, "job", identity=self.identity(role))
        return SharedEndpoint(role, "job") if carrier == "shared" else TcpEndpoint(role, "job")

    def meet(self, end: SocketEndpoint, shard: SocketEndpoint) -> None:
        opening = threading.Thread(target=end.connect, args=("shard 0", self.address))
        opening.start()
        while opening.is_alive():
            shard.poll(0.0005)
        opening.join()

    def raw(self) -> socket.socket:
        if self.address.startswith("unix:@"):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect("\0" + self.address.removeprefix("unix:@"))
            return connection
        host, _, port = self.address.removeprefix("tcp:").rpartition(":")
        return socket.create_connection((host, int(port)))

    def until(self, reached: Callable[[], object]) -> None:
        end = monotonic() + SECONDS
        while not reached():
            assert monotonic() < end, self.got
            self.shard.poll(0.0005)

    def check_the_good_link(self) -> None:
        self.got.clear()
        self.good.send("shard 0", Ready(()))
        self.good.poll(0)
        self.until(lambda: self.got)
        assert [(arrival.sender, arrival.event) for arrival in self.got] == [("evaluator", Ready(()))]

    def close(self) -> None:
        self.good.close()
        self.shard.close()


@pytest.fixture(params=["shared", "tcp"])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    target = Target(request.param)
    yield target
    target.close()


def test_spoilt_frames_cost_the_link_they_came_on_and_no_other(target: Target) -> None:
    hello, tried, seed = (
        wire.encode(Hello("job", "replica 0", 0, 4096, 0 if isinstance(target.shard, SharedEndpoint) else 2, 0)),
        0,
        0,
    )
    while tried < COUNT:
        seed += 1
        spoiler, before = Spoiler(seed), len(target.got)
        with told(seed), target.raw() as peer:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                peer.sendall(hello + b"".join(spoiler.frame() for _ in range(BURST)))
                peer.shutdown(socket.SHUT_WR)
            target.until(lambda: any(isinstance(arrival.event, Lost) for arrival in target.got[before:]))  # noqa: B023
            assert all(
                isinstance(arrival.event, Message | Lost) and arrival.sender == "replica 0"
                for arrival in target.got[before:]
            )
        tried += len(target.got) - before
        if seed % 100 == 0:
            target.check_the_good_link()
    target.check_the_good_link()


def test_a_spoilt_introduction_is_a_stranger_dropped_or_a_role(target: Target) -> None:
    hello = wire.encode(Hello("job", "replica 0", 0, 64, 0, 0))
    for seed in range(COUNT):
        with told(seed), target.raw() as peer:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                peer.sendall(Spoiler(seed).frame([hello]))
                peer.shutdown(socket.SHUT_WR)
            target.until(lambda: closed(peer))
            assert all(
                isinstance(arrival.event, Lost | Message) and arrival.sender != "evaluator" for arrival in target.got
            )
            target.got.clear()
    target.check_the_good_link()


def test_spoilt_handshakes_cost_nobody_but_the_stranger() -> None:
    target = Target("tls")
    replica = target.end("tls", "replica 0")
    real = client_hello(replica)
    for seed in range(COUNT):
        with told(seed), target.raw() as peer:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                peer.sendall(Spoiler(seed).data(real))
                peer.shutdown(socket.SHUT_WR)
            target.until(lambda: closed(peer))
            assert not target.got
    target.check_the_good_link()
    replica.close()
    target.close()


def test_a_role_of_the_job_that_speaks_spoilt_frames_under_tls_costs_its_link() -> None:
    target = Target("tls")
    tried, seed = 0, 0
    while tried < COUNT // 10:
        seed += 1
        spoiler, before, replica = Spoiler(seed), len(target.got), target.end("tls", "replica 0")
        with told(seed):
            target.meet(replica, target.shard)
            with contextlib.suppress(OSError):
                replica._links["shard 0"].socket.sendall(b"".join(spoiler.frame() for _ in range(BURST)))
            replica.close()
            target.until(lambda: any(isinstance(arrival.event, Lost) for arrival in target.got[before:]))  # noqa: B023
            assert all(
                isinstance(arrival.event, Message | Lost) and arrival.sender == "replica 0"
                for arrival in target.got[before:]
            )
        tried += len(target.got) - before
    target.check_the_good_link()
    target.close()


def closed(connection: socket.socket) -> bool:
    """Whether the other end has closed; what it has said before (an alert, say) is passed over."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def client_hello(end: Any) -> bytes:
    """What a handshake begins with."""
    sent = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        end._dialling.sslsocket_class = ssl.SSLSocket
        end._dialling.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


# files


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    store = Checkpoints(folder)
    for index, own in enumerate(PLAN.assignments):
        moving = torch.randint(0, 2, (own.moving.size,), dtype=torch.uint8)
        arrays = {"vector.moving": moving, "vector.frozen": torch.zeros(own.frozen.size, dtype=torch.uint8)}
        store.save_part(1, f"shard-{index}", arrays, {"updates": 3, "samples": 9, "staleness": {"0": 3}})
    store.commit(1, PLAN, Position(1, 3, (Portion(0, 2, 1),)), 9)
    RunFolder(folder).write_job(
        {"task": "digits", "seed": 0, "settings": {"replicas": 2}, "options": {"data_dir": None}}
    )
    return folder


def test_a_spoilt_manifest_is_refused_or_read(run: Path) -> None:
    checkpoint = run / "checkpoints" / "000001"
    whole = (checkpoint / MANIFEST).read_bytes()
    inner = msgspec.json.decode(whole)["manifest"]
    for seed in range(COUNT):
        spoiler = Spoiler(seed)
        if seed % 4:  # with the right checksum: what is inside is read
            values = spoiler.value(inner)
            body = msgspec.json.encode(values) if seed % 8 < 6 else spoiler.data(msgspec.json.encode(inner))
            spoilt = b'{"crc32":%d,"manifest":%s}' % (zlib.crc32(body), body)
        else:
            spoilt = spoiler.data(whole)
        (checkpoint / MANIFEST).write_bytes(spoilt)
        for reads in (
            lambda: read_manifest(checkpoint),
            lambda: load_part(checkpoint, PLAN, 0),
            lambda: load_weights(checkpoint, LAYOUT),
        ):
            with told(seed), contextlib.suppress(CheckpointError):
                reads()
    (checkpoint / MANIFEST).write_bytes(whole)
    assert load_part(checkpoint, PLAN, 1)


def test_spoilt_weights_are_refused_or_read(run: Path) -> None:
    model, whole = run / "spoilt.safetensors", (run / "model.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = msgspec.json.decode(whole[8 : 8 + length])
    for seed in range(COUNT):
        spoiler = Spoiler(seed)
        if seed % 2:
            head = msgspec.json.encode(spoiler.value(header))
            model.write_bytes(len(head).to_bytes(8, "little") + head + whole[8 + length :])
        else:
            model.write_bytes(spoiler.data(whole))
        with told(seed), contextlib.suppress(CheckpointError):
            load_weights(model, LAYOUT)


def test_a_spoilt_part_with_the_right_checksum_is_refused_or_read(run: Path) -> None:
    checkpoint = run / "checkpoints" / "000001"
    part, sealed = checkpoint / "shard-0.safetensors", (checkpoint / MANIFEST).read_bytes()
    whole, manifest = part.read_bytes(), msgspec.json.decode(sealed)["manifest"]
    length = int.from_bytes(whole[:8], "little")
    header = msgspec.json.decode(whole[8 : 8 + length])
    for seed in range(COUNT):
        spoiler = Spoiler(seed)
        head = msgspec.json.encode(spoiler.value(header))
        spoilt = len(head).to_bytes(8, "little") + head + whole[8 + length :] if seed % 2 else spoiler.data(whole)
        part.write_bytes(spoilt)
        manifest["parts"][0] |= {"size": len(spoilt), "crc32": zlib.crc32(spoilt)}
        body = msgspec.json.encode(manifest)
        (checkpoint / MANIFEST).write_bytes(b'{"crc32":%d,"manifest":%s}' % (zlib.crc32(body), body))
        with told(seed), contextlib.suppress(CheckpointError):
            load_part(checkpoint, PLAN, 0)
    part.write_bytes(whole)
    (checkpoint / MANIFEST).write_bytes(sealed)


def test_a_spoilt_job_is_refused_or_read(run: Path) -> None:
    folder = RunFolder(run)
    whole = folder.job.read_bytes()
    for seed in range(COUNT):
        folder.job.write_bytes(Spoiler(seed).data(whole))
        with told(seed), contextlib.suppress(CheckpointError):
            assert isinstance(folder.read_job(), dict)
    folder.job.write_bytes(whole)


def test_spoilt_metrics_lose_lines_and_nothing_else(run: Path) -> None:
    lines = [
        b'{"seconds":0.1,"event":"Started","replicas":2,"shards":2,"parameters":80,"samples_per_epoch":100,"batch_size":16,"epochs":1,"samples":0}\n',
        b'{"seconds":0.2,"event":"Stepped","role":"replica 0","steps":1,"samples":16,"pushes":1,"loss":0.5}\n',
        b'{"seconds":0.3,"event":"Tested","epoch":1,"loss":0.5,"accuracy":0.9}\n'
        b'{"seconds":0.4,"event":"Finished","outcome":"done","cause":"all epochs are done","reason":"x"}\n',
    ]
    path = run / "metrics.jsonl"
    path.write_bytes(b"".join(lines))
    assert len(list(read_metrics(path))) == 4
    for seed in range(COUNT):
        path.write_bytes(Spoiler(seed).data(b"".join(lines), lines))
        with told(seed):
            summary = Summary({})
            for seconds, record in in_effect(path, [*goes_back(path), sys.maxsize]):
                summary.take(seconds, record)
            msgspec.json.encode(summary.result())


def test_a_spoilt_data_file_is_refused_or_read(run: Path) -> None:
    plain = bytes((0, 0, 8, 3)) + struct.pack(">3I", 5, 2, 3) + bytes(range(30))
    packed = gzip.compress(plain, mtime=0)
    for seed in range(COUNT):
        (run / "data").write_bytes(Spoiler(seed).data(packed if seed % 2 else plain))
        with told(seed), contextlib.suppress(DataError):
            assert read_idx(run / "data", (2, 3)).shape == (5, 2, 3)
