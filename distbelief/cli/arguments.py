"""Options of a command, made from the fields of frozen dataclasses: name, type, default and docstring of each.

argparse finds which words belong to which option and lays out the help. Values are converted here, so that an error
names the option, the value and what it may be.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import re
import tomllib
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from distbelief.core.settings import option
from distbelief.core.values import read_as
from distbelief.errors import Refusals, UsageError, nearest, synonym

HELP = ("--help", "-h")
NEGATIVE = re.compile(r"-[0-9.]")
ALL = "all"
"""Word after --help that shows the rare options too."""


class Argument(NamedTuple):
    """One option."""

    name: str
    hint: Any
    default: Any
    text: str
    """Docstring of the field."""

    @property
    def option(self) -> str:
        """Return the option as the command line spells it."""
        return option(self.name)

    @property
    def several(self) -> bool:
        """Return whether several words may follow."""
        return typing.get_origin(self.hint) is tuple

    @property
    def kinds(self) -> tuple[Any, ...]:
        """Return the types that one word of its value may have."""
        return tuple(kind for kind in typing.get_args(self.hint) or (self.hint,) if kind not in (type(None), ...))

    @property
    def may_be_bare(self) -> bool:
        """Return whether its value may be left off."""
        return bool in self.kinds and not self.is_flag

    @property
    def is_flag(self) -> bool:
        """Return whether it takes no value."""
        return self.hint is bool

    def convert(self, word: str) -> Any:
        """Convert one word of its value, or raise a `UsageError`."""
        for kind, what in ((int, "a whole number"), (float, "a number")):
            if kind in self.kinds:
                try:
                    return kind(word)
                except ValueError:
                    if str not in self.kinds:
                        raise UsageError(f"{self.option} {word!r}: is not {what}") from None
        return word


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFolder:
    """Place of the data, for commands without a job."""

    data_dir: str | None = None
    """Folder of the data. The default is $DISTBELIEF_DATA, then the cache."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quiet:
    """Option that silences a command."""

    quiet: bool = False
    """Show nothing but errors."""


class Heading(NamedTuple):
    """Heading of the help, and the options under it, separated by blanks."""

    title: str
    common: str
    """Options that --help shows."""
    rare: str = ""
    """Options that only `--help all` shows."""


