"""Plans that train for real: what was predicted beside what was measured, and cores that compute at the same time."""

from __future__ import annotations

import pytest

from distbelief.core.optimizer import optim
from distbelief.planner import together, trials
from distbelief.planner.candidates import Candidate
from distbelief.strategies import Downpour


def test_a_candidate_is_trained_with_and_tells_what_its_steps_were_made_of() -> None:
    found = trials.run("digits", Candidate(Downpour(replicas=1, shards=1, optimizer=optim("sgd"))), 64, 2.0)
    assert min(found.compute, found.wait, found.communicate, found.samples_per_second) > 0
    assert found.waits_for == "shard"
    assert found.step == pytest.approx(64 / found.samples_per_second, rel=0.7)


def test_cores_that_compute_together_have_some_of_their_speed() -> None:
    assert 0.2 < together.measure("digits", None, 64, 2) <= 1.0
    assert together.measure("digits", None, 64, 1) == 1.0
