"""One thread of torch for all simulated jobs."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """As in a simulation: torch rounds otherwise with more threads."""
    torch.set_num_threads(1)
