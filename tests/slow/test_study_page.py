"""The page of a report in a browser, where playwright and Chromium are installed: open soon, no error, charts there,
readable on a telephone and a desk, dark and light.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from made_studies import made_report

from distbelief.lab.study.report import write_page

OTHER = {"dark": "light", "light": "dark"}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 200 runs."""
    file = tmp_path_factory.mktemp("report") / "report.html"
    write_page(file, made_report(arms=40, seeds=5, points=60))
    assert file.stat().st_size < 6_000_000
    return file


def test_a_report_of_200_runs_is_open_soon_and_draws_what_comes_into_view(browser: Any, report: Path) -> None:
    tab = browser.new_page(viewport={"width": 1400, "height": 900})
    began = time.monotonic()
    tab.goto(report.as_uri())
    tab.wait_for_selector("li")
    opened = time.monotonic() - began
    charts, drawn = tab.locator(".chart"), tab.locator(".chart:has(.main-svg)")
    places = [chart.bounding_box() for chart in charts.all()]
    assert drawn.count() < charts.count()
    _look_at_all(tab)
    assert drawn.count() == charts.count() >= 7
    tab.evaluate("scrollTo(0, 0)")
    assert [chart.bounding_box() for chart in charts.all()] == places, "what is drawn pushes nothing away"
    assert opened < 3, opened


def test_what_is_printed_is_drawn(browser: Any, report: Path) -> None:
    tab = browser.new_page(viewport={"width": 1400, "height": 900})
    tab.goto(report.as_uri())
    tab.pdf()
    assert tab.locator(".chart:has(.main-svg)").count() == tab.locator(".chart").count()


@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_a_report_is_readable(width: int, scheme: str, browser: Any, report: Path) -> None:
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.goto(report.as_uri())
    _look_at_all(tab)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    ink, paper = (tab.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
    assert (_light(ink) > _light(paper)) == (scheme == "dark")
    alike = (
        "getComputedStyle(document.querySelector('#loss .legendtext')).fill === getComputedStyle(document.body).color"
    )
    assert tab.evaluate(alike)
    tab.emulate_media(color_scheme=OTHER[scheme])
    tab.wait_for_function(alike)
    assert tab.evaluate("getComputedStyle(document.body).color") != ink
    assert not said


def _look_at_all(tab: Any) -> None:
    for chart in tab.locator(".chart").all():
        chart.scroll_into_view_if_needed()
        chart.locator(".main-svg").first.wait_for()


def _light(colour: str) -> int:
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))
