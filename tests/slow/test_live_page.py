"""The page of a run in a browser, where playwright and Chromium are installed: a real job with its buttons, an ended
one with its slider, a phone and a desk, dark and light, a proxy, and a server that goes and comes.
"""

from __future__ import annotations

import asyncio
import http.client
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from made_page import EVIL, MadeRun
from patience import SECONDS, SLOWNESS

from distbelief.lab.watch.feed import Feed
from distbelief.lab.watch.server import Page

TOKEN = "right"
COMMAND = [sys.executable, "-m", "distbelief"]
WAIT = 1000 * SECONDS


@contextmanager
def served(run: MadeRun, port: int = 0, page: Page | None = None, **more: Any) -> Iterator[str]:
    """The address of a page of this process."""
    app = (page or Page(Feed(run), **more)).app(TOKEN)
    listener = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=0)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/?token={TOKEN}"
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        listener.close()


class Tab:
    """A page in the browser, and what should not happen in it."""

    def __init__(
        self, browser: Any, address: str, width: int = 1400, scheme: str = "light", silent: int | None = None
    ) -> None:
        # a context of its own: cookies of other tests are not sent
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.context.set_default_timeout(WAIT)
        self.tab = self.context.new_page()
        self.wrong: list[str] = []
        self.asked: set[str] = set()
        self.tab.on("console", lambda message: self._hear(message))
        self.tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.tab.on("request", lambda request: self.asked.add(urlsplit(request.url).netloc))
        if silent is not None:
            self.tab.route("**/page.js", lambda route: self._patient(route, silent))
        self.tab.goto(address)
        self.tab.wait_for_selector("#members tr")

    def _patient(self, route: Any, silent: int) -> None:
        """Let the page give up a server that has said nothing for so many milliseconds."""
        answer = route.fetch()
        route.fulfill(response=answer, body=answer.text().replace("SILENT = 40000", f"SILENT = {silent}"))

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(message.text)

    def text(self, name: str) -> str:
        return str(self.tab.locator(f"#{name}").inner_text())

    def until(self, name: str, words: str) -> None:
        """Wait until an element says something."""
        self.tab.wait_for_function(
            "([name, words]) => document.getElementById(name).innerText.includes(words)", arg=[name, words]
        )

    def charts(self) -> None:
        """Wait until the charts are drawn."""
        for chart in ("learning", "rate", "bytes"):
            self.tab.wait_for_selector(f"#{chart} .main-svg")

    def number(self, name: str) -> float:
        cell = self.tab.locator("#numbers div", has=self.tab.get_by_text(name, exact=True)).locator("dd")
        return float(cell.inner_text().replace(",", ""))


@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_a_page_is_readable_and_asks_nobody_else(width: int, scheme: str, browser: Any) -> None:
    with served(MadeRun(replicas=8)) as address:
        one = Tab(browser, address, width, scheme)
        one.charts()
        assert one.tab.evaluate("document.documentElement.scrollWidth") <= width
        ink, paper = (
            one.tab.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor")
        )
        assert (_light(ink) > _light(paper)) == (scheme == "dark")
        assert one.tab.url == address.partition("?")[0], "the token is not left in the address"
        assert one.text("sentence").endswith(f"; wrong: the rate is too high for {EVIL}")
        assert one.tab.locator("#diagnosis li").inner_text() == f"rate: lr {EVIL}; try --lr"
        assert EVIL in one.text("folder")
        assert one.asked == {urlsplit(address).netloc}
        assert not one.wrong
        one.context.close()


def test_a_page_is_for_those_who_do_not_see_and_who_have_no_mouse(browser: Any) -> None:
    with served(MadeRun(), press=lambda *_: "done") as address:
        one = Tab(browser, address)
        one.charts()
        tab = one.tab
        assert tab.get_by_role("status").text_content().startswith("Epoch 2 of 5")
        assert "the rate is too high" in tab.get_by_role("status").text_content()
        assert tab.get_by_role("rowheader", name="replica 1").count() == 1
        bands = tab.locator("#members canvas")
        words = [bands.nth(at).get_attribute("aria-label") for at in range(3)]
        assert words[1].startswith("replica 1: computing ")
        assert words[1].endswith("died at 31 s; joined at 34 s")
        for name in ("learning", "rate", "bytes", "staleness"):
            assert tab.locator(f"#{name}").get_attribute("aria-label")
        assert "shard 0 succeeded at 1:00" in tab.locator("#rate").get_attribute("aria-label")
        assert "⇄" in one.text("rate")
        reached = []
        for _ in range(12):
            tab.keyboard.press("Tab")
            reached.append(tab.evaluate("document.activeElement.ariaLabel || document.activeElement.id"))
        assert {"stop", "axis", "Kill replica 0", "Kill replica 2"} <= {*reached}
        tab.locator("#axis").focus()
        assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        tab.keyboard.press("Enter")
        tab.wait_for_selector("#axis[aria-pressed=true]")
        one.context.close()


