"""A thread that plays schedules beside the backward pass, one tensor after the other."""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
from collections.abc import Callable

import torch

from distbelief.fabric.lines import Lines, Native
from distbelief.fabric.player import WHOLE, Mover, play
from distbelief.schedules.schedule import Schedule

LEAVE_SECONDS = 2.0
"""Time that the thread of a group that is left may take to notice."""


class ReductionThread:
    """Reduces tensors of one rank.

    Args:
        lines: of this rank, which are this thread's as long as it plays something.
    """

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self._native = Native(lines)
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stream = torch.cuda.Stream(lines.device) if lines.device.type == "cuda" else None
        self._thread = threading.Thread(target=self._run, name="all-reduce", daemon=True)
        self._thread.start()

    def start(
        self, tensor: torch.Tensor, how: Schedule | Mover[torch.Tensor] | None
    ) -> torch.futures.Future[torch.Tensor]:
        """Reduce a contiguous 1-D tensor in place: by a schedule, a lowering, or (None) the library's own way.

        Returns:
            What will have it, or the error.
        """
        lines = self.lines
        devices: list[int | str | torch.device] | None = [lines.device] if self._stream else None
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        event = torch.cuda.current_stream(lines.device).record_event() if self._stream else None

        def task() -> None:
            try:
                lines.stay()
                with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
                    if self._stream and event:
                        self._stream.wait_event(event)
                    self._play(tensor, how)
                    lines.stay()
                    if self._stream:
                        self._stream.synchronize()
                    # with the stream on which it was made: whoever waits on another has that one wait
                    done.set_result(tensor)
            except Exception as error:  # of a peer that is gone: told to whoever waits
                lines.leave()  # what is queued fails too: others may wait for this rank until it has left
                # its frames hold the group, which ends for the others when nobody does
                traceback.clear_frames(error.__traceback__)
                error.__traceback__ = None
                # torch takes any exception, and says it is the value
                done.set_exception(error)  # type: ignore[arg-type]  # its stubs take a future's value only

        self._queue.put(task)
        if lines.left:  # perhaps nobody takes it any more
            self._drain()
        return done

    def _play(self, tensor: torch.Tensor, how: Schedule | Mover[torch.Tensor] | None) -> None:
        if isinstance(how, Schedule):
            play(self.lines, tensor, how.steps_of(self.lines.rank))
        else:
            play(self._native if how is None else how, tensor, WHOLE)

    def leave(self) -> None:
        """Play nothing more; what is being played is given up."""
        self.lines.leave()
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(LEAVE_SECONDS)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            task()

    def _drain(self) -> None:
        """Fail what was queued: who waits for it is not to wait for ever."""
        with contextlib.suppress(queue.Empty):
            while True:
                if (task := self._queue.get_nowait()) is not None:
                    task()
