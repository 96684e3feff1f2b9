"""The groups of a job without a server: who is there, who is in the group, and how many rounds each has made."""

from __future__ import annotations

from distbelief.core import roles
from distbelief.core.conversations import grouping
from distbelief.core.conversations.grouping import NOTHING
from distbelief.core.messages import Address

AWAITED = -1
"""The rounds of one who is to halt, and has not said so."""


class Grouping:
    """The groups of one job, one after the other.

    A group is formed once all who were in the last one have halted, and is whole once all of it have reported that they
    hold what it begins with.
    """

    def __init__(self) -> None:
        self.here: dict[str, grouping.Enter] = {}
        """Those who are there, by role."""
        self.group: list[str] = []
        """The members, in their order; empty while a group is formed."""
        self.dealt: list[str] = []
        """The members of the last group that was dealt anything."""
        self.number = 0
        """Number of the group, or of the one that is being formed."""
        self.whole = False
        """True if all of the group hold what it began with."""
        self._stand: dict[str, int] = {}
        self._reported: dict[str, int] = {}
        self._begins = 0

    def enter(self, role: str, event: grouping.Enter) -> None:
        """A replica is there, or its next life is."""
        self.here[role], self._stand[role] = event, NOTHING

    def leave(self, role: str) -> bool:
        """A replica is gone; whether it was there."""
        self._stand.pop(role, None)
        return self.here.pop(role, None) is not None

    def break_up(self) -> list[str]:
        """There is no group any more; returns those who are to halt."""
        if not self.group:
            return []
        # another life of one may have come already, which is in no group
        halting = [role for role in self.group if role in self._reported and self._stand.get(role, NOTHING) != NOTHING]
        self.group, self.whole = [], False
        self.number += 1
        self._stand |= dict.fromkeys(halting, AWAITED)
        return halting

    def halted(self, role: str, event: grouping.Halted) -> None:
        """A replica has halted after so many rounds, or holds nothing."""
        if event.group == self.number and self._stand.get(role) == AWAITED:
            self._stand[role] = event.rounds

    @property
    def awaited(self) -> list[str]:
        """Those who have not halted."""
        return [role for role, rounds in self._stand.items() if rounds == AWAITED]

    @property
    def most(self) -> int:
        """The most rounds that one of those who are there has made."""
        return max(self._stand.values(), default=NOTHING)

    def form(self, begins: int, alike: bool) -> tuple[tuple[grouping.Member, ...], int]:
        """A group of all who are there, which begins after so many rounds: its members, and who of them is the source.

        With `alike`, those whose initial parameters are the source's need nothing.
        """
        most = self.most
        self.group = sorted(self.here, key=roles.index_of)
        source = next(i for i, role in enumerate(self.group) if self._stand[role] == most)
        digest = self.here[self.group[source]].digest
        members = []
        for i, role in enumerate(self.group):
            entered, stand = self.here[role], self._stand[role]
            lacks = (not alike or entered.digest != digest) if most == NOTHING else stand != most
            members.append(
                grouping.Member(
                    role,
                    Address(entered.address, entered.incarnation),
                    i != source and lacks,
                    entered.store,
                    entered.parts,
                )
            )
        self._stand = dict.fromkeys(self.group, begins)
        self._reported = dict.fromkeys(self.group, NOTHING)
        self._begins = begins
        return tuple(members), source

    def report(self, role: str, event: grouping.RoundsMade) -> int | None:
        """A member has made so many rounds; returns how many all of the group have, once it is whole."""
        if event.group != self.number or role not in self.group:
            return None
        self._reported[role] = max(self._reported[role], event.rounds)
        least = min(self._reported[role] for role in self.group)
        return least if least >= self._begins else None

    def waits_for(self) -> list[str]:
        """The members that have made the fewest rounds."""
        least = min(self._reported[role] for role in self.group)
        return [role for role in self.group if self._reported[role] == least]
