"""Whatever comes by the wire or lies in a file, it is taken or it is the error that is promised for it, and nothing
else.

`DISTBELIEF_FRAMES` says how many spoilt frames and files each test tries; the seed of one that fails is in its message.
"""

import contextlib
import dataclasses
import os
import socket
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from ends import Target, client_hello, closed, end_of, meet
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
from distbelief.core.effects import Send
from distbelief.core.events import Lost
from distbelief.core.messages import Hello, Message
from distbelief.core.portions import ANEW, Portion, Position
from distbelief.errors import CheckpointError, RemoteProtocolError
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
from distbelief.strategies.sandblaster.shard import WorkUnitSums
from distbelief.strategies.sandblaster.vectors import TorchVectorSlice
from distbelief.transport.base import outside
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


def filled(one: Any, plan: Any) -> Any:
    """A shard that has its range, and zeros in it."""
    one.handle("coordinator", initialising.Restore(plan, ""), None)
    for part in (plan.assignments[0].moving, plan.assignments[0].frozen):
        initialise = initialising.Initialise(0, part.start, part.stop)
        one.handle("replica 0", initialise, torch.zeros(part.size, dtype=torch.uint8))
    return one


def shard() -> Any:
    return filled(Shard(0, TorchSlice), PLAN)


DESCENT = msgspec.structs.replace(PLAN, settings=dataclasses.replace(PLAN.settings, strategy=Sandblaster()))


def descending_shard() -> Any:
    one = filled(Shard(0, TorchVectorSlice, sums=WorkUnitSums), DESCENT)
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


@pytest.fixture(params=["shared", "tcp", "tls"])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    target = Target(request.param)
    yield target
    target.close()


@contextlib.contextmanager
def linked(target: Target) -> Iterator[socket.socket]:
    """A link of replica 0, on which anything can be said."""
    if isinstance(target.endpoint, TlsEndpoint):
        replica = end_of("replica 0")
        meet(replica, target.endpoint, target.address)
        yield replica._links["shard 0"].socket
        replica.close()
    else:
        with target.raw() as peer:
            peer.sendall(
                wire.encode(Hello("job", "replica 0", 0, 4096, 2 * isinstance(target.endpoint, TcpEndpoint), 0))
            )
            yield peer


def test_spoilt_frames_cost_the_link_they_came_on_and_no_other(target: Target) -> None:
    tried, seed, secret = 0, 0, isinstance(target.endpoint, TlsEndpoint)
    while tried < (COUNT // 10 if secret else COUNT):
        seed += 1
        target.got.clear()
        spoiler = Spoiler(seed)
        with told(seed):
            with linked(target) as peer, contextlib.suppress(OSError):
                peer.sendall(b"".join(spoiler.frame() for _ in range(BURST)))
            target.until(lambda: any(isinstance(arrival.event, Lost) for arrival in target.got))
            for arrival in target.got:
                assert isinstance(arrival.event, Message | Lost)
                assert arrival.sender == "replica 0"
        tried += len(target.got)
        if seed % 100 == 0:
            target.got.clear()
            target.goes_on()
    target.got.clear()
    target.goes_on()


def test_a_spoilt_introduction_is_a_stranger_dropped_or_a_role(target: Target) -> None:
    """Over TLS it is a handshake, and nobody has a role who has not made it."""
    secret = isinstance(target.endpoint, TlsEndpoint)
    first = client_hello() if secret else wire.encode(Hello("job", "replica 0", 0, 64, 0, 0))
    for seed in range(COUNT):
        spoiler = Spoiler(seed)
        with told(seed), target.raw() as peer:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                peer.sendall(spoiler.data(first) if secret else spoiler.frame([first]))
                peer.shutdown(socket.SHUT_WR)
            target.until(lambda: closed(peer))
            for arrival in target.got:
                assert isinstance(arrival.event, Lost | Message)
                assert arrival.sender != "evaluator"
                assert not secret
            target.got.clear()
    target.goes_on()


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
