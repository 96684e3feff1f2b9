"""The page of a report in a browser, where playwright and Chromium are installed: no error, charts there, readable on a
telephone and a desk, dark and light.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from made_studies import made_report

from distbelief.study.page import write_page

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_a_browser_shows_the_report(width: int, scheme: str, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    assert not write_page(file, made_report(arms=40, seeds=5, points=60))
    assert file.stat().st_size < 6_000_000
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        said: list[str] = []
        tab.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda error: said.append(str(error)))
        began = time.monotonic()
        tab.goto(file.as_uri())
        tab.wait_for_selector("#efficiency .main-svg")
        opened = time.monotonic() - began
        tab.screenshot(path=str(tmp_path / "page.png"))
        charts = tab.locator(".chart").count()
        drawn = tab.locator(".chart:has(.main-svg)").count()
        wide = tab.evaluate("document.documentElement.scrollWidth")
        ink, paper = (tab.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
        browser.close()
    assert not said
    assert charts == drawn >= 7
    assert wide <= width
    assert (sum(map(int, ink[4:-1].split(","))) > sum(map(int, paper[4:-1].split(",")))) == (scheme == "dark")
    assert opened < 30, opened  # the figure is 3 s, on a machine that does nothing else
