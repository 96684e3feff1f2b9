"""What the jobs of these tests train, and how the tests watch them: `jobs:tiny` is a task like any user's own."""

import contextlib
import gc
import itertools
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeVar

import numpy
import torch
from safetensors.torch import load_file
from setproctitle import getproctitle
from torch import nn

from distbelief.core.conversations.grouping import Assemble
from distbelief.core.records import Applied, Checkpointed, Record
from distbelief.errors import DataError as DataError
from distbelief.fabric.process_group import ProcessGroup
from distbelief.fabric.role_links import RoleLinks
from distbelief.job import Job
from distbelief.places.attempt import Attempt
from distbelief.places.processes.local import Local
from distbelief.places.simulated.simulated import Simulated
from distbelief.replica import siblings
from distbelief.runtime.direct import DirectEndpoint, SharedShard
from distbelief.server.passed import PassedSlice
from distbelief.strategies import Downpour
from distbelief.tasks import Task, TensorData
from distbelief.tasks.on_disk import LARGE
from distbelief.transport.sockets import SocketEndpoint

SAMPLES, BATCH = 330, 16
"""21 minibatches an epoch; the last is smaller."""
COUNTERS = 1_000_000
"""Parameters of `jobs:counting`, and elements of its buffer, which lie behind them."""
Kind = TypeVar("Kind", bound=Record)
LONG = 30
"""Epochs in which there is time for a death."""
MANY = 100_000
"""Epochs of a job that something has to end."""
PLAIN = Simulated(keep=True)
"""The place of what processes are held against."""


def data(samples: int = SAMPLES) -> TensorData:
    inputs = torch.randn(samples, 8, generator=torch.Generator().manual_seed(7))
    return TensorData(inputs, (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long())


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def tiny() -> Task:
    return Task(model=net, train=data, test=lambda: data(100))


class _FromAfar(TensorData):
    """Loads a minibatch in much more time than its step takes."""

    def batch(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sleep(0.02)
        return super().batch(numbers)


def starved() -> Task:
    return Task(model=net, train=lambda: _FromAfar(data().inputs, data().targets))


def wrongly_split() -> Task:
    return Task(model=net, train=data, split="0=stagse")


def split_as_another() -> Task:
    return Task(model=net, train=data, split="encoder=stages")


def in_partitions() -> Task:
    """Whose model can be built in a process only that has what torch traces with, before it has traced anything."""

    def model() -> nn.Module:
        if "torch._dynamo" not in sys.modules and multiprocessing.parent_process() is not None:
            raise RuntimeError("torch._dynamo has not been imported")
        return net()

    return Task(model=model, train=data)


def tallied() -> Task:
    """Whose parameters say which minibatches are in them, of a job of `LONG` epochs."""
    import tally  # which is not on the path of every process that reads this file

    return tally.tallied(tiny(), BATCH, LONG)


def wide() -> Task:
    """With layers large enough that they lie in files until a partition takes its own."""

    def model() -> nn.Module:
        sizes = itertools.pairwise((8, 600, 700, 800, 4))
        return nn.Sequential(*(part for one in sizes for part in (nn.Linear(*one), nn.Tanh())))

    return Task(model=model, train=data)


class Mapped(nn.Sequential):
    """Layers that are evaluated only where all that is large of them lies in memory that others map, or in files."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        large = [] if self.training else [one.data_ptr() for one in self.parameters() if one.nbytes >= LARGE]
        shared = [
            range(*(int(end, 16) for end in line.split()[0].split("-")))
            for line in Path("/proc/self/maps").read_text().splitlines()
            if large and line.split()[1].endswith("s")
        ]
        if not all(any(address in one for one in shared) for address in large):
            raise RuntimeError("what is evaluated is in memory of its own")
        return super().forward(value)


def wide_and_mapped() -> Task:
    """The same, with a test set; it cannot be evaluated in memory of a process's own."""
    return Task(model=lambda: Mapped(*wide().model()), train=data, test=data)


def of_an_array() -> Task:
    """With a large layer that no operation of torch has made."""

    def model() -> nn.Module:
        made = nn.Linear(600, 600)
        made.weight = nn.Parameter(torch.from_numpy(numpy.eye(600, dtype="float32")))
        return nn.Sequential(nn.Linear(8, 600), made, nn.Linear(600, 4))

    return Task(model=model, train=data)


def dropped() -> Task:
    return Task(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4)), train=data
    )


