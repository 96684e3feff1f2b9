"""The page of a run: who may read it, what it sends, and that it sends no more than what has changed. No socket is
opened here: the application is called as a server calls it.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from importlib.resources import files
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_page import MadeRun

from distbelief.errors import JobFailed, UsageError
from distbelief.lab.watch import feed, server
from distbelief.lab.watch.feed import Feed, changes
from distbelief.lab.watch.server import Guard, Page

TOKEN = "right"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def asked(
    app: Guard,
    path: str = "/",
    method: str = "GET",
    token: str = TOKEN,
    body: bytes = b"",
    scheme: str = "http",
    enough: Callable[[str], bool] = lambda _: False,
    **headers: str,
) -> Answer:
    """What the application answers; a stream is left as soon as what came is enough."""
    address, _, query = path.partition("?")
    names = {"host": "127.0.0.1:8000", **({"cookie": f"{app._cookie}={token}"} if token else {}), **headers}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": method,
        "path": address,
        "query_string": query.encode(),
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in names.items()],
        "scheme": scheme,
        "root_path": "",
    }
    got: dict[str, Any] = {"body": b""}
    left = asyncio.Event()
    sent = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in sent:
            return message
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        got.update({name: value for name, value in message.items() if name in ("status", "headers")})
        got["body"] += message.get("body", b"")
        if enough(got["body"].decode()):
            left.set()

    await app(scope, receive, send)
    return Answer(got["status"], {k.decode(): v.decode() for k, v in got["headers"]}, got["body"].decode())


def ask(app: Guard, *words: Any, **more: Any) -> Answer:
    return asyncio.run(asked(app, *words, **more))


def page(run: MadeRun | None = None, **more: Any) -> Guard:
    return Page(Feed(run or MadeRun()), **more).app(TOKEN)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (feed, server):
        monkeypatch.setattr(module, "PERIOD", 0.0)


# changes

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
)
OBJECTS = st.dictionaries(st.sampled_from("abc"), JSON, max_size=3)


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386, section 2, word for word."""
    if not isinstance(patch, dict):
        return patch
    target = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        else:
            target[name] = merged(target.get(name), value)
    return target


@given(OBJECTS, OBJECTS)
def test_a_merge_patch_leads_from_any_state_to_any_other(old: Any, new: Any) -> None:
    assert merged(merged({}, old), changes(old, new)) == merged({}, new), "null and nothing are one"


def test_what_is_the_same_is_not_sent_again() -> None:
    run = MadeRun()
    before = run.view(None)
    run.seconds += 1
    patch = changes(before, run.view(None))
    assert len(patch["series"]) == len(patch["bands"]["replica 0"]) == 1
    assert "diagnosis" not in patch
    assert changes(before, before) == {}


# who may read

OTHERS = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::1", "127.0.0.1@evil.example"]


@pytest.mark.parametrize(
    "path", ["/", "/state", "/events", "/page.js", "/plotly/plotly.min.js", "/press/stop/job", "/nothing"]
)
def test_without_the_token_nothing_is_told(path: str) -> None:
    app = page(press=lambda *_: "done")
    for token in ("", "wrong", "rightt", "righ"):
        for method in ("GET", "POST"):
            told = ask(app, path, method, token)
            assert (told.status, told.body[:24]) == (403, "distbelief: the token of")
        assert ask(app, f"{path}?token={token}", token="").status == 403


@pytest.mark.parametrize("host", OTHERS)
def test_a_site_whose_name_leads_here_is_refused(host: str) -> None:
    assert ask(page(), host=host).status == 403


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST:1", "127.0.0.1:80"])
def test_this_machine_has_several_names(host: str) -> None:
    assert ask(page(), host=host).status == 200


