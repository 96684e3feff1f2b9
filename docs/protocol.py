"""Writes docs/protocol.md: the conversations between roles, as their tables have them.

python docs/protocol.py
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from distbelief.core.conversations.phases import ALLOWED, PHASES
from distbelief.core.conversations.table import Conversation, States
from distbelief.core.protocol import BATCHED, CONVERSATIONS, GROUPED, LINKING, SERVED
from distbelief.places import messages

WHOSE = {
    "a job with a server (`downpour`, `softsync`, `bounded`, `synchronous`, `hogwild`, `locking`)": SERVED,
    "`sandblaster`": BATCHED,
    "`allreduce`, and `single` where its model is split": GROUPED,
}
CHANNELS = {
    "a job's processes": messages.ProcessMessage,
    "agents of other hosts": messages.HostMessage,
    "guests": messages.JoinRequest | messages.JoinAnswer,
    "a prediction's processes": messages.PredictionMessage,
}
STARTING = """## Starting and watching

The messages of whoever starts processes and watches them, on channels beside the links between roles. In both
directions a message is its length in 4 bytes, and itself; nothing is pickled. `distbelief status` is answered with one
JSON object.
"""
INTRODUCTION = """# Who says what to whom

Made from the tables in `distbelief/core/conversations` by `python docs/protocol.py`; a test sees that it is current.
A machine takes a message from those who say it here, and from nobody else; what the tables say nothing of is refused,
and its link is dropped. Beside messages a machine is told `Lost` (the link to a peer is gone), `Saved` and `Loaded` (by
the store), `Woke` (by the clock) and `Lent` (by the transport).
"""


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    """A table in Markdown."""
    for row in (head, ("---",) * len(head), *rows):
        yield f"| {' | '.join(row)} |"
    yield ""


def first(text: str | None) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((text or "").split("\n\n")[0].split())


def states(found: States[Any]) -> Iterator[str]:
    """The states of something, and a diagram of its moves."""
    yield f"The states of {found.of}:\n"
    yield from table(("state", "meaning"), [(f"`{state}`", meaning) for state, meaning in found.meaning.items()])
    yield "```mermaid\nstateDiagram-v2"
    yield f"    [*] --> {next(iter(found.meaning))}"
    for move in found.moves:
        yield f"    {move.before} --> {move.after}" + (
            f": {', '.join(one.__name__ for one in move.on)}" if move.on else ""
        )
    yield "```\n"


def allowed(by_phase: Mapping[Any, frozenset[StrEnum]]) -> Iterator[str]:
    """What each phase allows."""
    acts = type(next(iter(next(iter(by_phase.values())))))
    rows = [(act.value, *("yes" if act in may else "" for may in by_phase.values())) for act in acts]
    yield from table(("the coordinator may", *(f"`{phase}`" for phase in by_phase)), rows)


def conversation(one: Conversation) -> Iterator[str]:
    """One conversation: what it is for, its messages, and its states."""
    module = import_module(f"distbelief.core.conversations.{one.title.lower()}")
    yield f"## {one.title}\n"
    what = first(module.__doc__).partition(": ")[2]
    yield f"{what[:1].upper()}{what[1:]}\n"
    rows = [
        (
            f"`{row.message.__name__}`",
            ", ".join(row.by),
            ", ".join(row.to),
            f"`{row.answers.__name__}`" if row.answers else "",
            first(row.message.__doc__),
        )
        for row in one.says
    ]
    yield from table(("message", "from", "to", "answers", "what it says"), rows)
    for found in one.states:
        yield from states(found)


def document() -> str:
    """The whole of docs/protocol.md."""
    lines = [INTRODUCTION, "| what is trained by | its conversations |", "| --- | --- |"]
    for who, theirs in WHOSE.items():
        named = [f"[{one.title}](#{one.title.lower()})" for one in CONVERSATIONS if one is LINKING or one in theirs]
        lines.append(f"| {who} | {', '.join(named)} |")
    lines += ["", "## The phases of a job\n", *states(PHASES), *allowed(ALLOWED)]
    for one in CONVERSATIONS:
        lines += conversation(one)
    lines.append(STARTING)
    rows = [
        (f"`{one.__name__}`", where, first(one.__doc__)) for where, said in CHANNELS.items() for one in get_args(said)
    ]
    lines += table(("message", "to or from", "what it says"), rows)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(document())
