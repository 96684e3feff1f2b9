"""Reader of a run for its page."""

from __future__ import annotations

from pathlib import Path

from distbelief.core.records import Json
from distbelief.places.status import lines, status


class Reading:
    """Source of a page: what `status` knows."""

    def __init__(self, run: Path) -> None:
        self._run = run

    def view(self, at: float | None) -> Json:
        """Return the state of the run now."""
        found = status(self._run)
        members = {
            one["role"]: {
                **{name: one.get(name) for name in ("state", "waits_for", "rate", "staleness", "participation", "pid")},
                "waited": one.get("waited_seconds"),
            }
            for one in found.get("members", ())
        }
        return {
            "sentence": lines(found)[0].partition(": ")[2],
            "run": {
                "title": self._run.name,
                "folder": str(self._run),
                **{name: found.get(name) for name in ("running", "seconds", "outcome", "reason")},
            },
            "numbers": {name: found.get(name) for name in ("samples", "of_samples", "rate")},
            "members": members,
            "shards": {name: {"version": one.get("version")} for name, one in members.items() if "shard" in name},
        }
