"""Server of a page: what it answers, and to whom."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from hashlib import blake2b
from importlib.resources import files
from secrets import compare_digest, token_urlsafe
from urllib.parse import SplitResult, urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distbelief.errors import DistbeliefError
from distbelief.lab.watch.feed import PERIOD, Feed, FeedPart

CLIENTS = 16
"""Most streams at the same time; further pages ask again and again instead."""
QUIET_SECONDS = 15.0
"""Longest silence on a stream, since proxies close silent ones."""
STREAM_SECONDS, GRACE_SECONDS = 600.0, 5.0
"""Longest life of a stream, and time to read its end; the page then opens another, which goes on there."""
TOKENS = 32
"""Most tokens for buttons that are valid at the same time."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src "
    "'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Headers of every answer."""
Press = Callable[[str, str], str]
"""Function that does what a button says, given its name and a role, and returns a sentence about it."""


class Guard:
    """Gate before a page: it refuses who lacks the token, and adds headers to every answer.

    Args:
        app: what is guarded.
        token: the token, which the first address has, and later the cookie.
        hosts: names by which the page may be addressed; empty for all. A site that has its own name lead here, to read
            the page through a visitor's browser, is refused.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: tuple[str, ...]) -> None:
        self._app, self._token, self._hosts = app, token, hosts
        # browsers send cookies to every port of a host, so pages must not share a name
        self._cookie = f"distbelief-{blake2b(token.encode(), digest_size=4).hexdigest()}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":  # such as the start of the server
            return await self._app(scope, receive, send)
        request = HTTPConnection(scope)
        token = request.query_params.get("token", "")
        known = compare_digest((token or request.cookies.get(self._cookie, "")).encode(), self._token.encode())

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if token and known:
                    secure = "; Secure" if scope["scheme"] == "https" else ""
                    # without a path it is for the folder of the address, as the browser knows that behind a proxy
                    headers.append("Set-Cookie", f"{self._cookie}={token}; HttpOnly; SameSite=Strict{secure}")
            await send(message)

        why = "" if known else "the token of this page is missing or wrong: open the address that distbelief shows"
        host = _split(f"//{request.headers.get('host', '')}").hostname
        if self._hosts and host not in self._hosts:
            why = f"{host} is no name of this page; behind a proxy, start it with --proxy"
        app = PlainTextResponse(f"distbelief: {why}\n", 403, {"Connection": "close"}) if why else self._app
        return await app(scope, receive, send_guarded)


def _split(address: str) -> SplitResult:
    """Split an address; one that cannot be split has no host."""
    with suppress(ValueError):
        return urlsplit(address)
    return urlsplit("")


class Page:
    """Page of one run.

    Args:
        feed: the states of the run.
        press: does what a button says; without it there are no buttons.
        proxy: the host of a proxy before this page, if it has one.
    """

    def __init__(self, feed: Feed, press: Press | None = None, proxy: str = "") -> None:
        self._feed, self._press, self._proxy = feed, press, proxy
        self._streams = 0
        self._tokens: list[str] = []
        self._pressing = asyncio.Lock()

    def app(self, token: str, hosts: tuple[str, ...] = LOOPBACK) -> Guard:
        """Return the page as an application that a server can run."""
        routes: list[BaseRoute] = [
            Route("/state", self._state),
            Route("/state/{moment:float}", self._past),
            Route("/events", self._events),
            Mount("/plotly", StaticFiles(directory=str(files("plotly").joinpath("package_data")))),
            Mount("/", StaticFiles(directory=str(files("distbelief.lab.watch").joinpath("page")), html=True)),
        ]
        if self._press:
            routes.insert(0, Route("/press/{name}/{role}", self._pressed, methods=["POST"]))
        refused = {DistbeliefError: lambda _, error: PlainTextResponse(f"{error}\n", 503)}
        return Guard(
            Starlette(routes=routes, exception_handlers=refused), token, (*hosts, self._proxy) if hosts else ()
        )

    async def _parts(self, name: str) -> list[FeedPart]:
        """Return what came after a state, and with a whole state a token for the buttons."""
        await self._feed.look()
        parts = self._feed.since(name)
        if self._press and parts and parts[0].kind == "whole":
            parts.append(FeedPart(parts[0].name, "press", msgspec.json.encode(self._issue())))
        return parts

    async def _state(self, request: Request) -> Response:
        parts = await self._parts(request.query_params.get("after", ""))
        return _json([(part.name, part.kind, msgspec.Raw(part.data)) for part in parts])

    async def _past(self, request: Request) -> Response:
        return _json(await self._feed.at(request.path_params["moment"]))

    async def _events(self, request: Request) -> Response:
        if self._streams >= CLIENTS:
            return PlainTextResponse("too many pages are open\n", 503)
        after = request.headers.get("last-event-id") or request.query_params.get("after", "")
        headers = {"X-Accel-Buffering": "no"}
        return BoundedStream(self._stream(after), media_type="text/event-stream", headers=headers)

    async def _stream(self, name: str) -> AsyncIterator[bytes]:
        """Yield events: what came after a state, what comes, and the end."""
        self._streams += 1
        try:
            spoken = time.monotonic()
            until = spoken + STREAM_SECONDS
            while time.monotonic() < until:
                for part in await self._parts(name):
                    yield b"id: %s\nevent: %s\ndata: %s\n\n" % (part.name.encode(), part.kind.encode(), part.data)
                    name, spoken = part.name, time.monotonic()
                if not self._feed.running:
                    yield b"event: end\ndata:\n\n"
                    return
                if time.monotonic() > spoken + QUIET_SECONDS:
                    # a proxy sees the comment, and the page the event
                    yield b": nothing has changed\nevent: alive\ndata:\n\n"
                    spoken = time.monotonic()
                await asyncio.sleep(PERIOD)
        finally:
            self._streams -= 1

    def _issue(self) -> str:
        """Return a new token for one press of a button."""
        self._tokens = [*self._tokens, token_urlsafe(16)][-TOKENS:]
        return self._tokens[-1]

    async def _pressed(self, request: Request) -> Response:
        """Do what a button says, once for each token; answer a sentence, and the token for the next press."""
        origin = _split(request.headers.get("origin", ""))
        if not origin.netloc or (request.headers.get("host") != origin.netloc and self._proxy != origin.hostname):
            return PlainTextResponse("this does not come from the page\n", 403)
        try:
            self._tokens.remove(request.headers.get("x-press", ""))
        except ValueError:
            return PlainTextResponse("the token of this button is used up: load the page again\n", 403)
        assert self._press is not None
        try:
            async with self._pressing:  # of two who stop a job, the second is to see that it ends
                answer = await asyncio.to_thread(self._press, request.path_params["name"], request.path_params["role"])
        except (DistbeliefError, OSError) as error:
            answer = str(error)
        return _json({"told": answer, "press": self._issue()})


class BoundedStream(StreamingResponse):
    """Stream that ends in any case, also where its reader has stopped reading."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STREAM_SECONDS + GRACE_SECONDS):
                await super().__call__(scope, receive, send)


def _json(answer: object) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
