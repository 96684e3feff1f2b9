"""What a script keeps (`replica.keep()`), and where its epochs begin, on the inline transport."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain.scripts import SCHEDULERS
from torch import nn
from torch.optim import lr_scheduler

from distbelief.core.conversations.membership import JobReached
from distbelief.core.effects import SCRIPT, Arrival
from distbelief.errors import CheckpointError, UsageError
from distbelief.record import checkpoints
from distbelief.runtime import kept as keeping
from distbelief.runtime import script_story
from distbelief.runtime.driver import Driver
from distbelief.runtime.kept import KeptObjects, KeptState, kept_of, packed, unpacked
from distbelief.runtime.loop import Replica
from distbelief.runtime.player import PlayedRole, Worker
from distbelief.runtime.script_story import ScriptStage
from distbelief.transport.inline import Inline

CPU = torch.device("cpu")


def optimizer(rate: float = 0.1, momentum: float = 0.0) -> Any:
    """One of a script, as far as schedulers and checkpoints see it."""
    made: Any = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=rate, momentum=momentum)
    made.first_options = [{name: one for name, one in made.param_groups[0].items() if name not in ("params", "lr")}]
    return made


def saved(objects: KeptObjects, epoch: int = 3, *optimizers: Any) -> KeptState:
    """What a checkpoint has of it."""
    state = kept_of(objects.part(epoch, optimizers), "000001")
    assert state is not None
    return state


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning", "ignore:The epoch parameter:UserWarning")
def test_every_scheduler_goes_on_with_the_rates_that_it_would_have_set(name: str) -> None:
    def step(scheduler: Any, own: Any) -> float:
        scheduler.step(*((1.0,) if name == "ReduceLROnPlateau" else ()))
        return float(own.param_groups[0]["lr"])

    whole = optimizer()
    scheduler = SCHEDULERS[name](whole)
    first = KeptObjects(CPU)
    first.keep({"scheduler": scheduler}, None)
    rates = [step(scheduler, whole) for _ in range(5)]
    state = saved(first, 5, whole)
    rates += [step(scheduler, whole) for _ in range(5)]
    again = optimizer()
    scheduler = SCHEDULERS[name](again)
    second = KeptObjects(CPU)
    second.keep({"scheduler": scheduler}, state)
    second.load_options([again], state)
    assert [step(scheduler, again) for _ in range(5)] == rates[5:]


@pytest.mark.parametrize("changed", [0.5, 0.9])
def test_what_else_a_script_has_changed_goes_on_and_not_what_a_scheduler_writes_as_it_is_made(changed: float) -> None:
    first, again = (optimizer(momentum=0.9) for _ in range(2))
    first.param_groups[0]["momentum"] = changed
    state = saved(KeptObjects(CPU), 5, first)
    again.param_groups[0]["momentum"] = 0.95
    KeptObjects(CPU).load_options([again], state)
    assert again.param_groups[0]["momentum"] == changed


def test_values_come_back_as_they_were() -> None:
    values = {
        "none": None, "flag": True, "number": 1 << 63, "less": -(1 << 63), "rate": math.inf, "word": "é",
        "raw": b"\0\1",
        "nested": [(1, [2.5, None]), {"a": (), 3: {("b", 1): [True]}}, []],
    }  # fmt: skip
    tensors = [
        torch.arange(6).reshape(2, 3).t(), torch.tensor(1.5, dtype=torch.bfloat16), torch.zeros(0, 3),
        torch.ones(2) > 0, torch.tensor([1 + 2j]), nn.Parameter(torch.ones(2)),
    ]  # fmt: skip
    objects = KeptObjects(CPU)
    space = objects.keep({**values, "tensors": tensors, "nan": 0.0}, None)
    space.nan = math.nan
    again = KeptObjects(CPU).keep(dict.fromkeys((*values, "tensors", "nan"), 0), saved(objects))
    assert {name: getattr(again, name) for name in values} == values
    assert math.isnan(again.nan)
    for one, other in zip(tensors, again.tensors, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert torch.equal(one, other)


class Foreign:
    """Of which nobody knows what is to be kept."""


def endless() -> list[object]:
    """A list that is in itself."""
    value: list[object] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Foreign(), r"best is <.*>, of type Foreign"),
        ([1, {"a": {2}}], r"best\[1\]\['a'\] is \{2\}, of type set"),
        (1 << 64, r"best is 18446744073709551616, of type int"),
        (torch.eye(2).to_sparse(), r"best is .*, of type Tensor"),
        (lambda: 1, r"best is <function .*, of type function"),
        (endless(), r"best is nested too deeply"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_by_name(value: object, says: str) -> None:
    objects = KeptObjects(CPU)
    with pytest.raises(UsageError, match=rf"^keep\(\): {says}"):
        objects.keep({"best": value}, None)
    space = KeptObjects(CPU)
    values = space.keep({"best": 1.0}, None)
    values.best = value
    with pytest.raises(UsageError, match=rf"^keep\(\): {says}"):
        saved(space)


def test_a_name_is_kept_once_and_goes_on_with_the_same_names() -> None:
    objects = KeptObjects(CPU)
    values = objects.keep({"best": 1.0, "scaler": torch.amp.GradScaler("cpu")}, None)
    with pytest.raises(UsageError, match=r"keep\(best=...\) a second time"):
        objects.keep({"best": 2.0}, None)
    with pytest.raises(UsageError, match=r"^worst = 3: keep\(\) has best: pass it there too"):
        values.worst = 3
    state = saved(objects)
    with pytest.raises(UsageError, match=r"keep\(worst=...\): the run has kept scaler, best, .* no such value"):
        KeptObjects(CPU).keep({"worst": 1}, state)
    with pytest.raises(UsageError, match=r"keep\(best=...\): the run has kept scaler, best, .* no such object"):
        KeptObjects(CPU).keep({"best": torch.amp.GradScaler("cpu")}, state)
    fewer = KeptObjects(CPU)
    fewer.keep({"best": 0.0}, state)
    with pytest.raises(UsageError, match="the run has kept 'scaler', but the script does not"):
        fewer.check_names(state)
    with pytest.raises(UsageError, match=r"keep\(scaler=...\): the object does not accept the state .*KeyError"):
        KeptObjects(CPU).keep({"scaler": lr_scheduler.ChainedScheduler([SCHEDULERS["StepLR"](optimizer())])}, state)


def test_more_than_may_be_kept_is_refused_with_the_name_of_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "SCRIPT_LIMIT", 1000)
    objects = KeptObjects(CPU)
    objects.keep({"small": b"", "large": torch.zeros(100), "most": torch.zeros(200)}, None)
    with pytest.raises(UsageError, match=r"^keep\(\): 1,\d\d\d bytes, of which most has 8\d\d; the limit is 1,000"):
        saved(objects)


def test_what_is_no_state_of_a_script_is_refused() -> None:
    with pytest.raises(CheckpointError, match="the script's part of 000001 cannot be read"):
        kept_of({SCRIPT: torch.zeros(3, dtype=torch.uint8)}, "000001")


# where a script begins


class Clock:
    """Takes a turn by delivering a message."""

    def __init__(self, network: Inline) -> None:
        self._network = network

    def now(self) -> float:
        return 0.0

    def turn(self) -> None:
        assert self._network.step()


def replica(*reached: JobReached, role: str = "replica 0") -> Replica:
    """One that is told where its job is, as often as it asks."""
    network, answers = Inline(), list(reached)
    coordinator = network.endpoint("coordinator")

    def answer(arrival: Arrival) -> None:
        coordinator.send(arrival.sender, answers.pop(0))

    coordinator.deliver = answer
    clock: Any = Clock(network)
    nobody: Any = SimpleNamespace(script=None)
    return Replica(
        role, ScriptStage(Driver(clock, nobody), network.endpoint(role), lambda _: PlayedRole(nobody, Worker()))
    )


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The newest of a job whose script keeps how many epochs it has done, and a scheduler."""
    own = optimizer()
    objects = KeptObjects(CPU)
    objects.keep({"done": 3, "scheduler": SCHEDULERS["StepLR"](own)}, None)
    part = objects.part(3, [own])

    def load_script(path: str) -> dict[str, torch.Tensor]:
        if path != str(tmp_path):
            raise CheckpointError("it is not there")
        return part

    monkeypatch.setattr(script_story, "load_script", load_script)
    return str(tmp_path)


