"""Paths of updates: made by the shards' processes (served), or by replicas in memory shared with them (direct)."""

from __future__ import annotations

from distbelief.core.settings import Settings
from distbelief.errors import UsageError, unknown
from distbelief.strategies.base import Strategy

AUTO, SERVED, DIRECT = "auto", "served", "direct"
PATHS = (AUTO, DIRECT, SERVED)


def path_of(asked: str, strategy: Strategy, settings: Settings, carrier: str, lacking: str = "") -> str:
    """The path of a job.

    Args:
        asked: one of `PATHS`; auto is the direct one where that can be.
        strategy: of the job.
        settings: of the job.
        carrier: how bytes travel between its replicas and shards: shared or tcp.
        lacking: what the place lacks for the direct path; "" for nothing.

    Raises:
        UsageError: there is no such path, or none for this job.
    """
    if asked not in PATHS:
        raise unknown("path", asked, PATHS)
    why = strategy.served_because(settings, carrier) or lacking
    if asked == DIRECT and why:
        raise UsageError(f"--path direct: {why}; leave it off")
    return SERVED if why or asked == SERVED else DIRECT
