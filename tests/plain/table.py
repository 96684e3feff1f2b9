"""The table: what comes of a feature in a way, and what should."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from plain.play import WAYS, Outcome, play_ours, play_plain
from plain.scripts import FEATURES, Feature

EQUAL = "Equal"
_plain: dict[str, Outcome] = {}
"""What came of each feature plainly, whatever the way."""


def difference(plain: Outcome, ours: Outcome, within: float = 0.0) -> str:
    """The first thing in which two outcomes differ; "" where they are equal."""
    if plain.error != ours.error:
        return f"it ended with {ours.error or 'no error'!r}, and plainly with {plain.error or 'no error'!r}"
    if [*plain.state] != [*ours.state]:
        return f"its model has {[*ours.state]}, and plainly {[*plain.state]}"
    for name, value in plain.state.items():
        if wrong := apart(value, ours.state[name], within):
            return f"{name} {wrong}"
    if len(plain.seen) != len(ours.seen):
        return f"it has seen {len(ours.seen)} things, and plainly {len(plain.seen)}"
    for number, (one, other) in enumerate(zip(plain.seen, ours.seen, strict=True)):
        if one != other and (wrong := apart(unpacked(one), unpacked(other), within)):
            return f"what it saw as number {number} {wrong}: {unpacked(other)}, and plainly {unpacked(one)}"
    if plain.files.keys() != ours.files.keys():
        return f"it saved {[*ours.files]}, and plainly {[*plain.files]}"
    for name, held in plain.files.items():
        if held != ours.files[name]:
            return f"its file {name} differs"
    if plain.messages != ours.messages:
        return f"it says {ours.messages!r}, and plainly {plain.messages!r}"
    return ""


def unpacked(noted: object) -> object:
    """What `bits` has made of a value, as the tensor or the number that it was."""
    if isinstance(noted, tuple):
        dtype, shape, held = noted
        whole = torch.frombuffer(bytearray(held), dtype=torch.uint8) if held else torch.zeros(0, dtype=torch.uint8)
        return whole.view(getattr(torch, dtype.removeprefix("torch."))).reshape(shape)
    return torch.tensor(noted, dtype=torch.float64) if isinstance(noted, float) else noted


def apart(plain: object, ours: object, within: float) -> str:
    """In what two values differ by more than a part of the largest of the first; "" where they do not."""
    if not (isinstance(plain, torch.Tensor) and isinstance(ours, torch.Tensor)):
        return "" if plain == ours else "differs"
    if (plain.dtype, plain.shape) != (ours.dtype, ours.shape):
        return f"is {ours.dtype} {[*ours.shape]}, and plainly {plain.dtype} {[*plain.shape]}"
    if torch.equal(plain.nan_to_num(7.0), ours.nan_to_num(7.0)) and torch.equal(plain.isnan(), ours.isnan()):
        return ""
    off = float((plain.double() - ours.double()).abs().max() / plain.double().abs().max().clamp_min(1e-30))
    return "" if off <= within else f"is {off:.2g} of its largest value off"


class Cell(NamedTuple):
    """A feature in a way."""

    name: str
    way: str

    @property
    def feature(self) -> Feature:
        """The feature."""
        return FEATURES[self.name]


def cells() -> Iterator[Cell]:
    """All of the table."""
    for name, one in FEATURES.items():
        yield from (Cell(name, way) for way in one.ways)


def wrong(cell: Cell, folder: Path) -> str:
    """What is wrong with a cell; "" where it is as the table has it."""
    one = cell.feature
    ours = play_ours(one.script, WAYS[cell.way], one.optimizer, one.epochs, folder / "ours")
    if says := one.refused.get(cell.way):
        kind, _, sentence = ours.error.partition(": ")
        fits = kind in ("UsageError", "DataError", "LayoutError", "LossNotFinite") and re.search(says, sentence)
        return "" if fits else f"it should be refused with {says!r}, and ended with {ours.error or 'no error'!r}"
    rest, says = re.subn(one.says, "", ours.messages) if one.says else (ours.messages, 1)
    return difference(plainly(cell.name, folder / "plain"), ours._replace(messages=rest), one.within) or (
        "" if says == 1 else f"it does not say {one.says!r} once"
    )


def plainly(name: str, folder: Path) -> Outcome:
    """What comes of a feature in a plain script."""
    if name not in _plain:
        one = FEATURES[name]
        _plain[name] = play_plain(one.script, one.optimizer, one.epochs, folder)
    return _plain[name]


HEAD = """# What a script may do, feature by feature

With one replica a script does what plain PyTorch does, or a sentence refuses it ([scripts.md](scripts.md)).
`pytest tests/plain` runs a small script for each feature without distbelief, and in four ways: `served` and `direct`
(both `downpour`), `synchronous` and `allreduce`.

**Equal** features have the same parameters, buffers, losses, samples, files and messages, bit for bit. Others are
refused: the tables have the end of the message. Where a way is named, only that way refuses.

`DISTBELIEF_RENEW=1 pytest tests/plain -k document` writes this page.
"""
BRACKETS = r" \([^()]*(\([^()]*\)[^()]*)*\)"
VALUES = r"(?<!\w)'[^']*'|\b\d+\b"


def document(folder: Path) -> str:
    """The page that has the table: in each section what is equal, then the features of each sentence."""
    outcomes = [outcome(name, folder / name) for name in FEATURES]  # a script in a `for` of this folder is refused
    sections: dict[str, dict[str, list[str]]] = {}
    for one, what in zip(FEATURES.values(), outcomes, strict=True):
        titles = sections.setdefault(one.section, {}).setdefault(what, [])
        titles += [one.title] if one.title not in titles else []
    lines = [HEAD]
    for section, features in sections.items():
        lines += [f"## {section.capitalize()}", ""]
        for what in sorted(features, reverse=True):
            if what.startswith(EQUAL):
                lines += [f"**{what}**: {'; '.join(features.pop(what))}.", ""]
        if features:
            lines += ["| refused | why, and what to do |", "|---|---|"]
            lines += [*(f"| {'; '.join(titles)} | {what} |" for what, titles in features.items()), ""]
    return "\n".join(lines)


def outcome(name: str, folder: Path) -> str:
    """What comes of a feature: that it is equal, or what the sentences that refuse it now end with, and their ways."""
    one = FEATURES[name]
    if not one.refused:
        return f"{EQUAL} within {one.within:g}, as {one.because}" if one.within else EQUAL
    ended = {way: ended_with(Cell(name, way), folder / way) for way in one.refused}
    sentences: dict[str, list[str]] = {}
    for way, sentence in ended.items():
        short = re.sub(VALUES, "...", re.sub(BRACKETS, "", sentence))
        sentences.setdefault(short.partition(": ")[2] or short, []).append(way)
    return "; ".join(
        f"{', '.join(ways)}: {what}" if set(ways) < set(one.ways) else what for what, ways in sentences.items()
    )


def ended_with(cell: Cell, folder: Path) -> str:
    """What a script was ended with, without the kind of error."""
    one = cell.feature
    return play_ours(one.script, WAYS[cell.way], one.optimizer, one.epochs, folder).error.partition(": ")[2]
