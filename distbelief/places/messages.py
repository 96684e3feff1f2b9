"""Messages of whoever starts and watches processes: to these, to the agents of other hosts, and to guests."""

from __future__ import annotations

import msgspec

from distbelief import errors
from distbelief.core import records, roles
from distbelief.core.conversations import membership
from distbelief.core.events import Event, Lost
from distbelief.core.records import Json
from distbelief.errors import DistbeliefError, JobFailed


class ChannelMessage(msgspec.Struct, frozen=True, tag=True):
    """Any message on a channel."""


# between a supervisor and the processes of its job


class Listening(ChannelMessage, frozen=True, tag=True):
    """Address at which the coordinator listens; sent by it, and passed on to all others."""

    address: str


class Noted(ChannelMessage, frozen=True, tag=True):
    """Record of a role, with its moment on the machine's monotonic clock."""

    moment: float
    role: str
    record: records.AnyRecord


class Failed(ChannelMessage, frozen=True, tag=True):
    """Error of a role, or of an agent: one of `distbelief.errors` by its `kind`, or another ("")."""

    kind: str
    text: str
    trace: str = ""
    """The traceback of what the user's code raised."""
    done: bool = False
    """True if its part of the job was done before."""
    host: str = ""
    """Host of the role, which a place of several hosts adds; else ""."""

    @property
    def told(self) -> str:
        """Return the text for the user, with the host if there are several."""
        return f"host {self.host}: {self.text}" if self.host else self.text

    @property
    def error(self) -> DistbeliefError:
        """Return the error with which the role has failed."""
        error: DistbeliefError = getattr(errors, self.kind, JobFailed)(self.told)
        if self.trace:
            error.add_note(self.trace)
        return error


class Over(ChannelMessage, frozen=True, tag=True):
    """End of a role that is done; a process that ends without it has died."""


class Interrupt(ChannelMessage, frozen=True, tag=True):
    """Request of a user to end the job with a checkpoint; an agent passes on what a signal asks of it."""

    reason: str

    def event_for(self, role: str) -> Event:
        """Return the event that asks a role to end."""
        return membership.Finish(self.reason) if roles.is_replica(role) else membership.Stop(self.reason)


class Died(ChannelMessage, frozen=True, tag=True):
    """Death of an incarnation of a role."""

    role: str
    reason: str
    incarnation: int
    left: bool = False
    """True if it had played its role to the end."""

    @property
    def event(self) -> Event:
        """Return the event that reports the death to the coordinator."""
        leaves = self.left and roles.is_replica(self.role)
        return membership.Leave(for_good=True) if leaves else Lost(self.reason, self.incarnation)


class Explain(ChannelMessage, frozen=True, tag=True):
    """Request to record what the job waits for."""


class Ask(ChannelMessage, frozen=True, tag=True):
    """Request for the state of a role."""


class Standing(ChannelMessage, frozen=True, tag=True):
    """State of a role: its activity, what it waits for and since how many seconds, and its counts.

    `facts` may hold "of": what this role knows of others, by role.
    """

    role: str
    state: str
    waits_for: str
    waited: float | None
    facts: Json


ProcessMessage = Listening | Noted | Failed | Over | Interrupt | Died | Explain | Ask | Standing


# between a supervisor and the agents of a job's hosts


class OpenJob(ChannelMessage, frozen=True, tag=True):
    """Description of the job to an agent, before anything is started."""

    mark: str
    """A file in the run folder, by which an agent knows whether it sees that."""
    environment: dict[str, str]
    """Environment of the roles beside that of the host."""
    processors: list[int]
    """Processors that the roles may use, by number; none for all that the agent may."""
    task: str = ""
    """Task whose data the agent looks for; "" for none."""
    data_dir: str = ""


class Greeting(ChannelMessage, frozen=True, tag=True):
    """Description of an agent's host."""

    cores: int
    gpus: int
    memory: int
    """Bytes of memory that are free on its host."""
    addresses: dict[str, list[str]]
    """Addresses by interface."""
    login: list[str]
    """Addresses by which a remote shell has come here: the other end's, and this host's; none where it was another."""
    port: int
    """Port, at each of its addresses, for others to try and measure the way to it."""
    clock: float
    """Seconds since 1970."""
    keeps: bool
    """True if it sees the run folder."""
    lacks: str = ""
    """Why the data of the task are missing; "" where they are there, or no task is named."""


class ReachHosts(ChannelMessage, frozen=True, tag=True):
    """Request to an agent to reach other hosts, each at some addresses `host:port`."""

    others: dict[str, list[str]]


class HostsReached(ChannelMessage, frozen=True, tag=True):
    """Answer of an agent: for each address "", or why it cannot be reached."""

    others: dict[str, list[str]]


