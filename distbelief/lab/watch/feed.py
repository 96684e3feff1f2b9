"""Feed of a page: the latest state of a run, and the changes that led to it as JSON merge patches (RFC 7386)."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import deque
from typing import NamedTuple, Protocol

import msgspec

from distbelief.core.records import Json
from distbelief.errors import DistbeliefError, JobFailed, UsageError

PERIOD = 1.0
"""Least seconds between two looks at a run, and so between two messages to a page."""
KEPT = 120
"""Changes that are kept for pages that reconnect; a page that has missed more gets the whole state."""


class RunReader(Protocol):
    """Reader of a run."""

    def view(self, at: float | None) -> Json:
        """Return the state of the run, now or at a moment (seconds of its clock)."""


class FeedPart(NamedTuple):
    """Part of a feed: what makes the named state of the one before, as JSON."""

    name: str
    kind: str
    """Its kind: the whole state ("whole"), a merge patch ("patch"), or a token for buttons ("press")."""
    data: bytes


def changes(old: Json, new: Json) -> Json:
    """Return the merge patch from one object to another; in it, None removes a name.

    >>> changes({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 2, "d": 4}, "e": [5]})
    {'a': None, 'b': {'d': 4}, 'e': [5]}
    """
    patch: Json = {}
    for name in old | new:
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        patch[name] = changes(before, after) if isinstance(before, dict) and isinstance(after, dict) else after
    return patch


class Feed:
    """Feed of one run: any number of pages share one look at it."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._looking, self._looked = asyncio.Lock(), -PERIOD
        self._state: Json = {}
        self.gone = False
        """True if there was no run folder at the last look."""
        self._read = time.monotonic()
        """Time of the last look at which the run could be read."""
        self._start, self._number = secrets.token_hex(4), 0  # names of another process are not taken for these
        self._patches: deque[FeedPart] = deque(maxlen=KEPT)

    @property
    def running(self) -> bool:
        """Return whether the run was running when it could be read last."""
        return bool(self._state.get("run", {}).get("running", True))

    async def look(self) -> None:
        """Look at the run, unless it was looked at within `PERIOD`."""
        # a page that goes away ends this call, but not the thread that reads, and no two may read at the same time
        await asyncio.shield(self._look())

    async def _look(self) -> None:
        async with self._looking:
            if time.monotonic() < self._looked + PERIOD:
                return
            try:
                state, self.gone = await self._view(None), False
                self._read = time.monotonic()
            except DistbeliefError as error:  # a job that hangs is still shown; one without a folder makes it again
                sentence = f"for {time.monotonic() - self._read:.0f} s: {error}"
                state, self.gone = self._state | {"sentence": sentence}, isinstance(error, UsageError)
            self._looked = time.monotonic()
            if patch := changes(self._state, state):
                self._state, self._number = state, self._number + 1
                self._patches.append(FeedPart(self._name, "patch", msgspec.json.encode(patch)))

    async def at(self, moment: float) -> Json:
        """Return the state at a moment of the run."""
        async with self._looking:
            return await self._view(moment)

    async def _view(self, at: float | None) -> Json:
        """Return the state that the reader finds, or raise a `DistbeliefError`."""
        try:
            return await asyncio.to_thread(self._reader.view, at)
        except DistbeliefError:
            raise
        except Exception as error:  # a folder was deleted, or a file is spoilt in a way that nobody foresaw
            raise JobFailed(f"the run cannot be read: {error!r}") from error

    @property
    def _name(self) -> str:
        return f"{self._start}-{self._number}"

    def since(self, name: str) -> list[FeedPart]:
        """Return what came after a named state, or the whole state if that is not known."""
        if name == self._name:
            return []
        later = [*itertools.dropwhile(lambda part: part.name != name, self._patches)][1:]
        if later:
            return later
        return [FeedPart(self._name, "whole", msgspec.json.encode(self._state))]
