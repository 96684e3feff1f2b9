"""Messages between a supervisor and the agents of a job's hosts, and the line on which they go."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from distbelief.errors import RemoteProtocolError
from distbelief.places.channel_messages import AnyChannelMessage

WORD_LIMIT = 1 << 24
"""Longest word, in bytes."""
BEAT_SECONDS = 1.0
"""Between two signs of life on a line."""
SILENCE_SECONDS = 45.0
"""Without a sign of life, after which the other end is gone. A cable that was cut for 15 s is heard from again within
30; links between roles give up a peer no earlier."""
MARK = b"\0distbelief agent\n"
"""First bytes of an agent: whatever a login shell prints before them is none of its words."""


class AgentWord(msgspec.Struct, frozen=True, tag=True):
    """Anything that is said on a line."""


class OpenJob(AgentWord, frozen=True, tag=True):
    """To an agent: what the job is, before anything is started."""

    mark: str
    """A file in the run folder, by which an agent knows whether it sees that."""
    environment: dict[str, str]
    """Environment of the roles beside that of the host."""


class Greeting(AgentWord, frozen=True, tag=True):
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


class ReachHosts(AgentWord, frozen=True, tag=True):
    """To an agent: try to reach others, each at some addresses, as `host:port`."""

    others: dict[str, list[str]]


class HostsReached(AgentWord, frozen=True, tag=True):
    """Answer of an agent: for each other and each of its addresses, "" where it answers there, else why it does not."""

    others: dict[str, list[str]]


class Look(AgentWord, frozen=True, tag=True):
    """To an agent, before a job: look whether the data of a task are there."""

    task: str
    """"" for none."""
    data_dir: str


class Looked(AgentWord, frozen=True, tag=True):
    """Answer of an agent: why the data are not there, "" where they are."""

    lacks: str


class MeasureWays(AgentWord, frozen=True, tag=True):
    """To an agent: measure the way to others, each at an address `host:port`."""

    others: dict[str, str]


class Way(msgspec.Struct, frozen=True):
    """Between two hosts."""

    latency: float
    """Seconds of a round trip."""
    bandwidth: float
    """Bytes a second."""


class WaysMeasured(AgentWord, frozen=True, tag=True):
    """Answer of an agent: the way to each that answers."""

    ways: dict[str, Way]


class OfLife(AgentWord, frozen=True, tag=True):
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

    word: AnyChannelMessage


class LifeStarted(OfLife, frozen=True, tag=True):
    """Word of an agent: the process of a life."""

    pid: int


class LifeSaid(OfLife, frozen=True, tag=True):
    """Word of an agent: a life has said a word, of which a moment is so many seconds ago."""

    word: AnyChannelMessage
    age: float = 0.0


class LifeEnded(OfLife, frozen=True, tag=True):
    """Word of an agent: a life is there no more; as `places.place.Ended`."""

    how: str
    killed: bool
    done: bool


class Printed(OfLife, frozen=True, tag=True):
    """Word of an agent: a line that a life has printed."""

    text: str


class StoppedLives(AgentWord, frozen=True, tag=True):
    """Word of an agent: the lives that are stopped by a signal by now."""

    lives: list[int]


class AgentFailed(AgentWord, frozen=True, tag=True):
    """Word of an agent: it cannot go on."""

    why: str


class ToldToEnd(AgentWord, frozen=True, tag=True):
    """Word of an agent: a signal has told it to end; it goes on until the job has ended in peace."""

    why: str


class AttendMeeting(AgentWord, frozen=True, tag=True):
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


class Appoint(AgentWord, frozen=True, tag=True):
    """To one of them: be the agent of its host, with these processors."""

    processors: list[int]


class EndRoles(AgentWord, frozen=True, tag=True):
    """To one of them: end what you have started, and wait to be dismissed."""


class Dismiss(AgentWord, frozen=True, tag=True):
    """To one of them: the job is over; end with this status."""

    status: int


class Beat(AgentWord, frozen=True, tag=True):
    """A sign of life."""


AnyAgentWord = (
    OpenJob | Greeting | ReachHosts | HostsReached | Look | Looked | MeasureWays | WaysMeasured | StartLife
    | EndLife | TellLife | LifeStarted | LifeSaid | LifeEnded | Printed | StoppedLives | AgentFailed | ToldToEnd
    | AttendMeeting | Appoint | EndRoles | Dismiss | Beat
)  # fmt: skip

_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], AgentWord] = msgspec.msgpack.Decoder(AnyAgentWord).decode


class Line:
    """One end of a line; in both directions a word is its length in 4 bytes, and itself."""

    def __init__(self, reads: Connection, writes: Connection) -> None:
        self.reads, self._writes = reads, writes

    def say(self, word: AgentWord) -> None:
        """Send a word; to an end that is gone, nothing."""
        try:
            self._writes.send_bytes(_encode(word))
        except OSError:
            return

    def hear_all(self, take: Callable[[AgentWord], None]) -> bool:
        """Hand over every word that is here; False when the other end is gone.

        Raises:
            RemoteProtocolError: what is here is no word.
        """
        try:
            while self.reads.poll():
                take(_decode(self.reads.recv_bytes(WORD_LIMIT)))
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"the other end says what is no word: {error}") from error
        except (EOFError, OSError):
            return False
        return True

    def close(self) -> None:
        """Say no more; the other end sees that."""
        self.reads.close()
        self._writes.close()
