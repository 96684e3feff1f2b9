"""Settings and schedules: what no job can have is refused with the option, its value and the remedy."""

from __future__ import annotations

import ast
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made import made

import distbelief
from distbelief.core.optimizer import LAYERWISE, LEARNING_RATES, SCHEDULES, LearningRate, Optimizer, optim
from distbelief.core.settings import Plan, Settings, Traits, option
from distbelief.errors import UsageError
from distbelief.sharding.assignments import cut
from distbelief.sharding.layout import Tensor, lay_out
from distbelief.strategies import Strategy

NAN, INF = float("nan"), float("inf")
ROUNDS = {"strategy": "synchronous"}


def refused(settings: Settings) -> list[UsageError]:
    errors = []
    for check in (*settings.sizes(), *settings.checks(), *settings.checks_together(), settings.check_policy):
        try:
            check()
        except UsageError as error:
            errors.append(error)
    return errors


LAYOUT = lay_out([Tensor("w", (3,), "float32")])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        *[({name: 0}, f"{option(name)} 0: must be 1 or more") for name in
          ("replicas", "shards", "epochs", "batch_size", "push_every", "fetch_every", "keep_checkpoints")],
        *[({name: -1}, f"{option(name)} -1: must be 0 or more") for name in
          ("warm_start_steps", "checkpoint_every")],
        ({"evaluate_every": -1}, "--evaluate-every -1: is a number of epochs such as 2"),
        *[({name: -1.0}, f"{option(name)} -1.0: must be 0 or more") for name in
          ("clip_norm", "local_lr", "target_accuracy")],
        *[({name: bad}, f"{option(name)} {bad}: must be 0 or "
            "more") for name in ("clip_norm", "local_lr", "target_accuracy") for bad in (NAN, INF)],
        *[({name: 999999}, f"{option(name)} 999999: must be at most 65536") for name in ("replicas", "shards")],
        ({"target_accuracy": 97.5}, "--target-accuracy 97.5: is a fraction, from 0 to 1"),
        ({"target_accuracy": 0.9, "evaluate_every": 0}, "--target-accuracy needs evaluations: set --evaluate-every"),
        ({"local_lr": 0.1}, "--local-lr 0.1: the fetch after each step overwrites what it steps; set --fetch-every to "
            "2 or more"),
        ({"local_lr": 0.1, "prefetch": 1}, "--local-lr 0.1"),
        ({"prefetch": 2}, "--prefetch 2: is 0 or 1"),
        *[({name: 2**63}, f"{option(name)} {2**63}: does not fit into 64 "
            "bits") for name in ("replicas", "epochs", "batch_size", "seed")],
        ({"optimizer": Optimizer(lr=-0.1)}, "--lr -0.1: must be 0 or more, and finite"),
        ({"optimizer": Optimizer(lr=NAN)}, "--lr nan"),
        ({"optimizer": Optimizer(lr=INF)}, "--lr inf"),
        ({"lr_schedule": "cosin"}, "unknown learning-rate schedule 'cosin'; did you mean 'cosine'"),
        ({**ROUNDS, "lr_scaling": "linea", "base_batch": 4}, "unknown learning-rate scaling 'linea'; did you mean"),
        ({**ROUNDS, "lr_scaling": "linear"}, "--base-batch 0 with --lr-scaling linear: .* give both or neither"),
        ({**ROUNDS, "base_batch": 64}, "--base-batch 64 with --lr-scaling none: .* give both or neither"),
        ({**ROUNDS, "base_batch": -1, "lr_scaling": "sqrt"}, "--base-batch -1"),
        ({"warmup": "graduall", "warmup_epochs": 1.0}, "unknown warm-up 'graduall'; did you mean 'gradual'"),
        ({"warmup_epochs": 2.0}, "--warmup-epochs 2: must be from 0 to --epochs, which is 1"),
        ({"warmup_epochs": NAN}, "--warmup-epochs nan"),
        ({"warmup": "constant", "warmup_epochs": 1.0}, "--warmup constant keeps the rate of the base batch .* "
            "--base-batch and --lr-scaling"),
        ({"lr_power": 3.0}, "--lr-power 3.0: belongs to --lr-schedule polynomial, and this one is constant"),
        ({"lr_gamma": 0.5, "lr_schedule": "cosine"}, "--lr-gamma 0.5: belongs to --lr-schedule step"),
        ({"lr_steps": (3.0, 2.0), "lr_schedule": "step", "epochs": 9}, "--lr-steps .*: are epochs in rising order"),
        ({"lr_steps": (9.0,), "lr_schedule": "step", "epochs": 9}, "--lr-steps .* before --epochs, which is 9"),
        ({"lr_steps": (1.0, 3.0), "lr_schedule": "backoff", "epochs": 9}, "--lr-steps .* backoff needs the first only"),
        ({"lr_power": -1.0, "lr_schedule": "polynomial"}, "--lr-power -1.0: must be more than 0"),
        ({"optimizer": Optimizer(decay_exempt=True)}, "--decay-exempt leaves .* there is none: set --weight-decay"),
        *[({"optimizer": Optimizer(name), "strategy": kind}, f"--optimizer {name} needs the norms of whole layers, "
            ".* or --shards 1")
          for name in LAYERWISE for kind in ("downpour", "softsync", "bounded")],
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_no_job_can_have_are_refused(options: dict[str, Any], says: str) -> None:
    assert any(re.search(says, str(error)) for error in refused(made(**options)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefetch": 1},
        {"local_lr": 0.1, "fetch_every": 2},
        {"target_accuracy": 1.0},
        {"optimizer": Optimizer(lr=0.0)},
        {"warm_start_steps": 10**9},
    ],
    ids=str,
)
def test_settings_that_a_job_can_have_pass(options: dict[str, Any]) -> None:
    assert not refused(made(**options))


