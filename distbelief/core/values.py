"""Values that users pass: each field of a public class is checked against its annotation, at the door."""

from __future__ import annotations

import dataclasses
import functools
import re
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, Generic, TypeVar

import msgspec

from distbelief.errors import UsageError

Read = TypeVar("Read")
Also = TypeVar("Also")

_WORDS: Mapping[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a string",
    types.NoneType: "None",
}


class Given(Generic[Read, Also]):
    """Field of a frozen dataclass that accepts values of another type, such as a name, and converts them to one type.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Box:
    ...     size: Given[int, str] = Given(3, str, {"large": 9}.__getitem__)
    >>> Box().size, Box("large").size, Box(5).size
    (3, 9, 5)
    """

    # `also` is the class Also; as type[Also], mypy would refuse an abstract class
    def __init__(self, default: Read, also: Any, find: Callable[[Also], Read]) -> None:
        self._default, self._also, self._find = default, also, find
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Read:
        return self._default if instance is None else vars(instance)[self._name]

    def __set__(self, instance: object, value: Read | Also) -> None:
        vars(instance)[self._name] = self._find(value) if isinstance(value, self._also) else value


class Checked:
    """Dataclass whose fields are checked against their annotations."""

    def __post_init__(self) -> None:
        check_fields(self)


class CheckedStruct(msgspec.Struct, frozen=True):
    """Struct whose fields are checked against their annotations."""

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(whole: object, **later: object) -> None:
    """Check each field of a frozen dataclass or struct against its annotation; convert equivalents, such as lists.

    A value of another type raises a `UsageError` that names the field. `later` has types in the annotations that the
    module of `whole` does not import.
    """
    kind: type = type(whole)
    for name, hint in hints_of(kind, **later).items():
        value = getattr(whole, name)
        held = admit(value, hint, f"{type(whole).__name__}({name}={shown(value)})")
        if held is value:
            continue
        if isinstance(whole, msgspec.Struct):
            msgspec.structs.force_setattr(whole, name, held)
        else:
            object.__setattr__(whole, name, held)


@functools.lru_cache(maxsize=256)
def hints_of(kind: type[Any], **later: object) -> dict[str, object]:
    """Return the type of each field of a dataclass or struct."""
    fields = (
        kind.__struct_fields__
        if issubclass(kind, msgspec.Struct)
        else [field.name for field in dataclasses.fields(kind)]
    )
    hints = typing.get_type_hints(kind, localns=later)
    return {name: hints[name] for name in fields}


def read_as(hint: object) -> Any:
    """Return the type that a field of this annotation is read as."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Given else hint


def _kinds(hint: object) -> tuple[object, ...]:
    """Return the types that a value may have."""
    if typing.get_origin(hint) is Given:
        return tuple(kind for part in typing.get_args(hint) for kind in _kinds(part))
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def admit(value: object, hint: object, where: str) -> Any:
    """Convert a value to the type of a field, or raise a `UsageError` that names the place and the type.

    >>> admit([1, 2], tuple[float, ...], "lr_steps")
    (1.0, 2.0)
    >>> admit(True, int | None, "epochs=True")
    Traceback (most recent call last):
    distbelief.errors.UsageError: epochs=True: must be a whole number or None, not a bool
    """
    kinds = _kinds(hint)
    for kind in kinds:
        if (held := _held(value, kind, where)) is not _NONE:
            return held
    if isinstance(value, type):
        fits = any(isinstance(kind, type) and issubclass(value, kind) for kind in kinds)
        remedy = f"; write {value.__name__}()" if fits else ""
        raise UsageError(f"{where}: must be {_names(kinds)}, not a class{remedy}")
    raise UsageError(f"{where}: must be {_names(kinds)}, not {_article(type(value).__name__)}")


_NONE = object()
"""Mark of a value of another type."""


def _held(value: object, kind: object, where: str) -> Any:
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(admit(item, of[0], where) for item in value)
    if origin is dict and isinstance(value, Mapping):
        return {admit(name, of[0], where): admit(item, of[1], where) for name, item in value.items()}
    if kind is str and isinstance(value, str):
        check_text(value, where)
    if kind is int:
        return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else _NONE
    if kind is float:
        return _number(value, where) if isinstance(value, Real) and not isinstance(value, bool) else _NONE
    if origin is Callable:
        return value if callable(value) else _NONE
    return value if isinstance(kind, type) and origin is None and isinstance(value, kind) else _NONE


def check_text(text: str, where: str) -> None:
    """Refuse a text that is not UTF-8, such as a file name of another encoding."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{where}: is not UTF-8, or the locale has another encoding; rename it, or set LC_ALL=C.UTF-8"
        ) from None


def _number(value: Real, where: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise UsageError(f"{where}: is too large a number to compute with") from None


def _names(kinds: tuple[object, ...]) -> str:
    *most, last = [_words(kind) for kind in kinds]
    return f"{', '.join(most)} or {last}" if most else last


def _words(kind: Any) -> str:
    of = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return f"a tuple, each of it {_words(of[0])}"
    if typing.get_origin(kind) is Callable:
        return "a function"
    if typing.get_origin(kind) is dict:
        return f"a dict from {_words(of[0])} to {_words(of[1])}"
    return _WORDS.get(kind) or _article((typing.get_origin(kind) or kind).__name__)


def _article(name: str) -> str:
    """Put the article before a name.

    >>> _article("int"), _article("Downpour")
    ('an int', 'a Downpour')
    """
    return f"a{'n' * (name[0].lower() in 'aeiou')} {name}"


def shown(value: object) -> str:
    """Return a short text of any value, for a message."""
    return value.__name__ if isinstance(value, type) else " ".join(reprlib.repr(value).split())


def device_number(device: str) -> int | None:
    """Return the number in `--device cuda:N`; None without one. Refuse a text that names no device.

    >>> device_number("cuda:3")
    3
    """
    if not (named := re.fullmatch(r"cpu|cuda(?::(\d+))?", device)):
        raise UsageError(f"--device {device}: is cpu, cuda or cuda:N")
    return int(named[1]) if named[1] else None
