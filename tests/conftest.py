"""What all tests share: one thread of torch, and hypothesis without deadlines, for a busy machine is no failure, and
without chance from run to run; limits of time that a busy machine may stretch. `pytest` alone draws one case of
each test that is not long.
"""

import gc
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from asking import Ask
from drawn import FEW, SEEDS
from hypothesis import settings
from patience import SLOWNESS
from rings import ROOT, hash_of_sources

from distbelief.cli import main

# the bits of a sum follow its threads, and replicas have one; two workers of pytest with two each would fight, too
torch.set_num_threads(1)
settings.register_profile("steady", deadline=None, derandomize=True, max_examples=min(200, max(24, SEEDS)))
settings.load_profile("steady")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw cases where few are asked for; stretch the limit of each test, to at least that of the command line."""
    chosen = any(config.getoption(option, None) for option in ("keyword", "markexpr", "lf", "failedfirst"))
    if SEEDS < FEW and not chosen and [*config.args] == config.getini("testpaths"):
        kept = drawn(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    least, usual = config.getoption("timeout") or 0.0, float(config.getini("timeout"))
    for item in items:
        mark = item.get_closest_marker("timeout")
        limit = max(least, (mark.args[0] if mark else usual) * SLOWNESS)
        item.add_marker(pytest.mark.timeout(limit), append=False)


def drawn(items: list[pytest.Item]) -> set[pytest.Item]:
    """Draw one case of each test that is not long, another after each change of the sources."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("long") is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chance = random.Random(hash_of_sources(ROOT))
    return {chance.choice(some) for some in cases.values()}


@pytest.fixture(autouse=True, scope="module")
def seldom_collected() -> None:
    """What has been imported is no garbage: collections look at what the tests of this file have made."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run a command of distbelief, hold its status, and give what it has said."""

    def run(words: str | Sequence[str], status: int = 0) -> Any:
        assert main.run(words.split() if isinstance(words, str) else [*words]) == status
        return capsys.readouterr()

    return run
