"""Communication hook with which PyTorch's DistributedDataParallel adds its gradients in shared memory, if possible."""

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
    """State of `comm_hook`, one for all models of a process: how DDP's gradients are added.

    It may be made before `init_process_group`. All ranks must reach their first backward pass at the same place in the
    script. There it makes its own process group, so that its messages never meet the script's. Processes that share
    memory on one host send nothing.

    Args:
        algorithm: shared (in shared memory, on one host), native (by gloo or NCCL), or auto: shared if possible, else
            native.
        group: process group of the model's ranks if these are not all; used for nothing else:
            `torch.distributed.new_group(ranks)`.

    Raises:
        UsageError: the algorithm is unknown, or this process is not in the group.

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
                f"Reduce(algorithm={algorithm!r}): must be {', '.join(WAYS)}; other names of --algorithm are for jobs"
            )
        if algorithm == SHARED:
            check_order("Reduce(algorithm='shared'): what the ranks add up", f"use {AUTO}")
        if group is not None and dist.get_rank(group) < 0:
            raise UsageError(f"rank {dist.get_rank()} is not in the group: make the state only on the model's ranks")
        self._algorithm, self._group = algorithm, group
        self.chosen = ""
        """Way of adding gradients, shared or native, after the first backward pass."""
        self._rank, self._ranks, self._device = 0, 1, torch.device("cpu")
        self._window: Window | None = None
        self._thread: ReductionThread | None = None
        self._failed = ""

    def start(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Begin to average a contiguous 1-D tensor in place over all ranks, which do so in the same order.

        Returns:
            A future of the tensor or the error.

        Raises:
            UsageError: the tensor is sparse or on another device than before, there is no process group, or the ranks
                differ or cannot share memory.
        """
        if tensor.layout is not torch.strided:  # raised on every rank alike, so that none waits for another
            raise UsageError(
                f"a gradient of this bucket is sparse, of a parameter of shape {[*tensor.shape]}: make it dense "
                "(torch.nn.Embedding(sparse=False)), or leave the hook out"
            )
        if not (self.chosen or self._failed):
            self._begin(tensor.device)
        if self._failed:
            lost: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            # torch accepts any exception as the value
            lost.set_exception(JobFailed(self._failed))  # type: ignore[arg-type]  # its stubs take a future's value only
            return lost
        if tensor.device != self._device:
            raise UsageError(
                f"gradients on {tensor.device}, and before on {self._device}: make a Reduce for each device"
            )
        tensor.div_(self._ranks)  # before the sum, as DDP does: a sum of half floats could overflow
        added: torch.futures.Future[object]
        if self._thread is None:
            added = dist.all_reduce(tensor, group=self._group, async_op=True).get_future()
        else:
            added = self._thread.do(partial(self._add_up, tensor))
        return added.then(partial(self._finished, tensor))

    def _begin(self, device: torch.device) -> None:
        if self._algorithm == SHARED and device.type != "cpu":
            raise UsageError(f"{SHARED}: the gradients are on {device}, and only CPUs share this memory; use {AUTO}")
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
        """Choose a way together with all ranks; return why that fails, on all ranks alike."""
        if self._ranks > 1:
            number = WAYS.index(self._algorithm)
            both = torch.tensor([number, -number], device=self._device)
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
            if both[0] != -both[1]:
                return f"the ranks have different algorithms, this one {self._algorithm}; give all the same"
            if self._algorithm != NATIVE and self._device.type == "cpu":
                self._window = open_window(self._rank, self._ranks, self._group)
            if self._window is None and self._algorithm == SHARED:
                apart = f"the {self._ranks} ranks are not processes of one host that can share memory"
                return f"{SHARED}: {apart}; use {AUTO}"
        self.chosen = SHARED if self._window else NATIVE
        if self._device.type == "cpu":  # NCCL has a stream of its own
            self._thread = ReductionThread()
            weakref.finalize(self, _end, self._thread, self._window)  # this function also runs when the process ends
        return ""

    def _add_up(self, tensor: torch.Tensor) -> None:
        if self._failed:
            raise RuntimeError(self._failed)
        if self._window:
            self._window.add_up(tensor)
        else:
            dist.all_reduce(tensor, group=self._group)

    def _finished(self, tensor: torch.Tensor, done: torch.futures.Future[object]) -> torch.Tensor:
        try:
            done.value()
        except RuntimeError as error:
            self._fail(str(error))
            raise JobFailed(self._failed) from None
        return tensor

    def _fail(self, why: str) -> None:
        """Leave the group, so that ranks waiting for this one need not wait until its process ends."""
        gone = f"a rank is gone, or unreachable from rank {self._rank}"
        self._failed = self._failed or f"{self._algorithm} among {self._ranks} ranks: {gone}: {why}"
        group, self._group = self._group, None
        if self._window:
            self._window.leave()
        if group is not None and self._device.type == "cpu":  # NCCL's watchdog ends a waiting peer
            leave(group)


def _end(thread: ReductionThread, window: Window | None) -> None:
    if window is not None:
        window.leave()
    thread.end()
    thread.join(LEAVE_SECONDS)  # still inside torch when the process ends, the thread would abort it


def open_window(rank: int, ranks: int, group: dist.ProcessGroup | None) -> Window | None:
    """Open a window of memory between all ranks of a group, which call this together; return None if they cannot share
    it.

    Raises:
        RuntimeError: a rank is gone.
    """
    memory = -1
    window: Window | None = None
    with contextlib.suppress(OSError, AttributeError):  # a failure is sent to the other ranks
        memory = os.memfd_create("distbelief window") if rank == 0 else -1
    try:
        mine = torch.tensor([_here(), os.getpid(), memory, os.fstat(memory).st_ino if memory >= 0 else 0], device="cpu")
        all_of = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(all_of, mine, group=group)
        hosts, pids, (place, *_), (inode, *_) = (list(map(int, column)) for column in zip(*all_of, strict=True))
        if in_order() and place >= 0 and hosts[0] >= 0 and len(set(hosts)) == 1:
            with contextlib.suppress(OSError), open(f"/proc/{pids[0]}/fd/{place}", "r+b", buffering=0) as segment:
                if os.fstat(segment.fileno()).st_ino == inode:  # /proc is then that of these processes
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
    """Return a number shared by processes that see each other's ids and memory, or -1.

    It identifies one start of a machine and one container.
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
    """Average a bucket for DDP, by `model.register_comm_hook(distbelief.Reduce(), distbelief.comm_hook)`.

    Args:
        state: the state of the hook.
        bucket: a bucket of DDP, whose gradients are one contiguous 1-D tensor.

    Returns:
        A future of the mean over all ranks, with the same bits on each, in the memory of the gradients.

    Raises:
        JobFailed: a rank is gone; the backward pass raises it as a RuntimeError.
    """
    return state.start(bucket.buffer())
