"""Writes docs/protocol.md from the tables of the conversations between roles.

python docs/protocol.py
"""

import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from distbelief.core.conversations.phases import PHASES
from distbelief.core.conversations.table import Conversation, Says, States
from distbelief.core.messages import Message
from distbelief.core.protocol import BATCHED, CONVERSATIONS, GROUPED, LINKING, SERVED
from distbelief.core.roles import Kind
from distbelief.places import messages

JOBS = {
    "a job with a parameter server": SERVED,
    "`sandblaster`": BATCHED,
    "`allreduce`, and `single` with a split model": GROUPED,
}
ROLES = {Kind.REPLICA, Kind.SHARD, Kind.STANDBY, Kind.COORDINATOR, Kind.EVALUATOR}
CHANNELS = {
    "a job's processes": messages.ProcessMessage,
    "agents of other hosts": messages.HostMessage,
    "guests": messages.JoinRequest | messages.JoinAnswer,
    "a prediction's processes": messages.PredictionMessage,
}
STARTING = """## Starting and watching

Messages on the channels between a supervisor and its processes: the length of each in 4 bytes, then the message;
nothing is pickled. `distbelief status` is answered with one JSON object.
"""
INTRODUCTION = """# The protocol

`python docs/protocol.py` makes this page from the tables in `distbelief/core/conversations`.

A role takes a message only from the senders named here: anything else is refused, and its link is dropped. An empty
cell is the same as the one above; states begin with the first. `Again` lists messages whose meaning is in an earlier
table.

Five events are not messages: `Lost` (the link to another role is gone), `Saved` and `Loaded` (from the store), `Woke`
(a timer) and `Lent` (memory from the transport).
"""


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Format a table in Markdown."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'-|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |".replace("|  |", "| |")
    yield ""


def first(text: str | None) -> str:
    """Return the first sentence of a docstring, on one line, without words that its row has."""
    sentence = " ".join((text or "").split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
    said = (
        r"(?:Report|News)(?: of a replica)? that|Answer of an agent:|Request to(?: an agent to)?(?! an? | the | end: )"
    )
    return capital(re.sub(f"^(?:{said}) ", "", sentence)).replace(", and to ", ", and ")


def capital(text: str) -> str:
    """Begin a sentence."""
    return text[:1].upper() + text[1:]


def states(shown: States[Any]) -> Iterator[str]:
    """Format the states of something, and its moves."""
    rows = []
    for state, meaning in shown.meaning.items():
        moves = [
            f"`{move.after}`" + (f" on {', '.join(event.__name__ for event in move.on)}" if move.on else "")
            for move in shown.moves
            if move.before == state
        ]
        rows.append((f"`{state}`", meaning, "; ".join(moves)))
    yield from table((f"state of {shown.of}", "meaning", "moves to"), rows)


def way(row: Says) -> str:
    """Name the senders and the receivers of a row."""
    return " → ".join("any role" if {*kinds} >= ROLES else ", ".join(kinds) for kinds in (row.by, row.to))


def meaning(row: Says) -> str:
    """Return what a message means, and which one it answers if neither its name nor its docstring says so."""
    text = first(row.message.__doc__)
    answered = row.answers.__name__ if row.answers else ""
    return text if row.message.__name__.startswith(answered) or answered in text else f"{text}; answers `{answered}`"


def conversation(shown: Conversation, homes: dict[type[Message], str]) -> Iterator[str]:
    """Format one conversation: its purpose, its messages and its states.

    Args:
        shown: the conversation.
        homes: the conversation that gives the meaning of each message; those that are new here are added.
    """
    module = import_module(f"distbelief.core.conversations.{shown.title.lower()}")
    yield f"## {shown.title}\n"
    purpose = first(module.__doc__).partition(": ")[2]
    yield f"{capital(purpose.replace('messages by which', 'how'))}.\n"
    rows: dict[type[Message], tuple[list[str], str]] = {}
    again: dict[str, list[str]] = {}
    for row in shown.says:
        name = f"`{row.message.__name__}`"
        if homes.setdefault(row.message, shown.title) != shown.title:
            again.setdefault(way(row), []).append(name)
            continue
        rows.setdefault(row.message, ([], meaning(row)))[0].append(way(row))
    ways = ["; ".join(ends) for ends, _ in rows.values()]
    shorter = ["" if before == ends else ends for before, ends in pairwise(["", *ways])]
    cells = [(f"`{message.__name__}`", ends, rows[message][1]) for message, ends in zip(rows, shorter, strict=True)]
    yield from table(("message", "from → to", "meaning"), cells)
    if again:
        yield f"Again: {'; '.join(f'{ends}: ' + ', '.join(names) for ends, names in again.items())}.\n"
    for its in shown.states:
        yield from states(its)


def document() -> str:
    """Return the whole of docs/protocol.md."""
    homes: dict[type[Message], str] = {}
    lines = [INTRODUCTION]
    for job, conversations in JOBS.items():
        without = [shown.title for shown in CONVERSATIONS if shown not in (LINKING, *conversations)]
        lines.append(f"- Not used by {job}: {', '.join(without)}.")
    lines += ["", "## The phases of a job\n", *states(PHASES)]
    for shown in CONVERSATIONS:
        lines += conversation(shown, homes)
    rows: list[tuple[str, str, str]] = []
    for peers, messages_of in CHANNELS.items():
        for number, message in enumerate(get_args(messages_of)):
            name = f"`{message.__name__}`"
            shown_before = any(name == row[0] for row in rows)
            rows.append((name, "" if number else peers, "as above" if shown_before else first(message.__doc__)))
    lines += [STARTING, *table(("message", "to or from", "meaning"), rows)]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(document())