def test_the_first_paint_waits_for_no_chart_and_a_long_run_is_soon_there(browser: Any) -> None:
    """Eight hours with 64 replicas."""
    with served(MadeRun(seconds=8 * 3600.0, replicas=64, whole=9 * 3600.0)) as address:
        one = Tab(browser, address)
        first, table = one.tab.evaluate("[performance.getEntriesByType('paint')[0].startTime, performance.now()]")
        one.charts()
        drawn = one.tab.evaluate("performance.now()")
        assert one.tab.locator("#members tr").count() == 64
        assert first < 1000 * SLOWNESS
        assert table < 3000 * SLOWNESS
        assert drawn < 10_000 * SLOWNESS
        one.context.close()


def test_a_page_outlives_its_server(browser: Any) -> None:
    run = MadeRun()
    with served(run) as address:
        one = Tab(browser, address)
        one.until("link", "live")
    one.until("link", "does not answer")
    run.seconds = 200
    with served(run, int(urlsplit(address).port or 0)):
        one.until("link", "live")
        one.until("sentence", "67 %")
        run.run = {"running": False}
        one.until("link", "done: all epochs are done")
    one.context.close()


def test_a_page_says_that_its_server_hangs(browser: Any) -> None:
    run, goes_on = MadeRun(), threading.Event()
    view = run.view
    run.view = lambda at: (goes_on.wait(SECONDS), view(at))[1]  # type: ignore[method-assign]
    goes_on.set()
    with served(run) as address:
        one = Tab(browser, address, silent=1000)
        one.until("link", "live")
        goes_on.clear()
        one.until("link", "does not answer")
        goes_on.set()
        one.until("link", "live")
        assert not one.wrong
        one.context.close()


def test_a_page_that_nobody_sees_holds_no_connection(browser: Any) -> None:
    run = MadeRun()
    page = Page(Feed(run))
    seen = "([hidden]) => {Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
    seen += "document.dispatchEvent(new Event('visibilitychange'))}"
    with served(run, page=page) as address:
        one = Tab(browser, address)
        one.until("link", "live")
        one.tab.evaluate(seen, [True])
        while page._streams:
            one.tab.wait_for_timeout(50)
        run.seconds = 200
        one.tab.evaluate(seen, [False])
        one.until("sentence", "67 %")
        assert page._streams == 1
        assert not one.wrong
        one.context.close()


