"""Options from a TOML file, as if they stood on the command line before all that does."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from distbelief.cli.arguments import Argument
from distbelief.core.settings import option
from distbelief.errors import UsageError, nearest

CONFIG = "--config"


class Configured(NamedTuple):
    """The words of a command, those of its file among them."""

    words: list[str]
    places: dict[str, str]
    """Of each option that the file gives: the file, and the line."""


def configured(args: Sequence[str], arguments: Sequence[Argument]) -> Configured:
    """The words of a command with those of the file that `--config` names before them; what the command line has too
    is taken from there.

    Args:
        args: of the command, after its first words.
        arguments: its options.

    Raises:
        UsageError: there is no such file, it is no TOML, or has a key or a value that is none.
    """
    words, paths = _without_config(args)
    if not paths:
        return Configured(words, {})
    if len(paths) > 1:
        raise UsageError(f"{CONFIG} {' '.join(paths)}: name one file")
    text, options = _read(paths[0])
    given = {word.partition("=")[0].replace("_", "-") for word in words}
    known = {argument.option: argument for argument in arguments}
    first: list[str] = []
    places: dict[str, str] = {}
    for key, value in options.items():
        place, name = f"{paths[0]}, line {_line_of(text, key)}", option(key)
        if name not in known or name == CONFIG:
            raise UsageError(f"{place}: no option {key!r} here{_nearest(key, known)}")
        if name in places:
            raise UsageError(f"{place}: {key} stands there twice, as at {places[name]}; leave one of them off")
        places[name] = place
        if name not in given:
            first += _words(known[name], value, f"{place}: {key}")
    return Configured([*first, *words], places)


def _without_config(args: Sequence[str]) -> tuple[list[str], list[str]]:
    words, paths, rest = [], [], iter(args)
    for word in rest:
        name, given, path = word.partition("=")
        if name != CONFIG:
            words.append(word)
        elif path := path if given else next(rest, ""):
            paths.append(path)
        else:
            raise UsageError(f"{CONFIG}: its value is missing")
    return words, paths


def _read(path: str) -> tuple[str, dict[str, object]]:
    """Read a file: its text, and the options in it."""
    try:
        text = Path(path).read_text("utf-8-sig")
        return text, tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"{CONFIG} {path}: {error.strerror}; name a TOML file of options") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{CONFIG} {path}: is no TOML: {error}; write lines such as replicas = 2") from error


def _line_of(text: str, key: str) -> int:
    found = re.search(rf"^\s*[\[\"']*{re.escape(key)}\b", text, re.MULTILINE)
    return text[: found.end()].count("\n") + 1 if found else 1


def _nearest(key: str, known: Collection[str]) -> str:
    near = nearest(option(key), [name for name in known if name != CONFIG])
    names = near.removeprefix("--").replace("-", "_")
    return f"; did you mean {names!r}?" if near else "; its options are those of --help, such as replicas"


def _words(argument: Argument, value: object, place: str) -> list[str]:
    """Return a value as the command line has it; a flag that is false is left off."""
    if argument.is_flag:
        if not isinstance(value, bool):
            raise UsageError(f"{place} is {value!r}: write true or false")
        return [argument.option] if value else []
    if isinstance(value, list) and argument.several and all(isinstance(one, str | int | float) for one in value):
        return [argument.option, *map(str, value)] if value else []
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return [f"{argument.option}={value}"]
    raise UsageError(f"{place} is {type(value).__name__} {value}: write one value{' or a list' * argument.several}")
