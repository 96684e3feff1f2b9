"""Messages between a supervisor and its processes, the agents of other hosts, and guests."""

from __future__ import annotations

import msgspec

from distbelief import errors
from distbelief.core import records, roles
from distbelief.core.conversations import membership
from distbelief.core.events import Event, Lost
from distbelief.core.records import Json
from distbelief.errors import DistbeliefError, JobFailed


class ChannelMessage(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages on a channel."""


# between a supervisor and the processes of its job


class Listening(ChannelMessage, frozen=True, tag=True):
    """Address at which the coordinator listens, which it sends and the supervisor passes on to all other roles."""

    address: str


class Noted(ChannelMessage, frozen=True, tag=True):
    """Record of a role, with its moment on the machine's monotonic clock."""

    moment: float
    role: str
    record: records.AnyRecord


class Failed(ChannelMessage, frozen=True, tag=True):
    """Error of a role; `kind` names its class in `distbelief.errors`, and is "" for any other class."""

    kind: str
    text: str
    trace: str = ""
    """Traceback of an error that the user's code raised."""
    done: bool = False
    """True if the role's part of the job was done already."""
    host: str = ""
    """Name of the role's host, which the place fills in where there are several."""

    @property
    def told(self) -> str:
        """Text of the error for people."""
        return f"host {self.host}: {self.text}" if self.host else self.text

    @property
    def error(self) -> DistbeliefError:
        """Error of the role, as an exception."""
        error: DistbeliefError = getattr(errors, self.kind, JobFailed)(self.told)
        if self.trace:
            error.add_note(self.trace)
        return error


class Over(ChannelMessage, frozen=True, tag=True):
    """End of a role that is done; a process that ends without this message has died."""


class Interrupt(ChannelMessage, frozen=True, tag=True):
    """Request of the user to end the job with a checkpoint."""

    reason: str


class Died(ChannelMessage, frozen=True, tag=True):
    """Death of an incarnation of a role."""

    role: str
    reason: str
    incarnation: int
    left: bool = False
    """True if the role had done its part."""

    @property
    def event(self) -> Event:
        """Event for the coordinator."""
        leaves = self.left and roles.is_replica(self.role)
        return membership.Leave(for_good=True) if leaves else Lost(self.reason, self.incarnation)


class Explain(ChannelMessage, frozen=True, tag=True):
    """Request to record what the job waits for."""


class Ask(ChannelMessage, frozen=True, tag=True):
    """Request for a role's state."""


class Standing(ChannelMessage, frozen=True, tag=True):
    """State of a role: its activity, what it waits for and for how many seconds, and its counts.

    `facts` may hold "of": facts about other roles, by role.
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
    """Path of a file in the run folder; an agent that sees the file sees the run folder."""
    environment: dict[str, str]
    """Environment variables of the roles, in addition to those of the host."""


class Greeting(ChannelMessage, frozen=True, tag=True):
    """Description of an agent's host."""

    version: str
    hostname: str
    cores: int
    gpus: int
    memory: int
    """Free memory of its host, in bytes."""
    network: str
    """Name of the machine and its network. Two agents with the same name can reach each other by loopback."""
    addresses: dict[str, list[str]]
    """Addresses of the host, by network interface."""
    login: list[str]
    """Addresses of the remote shell's connection: the other end's, and this host's; empty without a remote shell."""
    port: int
    """Port at each of its addresses where other hosts try and measure the connection to it."""
    clock: float
    """Time on the host's clock, in seconds since 1970."""
    keeps: bool
    """True if it sees the run folder."""


class ReachHosts(ChannelMessage, frozen=True, tag=True):
    """Request to an agent to connect to other hosts, each at some addresses `host:port`."""

    others: dict[str, list[str]]


class HostsReached(ChannelMessage, frozen=True, tag=True):
    """Answer of an agent: for each address "", or the reason why it cannot be reached."""

    others: dict[str, list[str]]


class Look(ChannelMessage, frozen=True, tag=True):
    """Request to an agent to look for the data of a task."""

    task: str
    """"" for none."""
    data_dir: str


class Looked(ChannelMessage, frozen=True, tag=True):
    """Answer of an agent: the reason why the data are missing; "" where they are available."""

    lacks: str


class MeasureWays(ChannelMessage, frozen=True, tag=True):
    """Request to an agent to measure the network to other hosts, each at `host:port`."""

    others: dict[str, str]


class Way(msgspec.Struct, frozen=True):
    """Measured connection between two hosts."""

    latency: float
    """Time of a round trip, in seconds."""
    bandwidth: float
    """Bytes per second."""


class WaysMeasured(ChannelMessage, frozen=True, tag=True):
    """Answer of an agent: the latency and bandwidth to each host that answers."""

    ways: dict[str, Way]


class OfLife(ChannelMessage, frozen=True, tag=True):
    """Message to or from one life of a role, named by its number on this line."""

    life: int


class StartLife(OfLife, frozen=True, tag=True):
    """Request to an agent to start an incarnation of a role, under a number."""

    role: str
    incarnation: int
    spec: bytes


class EndLife(OfLife, frozen=True, tag=True):
    """Request to an agent to kill a process."""


class TellLife(OfLife, frozen=True, tag=True):
    """Message for a process, which its agent passes on."""

    word: ProcessMessage


class LifeStarted(OfLife, frozen=True, tag=True):
    """Process id of a started role."""

    pid: int


class LifeSaid(OfLife, frozen=True, tag=True):
    """Message from a process, with its age in seconds."""

    word: ProcessMessage
    age: float = 0.0


class LifeEnded(OfLife, frozen=True, tag=True):
    """End of a process; see `places.place.Ended`."""

    how: str
    killed: bool
    done: bool


class Printed(OfLife, frozen=True, tag=True):
    """Line of output of a process."""

    text: str


class StoppedLives(ChannelMessage, frozen=True, tag=True):
    """Numbers of the processes that are stopped by a signal now."""

    lives: list[int]


class AgentFailed(ChannelMessage, frozen=True, tag=True):
    """Error that an agent cannot recover from."""

    why: str


class ToldToEnd(ChannelMessage, frozen=True, tag=True):
    """Notice of a signal that asks an agent to end; the agent goes on until the job has ended."""

    why: str


class AttendMeeting(ChannelMessage, frozen=True, tag=True):
    """Introduction of a process that a launcher has started: its host, and the resources there."""

    rank: int
    local_rank: int
    network: str
    """Name of the network, as in `Greeting`: processes with the same name are on one host."""
    hostname: str
    processors: list[int]
    """Numbers of the processors that it may use."""
    cores: int
    """Number of cores that the launcher reports as allotted on its host; 0 where it reports none."""
    quota: int
    """Largest number of cores that its container may use."""
    version: str
    restarts: int
    """Number of restarts by the launcher, as counted on its host."""


class Appoint(ChannelMessage, frozen=True, tag=True):
    """Request to a process to become the agent of its host, with these processors."""

    processors: list[int]


class EndRoles(ChannelMessage, frozen=True, tag=True):
    """Request to end all processes that were started, and wait for `Dismiss`."""


class Dismiss(ChannelMessage, frozen=True, tag=True):
    """Request to exit with this status: the job is over."""

    status: int


class Beat(ChannelMessage, frozen=True, tag=True):
    """Message that shows that its sender is alive."""


HostMessage = (
    OpenJob | Greeting | ReachHosts | HostsReached | Look | Looked | MeasureWays | WaysMeasured | StartLife
    | EndLife | TellLife | LifeStarted | LifeSaid | LifeEnded | Printed | StoppedLives | AgentFailed | ToldToEnd
    | AttendMeeting | Appoint | EndRoles | Dismiss | Beat
)  # fmt: skip


# between a guest and the join server of a job


class JoinRequest(ChannelMessage, frozen=True, tag=True):
    """Request of a guest to play a role, or for the next incarnation of its own role."""

    job: str
    secret: str
    role: str = ""
    incarnation: int = -1
    script: bool = False
    """True if the guest runs a script of its own."""
    version: str = ""
    strategy: str = ""
    """Name of a strategy from outside the package that the guest imports; "" for none."""


class JoinGrant(ChannelMessage, frozen=True, tag=True):
    """Part of a guest in a job: its role and incarnation, the coordinator's address, and its settings."""

    role: str
    incarnation: int
    coordinator: str
    restarts: int
    spec: bytes


class JoinRefusal(ChannelMessage, frozen=True, tag=True):
    """Refusal of a guest; `soon` is true if asking again in a moment may succeed."""

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
    """Splits of the models; empty if they are not split."""


class Predicted(ChannelMessage, frozen=True, tag=True):
    """Report that the outputs of a portion are written."""

    dtype: str
    shape: list[int]
    """Shape of the output of one sample."""
    sums: dict[str, float]
    """Sums of the task's loss and metrics over the portion; empty if the targets are not known."""


PredictionMessage = PredictPortion | PredictionReady | Predicted | Failed