class _Steady(nn.Module):
    """Computes for as long as it takes, and refuses parameters that change meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        before = [parameter.detach().clone() for parameter in self.parameters()]
        outputs: list[torch.Tensor] = [self.body(inputs) for _ in range(20)]
        if not all(map(torch.equal, before, self.parameters())):
            raise ValueError("a parameter has changed under a forward pass")
        return outputs[-1]


def steady() -> Task:
    return Task(model=_Steady, train=data)


class _Clamped(nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self[1].weight.clamp_(-0.3, 0.3)
        return super().forward(inputs)


class _ClampedPastAutograd(nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self[1].weight.data.clamp_(-0.3, 0.3)
        return super().forward(inputs)


def clamped() -> Task:
    return Task(model=lambda: _Clamped(nn.Tanh(), nn.Linear(8, 16), nn.Linear(16, 4)), train=data)


def clamped_past_autograd() -> Task:
    return Task(model=lambda: _ClampedPastAutograd(nn.Tanh(), nn.Linear(8, 16), nn.Linear(16, 4)), train=data)


class _Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(2, 8, max_norm=0.5), nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(inputs + self.rows((inputs[:, 0] > 0).long()))
        return output


def renormed() -> Task:
    return Task(model=_Renormed, train=data)


class _Fading(nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self[0].weight.mul_(0.9)
        return super().forward(inputs)


def partly_frozen() -> Task:
    """Each forward pass changes a parameter that is not trained."""

    def model() -> nn.Module:
        made = _Fading(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        made[0].requires_grad_(False)
        return made

    return Task(model=model, train=data)


class _Stubborn(nn.Module):
    """The third step of the first process that comes to it lasts until the pipe `PIPE` was opened and closed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.steps = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps == 3:
            with contextlib.suppress(FileExistsError):
                Path(os.environ["PIPE"] + ".who").symlink_to(getproctitle())
                Path(os.environ["PIPE"]).read_bytes()
        return self.linear(inputs)  # type: ignore[no-any-return]


def _talking() -> nn.Module:
    print(f"this is {os.environ['HOST_NAMED']}")
    return net()


def talking() -> Task:
    """Says on which host its model is made."""
    return Task(model=_talking, train=data)


def _absent_on_b() -> TensorData:
    if os.environ.get("HOST_NAMED") == "b":
        raise DataError("no data in /data")
    return data()


def absent() -> Task:
    """Whose data are on every host but b."""
    return Task(model=net, train=_absent_on_b)


def stubborn() -> Task:
    return Task(model=_Stubborn, train=data)


def job(out: object, strategy: object = None, task: str = "jobs:tiny", **options: object) -> Job:
    """A small job in the folder `out`."""
    return Job(task=task, strategy=strategy or Downpour(), out=str(out), **{"batch_size": BATCH, **options})  # type: ignore[arg-type]


def run(out: object, strategy: object = None, on: Any = None, **options: object) -> dict[str, object]:
    """Run a small job on processes of this machine."""
    return (on or Local()).run(job(out, strategy, **options))


def launch(
    folder: Path, source: str, strategy: object = None, *words: str, on: Local | None = None, **options: object
) -> dict[str, object]:
    """Launch a script of this source, with words of its own."""
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(source)
    return (on or Local()).launch(job(folder / "run", strategy, task="script", **options), [str(script), *words])


def weights(out: object) -> dict[str, torch.Tensor]:
    """The model that a run has ended with."""
    return load_file(Path(str(out)) / "model.safetensors")


