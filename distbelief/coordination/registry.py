"""Registry of a job's roles: the incarnation and address of each, which are gone, and which will not come back.

The coordinator has one registry. Its other parts keep the standing of a role, such as whether it holds its range, and
ask the registry for its incarnation.
"""

from __future__ import annotations

from distbelief.core import roles
from distbelief.core.conversations.partitioning import Meet
from distbelief.core.effects import Effect, Send
from distbelief.core.messages import Address
from distbelief.errors import RemoteProtocolError


class Registry:
    """Incarnations of roles, numbered 0, 1, 2, ...; a role that dies is started again up to `restarts` times.

    A death may be reported several times, before or after the next incarnation; only the first report is news.

    >>> registry = Registry(restarts=1)
    >>> registry.begin("replica 0", 0)
    >>> registry.end("replica 0", 0, died=True), registry.end("replica 0", -1, died=True), registry.over
    (True, False, set())
    >>> registry.begin("replica 0", 1)
    >>> registry.end("replica 0", 0, died=True), registry.end("replica 0", 1, died=True), registry.over
    (False, True, {'replica 0'})
    """

    def __init__(self, restarts: int) -> None:
        self._restarts = restarts
        self._present: dict[str, int] = {}
        self._granted: dict[str, int] = {}
        self.gone: dict[str, int] = {}
        """Last incarnation of each role that has ended."""
        self.over: set[str] = set()
        """Roles that have left, or have died in their last incarnation."""
        self.addresses: dict[str, Address] = {}
        """Present or last address of each role that listens, with its incarnation there."""

    def begin(self, role: str, incarnation: int) -> None:
        """Note that an incarnation of a role is present; refuse one that has already ended."""
        if incarnation <= self.gone.get(role, -1):
            raise RemoteProtocolError(f"{role} joins as incarnation {incarnation}, which has ended")
        self._present[role] = incarnation

    def grant(self, role: str, incarnation: int) -> None:
        """Grant a shard's next incarnation: messages from earlier ones no longer count."""
        self._granted[role] = incarnation

    def granted(self, role: str) -> int:
        """Return the granted incarnation of a shard."""
        return self._granted.get(role, 0)

    def meet(self, role: str, place: Address, partitions: int) -> list[Effect]:
        """Note that a partition of a replica is present; once all of one incarnation are, have them meet.

        >>> registry = Registry(restarts=1)
        >>> for role, incarnation in ("replica 0.1", 0), ("replica 0.0", 1), ("replica 0.1", 1):
        ...     print([sent.to for sent in registry.meet(role, Address("", incarnation), partitions=2)])
        []
        []
        ['replica 0.0', 'replica 0.1']
        """
        # partitions live and die together: a restarted one waits for the others' next incarnations
        if place.incarnation < self.incarnation_at(role):
            return []
        self.addresses[role] = place
        siblings = roles.partitions_of(role, partitions)
        if any(self.incarnation_at(sibling) != place.incarnation for sibling in siblings):
            return []
        everywhere = Meet(tuple(self.addresses[sibling] for sibling in siblings))
        return [Send(sibling, everywhere) for sibling in siblings]

    def incarnation_at(self, role: str) -> int:
        """Return the incarnation of a role at its last address; -1 if it never had one."""
        return self.addresses[role].incarnation if role in self.addresses else -1

    def present(self, role: str) -> int:
        """Return the present or last incarnation of a role."""
        return self._present.get(role, 0)

    def last_gone(self, role: str) -> int:
        """Return the last incarnation of a role that has ended; -1 for none."""
        return self.gone.get(role, -1)

    def end(self, role: str, incarnation: int, died: bool) -> bool:
        """Note the end of an incarnation; return whether that is news, and no later incarnation is present.

        An incarnation of -1 is the present one or, if there is none, the next.
        """
        # a broken link does not name an incarnation: assume the known one
        if incarnation < 0:
            incarnation = self._present.get(role, self.gone.get(role, -1) + 1)
        if incarnation <= self.gone.get(role, -1):
            return False
        self.gone[role] = incarnation
        if not died or incarnation >= self._restarts:
            self.over.add(role)
        return incarnation >= self._present.get(role, 0)
