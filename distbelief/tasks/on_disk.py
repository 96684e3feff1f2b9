"""Building a model that need not fit into memory: its large tensors are in files until a part of it is taken."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distbelief.tasks.task import Task
from distbelief.tasks.worker import build_model

LARGE = 1 << 20
"""Least bytes of a tensor in a file; a file costs milliseconds."""
ROOM = 32 << 20
"""Bytes of tensors in files that operations may touch before they are unloaded from memory."""
LIBC = ctypes.CDLL(None)
FOLDER = "/var/tmp"
"""Folder of the files, unless `TMPDIR` names another: `/tmp` is often in memory."""


class Built(NamedTuple):
    """A model, and the way in which it was built."""

    model: nn.Module
    why_in_memory: str
    """Reason why large tensors are in memory; "" if none is."""

    @property
    def told(self) -> str:
        """Return `why_in_memory` as a clause for a sentence about partitions, or ""."""
        why = self.why_in_memory
        return f"; each partition built more than its own part in memory, and dropped the rest, as {why}" if why else ""


def build_on_disk(task: Task, seed: int, fill: Callable[[nn.Module], None] = lambda _: None) -> Built:
    """Build the model of a task on the CPU as `build_model` does, with its large tensors in files without names.

    They are ordinary tensors, which the operating system reads from the files when they are used. A file vanishes with
    its tensor. `fill` gives the model other values, perhaps in tensors that are in files too.
    """

    def build() -> nn.Module:
        model = build_model(task, seed, "cpu")
        fill(model)
        return model

    try:
        files = _InFiles(_folder())
    except OSError as error:
        return Built(build(), str(error))
    chance, dtype = (random.getstate(), numpy.random.get_state()), torch.get_default_dtype()
    try:
        with files:
            model = build()
        if not files.refused:
            return Built(model, files.why_in_memory(model))
    except Exception:
        if not files.refused:  # the model's own error would be raised again
            raise
    finally:
        torch._dynamo.reset()  # torch.compile would never again compile code that it saw under such a mode
    random.setstate(chance[0])
    numpy.random.set_state(chance[1])
    torch.set_default_dtype(dtype)
    return Built(build(), files.refused)


def zeros_on_disk(size: int) -> torch.Tensor:
    """Return zeros (1-D uint8) in a file without a name, or in memory if they are few or no file can be had."""
    if size >= LARGE:
        with contextlib.suppress(OSError, RuntimeError):
            return torch.empty(0, dtype=torch.uint8).set_(_in_file(_folder(), size))
    return torch.zeros(size, dtype=torch.uint8)


class _InFiles(TorchDispatchMode):
    """A mode that moves large results of operations into files before anything else can see them."""

    supports_higher_order_operators = True

    def __init__(self, folder: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._folder = folder
        self._files: dict[int, StorageWeakRef] = {}
        self._in_memory: dict[int, StorageWeakRef] = {}
        """Storages in files that operations have touched, and that may be in memory."""
        self._room = ROOM
        self._unmoved = ""
        self.refused = ""
        """Operation that failed with a tensor in a file; "" if none did."""

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        arguments = {storage._cdata: storage for storage in map(torch.Tensor.untyped_storage, _plain((args, kwargs)))}
        try:
            result = func(*args, **(kwargs or {}))
        except Exception as error:  # the model's function may catch the error and continue
            if arguments.keys() & self._files.keys():
                self.refused = f"its function had an error of {_named(func, error)} with a tensor in a file"
            raise
        if isinstance(func, torch._ops.OpOverload) and not func._schema.is_mutable:
            try:
                arguments |= self._move(func, result, arguments)
            except Exception as error:
                self.refused = f"a tensor of {_named(func, error)} cannot be moved to a file"
                raise
        self._come_to(arguments.values())
        return result

    def _move(
        self, func: torch._ops.OpOverload, result: object, arguments: Mapping[int, torch.UntypedStorage]
    ) -> dict[int, torch.UntypedStorage]:
        """Move large results of an operation to files; return the new storages by the old ones' keys."""
        results = {storage._cdata: storage for storage in map(torch.Tensor.untyped_storage, _plain(result))}
        filled = func.namespace != "aten" or not func._opname.startswith(("empty", "new_empty"))
        moved = {
            key: replacement
            for key, storage in results.items()
            if key not in arguments and storage.nbytes() >= LARGE and not storage.is_shared()
            if (replacement := self._moved(storage, filled)) is not None
        }
        for tensor in _plain(result) if moved else ():
            if (replacement := moved.get(tensor.untyped_storage()._cdata)) is not None:
                tensor.set_(replacement, tensor.storage_offset(), tensor.shape, tensor.stride())
        return moved

    def _moved(self, storage: torch.UntypedStorage, filled: bool) -> torch.UntypedStorage | None:
        """Copy a storage to a file, or return None if that fails."""
        size = storage.nbytes()
        try:
            in_file = _in_file(self._folder, size)
            if filled:
                in_file.copy_(storage)  # some kinds of tensors have no memory to copy
        except (OSError, RuntimeError) as error:
            self._unmoved = (
                f"{size:,} bytes could not be moved to a file in {self._folder} ({_first_line(error)}); where that is "
                "full, name another folder by TMPDIR"
            )
            return None
        self._files[in_file._cdata] = StorageWeakRef(in_file)
        return in_file

    def _come_to(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Note that an operation has touched storages; after many bytes, unload those in files from memory."""
        for storage in storages:
            if (reference := self._files.get(storage._cdata)) is not None:
                self._in_memory[storage._cdata] = reference
                self._room -= storage.nbytes()
        if self._room < 0:
            for key, reference in self._in_memory.items():
                alive = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                if alive is None:
                    del self._files[key]
                elif alive.is_shared():
                    address, size = ctypes.c_void_p(alive.data_ptr()), ctypes.c_size_t(alive.nbytes())
                    LIBC.madvise(address, size, mmap.MADV_DONTNEED)
            self._in_memory.clear()
            self._room = ROOM

    def why_in_memory(self, model: nn.Module) -> str:
        """Return why large tensors of a model are in memory; "" if none is."""
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            for part in _plain(tensor):
                storage = part.untyped_storage()
                if (size := storage.nbytes()) >= LARGE and not storage.is_shared():
                    why = (
                        f"{name!r}, {size:,} bytes, was not made by an operation of torch in the thread that builds it"
                    )
                    return self._unmoved or why
        return ""


def _in_file(folder: str, size: int) -> torch.UntypedStorage:
    """Return zeros in a file without a name, or raise an `OSError` or `RuntimeError`."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)  # without room, a later write would end the process
        path = f"/proc/self/fd/{file.fileno()}"
        storage: torch.UntypedStorage = torch.UntypedStorage.from_file(path, shared=True, nbytes=size)  # type: ignore[assignment]  # torch names its base
        return storage


def _plain(values: object) -> Iterable[torch.Tensor]:
    for leaf in tree_leaves(values):
        plain = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.device.type == "cpu"
        if plain and not is_lazy(leaf) and not leaf.is_nested and leaf.untyped_storage().device.type == "cpu":
            yield leaf


def _named(func: object, error: Exception) -> str:
    return f"{getattr(func, '_opname', func)} ({_first_line(error)})"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]


def _folder() -> str:
    """Return the folder of the files, or raise an `OSError` if it is missing or in memory."""
    folder = os.environ.get("TMPDIR") or FOLDER
    device = os.stat(folder).st_dev
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        fields, _, kind = line.partition(" - ")
        if fields.split()[2] == f"{os.major(device)}:{os.minor(device)}" and kind.split()[0] in ("tmpfs", "ramfs"):
            raise OSError(f"{folder} is in memory ({kind.split()[0]}): name a folder on a disk by TMPDIR")
    return folder
