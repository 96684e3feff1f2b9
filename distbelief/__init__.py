"""Train deep networks on many machines: DistBelief on today's PyTorch.

Every name is imported at its first use, so that `import distbelief` costs nothing.

>>> import distbelief as db
>>> downpour = db.Downpour(replicas=2, shards=2, optimizer=db.optim("adagrad", lr=0.05))
>>> job = db.Job(task=db.tasks.digits(), strategy=downpour)
>>> db.run(job, on=db.Simulated())["samples"]  # on=db.Local(), the default, runs processes of this machine
1437
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distbelief import integrations, split, tasks
    from distbelief.core.optimizer import optim
    from distbelief.core.records import Json
    from distbelief.errors import CheckpointError, DataError, DistbeliefError, JobFailed, TrainingError, UsageError
    from distbelief.integrations.hook import Reduce, comm_hook
    from distbelief.job import Job
    from distbelief.lab.compress.compressing import compress, expand
    from distbelief.lab.compress.options import Compression
    from distbelief.lab.cost.options import PlanRequest
    from distbelief.lab.plan.plan import plan
    from distbelief.places.cluster.cluster import Cluster, Ray, Slurm
    from distbelief.places.compute_model import ComputeModel
    from distbelief.places.evaluate import evaluate
    from distbelief.places.join.own_process import join
    from distbelief.places.prediction.predict import predict
    from distbelief.places.processes.local import Local
    from distbelief.places.simulated.handling import INSTANT, Handling
    from distbelief.places.simulated.simulated import Simulated
    from distbelief.places.simulated.virtual_cluster import Crash, LeavingHost
    from distbelief.places.view import View
    from distbelief.split.options import Split
    from distbelief.strategies import (
        Allreduce,
        Bounded,
        Downpour,
        Hogwild,
        Locking,
        Sandblaster,
        Single,
        Softsync,
        Synchronous,
    )
    from distbelief.tasks import Task, TensorData
    from distbelief.tasks.inference import load
    from distbelief.transport.cluster_model import Hosts, NetworkModel, Outage

    __version__: str

_NAMES = {
    "places.processes.local": "Local",
    "places.cluster.cluster": "Cluster Ray Slurm",
    "places.simulated.simulated": "Simulated",
    "places.simulated.virtual_cluster": "Crash LeavingHost",
    "places.simulated.handling": "INSTANT Handling",
    "places.compute_model": "ComputeModel",
    "places.view": "View",
    "places.evaluate": "evaluate",
    "places.prediction.predict": "predict",
    "places.join.own_process": "join",
    "transport.cluster_model": "Hosts Outage NetworkModel",
    "integrations.hook": "Reduce comm_hook",
    "lab.compress.compressing": "compress expand",
    "lab.compress.options": "Compression",
    "lab.plan.plan": "plan",
    "lab.cost.options": "PlanRequest",
    "tasks.inference": "load",
    "tasks": "Task TensorData",
    "job": "Job",
    "strategies": "Allreduce Bounded Downpour Hogwild Locking Sandblaster Single Softsync Synchronous",
    "core.optimizer": "optim",
    "split.options": "Split",
    "errors": "CheckpointError DataError DistbeliefError JobFailed TrainingError UsageError",
}
"""Names that each module has."""
_PLACES = {name: module for module, names in _NAMES.items() for name in names.split()}

_NAMED = {"local": "Local", "simulated": "Simulated"}
"""Places that can be named."""

__all__ = [
    "Allreduce", "Bounded", "CheckpointError", "Cluster", "Compression", "Crash", "DataError", "DistbeliefError",
    "Downpour", "Handling", "Hogwild", "Hosts", "INSTANT", "Job", "JobFailed", "LeavingHost", "Local", "Locking",
    "Outage", "ComputeModel", "PlanRequest", "Ray", "Reduce", "Sandblaster", "Simulated", "Single", "Slurm", "Softsync",
    "Split", "Synchronous", "Task", "TensorData", "TrainingError", "UsageError", "View", "NetworkModel", "__version__",
    "comm_hook", "compress", "evaluate", "expand", "integrations", "join", "load", "optim", "plan", "predict", "run",
    "split", "tasks",
]  # fmt: skip


def run(job: Job, on: Local | Simulated | str = "local", view: View | None = None) -> Json:
    """Run a job to its end.

    Args:
        job: what to train, and how.
        on: the place: local (processes of this machine), simulated, or an object with other options.
        view: shows the job while it runs; None shows nothing.

    Returns:
        The content of `result.json`, and the run folder as `run`.

    Raises:
        UsageError: an argument is no job, place or view, or the job has a value that it cannot have.
        DistbeliefError: the job could not begin, or failed.

    >>> import distbelief as db
    >>> db.run(db.Job("digits", "synchronous", epochs=2), on="simulated")["samples"]
    2874
    """
    from distbelief.core.values import admit, shown
    from distbelief.errors import unknown
    from distbelief.places.processes.local import Local

    if isinstance(on, str) and on not in _NAMED:
        raise unknown("place", on, _NAMED)
    place = __getattr__(_NAMED[on])() if isinstance(on, str) else on
    if not isinstance(place, Local):
        from distbelief.places.simulated.simulated import Simulated

        admit(place, Local | Simulated | str, f"run(on={shown(place)})")
    return place.run(job, view)


def __getattr__(name: str) -> Any:
    if name in ("integrations", "split", "tasks"):
        return import_module(f"distbelief.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("distbelief")
    if name not in _PLACES:
        raise AttributeError(f"module 'distbelief' has no {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(f"distbelief.{_PLACES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