@pytest.mark.parametrize(("prefetch", "vectors"), [(0, 1), (1, 2)])
def test_prefetch_takes_a_second_vector_each_way(prefetch: int, vectors: int) -> None:
    assert made(prefetch=prefetch).slots == vectors


def test_an_optimizer_has_its_usual_learning_rate_unless_told() -> None:
    assert {name: optim(name).lr for name in LEARNING_RATES} == LEARNING_RATES
    assert optim("adam", lr=0.5, betas=(0.8, 0.9)) == Optimizer("adam", 0.5, {"betas": (0.8, 0.9)})
    with pytest.raises(UsageError, match="unknown optimizer 'adagrd'; did you mean 'adagrad'"):
        optim("adagrd")


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 10**9), st.integers(1, 100))
def test_a_schedule_begins_at_the_base_rate_and_never_rises(name: str, of_epoch: int, epochs: int) -> None:
    rate, total = LearningRate(lr_schedule=name), of_epoch * epochs
    steps = [rate.rate_factor(total * part // 40, of_epoch, epochs, 1) for part in range(41)]
    assert steps[0] == 1.0
    assert all(0.0 <= b <= a <= 1.0 for a, b in pairwise(steps))
    assert rate.rate_factor(5 * total, of_epoch, epochs, 1) == steps[-1]


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"lr_schedule": "constant"}, [1, 1, 1, 1]),
        ({"lr_schedule": "linear"}, [0.75, 0.5, 0.25, 0]),
        ({"lr_schedule": "cosine"}, [0.853553, 0.5, 0.146447, 0]),
        ({"lr_schedule": "polynomial"}, [0.5625, 0.25, 0.0625, 0]),
        ({"lr_schedule": "polynomial", "lr_power": 3.0}, [0.421875, 0.125, 0.015625, 0]),
        ({"lr_schedule": "step"}, [1, 0.1, 0.01, 0.01]),
        ({"lr_schedule": "step", "lr_gamma": 0.5}, [1, 0.5, 0.25, 0.25]),
        ({"lr_schedule": "step", "lr_steps": (1.0, 3.5)}, [0.1, 0.1, 0.1, 0.01]),
        ({"lr_schedule": "backoff"}, [0.37, 0.37, 0.37, 0.1369]),
        ({"lr_schedule": "backoff", "lr_gamma": 0.5}, [0.5, 0.5, 0.25, 0.25]),
        ({"lr_schedule": "backoff", "lr_gamma": 0.5, "lr_steps": (0.5,)}, [0.5, 0.25, 0.25, 0.125]),
        ({"lr_schedule": "backoff", "lr_gamma": 1.0}, [1, 1, 1, 1]),
        ({"warmup_epochs": 2.0}, [0.55, 1, 1, 1]),
        ({"warmup_epochs": 2.0, "lr_schedule": "linear"}, [0.55, 1, 0.5, 0]),
        ({"lr_scaling": "linear", "base_batch": 2}, [4, 4, 4, 4]),
        ({"lr_scaling": "sqrt", "base_batch": 2}, [2, 2, 2, 2]),
        ({"lr_scaling": "linear", "base_batch": 2, "warmup_epochs": 2.0}, [2.5, 4, 4, 4]),
        ({"lr_scaling": "linear", "base_batch": 2, "warmup_epochs": 2.0, "warmup": "constant"}, [1, 4, 4, 4]),
        ({"lr_scaling": "linear", "base_batch": 2, "warmup_epochs": 2.0, "lr_schedule": "linear"}, [2.5, 4, 2, 0]),
        (
            {"lr_scaling": "linear", "base_batch": 2, "warmup_epochs": 2.0, "lr_schedule": "step", "lr_steps": (3.0,)},
            [2.5, 4, 0.4, 0.4],
        ),
    ],
    ids=str,
)
def test_the_learning_rate_is_what_its_options_say(options: dict[str, Any], values: list[float]) -> None:
    """Four epochs, in updates of 8 samples."""
    settings = made("synchronous", replicas=1, batch_size=8, epochs=4, **options)
    assert not refused(settings)
    plan = Plan(settings, LAYOUT, cut(LAYOUT, 1, 1), samples=80)
    assert [plan.factor(quarter * 80) for quarter in (1, 2, 3, 4)] == pytest.approx(values, abs=1e-6)


