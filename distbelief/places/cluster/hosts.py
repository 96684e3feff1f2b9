"""Hosts of a job as they are written: on the command line (a:4,b:4), or in a hostfile, one a line."""

from __future__ import annotations

import re

import msgspec

from distbelief.errors import UsageError

MOST_HOSTS = 1 << 12
MOST_SLOTS = 1 << 12
"""Most slots of one host."""
_NAME = r"(?P<name>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_][A-Za-z0-9_.@-]*)"
"""Pattern of a name, an address, or user@name. None begins with a dash: a remote shell would take it for an option."""
_WORD = re.compile(rf"{_NAME}(?::(?P<slots>[0-9]+))?")
_LINE = re.compile(rf"{_NAME}(?::(?P<slots>[0-9]+)|\s+slots\s*=\s*(?P<named>[0-9]+))?")


class Host(msgspec.Struct, frozen=True):
    """A host as it was written."""

    name: str
    slots: int = 0
    """Number of replicas, or partitions of split ones, that it holds; 0 for as many as it has cores or GPUs."""


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts that `--hosts` names.

    Raises:
        UsageError: an entry is not a host, or names a host twice.

    >>> parse_hosts("a:4,me@b,[::1]:2")
    (Host(name='a', slots=4), Host(name='me@b', slots=0), Host(name='::1', slots=2))
    """
    named: dict[str, str] = {}
    hosts = [_host(_WORD.fullmatch(word.strip()), f"--hosts {text}", word, word, named) for word in text.split(",")]
    return _few(hosts, "--hosts")


def parse_hostfile(text: str, name: str) -> tuple[Host, ...]:
    r"""Return the hosts of a hostfile, with `host slots=4`, `host:4` or `host` on each line, and comments after `#`.

    Raises:
        UsageError: a line of file `name` is not a host, or names a host again; or there is no host.

    >>> parse_hostfile("a slots=4  # the large one\n\nb:2\n", "hosts")
    (Host(name='a', slots=4), Host(name='b', slots=2))
    """
    hosts, named = [], dict[str, str]()
    for number, line in enumerate(text.splitlines(), 1):
        if bare := line.partition("#")[0].strip():
            where = f"--hostfile {name}, line {number}"
            hosts.append(_host(_LINE.fullmatch(bare), where, bare, f"line {number}", named))
    if not hosts:
        raise UsageError(f"--hostfile {name} names no host: write one on each line, such as `node1 slots=4`")
    return _few(hosts, f"--hostfile {name}")


def _host(match: re.Match[str] | None, where: str, word: str, called: str, named: dict[str, str]) -> Host:
    """Return the host that an entry names; `named` holds the hosts before it, each with its place in the text."""
    if match is None:
        raise UsageError(f"{where}: {word[:80]!r} is no host; write NAME, NAME:SLOTS or, in a file, NAME slots=SLOTS")
    name, groups = match["name"].strip("[]"), match.groupdict()
    count = groups["slots"] or groups.get("named")
    if count is not None and not 1 <= int(count) <= MOST_SLOTS:
        raise UsageError(f"{where}: {name} with {int(count)} slots; a host has from 1 to {MOST_SLOTS}")
    if name in named:
        raise UsageError(
            f"{where}: host {name} is named twice, {named[name]!r} and {called!r}; name it once, with all its slots"
        )
    named[name] = called
    return Host(name, int(count or 0))


def _few(hosts: list[Host], where: str) -> tuple[Host, ...]:
    if len(hosts) > MOST_HOSTS:
        raise UsageError(f"{where} names {len(hosts)} hosts; there may be at most {MOST_HOSTS}")
    return tuple(hosts)