class MeasureWays(ChannelMessage, frozen=True, tag=True):
    """Request to an agent to measure the network to other hosts, each at `host:port`."""

    others: dict[str, str]


class Way(msgspec.Struct, frozen=True):
    """Between two hosts."""

    latency: float
    """Seconds of a round trip."""
    bandwidth: float
    """Bytes a second."""


class WaysMeasured(ChannelMessage, frozen=True, tag=True):
    """Answer of an agent: latency and bandwidth to each host that answers."""

    ways: dict[str, Way]


class OfLife(ChannelMessage, frozen=True, tag=True):
    """Message to or from one life of a role, which has a number on this line."""

    life: int


class StartLife(OfLife, frozen=True, tag=True):
    """Request to an agent to start an incarnation of a role, under a number."""

    role: str
    incarnation: int
    spec: bytes


class EndLife(OfLife, frozen=True, tag=True):
    """Request to an agent to kill a process."""


class LifeStarted(OfLife, frozen=True, tag=True):
    """Process id of a started role."""

    pid: int


class LifeMessage(OfLife, frozen=True, tag=True):
    """Message of a process, or for one, by its agent; one of a process has an age in seconds."""

    word: ProcessMessage
    age: float = 0.0


class LifeEnded(OfLife, frozen=True, tag=True):
    """End of a process; see `places.place.Ended`."""

    how: str
    killed: bool
    done: bool


class Printed(OfLife, frozen=True, tag=True):
    """Line that a process has printed."""

    text: str


class StoppedLives(ChannelMessage, frozen=True, tag=True):
    """Processes that are stopped by a signal now; an agent's sign of life."""

    lives: list[int]


class AttendMeeting(ChannelMessage, frozen=True, tag=True):
    """Introduction of a process that has connected by its ticket: its host, and what the host offers."""

    rank: int
    local_rank: int
    network: str
    """Name of its machine and network: processes with the same are on one host, and reach each other by loopback."""
    hostname: str
    processors: list[int]
    """Those that it may use, by number."""
    cores: int
    """Cores that the launcher says are allotted on its host; 0 where it says nothing of that."""
    quota: int
    """Cores that its container leaves at most."""
    version: str
    restarts: int
    """Restarts by the launcher, as it counts on its host."""


class EndRoles(ChannelMessage, frozen=True, tag=True):
    """Request to end what was started, and wait for `Dismiss`."""


class Dismiss(ChannelMessage, frozen=True, tag=True):
    """Request to end with this status: the job is over."""

    status: int


class Beat(ChannelMessage, frozen=True, tag=True):
    """Sign of life of a supervisor."""


HostMessage = (
    AttendMeeting | OpenJob | Greeting | ReachHosts | HostsReached | MeasureWays | WaysMeasured | StartLife | EndLife
    | LifeStarted | LifeMessage | LifeEnded | Printed | StoppedLives | Failed | Interrupt | EndRoles | Dismiss | Beat
)  # fmt: skip


# between a guest and the join server of a job


class JoinRequest(ChannelMessage, frozen=True, tag=True):
    """Request of a guest for a part, or for the next incarnation of its own."""

    job: str
    secret: str
    role: str = ""
    incarnation: int = -1
    script: bool = False
    """True if he has a script of his own to run."""
    version: str = ""
    strategy: str = ""
    """The strategy from outside the package that he names; "" for none."""


class JoinGrant(ChannelMessage, frozen=True, tag=True):
    """Part of a guest: its role and incarnation, the coordinator's address, and its settings."""

    role: str
    incarnation: int
    coordinator: str
    restarts: int
    spec: bytes


class JoinRefusal(ChannelMessage, frozen=True, tag=True):
    """Refusal of a guest; `soon` is true where a part may become free in a moment."""

    reason: str
    soon: bool = False


JoinAnswer = JoinGrant | JoinRefusal


# between a prediction and its processes


class PredictPortion(ChannelMessage, frozen=True, tag=True):
    """Request to a replica to predict the samples from `start` up to `stop`."""

    start: int
    stop: int


class PredictionReady(ChannelMessage, frozen=True, tag=True):
    """Report that models and data are loaded."""

    samples: int
    splits: list[str]
    """The split of each model, where they are split."""


class Predicted(ChannelMessage, frozen=True, tag=True):
    """Report that the outputs of a portion are written."""

    dtype: str
    shape: list[int]
    """Shape of the output of one sample."""
    sums: dict[str, float]
    """Sums of the task's loss and metrics over them; none where the targets are not known."""


PredictionMessage = PredictPortion | PredictionReady | Predicted | Failed