def test_warm_up_adds_the_same_to_the_rate_with_every_update_from_the_base_rate_to_the_scaled_one() -> None:
    rounds: dict[str, Any] = {"strategy": "synchronous", "replicas": 4, "batch_size": 8, "push_every": 2, "epochs": 10}
    settings = made(**rounds, lr_scaling="linear", base_batch=16, warmup_epochs=5.0)
    plan = Plan(settings, LAYOUT, cut(LAYOUT, 1, 1), samples=64)
    factors = [plan.factor(update * 64) for update in range(8)]
    assert factors == pytest.approx([1, 1.6, 2.2, 2.8, 3.4, 4, 4, 4])


@pytest.mark.parametrize(
    ("options", "batch"),
    [
        ({"replicas": 1}, 8),
        ({"replicas": 4}, 8),
        ({"replicas": 4, "push_every": 2}, 16),
        ({"replicas": 4, "strategy": "hogwild"}, 8),
        ({"replicas": 5, "strategy": "softsync", "n": 2}, 16),
        ({"replicas": 2, "accumulate": 4, "strategy": "allreduce"}, 64),
        ({"replicas": 5, "backup_workers": 1, "push_every": 3, "strategy": "synchronous"}, 96),
    ],
    ids=str,
)
def test_a_rate_that_is_not_scaled_is_warmed_up_as_torchs_linear_lr_does(options: dict[str, Any], batch: int) -> None:
    """From one step above none, with the first update, by the same amount with every update, however large that is."""
    settings = made(batch_size=8, epochs=4, warmup_epochs=2.0, **options)
    plan, updates = Plan(settings, LAYOUT, cut(LAYOUT, 1, 1), samples=10 * batch), 20
    stepped = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule, theirs = torch.optim.lr_scheduler.LinearLR(stepped, start_factor=1 / updates, total_iters=updates - 1), []
    for _ in range(updates + 5):
        theirs.append(stepped.param_groups[0]["lr"])
        stepped.step()
        schedule.step()
    assert [plan.factor(update * batch) for update in range(updates + 5)] == pytest.approx(theirs)
    assert theirs[0] == 1 / 20


@given(st.floats(0.05, 1.0), st.floats(0.1, 5.0), st.integers(1, 40))
def test_back_off_has_phases_that_grow_as_the_rate_falls(gamma: float, first: float, epochs: int) -> None:
    """K updates, then K / gamma at gamma times the rate, and so on (Niu et al. 2011, section 4)."""
    rate = LearningRate(lr_schedule="backoff", lr_gamma=gamma, lr_steps=(first,))
    factor, stop, length = 1.0, first * 1000, first * 1000
    for sample in range(0, 1000 * epochs, 100):
        while sample > stop and length < 1e9:
            factor, length = factor * gamma, length / gamma
            stop += length
        if abs(sample - stop) > 1e-3 and abs(sample - stop + length) > 1e-3:
            assert rate.rate_factor(sample, 1000, epochs, 1) == pytest.approx(factor)


def test_the_global_batch_is_that_of_the_replicas_that_a_round_waits_for() -> None:
    rounds: dict[str, Any] = {
        "strategy": "synchronous",
        "replicas": 5,
        "backup_workers": 1,
        "batch_size": 8,
        "push_every": 3,
    }
    assert made(**rounds).global_batch == 96


def test_a_schedule_needs_to_know_where_it_ends() -> None:
    with pytest.raises(UsageError, match="a schedule needs the samples of an epoch, got 0"):
        LearningRate(lr_schedule="linear").rate_factor(0, 0, 1, 1)


def test_what_is_asked_of_a_strategy_is_a_short_table_and_each_of_it_has_users() -> None:
    """A user asks a strategy outside their room, or says something of its own there."""
    traits = [name for name in {**vars(Traits), **vars(Strategy)} if not name.startswith("_")]
    users: Counter[str] = Counter()
    package = Path(distbelief.__file__).parent
    for file in package.rglob("*.py"):
        inside = file.is_relative_to(package / "strategies")
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and not inside
                and ast.unparse(node.value).endswith(("strategy", "kind"))
            ):
                users[node.attr] += 1
            if isinstance(node, ast.ClassDef) and inside and node.name != "Strategy":
                users.update(one.name for one in node.body if isinstance(one, ast.FunctionDef))
                users.update(ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign))
    assert len(traits) <= 20
    assert not [name for name in traits if users[name] < 2]
