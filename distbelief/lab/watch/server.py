"""Server of a page: what it answers, and to whom."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from hashlib import blake2b
from importlib.resources import files
from secrets import compare_digest, token_urlsafe
from urllib.parse import SplitResult, urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distbelief.errors import DistbeliefError
from distbelief.lab.watch.feed import PERIOD, Feed

CLIENTS = 16
"""Most streams at the same time; further pages ask again and again instead."""
QUIET_SECONDS = 15.0
"""Longest silence on a stream, since proxies close silent ones."""
STREAM_SECONDS = 600.0
"""Longest life of a stream; the page then opens another, which goes on where this one ended."""
GRACE_SECONDS = 5.0
"""Seconds that a browser has to read the last of a stream."""
TOKENS = 32
"""Most pages whose buttons work at the same time."""
WORDS = 1000
"""Longest request of a button in bytes."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src "
    "'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Headers of every answer."""
KINDS = {"css": "text/css", "js": "text/javascript"}
Press = Callable[[str, str], str]
"""Function that does what a button says, given its name and a role, and returns a sentence about it."""


class Guard:
    """Gate before the page: it refuses who lacks the token, and adds headers to every answer.

    Args:
        app: what is guarded.
        token: the token, which the first address has, and later the cookie.
        hosts: names by which the page may be addressed; empty for all. A site that has its own name lead here, to read
            the page by a visitor's browser, is refused.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: tuple[str, ...]) -> None:
        self._app, self._token, self._hosts = app, token, hosts
        # browsers send cookies to every port of a host, so pages must not share a name
        self._cookie = f"distbelief-{blake2b(token.encode(), digest_size=4).hexdigest()}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":  # such as the start of the server
            await self._app(scope, receive, send)
            return
        request = HTTPConnection(scope)
        asked = request.query_params.get("token", "")

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if asked and message["status"] == 200:
                    secure = "; Secure" if scope["scheme"] == "https" else ""
                    # without a path it is for the folder of the address, as the browser knows that behind a proxy
                    headers.append("Set-Cookie", f"{self._cookie}={self._token}; HttpOnly; SameSite=Strict{secure}")
            await send(message)

        known = self._known(asked) or self._known(request.cookies.get(self._cookie, ""))
        why = "" if known else "the token of this page is missing or wrong: open the address that distbelief shows"
        host = _split(f"//{request.headers.get('host', '')}").hostname
        if self._hosts and host not in self._hosts:
            why = f"{host} is no name of this page; behind a proxy, start it with --proxy"
        app = PlainTextResponse(f"distbelief: {why}\n", 403) if why else self._app
        await app(scope, receive, send_guarded)

    def _known(self, token: str) -> bool:
        return compare_digest(token.encode(), self._token.encode())


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
        proxy: the name of a proxy before this page, if it has one.
    """

    def __init__(self, feed: Feed, press: Press | None = None, proxy: str = "") -> None:
        self._feed, self._press, self._proxy = feed, press, proxy
        self._streams = 0
        self._tokens: list[str] = []
        self.asked = time.monotonic()
        """Moment of the last request."""

    def app(self, token: str, hosts: tuple[str, ...] = LOOPBACK) -> Guard:
        """Return the page as an application that a server can run."""
        own = files("distbelief.lab.watch")
        routes: list[Route] = [Route("/", self._page), Route("/state", self._state), Route("/events", self._events)]
        routes += [Route(f"/{name}", _file(own.joinpath(name).read_bytes(), name)) for name in ("page.css", "page.js")]
        script = files("plotly").joinpath("package_data/plotly.min.js").read_bytes()
        routes.append(Route("/plotly.js", _file(script, "plotly.js", {"Cache-Control": "private, max-age=86400"})))
        if self._press:
            routes.append(Route("/press/{name}", self._pressed, methods=["POST"]))
        names = (*hosts, self._proxy) if hosts and self._proxy else hosts
        return Guard(Starlette(routes=routes), token, names)

    async def _page(self, _: Request) -> Response:
        text = files("distbelief.lab.watch").joinpath("page.html").read_text()
        return Response(text.replace("{{press}}", self._issue() if self._press else ""), media_type="text/html")

    async def _state(self, request: Request) -> Response:
        """Answer the state at a moment, or the changes since the state that the page has."""
        if "at" in request.query_params:
            moment = math.nan
            with suppress(ValueError):
                moment = float(request.query_params["at"])
            if not math.isfinite(moment):
                return PlainTextResponse("at: is no number of seconds\n", 400)
            return Response(await self._feed.at(moment), media_type="application/json")
        await self._feed.look()
        missed = self._feed.since(request.query_params.get("after", ""))
        name, parts = ("whole", [self._feed.whole()]) if missed is None else ("patches", missed)
        body = b'{"id":"%s","%s":[%s]}' % (self._feed.id.encode(), name.encode(), b",".join(parts))
        return Response(body, media_type="application/json")

    async def _events(self, request: Request) -> Response:
        if self._streams >= CLIENTS:
            return PlainTextResponse("too many pages are open\n", 503)
        after = request.headers.get("last-event-id") or request.query_params.get("after", "")
        return BoundedStream(self._stream(after), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def _stream(self, id: str) -> AsyncIterator[bytes]:
        """Yield events: the whole state or the changes since `id`, further changes as they come, and the end."""
        self._streams += 1
        try:
            until, said = time.monotonic() + STREAM_SECONDS, time.monotonic()
            while time.monotonic() < until:
                await self._feed.look()
                missed = self._feed.since(id)
                kind, parts = (b"whole", [self._feed.whole()]) if missed is None else (b"patch", missed)
                id = self._feed.id
                if parts:
                    *earlier, last = parts
                    for part in earlier:
                        yield b"event: %s\ndata: %s\n\n" % (kind, part)
                    yield b"id: %s\nevent: %s\ndata: %s\n\n" % (id.encode(), kind, last)
                    said = time.monotonic()
                if not self._feed.running:
                    yield b"event: end\ndata:\n\n"
                    return
                if time.monotonic() > said + QUIET_SECONDS:
                    # a proxy sees the comment, and the page the event
                    yield b": nothing has changed\nevent: alive\ndata:\n\n"
                    said = time.monotonic()
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
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > WORDS:
                return PlainTextResponse("too long\n", 413)
        try:
            words = msgspec.json.decode(body, type=dict[str, str])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return PlainTextResponse("no JSON object of strings\n", 400)
        if words.get("token") not in self._tokens or self._press is None:
            return PlainTextResponse("the token of this button is used up: load the page again\n", 403)
        self._tokens.remove(words["token"])
        try:
            told = await asyncio.to_thread(self._press, request.path_params["name"], words.get("role", ""))
        except (DistbeliefError, OSError) as error:
            told = str(error)
        return JSONResponse({"told": told, "token": self._issue()})


class BoundedStream(StreamingResponse):
    """Stream that ends in any case, also where its reader has stopped reading."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STREAM_SECONDS + GRACE_SECONDS):
                await super().__call__(scope, receive, send)


def _file(data: bytes, name: str, headers: dict[str, str] | None = None) -> Callable[[Request], Awaitable[Response]]:
    """Return the answer of a file of the package."""

    async def answer(_: Request) -> Response:
        return Response(data, media_type=KINDS[name.rpartition(".")[2]], headers=headers)

    return answer
