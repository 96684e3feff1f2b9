"""Feed of a page: the latest state of a run, and the changes that led to it as JSON merge patches (RFC 7386)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from typing import Protocol

import msgspec

from distbelief.core.records import Json
from distbelief.errors import DistbeliefError

PERIOD = 1.0
"""Least seconds between two looks at a run, and so between two messages to a page."""
KEPT = 120
"""Changes that are kept for pages that reconnect; a page that has missed more gets the whole state."""
RUN = "run"
"""Part of a state that says whether the run is running."""


class RunReader(Protocol):
    """Reader of a run."""

    def view(self, at: float | None) -> Json:
        """Return the state of the run, now or at a moment (seconds of its clock)."""


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
    """Feed of one run: any number of readers share one look at it.

    Args:
        reader: the reader of the run.
    """

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._looking = asyncio.Lock()
        self._looked = -PERIOD
        self._state: Json = {}
        self._failed = False
        self._start = secrets.token_hex(4)  # a page of an earlier process must not take this one's changes for its own
        self._number = 0
        self._changes: deque[tuple[str, bytes]] = deque(maxlen=KEPT)
        """Each with the name of the state before it."""

    @property
    def running(self) -> bool:
        """Return whether the run was running at the last look."""
        return bool(self._state.get(RUN, {}).get("running", True))

    @property
    def lost(self) -> bool:
        """Return whether the run has ended, or could not be read at the last look."""
        return self._failed or not self.running

    @property
    def id(self) -> str:
        """Return the name of the state."""
        return f"{self._start}-{self._number}"

    async def look(self) -> None:
        """Look at the run, unless it was looked at within `PERIOD`."""
        async with self._looking:
            if time.monotonic() < self._looked + PERIOD:
                return
            try:
                state = await asyncio.to_thread(self._reader.view, None)
                self._failed = False
            except (DistbeliefError, OSError) as error:  # such as a folder that was deleted
                self._failed = True
                state = self._state | {"sentence": str(error)}
            self._looked = time.monotonic()
            if patch := changes(self._state, state):
                self._changes.append((self.id, msgspec.json.encode(patch)))
                self._number += 1
                self._state = state

    async def at(self, moment: float) -> bytes:
        """Return the state at a moment of the run, as JSON."""
        async with self._looking:
            return msgspec.json.encode(await asyncio.to_thread(self._reader.view, moment))

    def whole(self) -> bytes:
        """Return the state, as JSON."""
        return msgspec.json.encode(self._state)

    def since(self, id: str) -> list[bytes] | None:
        """Return the changes since a named state, as JSON; None if they are not known."""
        named = [*(before for before, _ in self._changes), self.id]
        return [patch for _, patch in [*self._changes][named.index(id) :]] if id in named else None
