"""Scripts that train two models with an optimizer each: what they train, and what they are told that they may not."""

from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from distbelief.core.optimizer import Optimizer
from distbelief.errors import UsageError
from distbelief.places.processes.local import Local
from distbelief.strategies import Allreduce, Bounded, Downpour, Softsync, Synchronous

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


def launch(folder: Path, strategy: Any, path: str = "auto", **fields: str) -> Any:
    (folder / "script.py").write_text(SCRIPT.format(**{**FIELDS, **fields}))
    options = {name: fields.pop(name) for name in ("lr_schedule",) if name in fields}
    job = jobs.job(folder / "run", strategy, task="script", epochs=2, **options)
    return Local(path=path).launch(job, [str(folder / "script.py")])


OPTIMIZERS = {
    "sgd": ("db.optim('sgd', lr=0.1)", "db.optim('sgd', lr=0.05)"),
    "adam": ("db.optim('adam', lr=0.01, betas=(0.5, 0.9))", "db.optim('adam', lr=0.003, weight_decay=0.1)"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("strategy", [Downpour, Bounded, Synchronous])
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
    kept = load_file(tmp_path / "run" / "model.safetensors")
    assert kept.keys() == expected.keys()
    for key, value in expected.items():
        same = torch.equal(kept[key], value) if name == "sgd" else torch.allclose(kept[key], value, 1e-4, 1e-5)
        assert same, f"{key} differs by up to {(kept[key] - value).abs().max()}"


@pytest.mark.parametrize("strategy", [Downpour, Synchronous])
def test_two_replicas_train_two_models_in_epochs(tmp_path: Path, strategy: Any) -> None:
    """Each as often as it likes; between epochs all have what the server has, and a rate of its own goes with each."""
    loop = "for real, _ in replica.batches(jobs.data(), 15):\n"
    script = SCRIPT.format(**FIELDS).replace(loop, f"for epoch in replica.epochs(2):\n    {loop}")
    script = script.replace("    seen.append(real)\n", "        seen.append(real)\n    ")
    (tmp_path / "script.py").write_text(script + "    of_maker.param_groups[0]['lr'] /= 2\n")
    job = jobs.job(tmp_path / "run", strategy(replicas=2, shards=2), task="script")
    result = Local().launch(job, [str(tmp_path / "script.py")])
    assert (result["outcome"], result["steps"], result["pushes"], result["epochs"]) == ("done", 44, 88, 2)


LEFT = {"replica.stop()": (1, 3), "break": (2, 44)}


@pytest.mark.parametrize("leaves", LEFT)
@pytest.mark.parametrize("strategy", [Downpour, Synchronous])
def test_a_minibatch_in_which_the_loop_is_left_is_done(tmp_path: Path, strategy: Any, leaves: str) -> None:
    """Both models were stepped in it: it is not dealt again, and nothing of it is pushed twice."""
    replicas, steps = LEFT[leaves]
    inside = f"{STEP}\n    if replica.index == 0 and len(seen) == 3: {leaves}"
    result = launch(tmp_path, strategy(replicas=replicas, shards=2), inside=inside)
    assert (result["outcome"], result["steps"], result["pushes"]) == ("done", steps, 2 * steps)


REFUSED: dict[str, tuple[Any, dict[str, str], str]] = {
    "one model twice": (Downpour, {"before": "maker = critic"}, "a model whose '0.weight' is '0.weight' of model 0"),
    "a shared parameter": (
        Downpour, {"before": "maker[1].bias = critic[1].bias"}, "a model whose '1.bias' is '1.bias' of model 0"
    ),
    "an optimizer for one": (Downpour, {"critic": "db.optim('adam')"}, "of one model and not of another"),
    "too late": (Downpour, {"inside": "replica.optimizer(torch.nn.Linear(2, 2))"}, "after the training has begun"),
    "another strategy": (Allreduce, {}, "strategy allreduce trains one; use downpour, bounded or synchronous"),
    "a job's optimizer": (
        lambda **own: Downpour(optimizer=Optimizer("adam", 0.1), **own),
        dict(zip(("critic", "maker"), OPTIMIZERS["sgd"], strict=True)),
        "--optimizer adam --lr 0.1: the script names the optimizer of each",
    ),
    "a cadence": (lambda **own: Downpour(push_every=2, **own), {}, "--push-every: the script has several models"),
    "softsync": (Softsync, {}, "strategy softsync: the script has several models"),
    "backup workers": (
        lambda **own: Synchronous(backup_workers=1, **{**own, "replicas": 2}), {}, "--backup-workers: the script has"
    ),
    "a standby": (lambda **own: Downpour(standby=1, **own), {}, "--standby 1: the script has several models"),
    "norms of layers": (
        lambda **own: Synchronous(optimizer=Optimizer("lars", 0.1), **own), {}, "--optimizer lars needs the norms"
    ),
    "other orders": (
        lambda **own: Synchronous(**{**own, "replicas": 2}),
        {"inside": "(of_critic if replica.index else of_maker).zero_grad(); critic(maker(real)).sum().backward(); "
                   "(of_critic if replica.index else of_maker).step()"},
        r"round 0: replica \d steps model \d first in a minibatch, and replica \d steps model \d first",
    ),
    "other optimizers": (
        lambda **own: Downpour(**{**own, "replicas": 2}),
        {"critic": "db.optim('sgd', lr=0.1 + replica.index)", "maker": "db.optim('sgd', lr=0.1)"},
        "names other optimizers than the job has",
    ),
    "the direct path": (Downpour, {"path": "direct"}, "--path direct: the script has several models"),
    "two steps outside": (Downpour, {"after": "of_maker.step()"}, "outside of a minibatch"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_two_models_cannot_have_is_refused(tmp_path: Path, name: str) -> None:
    strategy, fields, says = REFUSED[name]
    own = {"replicas": 1} if name == "another strategy" else {"replicas": 1, "shards": 2}
    with pytest.raises(UsageError, match=says):
        launch(tmp_path, strategy(**own), **fields)


def test_a_schedule_of_the_job_is_of_one_optimizer(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--lr-schedule and --warmup-epochs are of one optimizer"):
        launch(tmp_path, Downpour(replicas=1), lr_schedule="linear")
