"""Scripts that train two models with an optimizer each: what they train, and what they are told that they may not."""

from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from torch import nn

from distbelief.core.optimizer import Optimizer
from distbelief.errors import UsageError
from distbelief.places.processes.local import Local
from distbelief.strategies import Bounded, Downpour, Softsync, Synchronous

SCRIPT = """
import torch, distbelief as db, jobs
from torch.nn.functional import softplus
import test_two_models as here

replica = db.join()
critic, maker = here.models()
{before}
of_critic = replica.optimizer(critic, optim={critic})
of_maker = replica.optimizer(maker, optim={maker})
seen = []
for real, _ in replica.batches(jobs.data(), 15):
    seen.append(real)
    {inside}
{after}
"""
STEP = "here.step(real, critic, maker, of_critic, of_maker)"
FIELDS = {"before": "", "critic": "None", "maker": "None", "inside": STEP, "after": ""}


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    net = [
        nn.Sequential(nn.Linear(8, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, out)) for out in (1, 8)
    ]
    return net[0], net[1]


def step(real: torch.Tensor, critic: nn.Module, maker: nn.Module, of_critic: Any, of_maker: Any) -> None:
    """What a plain script does with a minibatch."""
    made = maker(real.flip(0))
    of_critic.zero_grad()
    nn.functional.softplus(critic(made.detach()) - critic(real)).mean().backward()
    of_critic.step()
    of_maker.zero_grad()
    nn.functional.softplus(-critic(made)).mean().backward()
    of_maker.step()


def launch(folder: Path, strategy: Any, path: str = "auto", epochs: int = 2, **fields: str) -> Any:
    options = {name: fields.pop(name) for name in ("lr_schedule",) if name in fields}
    source = SCRIPT.format(**{**FIELDS, **fields})
    return jobs.launch(folder, source, strategy, on=Local(path=path), epochs=epochs, **options)


OPTIMIZERS = {
    "sgd": ("db.optim('sgd', lr=0.1)", "db.optim('sgd', lr=0.05)"),
    "adam": ("db.optim('adam', lr=0.01, betas=(0.5, 0.9))", "db.optim('adam', lr=0.003, weight_decay=0.1)"),
}


@pytest.mark.parametrize(
    ("strategy", "name"), [(Bounded, "sgd"), (Synchronous, "adam")], ids=["bounded", "synchronous"]
)
def test_one_replica_trains_two_models_as_the_plain_script(tmp_path: Path, strategy: Any, name: str) -> None:
    """Bit for bit with SGD, also what the step of one does to the running statistics of the other; Adam's kernel rounds
    by where an element lies in a vector.
    """
    after = f"torch.save(seen, {str(tmp_path / 'seen')!r})"
    critic, maker = OPTIMIZERS[name]
    result = launch(tmp_path, strategy(replicas=1, shards=3), critic=critic, maker=maker, after=after)
    assert (result["outcome"], result["steps"], result["pushes"]) == ("done", 44, 88)
    assert (result["models"], result["path"], result["staleness"]["max"]) == (2, "served", 0)
    pair = models()
    kind: Any = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]
    of_adam: list[Any] = [{"lr": 0.01, "betas": (0.5, 0.9)}, {"lr": 0.003, "weight_decay": 0.1}]
    options = of_adam if name == "adam" else [{"lr": 0.1}, {"lr": 0.05}]
    steppers = [kind(net.parameters(), fused=True, **own) for net, own in zip(pair, options, strict=True)]
    pushed: dict[str, torch.Tensor] = {}
    steppers[0].register_step_post_hook(
        lambda *_: pushed.update({f"0.{key}": value.clone() for key, value in pair[0].state_dict().items()})
    )
    for real in torch.load(tmp_path / "seen"):
        step(real, *pair, *steppers)
    expected = {**pushed, **{f"1.{key}": value for key, value in pair[1].state_dict().items()}}
    kept = jobs.weights(tmp_path / "run")
    assert kept.keys() == expected.keys()
    for key, value in expected.items():
        same = torch.equal(kept[key], value) if name == "sgd" else torch.allclose(kept[key], value, 1e-4, 1e-5)
        assert same, f"{key} differs by up to {(kept[key] - value).abs().max()}"


