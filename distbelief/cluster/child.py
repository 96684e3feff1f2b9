"""A process of a job, as its supervisor sees it."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from distbelief.cluster.channel import Channel
from distbelief.core import roles


class Child:
    """One life of a role, in a process of its own."""

    def __init__(self, role: str, incarnation: int, process: Any, connection: Connection) -> None:
        self.role, self.incarnation, self.process, self.channel = role, incarnation, process, Channel(connection)
        self.open = True
        self.left = False
        """It has left the job in peace: what its script does after that takes as long as it takes."""
        self.over = False
        """It has played its role to the end."""
        self.stopped_at: float | None = None
        self.said = ""
        """Its last words, where these tell only of somebody else who is gone."""
        self.why = ""
        """Why the supervisor killed it."""

    @property
    def spare(self) -> bool:
        """Whether the job can go on until another takes its place."""
        return self.role not in (roles.COORDINATOR, roles.SINGLE)
