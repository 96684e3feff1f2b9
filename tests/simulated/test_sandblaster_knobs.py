"""What the options of Sandblaster do, one by one; that none is dead is in test_options."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from typing import Any

import pytest
import torch
from oracles import classes, mlp, smooth
from torch import nn
from watching.observed import Observed, Watcher

from distbelief.core import records
from distbelief.core.conversations import operations, pushing
from distbelief.core.messages import Message
from distbelief.errors import JobFailed, UsageError
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.simulated import Simulated
from distbelief.strategies import Sandblaster
from distbelief.strategies.sandblaster.evaluating import BatchWindows
from distbelief.tasks import Task
from distbelief.testing.simulations import attach


def task(samples: int = 83) -> Task:
    return smooth(samples, torch.float64)


class Traffic(Watcher):
    """What is dealt, sent and told, in order."""

    def __init__(self, run: Observed) -> None:
        self.dealt: list[tuple[float, str, operations.Assign]] = []
        self.counts: Counter[type] = Counter()
        self.operations: list[operations.Operate] = []
        self._clock = run.simulation.clock
        attach(run.simulation.network, self)

    def sent(self, sender: str, to: str, message: Message) -> None:
        self.counts[type(message)] += 1
        if isinstance(message, operations.Assign):
            self.dealt.append((self._clock.now(), to, message))
        elif isinstance(message, operations.Operate) and to == "shard 0":
            self.operations.append(message)

    def lasted(self, evaluation: int) -> float:
        """Seconds from dealing the first work unit of an evaluation to dealing the first of the next."""
        first = {
            number: min(when for when, _, one in self.dealt if one.evaluation == number)
            for number in (evaluation, evaluation + 1)
        }
        return first[evaluation + 1] - first[evaluation]


def play(cluster: Simulated | None = None, of: Task | None = None, **options: Any) -> tuple[Observed, Traffic]:
    strategy = Sandblaster(**{"iterations": 6, "portion_size": 4, "send_every": 2, "deterministic": True, **options})
    run = Observed(Job(of or task(), strategy, evaluate_every=0, checkpoint_every=0), cluster)
    traffic = Traffic(run)
    run.simulation.run()
    return run, traffic


def test_a_batch_is_cut_into_portions_and_these_into_work_units() -> None:
    run, traffic = play(replicas=1, portion_size=10, send_every=3)
    first = [one.work_unit.portion for _, _, one in traffic.dealt if one.evaluation == 1]
    assert [(portion.first, portion.count) for portion in first] == [(0, 3), (3, 3), (6, 3)]
    steps = run.told(records.Stepped)
    assert [(step.steps, step.samples) for step in steps[:3]] == [(3, 30), (3, 30), (3, 23)]


def test_parameters_are_fetched_once_for_an_evaluation() -> None:
    run, traffic = play(replicas=2, shards=1)
    evaluations = sum(record.evaluations for record in run.told(records.Iterated))
    assert evaluations >= 6
    assert traffic.counts[pushing.Fetch] == 2 * (1 + evaluations)  # and once to join


def test_a_fast_replica_takes_more() -> None:
    slow = Simulated(compute=ComputeModel(spread="constant", slow={0: 4.0}))
    _, traffic = play(slow, task(640), replicas=2, backup_portions=0)
    shares = Counter(to for _, to, one in traffic.dealt if one.evaluation == 3)
    assert 3 < shares["replica 1"] / shares["replica 0"] < 5


def test_backup_portions_save_a_batch_from_a_straggler() -> None:
    slow = Simulated(compute=ComputeModel(spread="constant", slow={0: 50.0}))
    with_backup, without = (play(slow, task(160), replicas=4, backup_portions=count) for count in (1, 0))
    assert with_backup[1].lasted(3) < 0.2 * without[1].lasted(3)
    assert with_backup[0].vector() == without[0].vector()
    copies = [sum(record.copies for record in run.told(records.Iterated)) for run, _ in (with_backup, without)]
    assert copies[0] > 0
    assert copies[1] == 0


def test_a_search_that_fails_begins_anew_from_the_steepest_descent_and_says_so() -> None:
    """In float32, close to the minimum, the loss is rounded to more than a step can lower it by."""
    run, _ = play(of=classes(lambda: nn.Linear(6, 3), 83), iterations=60, tolerance=0.0)
    notes = [record.text for record in run.told(records.Note)]
    assert any("restarts with steepest descent" in note for note in notes)
    ended = next(record.reason for record in run.told(records.Finished))
    assert "no step along the steepest descent lowers the loss" in ended


def test_one_round_of_dot_products_is_6m_and_a_direction_2m_and_one_coefficients() -> None:
    _, traffic = play(iterations=30, history=5)
    said = [command for message in traffic.operations for command in message.commands]
    learnt = [command for command in said if isinstance(command, operations.Dots)]
    made = [command for command in said if isinstance(command, operations.Combine) and command.into == "d"]
    assert statistics.mode(len(dots.pairs) for dots in learnt if len(dots.pairs) > 1) == 6 * 5
    assert statistics.mode(len(combine.terms) for combine in made) == 2 * 5 + 1


def test_dropout_draws_the_same_for_a_portion_in_every_evaluation() -> None:
    """So the loss is a function of the parameters, and the line search can go down it."""
    run, _ = play(of=classes(lambda: mlp().double(), 83, dtype=torch.float64), iterations=20)
    losses = [record.loss for record in run.told(records.Iterated)]
    assert losses == sorted(losses, reverse=True)
    assert run.vector() != play(iterations=20)[0].vector()


def test_batch_norm_is_refused_with_the_reason() -> None:
    normed = dataclasses.replace(task(), model=lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double())
    with pytest.raises(UsageError, match=r"BatchNorm1d '1': .* not the sum over its portions"):
        play(of=normed)


def test_windows_that_cannot_overlap_are_refused() -> None:
    with pytest.raises(UsageError, match="--batch-size 8 is 2 portions of 4"):
        BatchWindows(Sandblaster(batch_size=8), 83, 4)


def test_a_loss_that_is_no_number_ends_the_job() -> None:
    wrong = dataclasses.replace(task(), loss=lambda output, _: (output * float("nan")).sum())
    with pytest.raises(JobFailed, match="the loss is inf at the initial parameters"):
        Simulated().run(Job(wrong, Sandblaster(iterations=2), evaluate_every=0))


def test_the_result_counts_what_was_done() -> None:
    run, _ = play(iterations=9)
    told = run.told(records.Iterated)
    result = Simulated().run(run.simulation.job)
    descent = result["descent"]
    assert descent["iterations"] == 9 == told[-1].iteration
    assert descent["evaluations"] == sum(record.evaluations for record in told)
    assert descent["loss"] == told[-1].loss == result["history"][-1]["train_loss"]
    assert descent["restarts"] == 0


@pytest.mark.parametrize("phantom", [True, False])
def test_a_loss_that_nobody_computed_is_not_told(phantom: bool) -> None:
    result = Simulated(phantom=phantom).run(Job(task=task(), strategy=Sandblaster(replicas=2, shards=2, iterations=3)))
    assert result["descent"]["iterations"] == 3
    told = [result["descent"]["loss"], result["descent"]["gradient"], *(row["train_loss"] for row in result["history"])]
    assert all((one is None) == phantom for one in told), told
