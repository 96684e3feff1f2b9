"""A machine's memory as plain data: what it holds, part by part, so that another of its kind becomes what it was.

No machine may depend on the order of a set: the other has it in another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from distbelief.core.settings import Settings, read_strategy
from distbelief.errors import LocalProtocolError

_PLAIN = (type(None), bool, int, float, str, bytes)
_MANY: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, deque)}


def remember(value: Any, kinds: Mapping[str, type]) -> object:
    """Turn a value into plain data: numbers, words, and lists that begin with the name of what they are.

    Args:
        value: a machine, or what one holds.
        kinds: the classes that may be part of it, by name: messages, and those whose attributes are their memory, but
            for such as are `forgotten`.

    Raises:
        LocalProtocolError: there is something of another class in it.
    """
    name = type(value).__name__
    if isinstance(value, _PLAIN) and not isinstance(value, Enum):
        return value
    if type(value) is dict:
        return ["dict", [[remember(key, kinds), remember(one, kinds)] for key, one in value.items()]]
    if _MANY.get(name) is type(value):
        return [name, [remember(one, kinds) for one in value]]
    if kinds.get(name) is not type(value):
        raise LocalProtocolError(f"a {name} cannot be remembered: name it among the kinds, or forget it")
    if isinstance(value, msgspec.Struct | Settings | tuple | Enum):
        return [name, msgspec.msgpack.encode(value)]
    kept = {attribute: one for attribute, one in vars(value).items() if not getattr(one, "forgotten", False)}
    return [name, [[attribute, remember(one, kinds)] for attribute, one in kept.items()]]


def recall(memory: object, kinds: Mapping[str, type], now: object = None) -> object:
    """Undo `remember`. Where `now` is an object of the class, that becomes it, so that whoever shares it sees it.

    >>> from distbelief.coordination.registry import Registry
    >>> registry, other, kinds = Registry(restarts=1), Registry(restarts=1), {"Registry": Registry}
    >>> registry.begin("replica 0", 3)
    >>> recall(remember(registry, kinds), kinds, other) is other, other.present("replica 0")
    (True, 3)
    """
    if not isinstance(memory, list):
        return memory
    name, held = memory
    if name == "dict":
        return {recall(key, kinds): recall(one, kinds) for key, one in held}
    if name in _MANY:
        return _MANY[name](recall(one, kinds) for one in held)
    kind = kinds[name]
    if issubclass(kind, msgspec.Struct | Settings | tuple | Enum):
        return msgspec.msgpack.decode(held, type=kind, dec_hook=read_strategy)
    whole = now if type(now) is kind else kind.__new__(kind)
    for attribute, one in held:
        setattr(whole, attribute, recall(one, kinds, getattr(whole, attribute, None)))
    return whole
