"""Phases of a job: the acts that each allows its coordinator, and the events that move it on."""

from __future__ import annotations

from collections.abc import Mapping

from distbelief.core.conversations.dealing import Progress, StreamEnded
from distbelief.core.conversations.evaluating import Evaluated
from distbelief.core.conversations.grouping import Halted
from distbelief.core.conversations.initialising import Ready, Restored
from distbelief.core.conversations.membership import Here, Join, Leave, Stop
from distbelief.core.conversations.operations import Done, Operated
from distbelief.core.conversations.table import States, TextEnum, Transition
from distbelief.core.events import Lost, Saved


class Phase(TextEnum):
    """Phase of a job."""

    GATHERING = "gathering"
    RESTORING = "restoring"
    INITIALISING = "initialising"
    TRAINING = "training"
    LEAVING = "leaving"
    CLOSING = "closing"


_ENDS = (Ready, Restored, Progress, StreamEnded, Done, Operated, Evaluated, Saved, Stop, Leave, Lost)
"""Events that may end a job, or be its last."""

PHASES = States(
    "a job",
    {
        Phase.GATHERING: "waits for those who hold the parameters, and for the first replica, which tells the layout",
        Phase.RESTORING: "waits for the shards to know their ranges, and to load a checkpoint if there is one",
        Phase.INITIALISING: "waits for one replica to send the initial parameters, or for all to hold them",
        Phase.TRAINING: "deals portions until all are done, a target is reached or somebody stops the job",
        Phase.LEAVING: "waits for the replicas to push what they have accrued, and to leave",
        Phase.CLOSING: "waits for the last evaluation, the last checkpoint and the shards' accounts",
    },
    (
        Transition(Phase.GATHERING, Phase.RESTORING, (Here, Join)),
        Transition(Phase.GATHERING, Phase.INITIALISING, (Join,)),  # where replicas hold the parameters
        Transition(Phase.RESTORING, Phase.INITIALISING, (Restored,)),
        Transition(Phase.RESTORING, Phase.TRAINING, (Restored,)),
        Transition(Phase.INITIALISING, Phase.TRAINING, (Ready, Restored)),
        Transition(Phase.TRAINING, Phase.LEAVING, (*_ENDS, Join)),  # Join: that replica may have nothing left to do
        Transition(Phase.LEAVING, Phase.CLOSING, _ENDS),
        Transition(Phase.LEAVING, Phase.TRAINING, (Lost, Halted)),  # all go back to a checkpoint
        Transition(Phase.CLOSING, Phase.TRAINING, (Lost, Halted)),  # the same
    ),
)


class May(TextEnum):
    """Act of a coordinator that only some phases allow."""

    GATHER = "tell all shards their ranges, once they are there together"
    LOAD = "have the shards load a checkpoint, or learn that there is none"
    INITIALISE = "have a replica send the shards their first parameters"
    DEAL = "deal minibatches, begin checkpoints, and let the job end"
    REPLACE = "have a shard that comes again go on for the members, and a standby follow its shard"
    WELCOME = "welcome those who wait for it"
    DISMISS = "have those who come and those who are welcomed finish"
    AWAIT = "wait for the members to leave, and close then; or train again, where all go back to a checkpoint"
    CLOSE = "take the last steps: measure, save, account, stop"


ALLOWED: Mapping[Phase, frozenset[May]] = {
    Phase.GATHERING: frozenset({May.GATHER}),
    Phase.RESTORING: frozenset({May.LOAD}),
    Phase.INITIALISING: frozenset({May.INITIALISE}),
    Phase.TRAINING: frozenset({May.DEAL, May.REPLACE, May.WELCOME}),
    Phase.LEAVING: frozenset({May.REPLACE, May.WELCOME, May.DISMISS, May.AWAIT}),
    Phase.CLOSING: frozenset({May.WELCOME, May.DISMISS, May.CLOSE}),
}
"""Acts that each phase allows."""
