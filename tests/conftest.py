"""What all tests share: one thread of torch, and hypothesis without deadlines, for a busy machine is no failure, and
without chance from run to run.
"""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from drawn import SEEDS
from hypothesis import settings

# the bits of a sum follow its threads, and replicas have one; two workers of pytest with two each would fight, too
torch.set_num_threads(1)
settings.register_profile("steady", deadline=None, derandomize=True, max_examples=min(100, 4 * SEEDS))
settings.load_profile("steady")
GROWTH_PAGES, HELD = 200 * 2**20 // 4096, [1 << 62]


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
