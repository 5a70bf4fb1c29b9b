"""The turns of a training loop, measured in its own thread: what it waited, and what it did.

A CUDA device works behind the loop: a loop that launches its step and asks for the next batch at once has a step of a
millisecond for the processor and one of a hundred for the device, and while it waits for data nobody sees that. So an
event is recorded on the current stream when a batch is handed out and when the next one is asked for; the time between
the two, as the device saw them, is its work for one step. Events are read once they have happened: nothing is
synchronised, and CUDA is never initialised for it.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch

from quiver_client.loader.loop_rate import LoopTurn
from quiver_client.loader.making import Making

PENDING_MAX: Final = 8  # steps whose events have not happened yet: no more are measured meanwhile


class _Step(NamedTuple):
    begin: Any
    end: Any


class GpuSteps:
    """Measures the device's work for a step. Used by the loop's thread.

    A loop that changes devices cannot be measured so: events belong to one. It goes on, and is measured no more.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        """``cuda``: ``torch.cuda``, or what stands in for it."""
        self._cuda = cuda
        self._pending: deque[_Step] = deque()
        self._free: list[Any] = []
        self._begin: Any = None
        self._is_off = False

    def begin(self) -> None:
        """A batch is handed out: a step begins."""
        if self._is_off or self._begin is not None or len(self._pending) >= PENDING_MAX:
            return
        if self._cuda.is_initialized():
            with self._giving_up():
                self._begin = self._record()

    def end(self) -> None:
        """The loop asks for the next batch."""
        begin, self._begin = self._begin, None
        if begin is not None:
            with self._giving_up():
                self._pending.append(_Step(begin, self._record()))

    def take(self) -> float | None:
        """Return the seconds of the oldest step that ended on the device, ``None`` if none did; at most one a turn."""
        seconds: float | None = None
        with self._giving_up():
            if self._pending and self._pending[0].end.query():
                step = self._pending.popleft()
                seconds = step.begin.elapsed_time(step.end) / 1000
                self._free += step
        return seconds

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Measure no more after an error: what is wrong with the device, the loop's own work will say."""
        try:
            yield
        except RuntimeError:
            self._is_off = True
            self._pending.clear()

    def _record(self) -> Any:
        event = self._free.pop() if self._free else self._cuda.Event(enable_timing=True)
        event.record()
        return event


class Turns:
    """Measures one pass of a loop. Used by the loop's thread."""

    def __init__(
        self, making: Making, gpu: GpuSteps | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._making = making
        self._gpu = GpuSteps() if gpu is None else gpu
        self._clock = clock
        self._received: float | None = None
        self._asked = 0.0
        self._here = making.here_seconds

    def ask(self) -> None:
        """The loop asks for a batch."""
        self._asked = self._clock()
        self._gpu.end()

    def receive(self) -> LoopTurn:
        """The loop gets it; return what this turn took."""
        now, before, self._received = self._clock(), self._received, self._clock()
        made_here, self._here = self._making.here_seconds - self._here, self._making.here_seconds
        waited = max(now - self._asked - made_here, 0.0)
        step = None if before is None else max(self._asked - before, 0.0) + made_here
        turn = LoopTurn(waited, step, self._making.seconds, self._gpu.take())
        self._gpu.begin()
        return turn
