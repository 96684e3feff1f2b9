"""What a coordinator hears of many replicas: no more of a thousand than of some hundreds."""

from __future__ import annotations

from collections import Counter

import pytest
from oracles import classes
from torch import nn

from distbelief.core import roles
from distbelief.core.conversations.dealing import Progress
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.simulation import Simulation
from distbelief.replica import work
from distbelief.strategies import Allreduce, Downpour
from distbelief.transport.virtual import VirtualEndpoint

MOST = 20
"""Reports a second, instead of a thousand."""
STEP = 0.05


@pytest.mark.parametrize("strategy", [Downpour, Allreduce])
@pytest.mark.long
def test_all_replicas_together_report_so_often_at_most(
    monkeypatch: pytest.MonkeyPatch, strategy: type[Downpour | Allreduce]
) -> None:
    """Beside the reports that ask for a portion, of which there are few in a long epoch."""
    monkeypatch.setattr(work, "REPORTS", MOST)
    heard, send = Counter[type](), VirtualEndpoint.send

    def counted(endpoint: VirtualEndpoint, target: str, message: object, *more: object) -> None:
        if target == roles.COORDINATOR:
            heard[type(message)] += not (isinstance(message, Progress) and message.wants)
        send(endpoint, target, message, *more)  # type: ignore[arg-type]  # as it was sent

    monkeypatch.setattr(VirtualEndpoint, "send", counted)
    rates = []
    for replicas in (3, 40):
        heard.clear()
        task = classes(lambda: nn.Linear(6, 3), samples=300 * replicas)
        job = Job(task=task, strategy=strategy(replicas=replicas), batch_size=1, evaluate_every=0, checkpoint_every=0)
        result = Simulated(phantom=True, compute=ComputeModel(step=STEP)).run(job)
        rates.append(heard[Progress] / result["seconds"])
    assert rates[0] > 3 * 2  # of each, every quarter of a second and a step
    assert 1 < rates[1] < 2 * MOST < rates[0] * 40 / 3  # with those at the end of a portion


def test_what_every_message_passes_through_has_less_than_thirty_attributes() -> None:
    """With 30 or more, CPython 3.11 takes twice as long to find one of them."""
    job = Job(task=classes(lambda: nn.Linear(6, 3), samples=12), strategy=Downpour(replicas=1), batch_size=4)
    run = Simulation(job, job.settings(), Simulated(), lambda *_: None)
    run.run()
    endpoint, replica = run.network.endpoints["replica 0"], run.parts["replica 0"].player
    passed = [run.network, endpoint, run.driver, run.shards[0], replica, replica._training]  # type: ignore[attr-defined]  # a replica's
    many = {type(one).__name__: len(vars(one)) for one in passed}
    assert max(many.values()) < 30, many