def test_where_streams_do_not_pass_a_page_asks(browser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distbelief.lab.watch.server.CLIENTS", 0)
    run = MadeRun()
    with served(run) as address:
        one = Tab(browser, address)
        one.until("link", "live, by asking")
        run.seconds = 200
        one.until("sentence", "67 %")
        one.context.close()


class Proxy(BaseHTTPRequestHandler):
    """A proxy as clusters have them: it takes a prefix off the address, and passes on what comes."""

    protocol_version = "HTTP/1.0"
    behind = ""

    def do_GET(self) -> None:
        if not self.path.startswith("/user/me/8000/"):
            self.send_error(404)
            return
        connection = http.client.HTTPConnection(self.behind)
        connection.request("GET", self.path.removeprefix("/user/me/8000"), headers=dict(self.headers))
        answer = connection.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() != "transfer-encoding":
                self.send_header(name, value)
        self.end_headers()
        try:
            while data := answer.read1(1 << 16):
                self.wfile.write(data)
        except OSError:
            pass
        finally:
            connection.close()

    def log_message(self, *_: object) -> None:
        pass


def test_a_page_works_behind_a_proxy_with_a_prefix(browser: Any) -> None:
    run = MadeRun()
    with served(run, proxy="localhost") as address, ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        Proxy.behind = urlsplit(address).netloc
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        one = Tab(browser, f"http://localhost:{proxy.server_port}/user/me/8000/?token={TOKEN}")
        one.charts()
        one.until("link", "live")
        run.seconds = 200
        one.until("sentence", "67 %")
        assert not one.wrong
        run.run = {"running": False}
        one.until("link", "done")
        one.context.close()
        proxy.shutdown()


def test_a_page_goes_on_with_a_resumed_job(browser: Any) -> None:
    run = MadeRun()
    with served(run) as address:
        one = Tab(browser, address)
        run.run = {"running": False}
        one.until("link", "done")
        one.tab.wait_for_selector("#replay:visible")
        run.seconds, run.run = 200, {}
        one.until("link", "live")
        one.until("sentence", "67 %")
        assert one.tab.locator("#replay:visible").count() == 0
        assert not one.wrong
        one.context.close()


def test_a_simulated_job_is_played_again_on_its_own_clock(browser: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [
        "simulate",
        "digits",
        "downpour",
        "--replicas",
        "4",
        "--epochs",
        "3",
        "--keep",
        "--quiet",
        "--out",
        str(run),
    ]
    subprocess.run([*COMMAND, *words, "--compute", "1s"], check=True, timeout=SECONDS)
    with watched(run) as address:
        one = Tab(browser, address)
        one.until("link", "done: all epochs are done")
        one.until("folder", "simulated")
        whole = one.number("samples")
        one.tab.locator("#at").focus()
        one.tab.keyboard.press("Home")
        one.until("sentence", "at 0.0 s")
        one.tab.wait_for_function("() => document.getElementById('at').value == 0")
        one.tab.locator("#speed").select_option("1")
        one.tab.locator("#play").click()
        one.until("play", "Pause")
        while not 0 < one.number("samples") < whole:
            one.tab.wait_for_timeout(50)
        one.tab.locator("#at").focus()
        one.tab.keyboard.press("End")
        one.until("sentence", "done")
        one.until("play", "Play")
        assert one.number("samples") == whole
        assert not one.wrong
        run.rename(tmp_path / "elsewhere")
        one.tab.keyboard.press("Home")
        one.until("link", "cannot be read")
        (tmp_path / "elsewhere").rename(run)
        one.tab.keyboard.press("ArrowRight")
        one.until("link", "done: all epochs are done")
        one.context.close()


@contextmanager
def watched(run: Path, *words: str) -> Iterator[str]:
    """The address of a page in a process of its own."""
    process = subprocess.Popen([*COMMAND, "watch", str(run), *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("page: ").strip()
    finally:
        process.terminate()
        process.communicate(timeout=SECONDS)


def test_two_pages_show_a_real_job_kill_a_replica_that_comes_back_and_stop_the_job(
    browser: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ["train", "digits", "downpour", "--replicas", "2", "--shards", "2", "--restarts", "3", "--epochs", "100000"]
    job = subprocess.Popen(
        [*COMMAND, *words, "--pad", "20ms", "--quiet", "--out", str(run), "--page"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert job.stderr is not None
        first = job.stderr.readline().removeprefix("page: ").strip()
        with watched(run, "--control") as address:
            one, other = Tab(browser, address), Tab(browser, first)
            one.until("sentence", "epoch ")
            one.tab.wait_for_selector("#members canvas[aria-label*=computing]")
            before = one.number("samples")
            while one.number("samples") == before:  # the test's own limit ends it
                one.tab.wait_for_timeout(100)
            one.charts()
            assert other.tab.locator(".kill:visible, #stop:visible").count() == 0, "only with --control"
            one.tab.get_by_label("Kill replica 1").click()
            one.until("link", "replica 1 was killed")
            for tab in (one, other):
                tab.until("events", "replica 1 died")
                tab.tab.wait_for_selector("#members canvas[aria-label*='died at'][aria-label*='joined at']")
            one.tab.on("dialog", lambda dialog: dialog.accept())
            one.tab.locator("#stop").click()
            for tab in (one, other):
                tab.until("link", "interrupted")
                tab.until("sentence", "interrupted")
            assert not one.wrong
            assert not other.wrong
        assert job.wait(SECONDS) == 130
        assert any((run / "checkpoints").iterdir())
    finally:
        job.kill()
        job.communicate(timeout=SECONDS)


def _light(colour: str) -> int:
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))
