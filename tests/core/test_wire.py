"""The wire: every message survives it, and whatever else comes is the peer's error."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distbelief.core import messages, settings, wire
from distbelief.core.conversations import initialising, membership
from distbelief.core.messages import Message
from distbelief.core.optimizer import Optimizer
from distbelief.core.protocol import MESSAGES
from distbelief.core.settings import Plan, Settings, StrategyOptions
from distbelief.core.values import Given, hints_of
from distbelief.errors import LocalProtocolError, RemoteProtocolError
from distbelief.sharding.assignments import Assignment
from distbelief.sharding.layout import Entry, Layout, PartitionRanges, Piece, Range, Section, Tensor, lay_out
from distbelief.strategies import STRATEGIES

# msgpack has 64 bits
integers = st.integers(-(2**63), 2**63 - 1)
texts = st.text(max_size=20)
floats = st.floats(allow_nan=False)
kinds = st.sampled_from(["parameter", "buffer", "frozen"])

st.register_type_strategy(int, integers)
st.register_type_strategy(str, texts)
st.register_type_strategy(float, floats)


def built(kind: Any, /, **own: Any) -> st.SearchStrategy[Any]:
    """Instances of a struct, by the types of its fields."""
    return st.builds(
        kind, **{name: own[name] if name in own else strategy(hint) for name, hint in hints_of(kind).items()}
    )


def strategy(hint: Any) -> st.SearchStrategy[Any]:
    if hint is Layout:
        return layouts
    if hint is Plan:
        return plans
    if get_origin(hint) is Given:
        return strategy(get_args(hint)[0])
    if hint == Optimizer | None:
        return st.none() | optimizers
    if hint == tuple[Optimizer, ...]:
        return st.lists(optimizers, max_size=2).map(tuple)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return built(hint)
    return st.from_type(hint)


tensors = built(Tensor, shape=st.lists(integers, max_size=3).map(tuple), kind=kinds)
layouts = st.builds(
    Layout,
    entries=st.lists(st.builds(Entry, tensors, built(Piece), integers), max_size=2).map(tuple),
    sections=st.lists(built(Section, kind=kinds), max_size=2).map(tuple),
    groups=st.lists(st.dictionaries(texts, floats, max_size=2), max_size=2).map(tuple),
    aliases=st.dictionaries(texts, texts, max_size=2),
    partitions=st.lists(built(PartitionRanges), max_size=2).map(tuple),
    models=st.lists(built(Range), max_size=2).map(tuple),
)


def of_strategy(kind: Any) -> st.SearchStrategy[Any]:
    own = {"algorithm": st.sampled_from(["auto", "ring"]), "optimizer": optimizers}
    options = [one.name for one in dataclasses.fields(kind) if one.init]
    return st.builds(kind, **{name: own.get(name, strategy(hints_of(kind)[name])) for name in options})


values = st.one_of(floats, st.booleans(), st.lists(floats, max_size=2).map(tuple))
optimizers = built(Optimizer, options=st.dictionaries(texts, values, max_size=2))
plans = st.builds(
    Plan,
    settings=built(Settings, strategy=st.one_of([of_strategy(kind) for kind in STRATEGIES.values()])),
    layout=layouts,
    assignments=st.lists(st.builds(Assignment, built(Range), built(Range)), max_size=2).map(tuple),
    samples=integers,
    optimizers=strategy(tuple[Optimizer, ...]),
)


def through(message: Message) -> Message:
    frame = wire.encode(message)
    prefix, body = frame[: wire.PREFIX.size], frame[wire.PREFIX.size :]
    assert wire.length(prefix) == len(body)
    return wire.decode(body)


@dataclass(frozen=True)
class Stranger(StrategyOptions):
    """A strategy that nobody else knows."""

    name: ClassVar[str] = "antigravity:Strategy"


def test_settings_of_a_strategy_that_is_not_known_here_are_the_peers_error_and_nothing_is_imported() -> None:
    plan = Plan(Settings(strategy=Stranger()), lay_out([Tensor("w", (3,), "float32")]), (), 0)
    with pytest.raises(
        RemoteProtocolError, match="settings of strategy 'antigravity:Strategy', which is not known here"
    ):
        through(initialising.Restore(plan, ""))
    assert "antigravity" not in sys.modules


@dataclass(frozen=True)
class Mine(StrategyOptions):
    """A strategy that calls nobody's `__post_init__`, with a field that no user gives."""

    name: ClassVar[str] = "test_wire:Mine"
    depth: int = 1
    cache: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Nothing."""


def test_a_strategy_from_elsewhere_is_read_by_its_name_with_the_options_that_users_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(settings._known, Mine.name, Mine)
    plan = Plan(Settings(strategy=Mine(depth=3)), lay_out([Tensor("w", (3,), "float32")]), (), 0)
    told = through(initialising.Restore(plan, ""))
    assert isinstance(told, initialising.Restore)
    assert told.plan.settings.strategy == Mine(depth=3)
    assert settings.flat(told.plan.settings)["depth"] == 3


def test_every_message_is_one_that_may_stand_on_a_wire() -> None:
    def below(kind: type) -> set[type]:
        return {kind, *(k for sub in kind.__subclasses__() for k in below(sub))}

    assert set(MESSAGES) == below(Message) - {Message, messages.Bulk, messages.SlotRequest, messages.SlotReply}


@pytest.mark.parametrize("kind", MESSAGES)
@given(st.data())
def test_every_message_survives_the_wire(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(built(kind))
    assert through(message) == message
    assert type(through(message)) is kind


@given(st.binary(max_size=200))
def test_garbage_is_the_peers_error_and_nothing_else(garbage: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        assert isinstance(wire.decode(garbage), MESSAGES)


@given(st.sampled_from(MESSAGES), st.data())
def test_a_spoilt_frame_is_the_peers_error_or_another_message(kind: type[Message], data: st.DataObject) -> None:
    body = bytearray(wire.encode(data.draw(built(kind)))[wire.PREFIX.size :])
    where = data.draw(st.integers(0, len(body) - 1))
    body[where] = data.draw(st.integers(0, 255))
    spoilt = bytes(body[: data.draw(st.integers(0, len(body)))])
    with contextlib.suppress(RemoteProtocolError):
        assert isinstance(wire.decode(spoilt), MESSAGES)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x91" * 100_000,
        b"\xc1",
        b"\x92\xa4Push",
        b"\x91\xa7Unknown",
        b"\xdf\xff\xff\xff\xff",
        b"\x92\xa7Refused\xa1\x80",
    ],
    ids=len,
)
def test_a_body_that_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not a message of this protocol"):
        wire.decode(body)


@given(st.binary(min_size=wire.PREFIX.size, max_size=wire.PREFIX.size))
def test_a_prefix_tells_a_bounded_length_or_is_the_peers_error(prefix: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        assert 0 <= wire.length(prefix) <= wire.MESSAGE_LIMIT
        assert prefix[0] == wire.VERSION


@pytest.mark.parametrize(
    ("version", "size", "says"),
    [
        (wire.VERSION + 1, 10, f"the peer speaks version {wire.VERSION + 1} of the wire"),
        (wire.VERSION, wire.MESSAGE_LIMIT + 1, f"a message of {wire.MESSAGE_LIMIT + 1} bytes is over the limit"),
    ],
)
def test_another_version_and_an_oversized_message_are_refused(version: int, size: int, says: str) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        wire.length(wire.PREFIX.pack(version, size))


def test_the_longest_message_is_taken_and_a_longer_one_is_our_error() -> None:
    room = wire.MESSAGE_LIMIT - len(wire.encode(membership.Stop("x" * 2**16)))
    fits = wire.encode(membership.Stop("x" * (2**16 + room)))
    assert wire.length(fits[: wire.PREFIX.size]) <= wire.MESSAGE_LIMIT
    with pytest.raises(LocalProtocolError, match=r"a Stop of \d+ bytes is over the limit"):
        wire.encode(membership.Stop("x" * wire.MESSAGE_LIMIT))