def test_two_replicas_train_two_models_in_epochs(tmp_path: Path) -> None:
    """Each as often as it likes; between epochs all have what the server has, and a rate of its own goes with each."""
    loop = "for real, _ in replica.batches(jobs.data(), 15):\n"
    script = SCRIPT.format(**FIELDS).replace(loop, f"for epoch in replica.epochs(2):\n    {loop}")
    script = script.replace("    seen.append(real)\n", "        seen.append(real)\n    ")
    script += "    of_maker.param_groups[0]['lr'] /= 2\n"
    result = jobs.launch(tmp_path, script, Synchronous(replicas=2, shards=2))
    assert (result["outcome"], result["steps"], result["pushes"], result["epochs"]) == ("done", 44, 88, 2)


@pytest.mark.parametrize(
    ("strategy", "leaves", "replicas", "steps"), [(Downpour, "replica.stop()", 1, 3), (Synchronous, "break", 2, 44)]
)
def test_a_minibatch_in_which_the_loop_is_left_is_done(
    tmp_path: Path, strategy: Any, leaves: str, replicas: int, steps: int
) -> None:
    """Both models were stepped in it: it is not dealt again, and nothing of it is pushed twice."""
    inside = f"{STEP}\n    if replica.index == 0 and len(seen) == 3: {leaves}"
    result = launch(tmp_path, strategy(replicas=replicas, shards=2), inside=inside)
    assert (result["outcome"], result["steps"], result["pushes"]) == ("done", steps, 2 * steps)


REFUSED: dict[str, tuple[Any, dict[str, str], str]] = {
    "an optimizer for one": (Downpour, {"critic": "db.optim('adam')"}, "for one model and not for another"),
    "a job's optimizer": (
        lambda **own: Downpour(optimizer=Optimizer("adam", 0.1), **own),
        dict(zip(("critic", "maker"), OPTIMIZERS["sgd"], strict=True)),
        "--optimizer adam --lr 0.1: the script names the optimizer of each",
    ),
    "softsync": (Softsync, {}, "strategy softsync: the script has several models"),
    "norms of layers": (
        lambda **own: Synchronous(optimizer=Optimizer("lars", 0.1), **own), {}, "--optimizer lars needs the norms"
    ),
    "other optimizers": (
        lambda **own: Downpour(**{**own, "replicas": 2}),
        # so many epochs that the first replica still trains when the second comes
        {"critic": "db.optim('sgd', lr=0.1 + replica.index)", "maker": "db.optim('sgd', lr=0.1)", "epochs": 10**5},
        "names other optimizers than the job has",
    ),
    "a schedule of the job": (
        Downpour, {"lr_schedule": "linear"}, "--lr-schedule and --warmup-epochs are for one optimizer"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_two_models_cannot_have_is_refused(tmp_path: Path, name: str) -> None:
    strategy, fields, says = REFUSED[name]
    with pytest.raises(UsageError, match=says):
        launch(tmp_path, strategy(replicas=1, shards=2), **fields)


TRIES = """
def refused(says, call, *given):
    try:
        call(*given)
    except db.UsageError as error:
        assert says in str(error), error
    else:
        raise AssertionError(f"nothing was refused: {says}")

def optimizer(model, optim):
    made = kept(model, optim=optim)
    if model is critic:
        refused("a model whose '0.weight' is '0.weight' of model 0", kept, critic)
        refused("a model whose '1.bias' is '1.bias' of model 0", kept, taken)
    return made

taken = here.models()[1]
taken[1].bias = critic[1].bias
kept, replica.optimizer = replica.optimizer, optimizer
"""


def test_what_a_script_of_two_models_may_not_is_refused_by_what_it_calls(tmp_path: Path) -> None:
    inside = f"{STEP}\n    refused('after the training has begun', kept, torch.nn.Linear(2, 2))"
    after = "refused('outside of a minibatch', of_maker.step)"
    result = launch(tmp_path, Downpour(replicas=1, shards=2), before=TRIES, inside=inside, after=after)
    assert (result["outcome"], result["steps"]) == ("done", 44)
