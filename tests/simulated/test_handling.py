"""What a simulated job costs its roles: each message, and the bytes that are read and written because of it."""

from __future__ import annotations

from typing import Any

import pytest
from oracles import classes, mlp

from distbelief.core.conversations import operations
from distbelief.core.conversations.grouping import ReducedPiece
from distbelief.core.conversations.mirroring import Copied, CopyUse, WorkUnitTaken
from distbelief.core.conversations.operations import Contribute, Operate
from distbelief.core.conversations.pushing import Fetch, Fetched, Push, Pushed
from distbelief.core.effects import Phantom
from distbelief.core.messages import Message, Version
from distbelief.core.optimizer import LEARNING_RATES, optim
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.handling import INSTANT, STATES, Handling, HandlingCosts, touched
from distbelief.places.simulated.simulated import Simulated
from distbelief.strategies import Allreduce, Downpour, Sandblaster, Single, Softsync, Strategy, Synchronous
from distbelief.transport.cluster_model import Hosts, NetworkModel
from distbelief.transport.virtual import HEADER

UNIT = Handling(message=0.0, memory=1.0)
"""Seconds are vectors' bytes."""
STEADY = ComputeModel(step=1e-3, spread="constant")
AT, SLICE = Version(0, 1), 40
HUNDRED = Phantom(100)


def costs(strategy: Strategy, handling: Handling = UNIT, **options: Any) -> HandlingCosts:
    return HandlingCosts(handling, Job("digits", strategy).settings(), lambda: SLICE, **options)


PUSH = Push(0, 0, 100, 0, 1, AT, 1, 1)
FETCHED = Fetched(0, 0, 100, AT)


@pytest.mark.parametrize(
    ("strategy", "event", "payload", "vectors"),
    [
        (Downpour(optimizer=optim("sgd")), PUSH, HUNDRED, 2),
        (Downpour(optimizer=optim("momentum")), PUSH, HUNDRED, 3),
        (Downpour(optimizer=optim("adagrad")), PUSH, HUNDRED, 3),
        (Downpour(optimizer=optim("adam")), PUSH, HUNDRED, 4),
        (Synchronous(), PUSH, HUNDRED, 0),  # kept where it lies until its round is made
        (Softsync(n=1), PUSH, HUNDRED, 0),
        (Downpour(), Fetch(0, 0, 100), None, 0),
        (Downpour(), FETCHED, HUNDRED, 0),  # it has landed
        (Sandblaster(), Contribute(0, 0, 100, 0, 1, 1, 0), HUNDRED, 2),
        (Downpour(optimizer=optim("adam")), Copied(0, 0, 100, 0, 1, CopyUse.APPLY, (), (), 1, 1.0), HUNDRED, 4),
        (Downpour(optimizer=optim("adam")), Copied(0, 0, 100, 0, 1, CopyUse.GATHER, (), (), 1, 1.0), HUNDRED, 2),
        (Sandblaster(), WorkUnitTaken(0, 0, 100, 0, 1, 1, 0), HUNDRED, 2),
        (Allreduce(), ReducedPiece(0, 0, 0, 0, 0, True), HUNDRED, 2),
        (Allreduce(), ReducedPiece(0, 0, 0, 0, 0, False), HUNDRED, 2),
    ],
)
def test_taking_a_message_costs_the_vectors_that_it_touches(
    strategy: Strategy, event: Message, payload: Phantom | None, vectors: int
) -> None:
    assert costs(strategy).taking(event, payload) == 100 * vectors
    assert costs(strategy, Handling(0.5, 1.0)).taking(event, payload) == 100 * vectors + 0.5


def test_additions_that_the_network_counts_are_not_counted_twice() -> None:
    assert costs(Allreduce(), adds=False).taking(ReducedPiece(0, 0, 0, 0, 0, True), HUNDRED) == 0
    assert costs(Allreduce(), adds=False).taking(ReducedPiece(0, 0, 0, 0, 0, False), HUNDRED) == 200


@pytest.mark.parametrize(
    ("message", "payload", "seconds"), [(PUSH, HUNDRED, 200), (FETCHED, HUNDRED, 200), (Fetch(0, 0, 100), None, 0)]
)
def test_saying_something_costs_the_copy_of_its_bytes(
    message: Message, payload: Phantom | None, seconds: float
) -> None:
    assert costs(Downpour()).saying(message, payload) == seconds
    assert costs(Downpour(), found=True).saying(message, payload) == (0 if type(message) is Fetched else seconds)


def test_a_round_costs_an_addition_for_each_gradient_and_one_update() -> None:
    """Told when they are acknowledged; one that came too late is in no round."""
    work = costs(Synchronous(optimizer=optim("adam")))
    said = [
        work.saying(Pushed(0, 1, Version(0, version), dropped), None)
        for version, dropped in ((1, False), (1, False), (1, True), (2, False))
    ]
    assert said == [2 * SLICE + 4 * SLICE, 2 * SLICE, 0, 2 * SLICE + 4 * SLICE]
    assert costs(Downpour()).saying(Pushed(0, 1, AT), None) == 0


