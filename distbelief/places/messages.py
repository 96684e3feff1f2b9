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
    """Anything that is said on a channel."""


# between a supervisor and the processes of its job


class Listening(ChannelMessage, frozen=True, tag=True):
    """The coordinator listens at an address: it says so, and all others are told."""

    address: str


class Noted(ChannelMessage, frozen=True, tag=True):
    """A role recorded something at a moment of the machine's monotonic clock."""

    moment: float
    role: str
    record: records.AnyRecord


class Failed(ChannelMessage, frozen=True, tag=True):
    """A role failed with an error of `distbelief.errors`, or another (`kind` "")."""

    kind: str
    text: str
    trace: str = ""
    """The traceback of what the user's code raised."""
    done: bool = False
    """True if its part of the job was done before."""
    host: str = ""
    """Host where it was, of several; its place says it."""

    @property
    def told(self) -> str:
        """Return what people are told."""
        return f"host {self.host}: {self.text}" if self.host else self.text

    @property
    def error(self) -> DistbeliefError:
        """Return the error that the role says it has failed with."""
        error: DistbeliefError = getattr(errors, self.kind, JobFailed)(self.told)
        if self.trace:
            error.add_note(self.trace)
        return error


class Over(ChannelMessage, frozen=True, tag=True):
    """The process has played its role to the end: without this word it died, whatever its status."""


class Interrupt(ChannelMessage, frozen=True, tag=True):
    """End the job in peace: the person who runs it wants it to."""

    reason: str


class Died(ChannelMessage, frozen=True, tag=True):
    """The process of a role has ended: this life of it."""

    role: str
    reason: str
    incarnation: int
    left: bool = False
    """True if it had played its role to the end."""

    @property
    def event(self) -> Event:
        """Return what the coordinator is told."""
        leaves = self.left and roles.is_replica(self.role)
        return membership.Leave(for_good=True) if leaves else Lost(self.reason, self.incarnation)


class Explain(ChannelMessage, frozen=True, tag=True):
    """Note what the job waits for."""


class Ask(ChannelMessage, frozen=True, tag=True):
    """Say how you stand."""


class Standing(ChannelMessage, frozen=True, tag=True):
    """State of a role: what it does, what it waits for and for how many seconds by now, and its counts.

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
    """To an agent: what the job is, before anything is started."""

    mark: str
    """A file in the run folder, by which an agent knows whether it sees that."""
    environment: dict[str, str]
    """Environment of the roles beside that of the host."""


class Greeting(ChannelMessage, frozen=True, tag=True):
    """Description of an agent's host."""

    version: str
    hostname: str
    cores: int
    gpus: int
    memory: int
    """Bytes of memory that are free on its host."""
    network: str
    """Name of the machine and its network: two agents with the same can reach each other by loopback."""
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


class ReachHosts(ChannelMessage, frozen=True, tag=True):
    """To an agent: try to reach others, each at some addresses, as `host:port`."""

    others: dict[str, list[str]]


class HostsReached(ChannelMessage, frozen=True, tag=True):
    """Answer of an agent: for each other and each of its addresses, "" where it answers there, else why it does not."""

    others: dict[str, list[str]]


class Look(ChannelMessage, frozen=True, tag=True):
    """To an agent, before a job: look whether the data of a task are there."""

    task: str
    """"" for none."""
    data_dir: str


class Looked(ChannelMessage, frozen=True, tag=True):
    """Answer of an agent: why the data are not there, "" where they are."""

    lacks: str


class MeasureWays(ChannelMessage, frozen=True, tag=True):
    """To an agent: measure the way to others, each at an address `host:port`."""

    others: dict[str, str]


class Way(msgspec.Struct, frozen=True):
    """Between two hosts."""

    latency: float
    """Seconds of a round trip."""
    bandwidth: float
    """Bytes a second."""


class WaysMeasured(ChannelMessage, frozen=True, tag=True):
    """Answer of an agent: the way to each that answers."""

    ways: dict[str, Way]


class OfLife(ChannelMessage, frozen=True, tag=True):
    """A word to or of one life of a role, by the number that it goes by on this line."""

    life: int


