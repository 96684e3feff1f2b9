"""Join server of a job, and its messages: it gives each holder of the job's ticket a role."""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from distbelief.core import roles
from distbelief.core.roles import MOST
from distbelief.core.settings import read_strategy
from distbelief.errors import JobFailed, UsageError
from distbelief.places.join import ticket
from distbelief.places.join.ticket import GUEST, Ticket, TicketServer, reach
from distbelief.places.messages import JoinAnswer, JoinGrant, JoinRefusal, JoinRequest
from distbelief.record.folder import OWNER_ALONE, written_whole
from distbelief.strategies import STRATEGIES
from distbelief.transport.addresses import joined
from distbelief.transport.secure import MUTE

if TYPE_CHECKING:
    from distbelief.places.join.authority import Authority
    from distbelief.places.processes.spec import Spec

TICKET = "ticket.json"
WAIT_SECONDS, ASK_PAUSE = 60.0, 0.5
"""Limit in seconds of the wait for a job that has not begun, and the pause between two requests."""
WORD_LIMIT, ANSWER_LIMIT = 1 << 12, 16 << 20
"""Longest request of a guest, and longest answer, in bytes."""

_answers = msgspec.msgpack.Decoder(JoinAnswer)
_requests = msgspec.msgpack.Decoder(JoinRequest)


class JoinServer:
    """Server that gives each holder of the job's ticket a part, until it is closed.

    Args:
        where: the host and port to listen at; port 0 for any free one.
        advertise: the host that the ticket names.
        authority: the certificate authority of the roles, if links are TLS.
        admit: answers a guest that has proved that it holds the ticket.
        run: the run folder, to which the ticket is written.
    """

    def __init__(
        self,
        job: str,
        where: tuple[str, int],
        advertise: str,
        authority: Authority | None,
        admit: Callable[[JoinRequest], JoinAnswer],
        run: Path,
    ) -> None:
        self._admit = admit
        try:
            listener = socket.create_server(
                where, family=socket.AF_INET6 if ":" in where[0] else socket.AF_INET, backlog=ticket.CROWD
            )
        except OSError as error:
            raise UsageError(
                f"--listen {where[0]}:{where[1]}: {error}; choose another port, or another host of this machine"
            ) from error
        identity, guest = (authority.issue(roles.SUPERVISOR), authority.issue(GUEST)) if authority else (None, None)
        at = joined(advertise, listener.getsockname()[1])
        self.ticket, self.path = Ticket(job, [at], secrets.token_hex(16), guest), run / TICKET
        with written_whole(self.path, OWNER_ALONE) as file:
            file.write(self.ticket.text)
        self._server = TicketServer(listener, identity, self._answer, crowd=ticket.CROWD)

    def close(self) -> None:
        """Stop serving, and remove the ticket."""
        self.path.unlink(missing_ok=True)
        self._server.close()

    def _answer(self, connection: socket.socket) -> None:
        request = _requests.decode(ticket.hear(connection, WORD_LIMIT))
        same_secret = hmac.compare_digest(request.secret.encode(), self.ticket.secret.encode())
        known = same_secret and request.job == self.ticket.job
        same, theirs = request.version == ticket.VERSION, request.version or "older"
        wrong = "" if same else f"it runs distbelief {ticket.VERSION}, this is {theirs}: install the same everywhere"
        refusal = wrong if known else "the ticket is of another job"
        ticket.say(connection, JoinRefusal(refusal) if refusal else self._admit(request))


def wrong_strategy(strategy: str, named: str) -> str:
    """Return why a guest with strategy `named` ("" for none) may not join a job with `strategy`; "" if it may."""
    if strategy == named or (strategy in STRATEGIES and not named):
        return ""
    if strategy in STRATEGIES:
        return f"it trains with strategy {strategy}, not {named}: leave --strategy off"
    return (
        f"it trains with strategy {strategy}, which was written outside the package and is imported only where you "
        f"name it: join with --strategy {strategy}"
    )


class Guests:
    """Lives of the replicas of guests; the replicas' numbers follow those of the job itself.

    >>> guests = Guests(replicas=2, restarts=1)
    >>> guests.give(JoinRequest("", "")), guests.give(JoinRequest("", "", "replica 2", 0)), guests.give(JoinRequest("",
    ...     "", "replica 2", 1))
    (('replica 2', 0), ('replica 2', 1), JoinRefusal(reason='replica 2 has no life left', soon=False))
    """

    def __init__(self, replicas: int, restarts: int, most: int = MOST) -> None:
        self._next, self._restarts, self._most = replicas, restarts, min(MOST, replicas + most)
        self._lives: dict[str, int] = {}
        self._lock = threading.Lock()

    def give(self, request: JoinRequest) -> tuple[str, int] | JoinRefusal:
        """Return a free role, or the next incarnation of the guest's own."""
        with self._lock:
            if not request.role and self._next >= self._most:
                return JoinRefusal(f"it has had {self._most} replicas")
            if not request.role:
                role, self._next = roles.replica(self._next), self._next + 1
                self._lives[role] = 0
                return role, 0
            if self._lives.get(request.role) != request.incarnation:
                return JoinRefusal(f"{request.role} is not this guest's")
            if request.incarnation >= self._restarts:
                return JoinRefusal(f"{request.role} has no life left")
            self._lives[request.role] += 1
            return request.role, self._lives[request.role]


def take_part(holder: Ticket, request: JoinRequest, pause: Callable[[], None]) -> JoinGrant:
    """Request a part until there is one, with a pause between two requests.

    Raises:
        JobFailed: there is none, or the join server does not answer.
    """
    give_up = time.monotonic() + WAIT_SECONDS
    while isinstance(answer := ask(holder, request), JoinRefusal):
        if not answer.soon or time.monotonic() > give_up:
            raise JobFailed(f"there is no part in this job: {answer.reason}")
        pause()
    return answer


def spec_here(part: JoinGrant, strategy: str, host: str, **here: Any) -> Spec:
    """Return the spec of a part's process: the job's part of it, with this machine's.

    Args:
        part: the part in the job.
        strategy: the strategy from outside the package that this process names; "" for none.
        host: the address where this process listens, if it has to.
        here: the other fields of the spec.

    Raises:
        UsageError: the job has another strategy.
    """
    from distbelief.places.processes.spec import Opening, Spec

    if wrong := wrong_strategy(msgspec.msgpack.decode(part.spec, type=Opening).strategy, strategy):
        raise UsageError(wrong)
    theirs = msgspec.msgpack.decode(part.spec, type=Spec, dec_hook=read_strategy)
    return msgspec.structs.replace(theirs, bind=host, advertise=host, **here)


def ask(holder: Ticket, word: JoinRequest) -> JoinAnswer:
    """Send a request to the join server that a ticket names, and return its answer.

    Raises:
        JobFailed: there is no answer, or not one of a join server.
    """
    try:
        with reach(holder) as connection:
            ticket.say(connection, msgspec.structs.replace(word, version=ticket.VERSION))
            try:
                answer: JoinAnswer = _answers.decode(ticket.hear(connection, ANSWER_LIMIT))
            except TimeoutError:
                raise ConnectionError(f"{holder.where[0]} ({MUTE})") from None
            return answer
    except (OSError, msgspec.MsgspecError) as error:
        raise JobFailed(
            f"the job does not answer: {error}; is it still running, and is that its address from here?"
        ) from error
