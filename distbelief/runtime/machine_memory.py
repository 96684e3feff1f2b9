"""The state of a machine as plain data, from which another object of its class takes it over.

No machine may depend on the order of a set, which is different in another process.
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
    """Turn a value into plain data: scalars, and lists that begin with the name of their class.

    Args:
        value: a machine, or an object in it.
        kinds: classes that it may contain, by name: messages, and those whose state is their attributes, without the
            values that are `forgotten`.

    Raises:
        LocalProtocolError: it contains another class.
    """
    name = type(value).__name__
    if isinstance(value, _PLAIN) and not isinstance(value, Enum):
        return value
    if type(value) is dict:
        return ["dict", [[remember(key, kinds), remember(item, kinds)] for key, item in value.items()]]
    if _MANY.get(name) is type(value):
        return [name, [remember(item, kinds) for item in value]]
    if kinds.get(name) is not type(value):
        raise LocalProtocolError(f"a {name} cannot be stored: name it among the kinds, or mark it as forgotten")
    if isinstance(value, msgspec.Struct | Settings | tuple | Enum):
        return [name, msgspec.msgpack.encode(value)]
    kept = {attribute: item for attribute, item in vars(value).items() if not getattr(item, "forgotten", False)}
    return [name, [[attribute, remember(item, kinds)] for attribute, item in kept.items()]]


def recall(memory: object, kinds: Mapping[str, type], now: object = None) -> object:
    """Undo `remember`, in the object `now` if that has the class: then other references to it stay valid.

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
        return {recall(key, kinds): recall(item, kinds) for key, item in held}
    if name in _MANY:
        return _MANY[name](recall(item, kinds) for item in held)
    kind = kinds[name]
    if issubclass(kind, msgspec.Struct | Settings | tuple | Enum):
        return msgspec.msgpack.decode(held, type=kind, dec_hook=read_strategy)
    whole = now if type(now) is kind else kind.__new__(kind)
    for attribute, item in held:
        setattr(whole, attribute, recall(item, kinds, getattr(whole, attribute, None)))
    return whole