def same(one: object, other: object) -> bool:
    """Whether two runs have ended with the same bits."""
    ours, theirs = weights(one), weights(other)
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def assert_close(one: object, other: object, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Two runs have ended with the same model, but for rounding."""
    torch.testing.assert_close(weights(one), weights(other), rtol=rtol, atol=atol)


def environment(**more: str) -> dict[str, str]:
    """In which a command finds the tasks of this file."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]), **more}


def process_of(role: str) -> int:
    """The process id of a role; 0 where it is not there."""
    return next((one.pid for one in multiprocessing.active_children() if one.name == role and one.pid), 0)


def kill(role: str, how: signal.Signals = signal.SIGKILL) -> int:
    """Signal the process of a role, if it is there; returns its process id, or 0."""
    if process := process_of(role):
        with contextlib.suppress(ProcessLookupError):  # it was killed before, and has just been waited for
            os.kill(process, how)
            return process
    return 0


def descendants(process: int) -> dict[int, str]:
    """Every process below one, with its command line."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
    found: dict[int, str] = {}
    below = {process}
    while below:
        below = {pid for pid, parent in parents.items() if parent in below}
        found |= {pid: _title(pid) for pid in below}
    return found


def is_dead(pid: int) -> bool:
    """Whether a process has ended, or was never there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def processes_in(folder: Path) -> dict[int, str]:
    """The processes of this machine whose working directory is a folder, and what they are called."""
    found = {}
    for one in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(one / "cwd") == str(folder) and not is_dead(int(one.name)):
                found[int(one.name)] = _title(int(one.name))
    return found


def wait_until(reached: Callable[[], object]) -> None:
    """Within the seconds that anything may take."""
    from patience import SECONDS  # which is not on the path of every process that reads this file

    end = monotonic() + SECONDS
    while not reached():
        assert monotonic() < end
        sleep(0.01)


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


class Watch:
    """Calls a function with every record that the supervisor hears."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._record = Attempt.record
        self.interrupted = False
        self.rest()

    def rest(self) -> None:
        """Do nothing from here on."""
        self.act: Callable[[Record], object] = bool

    def take(self, attempt: Attempt, moment: float, role: str, record: Record) -> None:
        """Stand in for `Attempt.record`."""
        self._record(attempt, moment, role, record)
        self.records.append(record)
        self.act(record)

    def interrupt(self) -> None:
        """Ctrl-C for the job, once."""
        if not self.interrupted:
            self.interrupted = True
            os.kill(os.getpid(), signal.SIGINT)

    def of(self, kind: type[Kind]) -> list[Kind]:
        """The records of a kind."""
        return [record for record in self.records if isinstance(record, kind)]

    def accounts(self) -> list[Applied]:
        """The last account of each shard: it gives one every two seconds."""
        return [*{record.role: record for record in self.of(Applied)}.values()]

    def once(
        self, kind: type[Record], act: Callable[[], object], after: int = 0, role: str = "", kept: bool = False
    ) -> None:
        """Act at the record number `after` (from 0) of a kind, of a role where one is named, and `kept`: that comes
        when there is a checkpoint.
        """
        seen = 0

        def look(record: Record) -> None:
            nonlocal seen
            if (
                isinstance(record, kind)
                and role in ("", getattr(record, "role", ""))
                and (not kept or self.of(Checkpointed))
            ):
                seen += 1
                if seen == after + 1:
                    act()

        self.act = look


def low() -> Task:
    return Task(model=lambda: net().bfloat16(), train=data)


def placed() -> Task:
    """Can be made only where the folder and the environment are the test's."""
    if os.environ["JOBS_FOLDER"] != os.getcwd():
        raise FileNotFoundError(f"this is {os.getcwd()}, not {os.environ['JOBS_FOLDER']}")
    return tiny()


class _Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5000, 4, sparse=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.rows(inputs).sum(1)  # type: ignore[no-any-return]


def bags() -> Task:
    """Gradients of a few rows out of many."""

    def some(samples: int = SAMPLES) -> TensorData:
        chance = torch.Generator().manual_seed(3)
        rows, classes = (
            torch.randint(0, most, shape, generator=chance) for most, shape in ((5000, (SAMPLES, 6)), (4, (SAMPLES,)))
        )
        return TensorData(rows[:samples], classes[:samples])

    return Task(model=_Bag, train=some, test=lambda: some(50))


class _Counter(nn.Module):
    """Its parameters begin at 0, every gradient of them is 1, and its buffer is one number, of its minibatch."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(COUNTERS))
        self.register_buffer("seen", torch.zeros(COUNTERS))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.fill_(float(inputs.sum()))
        return self.count.sum()


def counting() -> Task:
    """With a learning rate of 1, minus a parameter is the number of updates that were not lost."""
    return Task(model=_Counter, train=data, loss=lambda output, _: output)


class Once(nn.Module):
    """A parameter for each sample, whose gradient is 1 where the sample is in the minibatch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.count[inputs].sum()


def once() -> Task:
    """With SGD and a learning rate of 1, minus a parameter is how often its sample was trained."""
    every = TensorData(torch.arange(SAMPLES), torch.zeros(SAMPLES, dtype=torch.long))
    return Task(model=Once, train=lambda: every, loss=lambda output, _: output)


def unmeasured() -> Task:
    """Who measures it ends, as if that were all that there is to do."""
    return Task(model=net, train=data, test=lambda: data(100), metric=lambda *_: os._exit(0))


def times_trained(out: object) -> list[int]:
    """How often each sample was trained in a run of that task."""
    counts: list[int] = weights(out)["count"].neg().int().tolist()
    return counts


class _Threaded(nn.Module):
    """Computes with as many threads as `THREADS` says, or not at all."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert torch.get_num_threads() == int(os.environ["THREADS"])
        return inputs


def particular(data_dir: str | None = None) -> Task:
    """Trains only in its folder, with its threads."""
    if data_dir != os.environ["JOBS_FOLDER"]:
        raise FileNotFoundError(f"the folder is {data_dir}, not {os.environ['JOBS_FOLDER']}")
    return Task(model=lambda: nn.Sequential(_Threaded(), net()), train=data, test=lambda: data(100))


def without_process_groups() -> Task:
    """None can be made."""

    def refuse(*_: object) -> None:
        raise RuntimeError("torch.distributed sends in the clear")

    ProcessGroup.__init__ = refuse  # type: ignore[method-assign,assignment]
    return tiny()


def stops_amid() -> Task:
    """That of `once`; replica 1 stops in the third update that it makes in memory, with the lock, behind that step
    of it which `AMID` names. Once: then there is the file `CAUGHT`.
    """
    step, calls = getattr(PassedSlice, os.environ["AMID"]), itertools.count(1)

    def last(*args: object) -> None:
        step(*args)
        if next(calls) == 3:
            with contextlib.suppress(FileExistsError):
                Path(os.environ["CAUGHT"]).touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGSTOP)

    if getproctitle().endswith("replica 1"):
        setattr(PassedSlice, os.environ["AMID"], last)
    return once()


STEPS_OF_A_TURN: tuple[tuple[type, str], ...] = (
    (DirectEndpoint, "send"), (SharedShard, "take"), (PassedSlice, "apply"), (PassedSlice, "_write_note"),
    (PassedSlice, "_point_to"), (DirectEndpoint, "_land"), (SharedShard, "give"), (DirectEndpoint, "poll"),
)  # fmt: skip
"""What a replica does on the direct path for a push and a fetch."""
CALM_PUSHES = 30
"""Of a replica, at most, until it kills a shard again."""


def kills_shards() -> Task:
    """That of `once`; replicas kill a shard now and then, before or behind a step of a push or a fetch, by the chance
    of `CHANCE`, and write down in the file `KILLED` where.
    """
    role = getproctitle()
    chance = random.Random(f"{os.environ['CHANCE']} {role}")
    calm, moment = CALM_PUSHES, 0

    def strikes(where: str) -> None:
        nonlocal calm, moment
        calm -= where == "before apply"
        moment -= calm <= 0
        if moment >= 0:
            return
        shards = [pid for pid, title in descendants(os.getppid()).items() if "distbelief: shard" in title]
        for shard in chance.sample(shards, min(1, len(shards))):
            with contextlib.suppress(ProcessLookupError), Path(os.environ["KILLED"]).open("a") as file:
                os.kill(shard, signal.SIGKILL)
                file.write(where + "\n")
        calm, moment = chance.randint(1, CALM_PUSHES), chance.randint(0, 4 * len(STEPS_OF_A_TURN))

    def struck(step: Callable[..., object], name: str) -> Callable[..., object]:
        def strike(*args: object) -> object:
            strikes(f"before {name}")
            answer = step(*args)
            strikes(f"behind {name}")
            return answer

        return strike

    if "replica" in role:
        for owner, name in STEPS_OF_A_TURN:
            setattr(owner, name, struck(getattr(owner, name), name))
    return once()


def _dying(form: Callable[..., bool]) -> Callable[..., bool]:
    def die(self: object, group: Assemble, told: Callable[[], bool]) -> bool:
        for member in group.members:
            if (
                member.role == "replica 1"
                and getproctitle().endswith(member.role)
                and member.place.incarnation in (1, 2)
            ):
                os.kill(os.getpid(), signal.SIGKILL)
        return form(self, group, told)

    return die


def dies_as_it_meets() -> Task:
    """Replica 1 dies in its second and third life as it is about to meet the others of its group."""
    for kind in (ProcessGroup, RoleLinks):
        kind.form = _dying(kind.form)  # type: ignore[method-assign]
    return tiny()


def _pictures(samples: int = SAMPLES) -> TensorData:
    inputs = torch.randn(samples, 64, generator=torch.Generator().manual_seed(7))
    return TensorData(inputs, (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long())


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.ReLU(), nn.Flatten(), nn.Linear(256, 4),
    )  # fmt: skip


def pictured() -> Task:
    """Of images of 8 x 8 pixels, with a convolution in two groups."""
    return Task(model=_convolutional, train=_pictures)


class _Paths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(8, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(12, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.head(torch.cat([self.left(inputs), self.right(inputs)], 1))
        return answer


def branching() -> Task:
    """With two paths beside each other."""
    return Task(model=_Paths, train=data)


class _Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(1, 6, num_layers=2, batch_first=True), nn.Linear(6, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.head(self.gru(inputs.unsqueeze(2))[0][:, -1])
        return answer


def recurrent() -> Task:
    """Two recurrent layers over the inputs, one after the other."""
    return Task(model=_Rows, train=data)


class _Parting:
    """The first life of partition 1 of replica 0 closes its link to partition 0 at a minibatch, while both live."""

    def __init__(self) -> None:
        self._data, self._asked = data(), itertools.count()

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mark = Path(os.environ["PARTED"])
        if getproctitle().strip().endswith("replica 0.1") and next(self._asked) == 5 and not mark.exists():
            mark.touch()
            [endpoint] = [one for one in gc.get_objects() if isinstance(one, SocketEndpoint)]
            endpoint.drop("replica 0.0", "it was cut")
        return self._data.batch(indices)


def parting() -> Task:
    siblings.PARTED_SECONDS = 0.5
    return Task(model=net, train=_Parting)
