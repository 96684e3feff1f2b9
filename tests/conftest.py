"""What all tests share: one thread of torch, and hypothesis without deadlines, for a busy machine is no failure, and
without chance from run to run; limits of time that a busy machine may stretch.
"""

import pytest
import torch
from drawn import SEEDS
from hypothesis import settings
from patience import SLOWNESS

# the bits of a sum follow its threads, and replicas have one; two workers of pytest with two each would fight, too
torch.set_num_threads(1)
settings.register_profile("steady", deadline=None, derandomize=True, max_examples=min(100, 4 * SEEDS))
settings.load_profile("steady")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Stretch the limit of each test, unless one is named on the command line."""
    if config.getoption("timeout") is not None:
        return
    usual = float(config.getini("timeout"))
    for item in items:
        mark = item.get_closest_marker("timeout")
        item.add_marker(pytest.mark.timeout((mark.args[0] if mark else usual) * SLOWNESS), append=False)
