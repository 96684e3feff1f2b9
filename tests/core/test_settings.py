"""Settings and schedules: what no job can have is refused with the option, its value and the remedy."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distbelief.core import learning_rate
from distbelief.core.layout import Tensor, lay_out
from distbelief.core.settings import LEARNING_RATES, Optimizer, Plan, Settings, optim, option
from distbelief.core.sharding import cut
from distbelief.errors import UsageError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        *[({name: 0}, f"{option(name)} 0: must be 1 or more") for name in
          ("replicas", "shards", "epochs", "batch_size", "push_every", "fetch_every", "keep_checkpoints")],
        *[({name: -1}, f"{option(name)} -1: must be 0 or more") for name in
          ("warm_start_steps", "evaluate_every", "checkpoint_every", "clip_norm", "local_lr", "target_accuracy")],
        *[({name: bad}, f"{option(name)} {bad}: must be 0 or more") for name in ("clip_norm", "local_lr", "target_accuracy") for bad in (NAN, INF)],
        *[({name: 999999}, f"{option(name)} 999999: must be at most 65536") for name in ("replicas", "shards")],
        ({"target_accuracy": 97.5}, "--target-accuracy 97.5: is a fraction, from 0 to 1"),
        ({"target_accuracy": 0.9, "evaluate_every": 0}, "--target-accuracy needs evaluations: set --evaluate-every"),
        ({"local_lr": 0.1}, "--local-lr 0.1: the fetch after each step overwrites what it steps; set --fetch-every to 2 or more"),
        ({"local_lr": 0.1, "prefetch": 1}, "--local-lr 0.1"),
        ({"prefetch": 2}, "--prefetch 2: is 0 or 1"),
        *[({name: 2**63}, f"{option(name)} {2**63}: does not fit into 64 bits") for name in ("replicas", "epochs", "batch_size", "seed")],
        ({"optimizer": Optimizer(lr=-0.1)}, "--lr -0.1: must be 0 or more, and finite"),
        ({"optimizer": Optimizer(lr=NAN)}, "--lr nan"),
        ({"optimizer": Optimizer(lr=INF)}, "--lr inf"),
        ({"lr_schedule": "cosin"}, "unknown learning-rate schedule 'cosin'; did you mean 'cosine'"),
        *[({"read_in_place": True, **more}, "--read-in-place reads the shards' own memory") for more in
          ({"local_lr": 0.1}, {"fetch_every": 2}, {"prefetch": 1})],
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_no_job_can_have_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Settings(**options).check()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefetch": 1},
        {"local_lr": 0.1, "fetch_every": 2},
        {"read_in_place": True},
        {"target_accuracy": 1.0},
        {"optimizer": Optimizer(lr=0.0)},
        {"warm_start_steps": 10**9},
    ],
    ids=str,
)
def test_settings_that_a_job_can_have_pass(options: dict[str, Any]) -> None:
    Settings(**options).check()


@pytest.mark.parametrize(("prefetch", "vectors"), [(0, 1), (1, 2)])
def test_prefetch_takes_a_second_vector_each_way(prefetch: int, vectors: int) -> None:
    settings = Settings(prefetch=prefetch)
    assert (settings.slots, settings.landings) == (vectors, vectors)


def test_an_optimizer_has_its_usual_learning_rate_unless_told() -> None:
    assert {name: optim(name).lr for name in LEARNING_RATES} == LEARNING_RATES
    assert optim("adam", lr=0.5, betas=(0.8, 0.9)) == Optimizer("adam", 0.5, {"betas": (0.8, 0.9)})
    with pytest.raises(UsageError, match="unknown optimizer 'adagrd'; did you mean 'adagrad'"):
        optim("adagrd")


def test_a_plan_counts_the_samples_of_all_epochs() -> None:
    layout = lay_out([Tensor("w", (3,), "float32")])
    assert Plan(Settings(epochs=4), layout, cut(layout, 1), samples=25).total_samples == 100


@given(st.sampled_from(sorted(learning_rate.SCHEDULES)), st.integers(1, 10**9))
def test_a_schedule_begins_at_the_base_rate_and_never_rises(name: str, total: int) -> None:
    learning_rate.check(name)
    steps = [learning_rate.factor(name, total * part // 40, total) for part in range(41)]
    assert steps[0] == 1.0
    assert all(0.0 <= b <= a <= 1.0 for a, b in pairwise(steps))
    assert learning_rate.factor(name, 5 * total, total) == steps[-1]


@pytest.mark.parametrize(
    ("name", "values"),
    [("constant", [1, 1, 1, 1]), ("linear", [0.75, 0.5, 0.25, 0]), ("cosine", [0.853553, 0.5, 0.146447, 0]), ("step", [1, 0.1, 0.01, 0.01])],
)
def test_a_schedule_is_what_its_name_says(name: str, values: list[float]) -> None:
    assert [learning_rate.factor(name, quarter, 4) for quarter in (1, 2, 3, 4)] == pytest.approx(values, abs=1e-6)


def test_a_schedule_needs_to_know_where_it_ends() -> None:
    with pytest.raises(UsageError, match="a schedule needs the samples of the whole job, got 0"):
        learning_rate.factor("linear", 0, 0)
