"""A communication hook: PyTorch's DistributedDataParallel adds up its gradients by our schedules."""

# no `from __future__ import annotations`: DDP compares the annotations of a hook with classes

import traceback
import weakref
from zlib import crc32

import torch
import torch.distributed as dist

from distbelief.core.values import admit, shown
from distbelief.errors import JobFailed, UsageError
from distbelief.fabric.choosing import ScheduleChoice
from distbelief.fabric.lines import Lines
from distbelief.fabric.thread import ReductionThread
from distbelief.integrations.window import Window, open_window
from distbelief.schedules.allreduce import PLACED, check_algorithm, check_hosts
from distbelief.schedules.schedule import Schedule

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""Libraries that send and receive tensors, by the kind of device."""


class Reduce:
    """Way in which DDP's gradients are added up: the state of `comm_hook`, one for all models of a process.

    It may be made before `init_process_group`. At the first backward pass, which all ranks make at the same place in
    the script, it makes a process group of its own, so that what it sends never meets what the script sends. Processes
    of one host that can share memory need send nothing; with auto they do so, and all others measure their lines then,
    and agree.

    Args:
        algorithm: shared (through shared memory, on one host), ring, butterfly, halving-doubling, tree, naive, direct,
            hierarchical (hierarchical:tree: with tree between hosts), native (gloo's or NCCL's own), or auto: shared
            where that can be, else the cheapest for each bucket's length by what is measured.
        per_host: ranks that follow each other on one host, for hierarchical and for auto; 0 for all.
        group: of the ranks of the model, and used for nothing else, where these are not all:
            `torch.distributed.new_group(ranks)`.

    Raises:
        UsageError: an unknown algorithm, with the nearest known one; a `per_host` that is negative, or that it does not
            ask for; a group that this process is not in. At the first backward pass: no process group.

    >>> import tempfile, torch, torch.distributed as dist, distbelief as db
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> store = tempfile.NamedTemporaryFile()
    >>> here = {"init_method": f"file://{store.name}", "rank": 0, "world_size": 1}  # torchrun says all of this
    >>> dist.init_process_group("gloo", **here)
    >>> model = DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> model.register_comm_hook(db.Reduce(), db.comm_hook)
    >>> model(torch.ones(3, 2)).sum().backward()
    >>> model.module.weight.grad
    tensor([[3., 3.]])
    >>> dist.destroy_process_group()
    """

    def __init__(self, algorithm: str = "auto", per_host: int = 0, group: dist.ProcessGroup | None = None) -> None:
        check_algorithm(admit(algorithm, str, f"Reduce(algorithm={shown(algorithm)})"), (*PLACED, Window.algorithm))
        if admit(per_host, int, f"Reduce(per_host={shown(per_host)})") < 0:
            raise UsageError(f"per_host {per_host}: must be 0 or more")
        check_hosts(algorithm, per_host, auto=True)
        if group is not None and dist.get_rank(group) < 0:
            raise UsageError(f"rank {dist.get_rank()} is not in the group: make the state only where the model is")
        self._algorithm, self._per_host = algorithm, per_host
        self._group = group
        self.ranks = 0
        """Number of ranks; known at the first backward pass."""
        self._thread: ReductionThread | None = None
        self._window: Window | None = None
        self._choice: ScheduleChoice | None = None
        self.chosen: dict[tuple[int, int], Schedule | Window | None] = {}
        """The way in which a bucket is added up, by its elements and their bytes; the same on all ranks.

        None is the library's own way.
        """
        self._failed = ""

    def start(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Begin to average a contiguous 1-D tensor in place over all ranks, which begin theirs in the same order.

        Returns:
            What will have it, or the error.

        Raises:
            UsageError: a sparse tensor; no process group; a device that it cannot send from, or another than before;
                no memory that all ranks could share; ranks that differ.
        """
        if tensor.layout is not torch.strided:  # on every rank, so that nobody waits for another
            raise UsageError(
                f"a gradient of this bucket is sparse, of a parameter of shape {[*tensor.shape]}: make it dense "
                "(torch.nn.Embedding(sparse=False)), or leave the hook out"
            )
        if self._thread is None:
            self._begin(tensor.device)
        if self._failed:
            lost: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            # torch takes any exception, and says it is the value
            lost.set_exception(JobFailed(self._failed))  # type: ignore[arg-type]  # its stubs take a future's value only
            return lost
        assert self._thread is not None
        before = self._thread.lines.device
        if tensor.device != before:
            raise UsageError(f"gradients on {tensor.device}, and before on {before}: make a Reduce for each device")
        key = tensor.numel(), tensor.itemsize
        if key not in self.chosen:
            self.chosen[key] = self._window or (self._choice.of(*key) if self._choice else None)
        tensor.div_(self.ranks)  # before they are added up, as DDP does: the sum of half floats could be too large
        return self._thread.start(tensor, self.chosen[key]).then(self._told)

    def _begin(self, device: torch.device) -> None:
        if self._algorithm == Window.algorithm and device.type != "cpu":
            reason = f"the gradients are on {device}, and go through memory that CPUs share"
            raise UsageError(f"{Window.algorithm}: {reason}; use auto")
        if not dist.is_initialized():
            raise UsageError("there is no process group yet: call torch.distributed.init_process_group() first")
        self._group = dist.new_group() if self._group is None else self._group
        self.ranks = dist.get_world_size(self._group)
        config = dict(pair.split(":") for pair in dist.get_backend_config(self._group).split(","))
        if (backend := config.get(device.type)) != BACKENDS.get(device.type, ""):
            raise UsageError(
                f"gradients on {device} and the backend {backend}: nothing is sent point to point so; "
                "init_process_group('cpu:gloo,cuda:nccl') takes gloo for CPUs and NCCL for GPUs"
            )
        lines = Lines(dist.get_rank(self._group), self.ranks, device, self._group)
        thread = self._thread = ReductionThread(lines)
        weakref.finalize(self, thread.leave)  # also at the end of the process
        refused = ""
        try:
            refused = self._agree(lines)
        except (RuntimeError, OSError) as error:
            traceback.clear_frames(error.__traceback__)
            self._fail(str(error))
        if refused:
            thread.leave()
            self._thread = None
            raise UsageError(refused)

    def _agree(self, lines: Lines) -> str:
        """Choose with the others how to add up; says why that cannot be, on all ranks alike."""
        if self.ranks > 1:
            number = crc32(f"{self._algorithm} {self._per_host}".encode())
            both = torch.tensor([number, -number], device=lines.device)
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
            if both[0] != -both[1]:
                settings = f"{self._algorithm}, per_host {self._per_host}"
                return f"the ranks were told to add up in different ways, this one: {settings}; tell all the same"
            if self._algorithm in ("auto", Window.algorithm) and lines.device.type == "cpu":
                self._window = open_window(lines.rank, self.ranks, self._group)
            if self._window:
                weakref.finalize(self, self._window.leave)
                return ""
            if self._algorithm == Window.algorithm:
                apart = f"the {self.ranks} ranks are not processes of one host that can share memory"
                return f"{Window.algorithm}: {apart}; use auto"
        self._choice = ScheduleChoice(lines, self._algorithm, self._per_host)
        return ""

    def _told(self, done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        try:
            return done.value()
        except RuntimeError as error:
            self._fail(str(error))
        raise JobFailed(self._failed)

    def _fail(self, why: str) -> None:
        """Tell the others by leaving the group: who waits for this rank is not to wait until its process ends."""
        assert self._thread is not None
        lines = self._thread.lines
        gone = f"a rank is gone, or not reached from rank {lines.rank}"
        self._failed = self._failed or f"{self._algorithm} among {self.ranks} ranks: {gone}: {why}"
        group, self._group = self._group, None
        if self._window:
            self._window.leave()
        self._thread.leave()
        if group is not None and lines.device.type == "cpu":  # a peer of NCCL that waits is ended by its own watchdog
            dist.destroy_process_group(group)


def comm_hook(
    state: Reduce,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch's stubs lack it
) -> torch.futures.Future[torch.Tensor]:
    """Add up a bucket for DDP, by `model.register_comm_hook(distbelief.Reduce(), distbelief.comm_hook)`.

    Args:
        state: how they are added up.
        bucket: of DDP; its gradients are one contiguous 1-D tensor.

    Returns:
        The mean over all ranks, in the place of the gradients; the same bits on all of them.

    Raises:
        JobFailed: in the backward pass, as a RuntimeError: a rank is gone.
    """
    return state.start(bucket.buffer())
