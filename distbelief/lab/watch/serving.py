"""Start of a page: its address, its token and its end."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from distbelief.errors import UsageError, limit
from distbelief.lab.watch.feed import PERIOD, Feed, RunReader
from distbelief.lab.watch.server import LOOPBACK, Page, Press
from distbelief.places.join.authority import for_clients
from distbelief.places.processes.options import host_and_port, is_loopback
from distbelief.record.folder import OWNER_ALONE, written_whole
from distbelief.transport.addresses import joined

KEY = "page.key"
"""File of a run folder with the token of its page, so that an open page outlives its server."""
CONNECTIONS = 128
"""Most connections at the same time."""
REQUEST_SECONDS = 5.0
"""Longest time from a connection to its first whole request: half-open ones must not keep others out."""
UNSEEN_SECONDS = 10.0
"""Seconds between two looks at a job for its end, while nobody has the page open."""


class PunctualProtocol(H11Protocol):
    """HTTP, by which a connection ends that asks for nothing."""

    def connection_made(self, transport: Any) -> None:
        """Begin a connection."""
        super().connection_made(transport)
        self.loop.call_later(REQUEST_SECONDS, self._end_silent)

    def _end_silent(self) -> None:
        if self.cycle is None:
            self.transport.close()


def serve(run: Path, reader: RunReader, bind: str, press: Press | None, proxy: str, stay: float | None) -> None:
    """Serve the page of a run until a signal comes, or the job has ended `stay` seconds ago.

    Args:
        run: the run folder.
        reader: its reader.
        bind: HOST or HOST:PORT.
        press: what does as the buttons say; None without buttons.
        proxy: the host of a proxy before the page, if it has one.
        stay: seconds; None to stay.

    Raises:
        UsageError: the address cannot be used.
    """
    host, port = host_and_port(bind)
    feed, token = Feed(reader), _token(run)
    config = uvicorn.Config(
        Page(feed, press, proxy).app(token, (*LOOPBACK, host) if is_loopback(host) else ()),
        log_level="error",
        access_log=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=1,
        server_header=False,
        http=PunctualProtocol,
        ws="none",
        proxy_headers=False,
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    authority = run / "page-authority.pem"
    try:
        config.load()
        config.ssl = for_clients(host, authority)
        listener = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        remedy = isinstance(error, OSError) and limit(error)
        raise UsageError(f"--bind {bind}: {error}; {remedy or 'name another address'}") from error
    with listener:
        where = joined(host, listener.getsockname()[1])
        certified = f", certified by {authority}" if config.ssl else ""
        print(f"page: http{'s' if config.ssl else ''}://{where}/?token={token}{certified}", flush=True)
        if stay is not None:  # whoever reads what the job prints shall not wait for this process
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
        asyncio.run(_until_end(uvicorn.Server(config), listener, feed, stay))


async def _until_end(server: uvicorn.Server, listener: socket.socket, feed: Feed, stay: float | None) -> None:
    serving = asyncio.create_task(server.serve([listener]))
    ended = None
    while not serving.done():
        # a page that nobody has open asks the job seldom
        await asyncio.wait([serving], timeout=UNSEEN_SECONDS if stay is None else min(UNSEEN_SECONDS, stay + PERIOD))
        if stay is not None:
            await feed.look()
            ended = None if feed.running and not feed.gone else (ended or time.monotonic())
            server.should_exit = ended is not None and time.monotonic() > ended + stay
    await serving


def _token(run: Path) -> str:
    """Return the token of a run's page: the one of an earlier page of this user, or a new one."""
    path = run / KEY
    with suppress(OSError, UnicodeDecodeError):
        about = path.lstat()
        if about.st_uid == os.getuid() and not about.st_mode & 0o077 and (token := path.read_text("ascii")):
            return token
    token = secrets.token_urlsafe(16)
    with suppress(OSError), written_whole(path, OWNER_ALONE) as file:  # else the next page has another token
        file.write(token.encode())
    return token
