"""Copies between a CUDA device and pinned memory of the host, which the device reads and writes by itself.

Such a copy has only begun when torch comes back from it. So nobody is told of what leaves before it is there, and what
is read is not said to be free before it has been read. With plain memory, where CUDA refuses to register it, the same
copies are right and slower.
"""

from __future__ import annotations

import contextlib
import weakref

import torch


class CudaDevice:
    """The calls of CUDA; all else here is done on a machine without a GPU too."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def register(self, memory: torch.Tensor) -> bool:
        """Have memory of the host stay where it is for the device; False where that cannot be, or is so already."""
        if memory.is_pinned():
            return False
        with torch.cuda.device(self.device):
            if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
                return True
            with contextlib.suppress(RuntimeError):
                # CUDA keeps the error, and the next kernel raises it: this one, not the user's
                torch.ones(1, device=self.device)
        return False

    def unregister(self, memory: torch.Tensor) -> None:
        """Undo that, once nothing is copied any more."""
        with contextlib.suppress(RuntimeError), torch.cuda.device(self.device):
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """Begin a copy behind all that the device has been asked for; returns what its end is waited for by."""
        to.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for the end of a copy."""
        event.synchronize()


def pin(memory: torch.Tensor, cuda: CudaDevice, owner: object) -> None:
    """Register memory of the host for as long as who uses it is there: it is freed after that, and not before."""
    if memory.nbytes and cuda.register(memory):
        weakref.finalize(owner, cuda.unregister, memory)


class DeviceCopies:
    """Copies between a device and the host.

    Args:
        device: where one computes.
        cuda: what is asked of CUDA there.
    """

    def __init__(self, device: torch.device, cuda: CudaDevice) -> None:
        self._device, self._cuda = device, cuda
        self._reading: list[torch.cuda.Event] = []
        """Ends of copies to the device that nobody has waited for."""

    def pin(self, memory: torch.Tensor) -> None:
        """Have copies from and to memory of the host made by the device itself."""
        pin(memory, self._cuda, self)

    def copy_out(self, tensor: torch.Tensor, to: torch.Tensor) -> None:
        """Copy from the device to the host: it is there when this returns."""
        self._cuda.wait(self._cuda.copy(to, tensor))

    def copy_in(self, source: torch.Tensor) -> torch.Tensor:
        """The same on the device, for what is computed next; the source must stay as it is until `settle`."""
        copied = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        self._reading.append(self._cuda.copy(copied, source))
        return copied

    def settle(self) -> None:
        """Wait until all that was copied in has been read."""
        for event in self._reading:
            self._cuda.wait(event)
        self._reading.clear()


def device_copies(device: torch.device) -> DeviceCopies | None:
    """Return what copies between a device and the host; None where they are one."""
    return DeviceCopies(device, CudaDevice(device)) if device.type == "cuda" else None
