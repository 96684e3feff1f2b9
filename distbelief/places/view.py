"""How a job is shown."""

from __future__ import annotations

from distbelief.core.values import CheckedStruct


class View(CheckedStruct, frozen=True):
    """How a job is shown while it runs."""

    quiet: bool = True
    json: bool = False
