"""Sharing: what one replica does for all where replicas share memory: it fills it, saves it and accounts for it, in a
shard's words.
"""

from __future__ import annotations

from distbelief.core.conversations.checkpointing import Describe, Description, Snapshot, SnapshotDone
from distbelief.core.conversations.initialising import Restore, Restored
from distbelief.core.conversations.table import Conversation, Says
from distbelief.core.roles import Kind

SHARING = Conversation(
    "Sharing",
    (
        Says(Restore, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,)),
        Says(Restored, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,), answers=Restore),
        Says(Snapshot, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,)),
        Says(SnapshotDone, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,), answers=Snapshot),
        Says(Describe, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,)),
        Says(Description, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,), answers=Describe),
    ),
)
