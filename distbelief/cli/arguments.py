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
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from distbelief.core.settings import option
from distbelief.core.values import read_as
from distbelief.errors import Refusals, UsageError, nearest, synonym

HELP = ("--help", "-h")
NEGATIVE = re.compile(r"-[0-9.]")
ALL = "all"
"""Word behind --help that shows the rare options too."""


class Argument(NamedTuple):
    """One option."""

    name: str
    """Name of the field."""
    hint: Any
    """Type of the field."""
    default: Any
    text: str
    """Its docstring."""

    @property
    def option(self) -> str:
        """Spelling of the option on the command line."""
        return option(self.name)

    @property
    def several(self) -> bool:
        """True where several words may follow."""
        return typing.get_origin(self.hint) is tuple

    @property
    def kinds(self) -> tuple[Any, ...]:
        """Types that one word of its value may have."""
        return tuple(kind for kind in typing.get_args(self.hint) or (self.hint,) if kind not in (type(None), ...))

    @property
    def is_flag(self) -> bool:
        """True where no value follows."""
        return self.hint is bool

    def convert(self, word: str) -> Any:
        """Convert one word of its value.

        Raises:
            UsageError: it is no number.
        """
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
    """Place of the data, for commands that have no job."""

    data_dir: str | None = None
    """Folder with the data; else $DISTBELIEF_DATA, else the cache."""


class Heading(NamedTuple):
    """Heading of the help, with the names of the options under it."""

    title: str
    common: str
    """Those that --help shows, separated by blanks."""
    rare: str = ""
    """Those that only `--help all` shows."""


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
    """Make an argument of each field of a dataclass.

    Args:
        kind: the dataclass.
        without: fields that are no options.
        defaults: an instance whose values are the defaults; else the fields' own are.
    """
    # a job's task is no option, and its type would import torch
    hints, texts = typing.get_type_hints(kind, localns={"Task": object}), documents(kind)
    # its own before those that other commands have too
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
    """Read the words of a command: the value of each option, by the name of its field.

    Args:
        prog: the command.
        meaning: what it does.
        known: its options.
        words: behind the command.
        headings: under which help shows the options; without any, all stand together.
        when: to change some options from their default.
        places: file and line of the options that are from a file.

    Raises:
        UsageError: values are missing or none, or a word belongs to no option.
        SystemExit: help was asked for, and shown.
    """
    words = _joined([_spelled(word) for word in words], [one.option for one in known if not one.is_flag])
    if asked := [at for at, word in enumerate(words) if word in HELP]:
        print(_help(prog, meaning, known, headings, when or {}, rare=words[asked[0] + 1 :][:1] == [ALL]), end="")
        raise SystemExit(0)
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    for argument in known:
        _add(parser, argument)
    try:
        found, strange = parser.parse_known_args(words)
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
        value = getattr(found, argument.name)
        try:
            if value is None:
                values[argument.name] = argument.default
            elif argument.several:
                values[argument.name] = tuple(argument.convert(word) for word in value)
            else:
                values[argument.name] = value if argument.is_flag else argument.convert(value)
        except UsageError as error:
            place = f"{at}: " if (at := (places or {}).get(argument.option)) else ""
            refusals.append(UsageError(f"{place}{error}; see {prog} --help"))
    if refusals:
        raise Refusals.of(refusals)
    return values


Asked = TypeVar("Asked")


def ask(prog: str, kind: type[Asked], words: Sequence[str], meaning: str = "", defaults: Asked | None = None) -> Asked:
    """Read the options of a command that are the fields of one dataclass.

    Raises:
        UsageError, SystemExit: as `read` and `refuse`.
    """
    known = arguments_of(kind, defaults=defaults)
    refuse(prog, words, [argument.option for argument in known])
    return kind(**read(prog, meaning or str(kind.__doc__), known, words))


def ask_of(
    prog: str, what: str, kind: type[Asked], words: Sequence[str], meaning: str = "", known: str = ""
) -> tuple[str, Asked]:
    """Read the word that comes first, and the options behind it.

    Args:
        prog: the command.
        what: what the first word names, such as "run folder".
        kind: the dataclass of the options.
        words: behind the command.
        meaning: what it does; else the docstring of `kind`.
        known: the first words that there are.

    Raises:
        UsageError: there is no such word, or as `ask`.
        SystemExit: help was asked for, and shown.
    """
    if not words:
        raise UsageError(f"which {what}? Write it first: {'; '.join(filter(None, (f'{prog} [options]', known)))}")
    if words[0] in HELP:
        ask(prog, kind, words, meaning)
    if words[0].startswith("-"):
        raise UsageError(f"{words[0]}: write the {what} first: {prog} [options]")
    return words[0], ask(prog, kind, words[1:], meaning)


def ask_after(prog: str, kind: type[Asked], words: Sequence[str]) -> tuple[list[str], Asked]:
    """Read the words before the options, and these.

    Raises:
        UsageError, SystemExit: as `ask`.
    """
    first = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    return list(words[:first]), ask(prog, kind, words[first:])


def refuse(
    prog: str,
    words: Sequence[str],
    known: Sequence[str],
    elsewhere: Callable[[], Mapping[str, str]] = dict,
    why: Mapping[str, str] | None = None,
) -> None:
    """Refuse an option that is not known.

    Args:
        prog: the command.
        words: behind it.
        known: its options.
        elsewhere: lists other options, and who has them.
        why: it has not some of those.

    Raises:
        UsageError: with the nearest that is, or where it would belong and why not here.
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
            raise UsageError(
                f"{prog} has no option {name}: {reason}{it} belongs to {others[there]}{other}; see {prog} --help"
            )
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
    """Join each option and a negative number behind it: argparse takes -1e-3 for an option.

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
        to.add_argument(argument.option, dest=argument.name, metavar=shown.__name__.upper(), **more)


def _help(
    prog: str, meaning: str, known: Sequence[Argument], headings: Sequence[Heading], when: Mapping[str, str], rare: bool
) -> str:
    """Lay the help out: the options under each heading, in its order, and at the end where the others are."""
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