@pytest.mark.parametrize(("epoch", "begins"), [(0, 0), (4, 4), (6, 5)])
def test_epochs_begin_where_the_job_is_and_the_last_is_gone_through_in_any_case(epoch: int, begins: int) -> None:
    assert list(replica(JobReached(epoch, "", False)).epochs(6)) == [*range(begins, 6)]


def test_what_is_kept_goes_on_with_its_own_epoch(checkpoint: str) -> None:
    one = replica(JobReached(5, checkpoint, True))
    own = one.optimizer(nn.Linear(2, 2))
    values = one.keep(done=0, scheduler=SCHEDULERS["StepLR"](own))
    assert (values.done, list(one.epochs(6))) == (3, [3, 4, 5])
    assert list(replica(JobReached(5, checkpoint, True)).epochs(6)) == [5], "nothing is kept"


def test_a_checkpoint_that_is_gone_is_asked_for_again_and_a_guest_has_none(checkpoint: str) -> None:
    one = replica(JobReached(2, f"{checkpoint}/gone", True), JobReached(5, checkpoint, True))
    assert one.keep(done=0, scheduler=SCHEDULERS["StepLR"](optimizer())).done == 3
    gone = JobReached(2, f"{checkpoint}/gone", True)
    assert list(replica(gone, gone).epochs(6)) == [2, 3, 4, 5], "nobody makes another"
    guest = replica(JobReached(5, checkpoint, True), role="replica 7")
    assert (guest.keep(done=0).done, list(guest.epochs(6))) == (0, [5])