def test_a_proxy_is_named_and_elsewhere_any_name_will_do() -> None:
    assert ask(page(), host="hub.example").status == 403
    assert ask(page(proxy="hub.example"), host="hub.example:8443").status == 200
    assert ask(Page(Feed(MadeRun())).app(TOKEN, ()), host="any.example").status == 200


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_first_address_gives_a_cookie_for_the_rest(scheme: str) -> None:
    app = page()
    told = ask(app, f"/?token={TOKEN}", token="", scheme=scheme)
    assert told.status == 200
    cookie, *marks = told.headers["set-cookie"].split("; ")
    assert marks == ["HttpOnly", "SameSite=Strict", *["Secure"] * (scheme == "https")], "no path: the browser's own"
    assert "set-cookie" not in ask(app).headers
    assert ask(app, "/state", token="", cookie=cookie).status == 200
    other = Page(Feed(MadeRun())).app("another").__dict__["_cookie"]
    assert not cookie.startswith(other), "two pages of one host do not share a name"


@pytest.mark.parametrize("path", ["/", "/state", "/page.js", "/plotly/plotly.min.js", "/nothing", "/state/x"])
def test_every_answer_forbids_what_the_page_does_not_need(path: str) -> None:
    for token in (TOKEN, "wrong"):
        headers = ask(page(), path, token=token).headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == "'self'"
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")


def test_the_page_asks_nobody_else_and_its_addresses_are_relative() -> None:
    for name in ("index.html", "page.css", "page.js"):
        text = files("distbelief.lab.watch").joinpath("page", name).read_text()
        assert not re.findall(r"https?:|//\w+\.|eval\(|innerHTML|new Function", text), name
        assert not re.findall(r"""(?:src|href|fetch|EventSource)(?:=|\()["'`]/""", text), name


# what is sent


def state_of(parts: list[Any], state: Any = None) -> Any:
    """What the parts of an answer make of a state."""
    for _, kind, data in parts:
        state = merged({} if kind == "whole" else state, data)
    return state


def test_a_page_that_asks_gets_the_whole_state_and_then_what_has_changed() -> None:
    run = MadeRun()
    app = page(run)
    first = ask(app, "/state").json
    assert [kind for _, kind, _ in first] == ["whole"]
    assert state_of(first) == merged({}, run.view(None))
    assert ask(app, f"/state?after={first[-1][0]}").json == []
    told = first[:]
    for _ in range(3):
        run.seconds += 1
        told += ask(app, f"/state?after={told[-1][0]}").json
    assert [kind for _, kind, _ in told] == ["whole", "patch", "patch", "patch"]
    assert state_of(told) == merged({}, run.view(None))
    assert ask(app, f"/state?after={first[-1][0]}").json == told[1:]
    for unknown in ("", "x", "x-1", f"{first[-1][0]}1", "0" * 5000):
        assert ask(app, f"/state?after={unknown}").json[0][1] == "whole"


def test_what_a_page_of_16_replicas_is_sent_in_a_minute_is_small() -> None:
    run = MadeRun(seconds=600, replicas=16)
    made = Feed(run)
    asyncio.run(made.look())
    sent = 0
    for _ in range(60):
        before = made._name
        run.seconds += 1
        asyncio.run(made.look())
        sent += sum(len(part.data) for part in made.since(before))
    assert 60 * 1000 < sent < 300_000


def test_a_page_that_missed_too_much_gets_the_whole_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "KEPT", 2)
    run = MadeRun()
    app = page(run)
    named = []
    for _ in range(4):
        run.seconds += 1
        named.append(ask(app, "/state").json[-1][0])
    kinds = [[kind for _, kind, _ in ask(app, f"/state?after={name}").json] for name in named]
    assert kinds == [["whole"], ["whole"], ["patch"], []]


def test_a_moment_is_asked_for_by_its_seconds() -> None:
    app = page(MadeRun(running=False))
    assert ask(app, "/state/30.5").json["run"]["at"] == 30.5
    assert {ask(app, f"/state/{wrong}").status for wrong in ("soon", "nan", "inf", "-1", "1e999")} == {404}


