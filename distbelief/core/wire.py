"""Frames on the wire: a prefix (version, length) and a message of that length; a `Bulk` message's bytes follow raw.

Every length is checked before memory is allocated. A frame that does not decode is an error of the peer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import reduce
from operator import or_

import msgspec

from distbelief.core.messages import Message
from distbelief.core.protocol import MESSAGES
from distbelief.core.settings import read_strategy
from distbelief.errors import LocalProtocolError, RemoteProtocolError

VERSION = 4
PREFIX = struct.Struct("<BxxxI")
MESSAGE_LIMIT = 16 << 20
"""Longest message in bytes; a layout of 100,000 tensors fits."""

_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes | bytearray | memoryview], Message]
_decode = msgspec.msgpack.Decoder(reduce(or_, MESSAGES), dec_hook=read_strategy).decode


def encode(message: Message) -> bytes:
    """Encode a message as a frame, without the raw bytes that follow it.

    A message over `MESSAGE_LIMIT` bytes is refused.
    """
    body = _encode(message)
    if len(body) > MESSAGE_LIMIT:
        raise LocalProtocolError(
            f"a {type(message).__name__} of {len(body)} bytes is over the limit of {MESSAGE_LIMIT}"
        )
    return PREFIX.pack(VERSION, len(body)) + body


def size(message: Message) -> int:
    """Return the length of a message's frame."""
    return PREFIX.size + len(_encode(message))


def length(prefix: bytes | bytearray | memoryview) -> int:
    """Return the length of a message from its frame's prefix; refuse another version, or a length over the limit."""
    version, size = PREFIX.unpack(prefix)
    if version != VERSION:
        raise RemoteProtocolError(
            f"the peer speaks version {version} of the wire, this is {VERSION}: install the same distbelief everywhere"
        )
    if size > MESSAGE_LIMIT:
        raise RemoteProtocolError(f"a message of {size} bytes is over the limit of {MESSAGE_LIMIT}")
    return int(size)


def decode(body: bytes | bytearray | memoryview) -> Message:
    """Decode a message; refuse bytes that are no known message.

    >>> from distbelief.core.conversations.checkpointing import Describe
    >>> decode(encode(Describe())[PREFIX.size:])
    Describe()
    """
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not a message of this protocol: {error}") from error
