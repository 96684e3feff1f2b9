"""View of a job while it runs."""

from __future__ import annotations

from distbelief.core.values import CheckedStruct


class View(CheckedStruct, frozen=True):
    """View of a job while it runs."""

    quiet: bool = True
    json: bool = False