def events(text: str) -> list[tuple[str, Any]]:
    blocks = [dict(re.findall(r"^(\w*): ?(.*)$", block, re.MULTILINE)) for block in text.split("\n\n") if block]
    return [(one["event"], json.loads(one["data"] or "null")) for one in blocks]


def test_a_stream_begins_with_all_and_goes_on_with_changes_until_the_end() -> None:
    run = MadeRun()
    app = page(run)

    def later(text: str) -> bool:
        run.seconds += 1
        run.run = {"running": False} if text.count("event: ") >= 3 else {}
        return False

    told = ask(app, "/events", enough=later)
    kinds = [kind for kind, _ in events(told.body)]
    assert kinds == ["whole", "patch", "patch", "patch", "end"]
    state: Any = {}
    for _, patch in events(told.body)[:-1]:
        state = merged(state, patch)
    assert not state["run"]["running"]
    assert told.headers["x-accel-buffering"] == "no"
    assert told.headers["content-type"].startswith("text/event-stream")
    assert "content-encoding" not in told.headers
    ids = re.findall("^id: (.*)$", told.body, re.MULTILINE)
    again = events(ask(app, "/events", last_event_id=ids[-2]).body)
    assert [kind for kind, _ in again] == ["patch", "patch", "end"], "one that reconnects goes on"


def test_a_quiet_stream_is_kept_open_and_says_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "QUIET_SECONDS", 0.0)
    told = ask(page(), "/events", enough=lambda text: text.count("event: alive") > 2)
    assert [kind for kind, _ in events(told.body)][:3] == ["whole", "alive", "alive"]
    assert "\n: nothing has changed\n" in told.body


def test_streams_are_few_and_one_that_is_left_makes_room() -> None:
    made = Page(Feed(MadeRun()))
    app = made.app(TOKEN)

    async def many() -> list[int]:
        done = asyncio.Event()
        open_ = [
            asyncio.create_task(asked(app, "/events", enough=lambda _: done.is_set())) for _ in range(server.CLIENTS)
        ]
        while sum(not one.done() for one in open_) < server.CLIENTS or made._streams < server.CLIENTS:
            await asyncio.sleep(0)
        refused = (await asked(app, "/events")).status
        for one in open_:
            one.cancel()
        await asyncio.gather(*open_, return_exceptions=True)
        later = await asked(app, "/events", enough=lambda text: "whole" in text)
        return [refused, later.status, made._streams]

    assert asyncio.run(many()) == [503, 200, 0]


def test_no_two_threads_read_a_run_though_a_page_goes_away_meanwhile() -> None:
    run, goes, reading, together = MadeRun(), threading.Event(), [], []
    view = run.view

    def slow(at: float | None) -> Any:
        together.append(len(reading))
        reading.append(at)
        goes.wait(0.2)
        return view(reading.pop())

    run.view = slow  # type: ignore[method-assign]
    made = Feed(run)

    async def leaves() -> None:
        one = asyncio.create_task(made.look())
        while not reading:
            await asyncio.sleep(0.01)
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
        await made.look()

    asyncio.run(leaves())
    assert set(together) == {0}


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (JobFailed("it does not answer"), "it does not answer"),
        (PermissionError(13, "Permission denied"), "the run cannot be read: PermissionError(13, 'Permission denied')"),
        (KeyError("level"), "the run cannot be read: KeyError('level')"),
    ],
)
def test_a_run_that_cannot_be_read_is_told_and_read_again(error: Exception, told: str) -> None:
    run = MadeRun()
    made, view = Feed(run), run.view
    app = Page(made).app(TOKEN)
    assert state_of(ask(app, "/state").json)["sentence"].startswith("Epoch 2")

    def broken(_: float | None) -> Any:
        raise error

    run.view = broken  # type: ignore[method-assign]
    state, past = state_of(ask(app, "/state").json), ask(app, "/state/3")
    assert (state["sentence"], state["run"]["seconds"], made.running) == (f"for 0 s: {told}", 90, True)
    assert (past.status, past.body) == (503, f"{told}\n")
    run.view = view  # type: ignore[method-assign]
    assert state_of(ask(app, "/state").json)["sentence"].startswith("Epoch 2")


