"""Every engine trains MNIST on hosts, in each way."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from commands import Command
from engines import ENGINES

ADAGRAD = ("--optimizer", "adagrad", "--lr", "0.02")
WAYS = {
    "downpour": ("downpour", "--replicas", "4", "--shards", "2", "--standby", "1", *ADAGRAD),
    "allreduce": ("allreduce", "--replicas", "4", *ADAGRAD),
    "split": ("downpour", "--replicas", "2", "--partitions", "2", "--shards", "2", *ADAGRAD),
}
EPOCHS, ACCURACY = (5, 0.97) if "DISTBELIEF_EPOCHS" in os.environ else (1, 0.93)
"""With $DISTBELIEF_EPOCHS as long as the accuracy takes that is promised."""


@pytest.mark.usefixtures("mnist")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_an_engine_trains_mnist(start: Callable[..., Command], way: str) -> None:
    job = start("mnist", *WAYS[way], "--epochs", str(EPOCHS))
    result = job.result()
    assert (result["outcome"], result["samples"]) == ("done", EPOCHS * 60_000), job.errors()
    assert result["test_accuracy"] > ACCURACY
    assert result["carrier"] == "tls"
    assert set(job.wait()) == {0}
