"""What all tests share: one thread of torch, and hypothesis without deadlines, for a busy machine is no failure, and
without chance from run to run; limits of time that a busy machine may stretch.
"""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from drawn import SEEDS
from hypothesis import settings
from patience import SLOWNESS

# the bits of a sum follow its threads, and replicas have one; two workers of pytest with two each would fight, too
torch.set_num_threads(1)
settings.register_profile("steady", deadline=None, derandomize=True, max_examples=min(100, 4 * SEEDS))
settings.load_profile("steady")
GROWTH_PAGES, HELD = 200 * 2**20 // 4096, [1 << 62]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Stretch the limit of each test, unless one is named on the command line."""
    if config.getoption("timeout") is not None:
        return
    usual = float(config.getini("timeout"))
    for item in items:
        mark = item.get_closest_marker("timeout")
        item.add_marker(pytest.mark.timeout((mark.args[0] if mark else usual) * SLOWNESS), append=False)


def resident() -> int:
    """Pages of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1])


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """A simulation is a cycle, which the collector would hardly ever look for: what is frozen while it runs counts as
    old thereafter, and as nothing new.
    """
    HELD[0] = min(HELD[0], resident())
    yield
    if resident() > HELD[0] + GROWTH_PAGES:
        gc.collect()
        HELD[0] = resident()
