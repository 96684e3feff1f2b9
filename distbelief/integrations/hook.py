"""A communication hook: PyTorch's DistributedDataParallel adds up its gradients through shared memory, where it can."""

# no `from __future__ import annotations`: DDP compares the annotations of a hook with classes

import contextlib
import os
import traceback
import weakref
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch
import torch.distributed as dist

from distbelief.core.values import admit, shown
from distbelief.errors import JobFailed, UsageError
from distbelief.fabric.memory import Window
from distbelief.fabric.order import check_order, in_order
from distbelief.fabric.process_group import LEAVE_SECONDS, leave
from distbelief.fabric.waiting import ReductionThread

SHARED, NATIVE, AUTO = WAYS = ("shared", "native", "auto")


class Reduce:
    """Way in which DDP's gradients are added up: the state of `comm_hook`, one for all models of a process.

    It may be made before `init_process_group`. At the first backward pass, which all ranks make at the same place in
    the script, it makes a process group of its own, so that what it sends never meets what the script sends. Processes
    of one host that can share memory need send nothing.

    Args:
        algorithm: shared (through shared memory, on one host), native (gloo's or NCCL's own), or auto: shared where
            that can be, else native.
        group: of the ranks of the model, and used for nothing else, where these are not all:
            `torch.distributed.new_group(ranks)`.

    Raises:
        UsageError: an unknown algorithm; a group that this process is not in. At the first backward pass: no process
            group.

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

    def __init__(self, algorithm: str = AUTO, group: dist.ProcessGroup | None = None) -> None:
        if admit(algorithm, str, f"Reduce(algorithm={shown(algorithm)})") not in WAYS:
            raise UsageError(
                f"Reduce(algorithm={algorithm!r}): must be {', '.join(WAYS)}; schedules, as --algorithm names "
                "them, are those of jobs"
            )
        if algorithm == SHARED:
            check_order("Reduce(algorithm='shared'): what the ranks add up", f"use {AUTO}")
        if group is not None and dist.get_rank(group) < 0:
            raise UsageError(f"rank {dist.get_rank()} is not in the group: make the state only where the model is")
        self._algorithm, self._group = algorithm, group
        self.chosen = ""
        """The way in which gradients are added up, shared or native; known at the first backward pass."""
        self._rank, self._ranks, self._device = 0, 1, torch.device("cpu")
        self._window: Window | None = None
        self._thread: ReductionThread | None = None
        self._failed = ""

    def start(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Begin to average a contiguous 1-D tensor in place over all ranks, which begin theirs in the same order.

        Returns:
            What will have it, or the error.

        Raises:
            UsageError: a sparse tensor; no process group; another device than before; no memory that all ranks could
                share; ranks that differ.
        """
        if tensor.layout is not torch.strided:  # on every rank, so that nobody waits for another
            raise UsageError(
                f"a gradient of this bucket is sparse, of a parameter of shape {[*tensor.shape]}: make it dense "
                "(torch.nn.Embedding(sparse=False)), or leave the hook out"
            )
        if not (self.chosen or self._failed):
            self._begin(tensor.device)
        if self._failed:
            lost: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            # torch takes any exception, and says it is the value
            lost.set_exception(JobFailed(self._failed))  # type: ignore[arg-type]  # its stubs take a future's value only
            return lost
        if tensor.device != self._device:
            raise UsageError(
                f"gradients on {tensor.device}, and before on {self._device}: make a Reduce for each device"
            )
        tensor.div_(self._ranks)  # before they are added up, as DDP does: the sum of half floats could be too large
        added: torch.futures.Future[object]
        if self._thread is None:
            added = dist.all_reduce(tensor, group=self._group, async_op=True).get_future()
        else:
            added = self._thread.do(partial(self._add_up, tensor))
        return added.then(partial(self._told, tensor))

    def _begin(self, device: torch.device) -> None:
        if self._algorithm == SHARED and device.type != "cpu":
            reason = f"the gradients are on {device}, and go through memory that CPUs share"
            raise UsageError(f"{SHARED}: {reason}; use {AUTO}")
        if not dist.is_initialized():
            raise UsageError("there is no process group yet: call torch.distributed.init_process_group() first")
        self._group = dist.new_group() if self._group is None else self._group
        self._rank, self._ranks, self._device = dist.get_rank(self._group), dist.get_world_size(self._group), device
        refused = ""
        try:
            refused = self._agree()
        except (RuntimeError, OSError) as error:
            traceback.clear_frames(error.__traceback__)
            self._fail(str(error))
        if refused:
            raise UsageError(refused)

    def _agree(self) -> str:
        """Choose with the others how to add up; says why that cannot be, on all ranks alike."""
        if self._ranks > 1:
            number = WAYS.index(self._algorithm)
            both = torch.tensor([number, -number], device=self._device)
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
            if both[0] != -both[1]:
                return (
                    f"the ranks were told to add up in different ways, this one: {self._algorithm}; tell all the same"
                )
            if self._algorithm != NATIVE and self._device.type == "cpu":
                self._window = open_window(self._rank, self._ranks, self._group)
            if self._window is None and self._algorithm == SHARED:
                apart = f"the {self._ranks} ranks are not processes of one host that can share memory"
                return f"{SHARED}: {apart}; use {AUTO}"
        self.chosen = SHARED if self._window else NATIVE
        if self._device.type == "cpu":  # NCCL has a stream of its own
            self._thread = ReductionThread()
            weakref.finalize(self, _end, self._thread, self._window)  # also at the end of the process
        return ""

    def _add_up(self, tensor: torch.Tensor) -> None:
        if self._failed:
            raise RuntimeError(self._failed)
        if self._window:
            self._window.add_up(tensor)
        else:
            dist.all_reduce(tensor, group=self._group)

    def _told(self, tensor: torch.Tensor, done: torch.futures.Future[object]) -> torch.Tensor:
        try:
            done.value()
        except RuntimeError as error:
            self._fail(str(error))
            raise JobFailed(self._failed) from None
        return tensor

    def _fail(self, why: str) -> None:
        """Tell the others by leaving the group: who waits for this rank is not to wait until its process ends."""
        gone = f"a rank is gone, or not reached from rank {self._rank}"
        self._failed = self._failed or f"{self._algorithm} among {self._ranks} ranks: {gone}: {why}"
        group, self._group = self._group, None
        if self._window:
            self._window.leave()
        if group is not None and self._device.type == "cpu":  # a peer of NCCL that waits is ended by its own watchdog
            leave(group)