class StartLife(OfLife, frozen=True, tag=True):
    """To an agent: begin a life of a role; from now on it goes by its number."""

    role: str
    incarnation: int
    spec: bytes


class EndLife(OfLife, frozen=True, tag=True):
    """To an agent: end a life at once."""


class TellLife(OfLife, frozen=True, tag=True):
    """To an agent: say a word to a life."""

    word: ProcessMessage


class LifeStarted(OfLife, frozen=True, tag=True):
    """Word of an agent: the process of a life."""

    pid: int


class LifeSaid(OfLife, frozen=True, tag=True):
    """Word of an agent: a life has said a word, of which a moment is so many seconds ago."""

    word: ProcessMessage
    age: float = 0.0


class LifeEnded(OfLife, frozen=True, tag=True):
    """Word of an agent: a life is there no more; as `places.place.Ended`."""

    how: str
    killed: bool
    done: bool


class Printed(OfLife, frozen=True, tag=True):
    """Word of an agent: a line that a life has printed."""

    text: str


class StoppedLives(ChannelMessage, frozen=True, tag=True):
    """Word of an agent: the lives that are stopped by a signal by now."""

    lives: list[int]


class AgentFailed(ChannelMessage, frozen=True, tag=True):
    """Word of an agent: it cannot go on."""

    why: str


class ToldToEnd(ChannelMessage, frozen=True, tag=True):
    """Word of an agent: a signal has told it to end; it goes on until the job has ended in peace."""

    why: str


class AttendMeeting(ChannelMessage, frozen=True, tag=True):
    """Introduction of one of a launcher's processes: where it is, and what it offers."""

    rank: int
    local_rank: int
    network: str
    """Network as that of `Greeting`: those with the same are on one host."""
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


class Appoint(ChannelMessage, frozen=True, tag=True):
    """To one of them: be the agent of its host, with these processors."""

    processors: list[int]


class EndRoles(ChannelMessage, frozen=True, tag=True):
    """To one of them: end what you have started, and wait to be dismissed."""


class Dismiss(ChannelMessage, frozen=True, tag=True):
    """To one of them: the job is over; end with this status."""

    status: int


class Beat(ChannelMessage, frozen=True, tag=True):
    """A sign of life."""


HostMessage = (
    OpenJob | Greeting | ReachHosts | HostsReached | Look | Looked | MeasureWays | WaysMeasured | StartLife
    | EndLife | TellLife | LifeStarted | LifeSaid | LifeEnded | Printed | StoppedLives | AgentFailed | ToldToEnd
    | AttendMeeting | Appoint | EndRoles | Dismiss | Beat
)  # fmt: skip


# between a guest and the join server of a job


class JoinRequest(ChannelMessage, frozen=True, tag=True):
    """A guest asks for a part, or for the next life of one that he has."""

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
    """The part of a guest: role, life, the coordinator's address, and the rest that a process must know, encoded."""

    role: str
    incarnation: int
    coordinator: str
    restarts: int
    spec: bytes


class JoinRefusal(ChannelMessage, frozen=True, tag=True):
    """There is no part for him; `soon` where there may be one in a moment."""

    reason: str
    soon: bool = False


JoinAnswer = JoinGrant | JoinRefusal


# between a prediction and its processes


class PredictPortion(ChannelMessage, frozen=True, tag=True):
    """To the processes of a replica: compute the samples from `start` on, up to `stop`."""

    start: int
    stop: int


class PredictionReady(ChannelMessage, frozen=True, tag=True):
    """The models and the data are loaded; the partition that has the outputs says so."""

    samples: int
    splits: list[str]
    """The split of each model, where they are split."""


class Predicted(ChannelMessage, frozen=True, tag=True):
    """The outputs of the samples that this replica was dealt first are written."""

    dtype: str
    shape: list[int]
    """Shape of the output of one sample."""
    sums: dict[str, float]
    """Sums of the task's loss and metrics over them; none where the targets are not known."""


PredictionMessage = PredictPortion | PredictionReady | Predicted | Failed