def test_a_run_without_a_folder_may_have_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run, now = MadeRun(), [1000.0]
    monkeypatch.setattr(feed.time, "monotonic", lambda: now[0])
    view, made = run.view, Feed(run)
    asyncio.run(made.look())

    def gone(_: float | None) -> Any:
        raise UsageError("there is no run in runs/x")

    run.view, now[0] = gone, 1040.0  # type: ignore[method-assign]
    state = state_of(ask(Page(made).app(TOKEN), "/state").json)
    assert (state["sentence"], state["run"]["seconds"]) == ("for 40 s: there is no run in runs/x", 90)
    assert (made.running, made.gone) == (True, True)
    run.view = view  # type: ignore[method-assign]
    assert state_of(ask(Page(made).app(TOKEN), "/state").json)["sentence"].startswith("Epoch 2")
    assert (made.running, made.gone) == (True, False)


def test_many_pages_share_a_look_at_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "PERIOD", 3600.0)
    run, looks = MadeRun(), []
    view = run.view
    run.view = lambda at: [looks.append(at), view(at)][1]  # type: ignore[method-assign]
    app = page(run)

    async def several() -> None:
        await asyncio.gather(*(asked(app, "/state") for _ in range(5)))

    asyncio.run(several())
    assert looks == [None]


# buttons


def token_of(app: Guard) -> str:
    """The token that a page gets with the whole state."""
    return next((str(data) for _, kind, data in ask(app, "/state").json if kind == "press"), "")


HERE = {"origin": "http://127.0.0.1:8000"}


def press(app: Guard, token: str, path: str = "/press/kill/replica%201", **headers: str) -> Answer:
    return ask(app, path.replace("%20", " "), "POST", x_press=token, **(headers or HERE))


def test_without_control_there_are_no_buttons_and_no_routes() -> None:
    app = page()
    assert token_of(app) == ""
    assert press(app, "").status == press(app, "", "/nothing").status == 405


def test_a_button_works_once_for_its_page_alone() -> None:
    done: list[Any] = []
    app = page(press=lambda *words: [done.append(words), "done"][1])
    token = token_of(app)
    assert token
    assert token != token_of(app)
    for wrong in ("", "wrong"):
        assert press(app, wrong).status == 403
    for origin in ("null", "http://[", "http://127.0.0.1", "http://evil.example", "http://127.0.0.1:8000.evil.example"):
        assert press(app, token, origin=origin).status == 403
    assert press(app, token, accept="all").status == 403, "no origin"
    assert ask(app, "/press/kill/x").status == 404, "not by a link"
    assert not done
    told = press(app, token)
    assert (told.status, told.json["told"], done) == (200, "done", [("kill", "replica 1")])
    assert press(app, token).status == 403
    assert press(app, told.json["press"], "/press/stop/job").status == 200
    assert done[1:] == [("stop", "job")]


def test_only_a_page_that_begins_gets_a_token_and_old_ones_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TOKENS", 2)
    run = MadeRun()
    app = page(run, press=lambda *_: "done")
    name = ask(app, "/state").json[0][0]
    run.seconds += 1
    assert [kind for _, kind, _ in ask(app, f"/state?after={name}").json] == ["patch"]
    first, second, third = (token_of(app) for _ in range(3))
    assert [press(app, token).status for token in (first, second, third)] == [403, 200, 200]


def test_what_a_button_could_not_do_is_told() -> None:
    def refuse(name: str, role: str) -> str:
        raise UsageError(f"{name} {role}: is not here")

    app = page(press=refuse)
    assert press(app, token_of(app)).json["told"] == "kill replica 1: is not here"


def test_a_button_behind_a_proxy_knows_its_own_page() -> None:
    app = page(press=lambda *_: "done", proxy="hub.example")
    assert press(app, token_of(app), origin="https://hub.example").status == 200