def _end(thread: ReductionThread, window: Window | None) -> None:
    if window is not None:
        window.leave()
    thread.end()
    thread.join(LEAVE_SECONDS)  # amid torch's own code at the end of the process, it would abort that


def open_window(rank: int, ranks: int, group: dist.ProcessGroup | None) -> Window | None:
    """A window between all ranks of a group, which all ask for at once.

    None, on all of them, where they cannot share memory.

    Raises:
        RuntimeError: a rank is gone.
    """
    memory = -1
    window: Window | None = None
    with contextlib.suppress(OSError, AttributeError):  # where there is none, the others are to know
        memory = os.memfd_create("distbelief window") if rank == 0 else -1
    try:
        mine = torch.tensor([_here(), os.getpid(), memory, os.fstat(memory).st_ino if memory >= 0 else 0], device="cpu")
        all_of = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(all_of, mine, group=group)
        hosts, pids, (place, *_), (inode, *_) = (list(map(int, column)) for column in zip(*all_of, strict=True))
        if in_order() and place >= 0 and hosts[0] >= 0 and len(set(hosts)) == 1:
            with contextlib.suppress(OSError), open(f"/proc/{pids[0]}/fd/{place}", "r+b", buffering=0) as segment:
                if os.fstat(segment.fileno()).st_ino == inode:  # and /proc is that of these processes
                    window = Window(rank, ranks, segment.fileno(), pids)
        all_can = torch.tensor([int(window is not None)], device="cpu")
        dist.all_reduce(all_can, dist.ReduceOp.MIN, group=group)
    except BaseException:
        if window:
            window.leave()
        raise
    finally:
        if memory >= 0:
            os.close(memory)
    if window and not all_can:
        window.leave()
    return window if all_can else None


def _here() -> int:
    """A number that processes have in common which see each other's ids and memory; -1 for none.

    It is that of one start of a machine, and one container.
    """
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return -1
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 2


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