@functools.cache
def documents(kind: type) -> dict[str, str]:
    """Read the docstring of each field of a dataclass from its source."""
    texts = {}
    for part in [part for part in kind.__mro__[::-1] if dataclasses.is_dataclass(part)]:
        [body] = [node.body for node in ast.parse(inspect.getsource(part)).body if isinstance(node, ast.ClassDef)]
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                texts[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return texts


def arguments_of(kind: type, without: Iterable[str] = (), defaults: object = None) -> list[Argument]:
    """Make an argument of each field of a dataclass but `without`; `defaults` is an instance with other defaults."""
    # a job's task is not an option, and its type would import torch
    hints, texts = typing.get_type_hints(kind, localns={"Task": object}), documents(kind)
    # options of this command alone come first
    fields = sorted(dataclasses.fields(kind), key=lambda field: field.name not in kind.__annotations__)
    return [
        Argument(
            field.name, read_as(hints[field.name]), getattr(defaults or kind, field.name), texts.get(field.name, "")
        )
        for field in fields
        if field.init and field.name not in without
    ]


def read(
    prog: str,
    meaning: str,
    known: Sequence[Argument],
    words: Sequence[str],
    headings: Sequence[Heading] = (),
    when: Mapping[str, str] | None = None,
    places: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Read the words after a command: the value of each option, by the name of its field.

    Args:
        prog: the command.
        meaning: description of the command in its help.
        known: options of the command.
        words: words after the command.
        headings: headings of the options in the help; without them, the options are one list.
        when: by option, when a user changes it.
        places: by option, the file and line that set it.

    Raises:
        UsageError: a value is missing or wrong, or a word belongs to no option.
        SystemExit: the words ask for help, which was shown.
    """
    words = _joined([_spelled(word) for word in words], [argument.option for argument in known if not argument.is_flag])
    if helps := [at for at, word in enumerate(words) if word in HELP]:
        print(_help(prog, meaning, known, headings, when or {}, rare=words[helps[0] + 1 :][:1] == [ALL]), end="")
        raise SystemExit(0)
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    for argument in known:
        _add(parser, argument)
    try:
        parsed, strange = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        flag = any(argument.option == error.argument_name and argument.is_flag for argument in known)
        raise UsageError(
            f"{error.argument_name}: {'takes no value' if flag else 'its value is missing'}; see {prog} --help"
        ) from None
    if strange:
        raise UsageError(f"{strange[0]!r} is one word too many; see {prog} --help")
    values: dict[str, Any] = {}
    refusals = []
    for argument in known:
        value = getattr(parsed, argument.name)
        try:
            if value is None:
                values[argument.name] = argument.default
            elif argument.several:
                values[argument.name] = tuple(argument.convert(word) for word in value)
            else:
                values[argument.name] = value if value is True else argument.convert(value)
        except UsageError as error:
            place = f"{at}: " if (at := (places or {}).get(argument.option)) else ""
            refusals.append(UsageError(f"{place}{error}; see {prog} --help"))
    if refusals:
        raise Refusals.of(refusals)
    return values


Asked = TypeVar("Asked")


def ask(prog: str, kind: type[Asked], words: Sequence[str], meaning: str = "", defaults: Asked | None = None) -> Asked:
    """Read the options of a command whose options are the fields of one dataclass; raise as `read` and `refuse`."""
    known = arguments_of(kind, defaults=defaults)
    refuse(prog, words, [argument.option for argument in known])
    return kind(**read(prog, meaning or str(kind.__doc__), known, words))


def picked(settings: object, *names: str) -> dict[str, Any]:
    """Return some of the options of a command, by name."""
    return {name: getattr(settings, name) for name in names}


def ask_of(
    prog: str, what: str, kind: type[Asked], words: Sequence[str], meaning: str = "", known: str = ""
) -> tuple[str, Asked]:
    """Read a first word, and the options after it; raise as `ask`.

    The first word names a thing of the kind `what`, such as "run folder"; an error shows the `known` ones.
    """
    if not words:
        raise UsageError(f"which {what}? Write it first: {'; '.join(filter(None, (f'{prog} [options]', known)))}")
    if words[0] in HELP:
        ask(prog, kind, words, meaning)
    if words[0].startswith("-"):
        raise UsageError(f"{words[0]}: write the {what} first: {prog} [options]")
    return words[0], ask(prog, kind, words[1:], meaning)


def ask_after(prog: str, kind: type[Asked], words: Sequence[str]) -> tuple[list[str], Asked]:
    """Read the words before the options, and the options; raise as `ask`."""
    first = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    return list(words[:first]), ask(prog, kind, words[first:])


def ask_maybe(prog: str, kind: type[Asked], words: Sequence[str]) -> tuple[str, Asked]:
    """Read a first word, "" if it is left off, and the options after it; raise as `ask`."""
    named, settings = ask_after(prog, kind, words)
    if len(named) > 1:
        raise UsageError(f"{named[1]!r} is one word too many: {prog}")
    return "".join(named), settings


def refuse(
    prog: str,
    words: Sequence[str],
    known: Sequence[str],
    elsewhere: Callable[[], Mapping[str, str]] = dict,
    why: Mapping[str, str] | None = None,
) -> None:
    """Refuse an unknown option, naming the nearest one, or the owner of the option and why it is not here.

    `elsewhere` lists the options of other commands and strategies with their owners; `why` has reasons for their lack.
    """
    for word in words:
        name = _spelled(word).partition("=")[0]
        if not name.startswith("--") or name in known or name in ("--help", "--"):
            continue
        others, here = elsewhere(), synonym(name, known)
        if there := name if name in others else "" if here else synonym(name, others):
            other = f", and here it is {here}" if here else ""
            reason = f"{why[there]}; " if why and there in why else ""
            it = "it" if there == name else there
            belongs = f"{reason}{it} belongs to {others[there]}{other}"
            raise UsageError(f"{prog} has no option {name}: {belongs}; see {prog} --help")
        near = nearest(name, [*known, "--help"])
        hint = f"did you mean {near}? " if near else ""
        raise UsageError(f"{prog} has no option {name}; {hint}All are in {prog} --help")


def _spelled(word: str) -> str:
    """Spell an option with hyphens.

    >>> _spelled("--push_every=4"), _spelled("a_b")
    ('--push-every=4', 'a_b')
    """
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else word


def _joined(words: Sequence[str], valued: Sequence[str]) -> list[str]:
    """Join each option with a negative number after it, since argparse mistakes -1e-3 for an option.

    >>> _joined(["--lr", "-1e-3", "--json"], ["--lr"])
    ['--lr=-1e-3', '--json']
    """
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in valued and NEGATIVE.match(word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _add(to: Any, argument: Argument, **more: str) -> None:
    if argument.is_flag:
        to.add_argument(argument.option, dest=argument.name, action="store_const", const=True, **more)
    elif argument.several:
        to.add_argument(argument.option, dest=argument.name, action="extend", nargs="*", metavar="WORD", **more)
    else:
        shown = str if str in argument.kinds else argument.kinds[0]
        bare: dict[str, Any] = {"nargs": "?", "const": True} if argument.may_be_bare else {}
        to.add_argument(argument.option, dest=argument.name, metavar=shown.__name__.upper(), **bare, **more)


def _help(
    prog: str, meaning: str, known: Sequence[Argument], headings: Sequence[Heading], when: Mapping[str, str], rare: bool
) -> str:
    """Lay out the help: the options under their headings, and how to see the rest."""
    by_name = {argument.name: argument for argument in known}
    shown = headings or [Heading("options", " ".join(by_name))]
    names = {heading: [*heading.common.split(), *heading.rare.split() * rare] for heading in shown}
    hidden = sum(name in by_name for heading in shown for name in heading.rare.split()) * (not rare)
    parser = argparse.ArgumentParser(
        usage=f"{prog} [options]",
        description=" ".join(meaning.split()).replace("%", "%%"),
        add_help=False,
        epilog=f"{hidden} more: {prog} --help {ALL}" if hidden else None,
    )
    for heading, those in names.items():
        group = parser.add_argument_group(heading.title)
        for argument in [by_name[name] for name in those if name in by_name]:
            bare = argument.default is None or argument.default is False or argument.default in ("", ())
            default = "" if bare else f" (default: {argument.default})"
            change = f" Change it {when[argument.name]}." if argument.name in when else ""
            _add(group, argument, help=f"{argument.text}{default}{change}".replace("%", "%%"))
    return parser.format_help()


CONFIG = "--config"


class Configured(NamedTuple):
    """Words of a command, together with those of its `--config` file."""

    words: list[str]
    places: dict[str, str]
    """File and line of each option that a file sets."""


def configured(args: Sequence[str], arguments: Sequence[Argument]) -> Configured:
    """Put the options of the TOML file that `--config` names before the words of a command, which take precedence.

    Raises:
        UsageError: the file cannot be read, or has an unknown key or a wrong value.
    """
    words, paths = _without_config(args)
    if not paths:
        return Configured(words, {})
    if len(paths) > 1:
        raise UsageError(f"{CONFIG} {' '.join(paths)}: name one file")
    text, options = _read(paths[0])
    typed = {word.partition("=")[0].replace("_", "-") for word in words}
    known = {argument.option: argument for argument in arguments}
    first: list[str] = []
    places: dict[str, str] = {}
    for key, value in options.items():
        place, name = f"{paths[0]}, line {_line_of(text, key)}", option(key)
        if name not in known or name == CONFIG:
            raise UsageError(f"{place}: no option {key!r} here{_nearest(key, known)}")
        if name in places:
            raise UsageError(f"{place}: {key} is set twice, first at {places[name]}; remove one")
        places[name] = place
        if name not in typed:
            first += _words(known[name], value, f"{place}: {key}")
    return Configured([*first, *words], places)


def _without_config(args: Sequence[str]) -> tuple[list[str], list[str]]:
    words, paths, rest = [], [], iter(args)
    for word in rest:
        name, equals, path = word.partition("=")
        if name != CONFIG:
            words.append(word)
        elif path := path if equals else next(rest, ""):
            paths.append(path)
        else:
            raise UsageError(f"{CONFIG}: its value is missing")
    return words, paths


def _read(path: str) -> tuple[str, dict[str, object]]:
    try:
        text = Path(path).read_text("utf-8-sig")
        return text, tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"{CONFIG} {path}: {error.strerror}; name a TOML file of options") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{CONFIG} {path}: is not TOML: {error}; write lines such as replicas = 2") from error


def _line_of(text: str, key: str) -> int:
    match = re.search(rf"^\s*[\[\"']*{re.escape(key)}\b", text, re.MULTILINE)
    return text[: match.end()].count("\n") + 1 if match else 1


def _nearest(key: str, known: Collection[str]) -> str:
    near = nearest(option(key), [name for name in known if name != CONFIG])
    names = near.removeprefix("--").replace("-", "_")
    return f"; did you mean {names!r}?" if near else "; its options are those of --help, such as replicas"


def _words(argument: Argument, value: object, place: str) -> list[str]:
    """Return a value as words of the command line: none for a flag that is false."""
    if isinstance(value, bool) and bool in argument.kinds:
        return [argument.option] if value else []
    if argument.is_flag:
        raise UsageError(f"{place} is {value!r}: write true or false")
    if isinstance(value, list) and argument.several and all(isinstance(word, str | int | float) for word in value):
        return [argument.option, *map(str, value)] if value else []
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return [f"{argument.option}={value}"]
    raise UsageError(f"{place} is {type(value).__name__} {value}: write one value{' or a list' * argument.several}")