def test_an_operation_costs_the_vectors_that_it_names() -> None:
    commands = (
        operations.Zero("g"), operations.Scale(2.0, "g"), operations.Copy("x", "x0"), operations.Add(1.0, "d", "x"),
        operations.Combine(((1.0, "g"), (2.0, "history.s"), (3.0, "d")), "d"), operations.Dots((("s", "s"), ("s",
            "y"))),
        operations.AbsoluteNorms("sum", ("g", "d")), operations.Gather(1, ("g", "g.tail")),
    )  # fmt: skip
    assert [touched(command) for command in commands] == [1, 1, 2, 2, 3, 2, 2, 2]
    assert costs(Sandblaster()).taking(Operate(1, commands), None) == 15 * SLICE


def test_every_optimizer_says_how_many_vectors_it_keeps() -> None:
    assert set(STATES) == set(LEARNING_RATES)


def run(strategy: Strategy, **options: Any) -> dict[str, Any]:
    compute = options.pop("compute", STEADY)
    task = classes(mlp, samples=options.pop("samples", 24))
    job = Job(task, strategy, batch_size=4, **{"checkpoint_every": 0, "evaluate_every": 0, **options.pop("job", {})})
    return Simulated(compute=compute, phantom=True, **options).run(job)


def test_a_step_of_downpour_takes_what_its_messages_cost() -> None:
    """One replica, one shard, sgd: the gradient is copied, sent, and added to the parameters; they are copied, and
    sent.

    The fetch follows the push on the line, and is read when the update is made.
    """
    latency, bandwidth, message, memory = 1e-3, 1e6, 2e-3, 1e5
    own = {"network": NetworkModel(latency=latency, bandwidth=bandwidth), "handling": Handling(message, memory)}
    short, long = (
        run(Downpour(1, 1, optimizer=optim("sgd")), samples=samples, **own)["seconds"] for samples in (80, 120)
    )
    size = plain_size()
    copies = 2 * size / memory
    there, back = (size + HEADER) / bandwidth + latency, (size + HEADER) / bandwidth + latency
    shard = message + copies + message  # the push and its update, and the fetch
    step = 1e-3 + copies + there + shard + copies + back
    replica = message  # the parameters: the acknowledgement was read while they were on their way
    assert (long - short) / 10 == pytest.approx(step + replica, rel=1e-6)


def plain_size() -> int:
    """Bytes that one shard holds of the little model."""
    from distbelief.sharding.assignments import cut
    from distbelief.tasks.flat import layout_of

    return cut(layout_of(mlp()), 1, 1)[0].moving.size


def test_who_shares_a_host_with_the_shards_is_sent_no_parameters_in_rounds_of_all() -> None:
    """A quorum may leave one behind; and on machines of their own all are sent them."""
    costs: dict[str, Any] = {"handling": Handling(0.0, 1e6)}
    one_host: dict[str, Any] = {"hosts": Hosts(cores=8), "network": NetworkModel(local_latency=1e-9)}
    apart: dict[str, Any] = {"network": NetworkModel(latency=1e-9, bandwidth=1e15)}

    def step(strategy: Strategy, **options: Any) -> float:
        short, long = (run(strategy, samples=samples, **costs, **options)["seconds"] for samples in (80, 120))
        return (long - short) / 10

    of_all, some = (Synchronous(1, 1, quorum=quorum, optimizer=optim("sgd")) for quorum in (0.0, 1.0))
    copy = 2 * plain_size() / 1e6
    assert step(some, **one_host) - step(of_all, **one_host) == pytest.approx(copy, rel=0.01)
    assert step(some, **apart) == pytest.approx(step(of_all, **apart), rel=0.01)


def test_four_replicas_on_one_core_take_four_times_the_time_of_one() -> None:
    """Steps of a millisecond, beside which messages are nothing."""
    own = {"handling": INSTANT, "network": NetworkModel(local_latency=1e-9), "samples": 160}
    assert run(Downpour(4, 1), hosts=Hosts(cores=1), **own)["seconds"] == pytest.approx(40e-3, rel=0.01)
    assert run(Downpour(4, 1), hosts=Hosts(cores=4), **own)["seconds"] == pytest.approx(10e-3, rel=0.01)
    assert run(Downpour(4, 1), hosts=Hosts(cores=2), **own)["seconds"] == pytest.approx(20e-3, rel=0.01)


def test_single_takes_the_pace_of_its_steps_and_the_time_of_its_updates() -> None:
    size = plain_size()
    for phantom in (True, False):
        job = Job(classes(mlp, samples=22), Single(optimizer=optim("adam")), batch_size=4, epochs=2)
        result = Simulated(compute=STEADY, handling=Handling(memory=1e6), phantom=phantom).run(job)
        assert result["seconds"] == pytest.approx(12 * (1e-3 + 4 * size / 1e6))
        assert (result["steps"], result["samples"], result["replicas"], result["shards"]) == (12, 44, 1, 0)
        assert (result["test_accuracy"] is None) is phantom


def test_a_result_says_what_the_cluster_costs() -> None:
    cluster = run(Downpour(2), handling=Handling(1e-5, 5e9), hosts=Hosts(cores=3))["cluster"]
    assert cluster["handling"] == {"message": 1e-5, "memory": 5e9}
    assert cluster["hosts"] == {"cores": 3, "replicas": 0, "together": 1.0, "busy": 0.0}
    assert cluster["compute"]["step"] == STEADY.step
