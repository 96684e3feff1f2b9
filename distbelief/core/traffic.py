"""What roles send, receive and read in memory that they share, in bytes: the one ledger of a job's traffic.

Whoever carries bytes counts them where they leave and where they arrive, as the kernel counts what is in its packets:
frames with their payloads, and of TLS its handshakes and the ends of its records. What one reads where another has
written it, in memory that both share, is sent by nobody, and is counted by who reads it.
"""

from __future__ import annotations

from distbelief.core.records import BytesCounted

KINDS = PUSH, FETCH, ALL_REDUCE, PARTITIONS, CONTROL = ("push", "fetch", "all_reduce", "partitions", "control")
"""What bytes are for: gradients to the shards, parameters that a fetch asked for, sums of gradients, what crosses
between the partitions of a replica, and all else.
"""
WAYS = ("sent", "received", "shared_memory")


class Traffic:
    """The bytes of one carrier of a role, by kind; one thread writes them.

    >>> traffic = Traffic()
    >>> traffic.sent[PUSH] += 100
    >>> traffic.tell("replica 0"), traffic.tell("replica 0")
    (BytesCounted(role='replica 0', sent={'push': 100}, received={}, shared_memory={}), None)
    """

    __slots__ = (*WAYS, "_told")

    def __init__(self) -> None:
        self.sent = dict.fromkeys(KINDS, 0)
        self.received = dict.fromkeys(KINDS, 0)
        self.shared_memory = dict.fromkeys(KINDS, 0)
        """What was read there."""
        self._told = {way: dict.fromkeys(KINDS, 0) for way in WAYS}

    def tell(self, role: str) -> BytesCounted | None:
        """What was counted since this was last asked; None where nothing was."""
        new = {way: self._new(getattr(self, way), self._told[way]) for way in WAYS}
        return BytesCounted(role, **new) if any(new.values()) else None

    @staticmethod
    def _new(counted: dict[str, int], told: dict[str, int]) -> dict[str, int]:
        new = {kind: more for kind in KINDS if (more := counted[kind] - told[kind])}
        for kind, more in new.items():
            told[kind] += more
        return new
