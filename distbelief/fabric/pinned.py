"""Copies between a CUDA device and pinned memory of the host, which the device reads and writes by itself.

Such a copy has only begun when torch returns. So a tensor is stamped only once its copy has ended, and memory counts as
free only once it has been read. If CUDA refuses to register the memory, the same copies are slower.
"""

from __future__ import annotations

import contextlib
import weakref

import torch


class CudaDevice:
    """Calls of CUDA; everything else here also runs without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def register(self, memory: torch.Tensor) -> bool:
        """Pin memory of the host; return False if CUDA refuses, or if it is already pinned."""
        if memory.is_pinned():
            return False
        with torch.cuda.device(self.device):
            if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
                return True
            with contextlib.suppress(RuntimeError):
                # CUDA reports the error at the next kernel: run one here, so that it is not the user's
                torch.ones(1, device=self.device)
        return False

    def unregister(self, memory: torch.Tensor) -> None:
        """Unpin memory, once all copies have ended."""
        with contextlib.suppress(RuntimeError), torch.cuda.device(self.device):
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """Begin a copy after the device's work so far; return the event of its end."""
        to.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for the end of a copy."""
        event.synchronize()


def pin(memory: torch.Tensor, cuda: CudaDevice, owner: object) -> None:
    """Pin memory of the host for as long as its owner exists; the memory is freed only after that."""
    if memory.nbytes and cuda.register(memory):
        weakref.finalize(owner, cuda.unregister, memory)


class DeviceCopies:
    """Copies between a device and the host."""

    def __init__(self, device: torch.device, cuda: CudaDevice) -> None:
        self._device, self._cuda = device, cuda
        self._reading: list[torch.cuda.Event] = []
        """Ends of copies to the device that nobody has waited for yet."""

    def pin(self, memory: torch.Tensor) -> None:
        """Pin memory of the host, so that the device copies by itself."""
        pin(memory, self._cuda, self)

    def copy_out(self, tensor: torch.Tensor, to: torch.Tensor) -> None:
        """Copy from the device to the host, and wait for the end."""
        self._cuda.wait(self._cuda.copy(to, tensor))

    def copy_in(self, source: torch.Tensor) -> torch.Tensor:
        """Copy to the device; the source must not change until `settle`."""
        copied = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        self._reading.append(self._cuda.copy(copied, source))
        return copied

    def settle(self) -> None:
        """Wait until the device has read all sources."""
        for event in self._reading:
            self._cuda.wait(event)
        self._reading.clear()


def device_copies(device: torch.device) -> DeviceCopies | None:
    """Return the copies between a device and the host; None if the device is the host."""
    return DeviceCopies(device, CudaDevice(device)) if device.type == "cuda" else None