def test_keep_comes_before_the_loop_and_takes_no_model_and_no_optimizer() -> None:
    one, model = replica(JobReached(0, "", False)), nn.Linear(2, 2)
    own = one.optimizer(model)
    with pytest.raises(UsageError, match=r"keep\(net=...\) of the model that is trained"):
        one.keep(net=model)
    with pytest.raises(
        UsageError, match=r"keep\(own=...\) of an optimizer: the shards and their checkpoints have its state"
    ):
        one.keep(own=own)
    next(iter(one.epochs(2)))
    with pytest.raises(UsageError, match=r"keep\(\) after the loop has begun"):
        one.keep(best=1)


def test_a_strategy_that_saves_nothing_of_a_script_says_so() -> None:
    one = replica(JobReached(0, "", False))
    one.optimizer(nn.Linear(2, 2))
    one.keep(best=1)
    with pytest.raises(UsageError, match=r"^keep\(\): strategy .*saves nothing of a script"):
        next(iter(one.batches((torch.zeros(4, 2),), 2)))


@pytest.mark.parametrize("name", ["StepLR", "ReduceLROnPlateau"])
def test_a_scheduler_that_was_not_kept_is_told_once_at_a_resume(name: str) -> None:
    def told(resumed: bool, role: str = "replica 0", **kept: object) -> list[str]:
        one = replica(JobReached(1, "", resumed), role=role)
        own = one.optimizer(nn.Linear(2, 2))
        scheduler = SCHEDULERS[name](own)
        one.keep(**dict.fromkeys(kept, scheduler))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            one._script.check(one._optimizers)
        assert scheduler.optimizer is own
        return [str(one.message) for one in caught]

    assert [line.split()[0] for line in told(True)] == [type(SCHEDULERS[name](optimizer())).__name__]
    assert (told(False), told(True, "replica 1"), told(True, scheduler=True)) == ([], [], [])


def test_a_pack_is_of_plain_types() -> None:
    assert packed(torch.ones(2), "it")[0] == "tensor"
    assert unpacked(packed({"a": (1, [b""])}, "it"), CPU) == {"a": (1, [b""])}
    assert checkpoints.SCRIPT_LIMIT == 16 << 20
