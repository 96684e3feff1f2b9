"""The inline carrier keeps the promises of transports."""

from __future__ import annotations

import pytest
import torch

from distbelief.core.conversations.initialising import Ready
from distbelief.core.conversations.pushing import Fetched, Push
from distbelief.core.effects import Phantom
from distbelief.core.messages import Version
from distbelief.errors import LocalProtocolError
from distbelief.sharding.layout import Range
from distbelief.testing import Pair, check_transport
from distbelief.transport.inline import Inline


def make_pair(held: Range, gradients: int, parameters: int) -> Pair:
    network = Inline()
    a, b = network.endpoint("replica 0"), network.endpoint("shard 0")
    a.allocate(held, gradients, parameters)
    return Pair(a, b, lambda: (network.step(), None)[1])


@pytest.mark.long
def test_conformance() -> None:
    check_transport(make_pair)


def test_one_step_delivers_the_oldest_message_of_all() -> None:
    network = Inline()
    ends = [network.endpoint(name) for name in "abc"]
    seen = []
    for end in ends:
        end.deliver = lambda arrival, end=end: seen.append((arrival.sender, end.role))
    ends[0].send("c", Ready(()))
    ends[1].send("c", Ready(()))
    ends[0].send("b", Ready(()))
    assert [network.step() for _ in range(4)] == [True, True, True, False]
    assert seen == [("a", "c"), ("b", "c"), ("a", "b")]


def test_a_push_is_handed_on_by_reference_and_a_phantom_passes() -> None:
    a, b, pump = make_pair(Range(0, 256), 1, 1)
    seen = []
    b.deliver = seen.append
    payload = a.arena.gradients[0][:128]
    a.send("shard 0", Push(0, 0, 128, 0, 0, Version(0, 0), 1, 1), payload)
    a.send("shard 0", Push(0, 0, 1 << 40, 0, 0, Version(0, 0), 1, 1), Phantom(1 << 40))
    pump()
    pump()
    assert seen[0].payload is payload
    assert seen[1].payload == Phantom(1 << 40)


def test_a_role_takes_part_once_at_a_time() -> None:
    network = Inline()
    first = network.endpoint("a")
    with pytest.raises(LocalProtocolError, match="a has an endpoint already"):
        network.endpoint("a")
    first.close()
    network.endpoint("a")


def test_an_answer_is_copied_when_it_is_sent() -> None:
    a, b, pump = make_pair(Range(0, 256), 1, 1)
    a.deliver = lambda _: None
    answer = torch.ones(64)
    b.send("replica 0", Fetched(0, 0, 256, Version(0, 1)), answer.view(torch.uint8))
    answer.fill_(5)
    pump()
    assert a.arena.parameters[0].view(torch.float32).tolist() == [1.0] * 64
