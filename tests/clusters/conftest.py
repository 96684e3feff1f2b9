"""Four hosts for each test of engines; after it, nothing of a job is left on any of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "processes")]

from commands import Command, environment  # noqa: E402
from engines import ENGINES, Engine  # noqa: E402
from hosts import TOOLS, Hosts, missing  # noqa: E402

from distbelief.tasks import available  # noqa: E402
from distbelief.tasks.digits import folder_of  # noqa: E402

END_SECONDS = 150.0
"""How long what is left of a job may take to end."""


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Where all tests were skipped, nothing was tried, and that is no success."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus == pytest.ExitCode.OK and reporter and "skipped" in reporter.stats and "passed" not in reporter.stats:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def mnist() -> str:
    """The folder of MNIST's files."""
    if why := available("mnist"):
        pytest.skip(why)
    return str(folder_of(None))


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Engine:
    """An engine whose tools are here."""
    found = ENGINES[getattr(request, "param", "ssh")]
    if why := missing({**TOOLS, **found.tools}):
        pytest.skip(why)
    return found


@pytest.fixture
def hosts(engine: Engine, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """The hosts; nothing is left on them at the end, whatever a test has done there."""
    try:
        several = Hosts(disk=getattr(request, "param", 0), environment=environment())
    except OSError as error:
        pytest.skip(f"no hosts can be made here: {error}")
    try:
        engine.prepare(several)
        yield several
        for name in several.names:
            several.cut(name, down=False)
        several.wait_until_empty(END_SECONDS)
    finally:
        several.close()


@pytest.fixture
def start(engine: Engine, hosts: Hosts, tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts a job on the hosts; none outlives the test."""
    begun: list[Command] = []

    def begin(*words: str) -> Command:
        begun.append(engine.start(hosts, tmp_path, *words))
        return begun[-1]

    yield begin
    for one in begun:
        one.close()
