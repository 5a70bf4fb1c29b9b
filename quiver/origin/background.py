"""An event loop in its own thread that runs coroutines for blocking callers, so that their waits can be cancelled.

One per process, started on first use. Only for processes that do not fork: daemons, commands, and the reader that
``origin_process`` starts. A caller that is interrupted, by Ctrl-C say, cancels its coroutine.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

T = TypeVar("T")

END_SECONDS: Final = 0.5  # for which the interpreter's exit waits for running coroutines


class _Background:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="quiver-origin", daemon=True)
                self._thread.start()
                atexit.register(self._end)
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _end(self) -> None:
        loop, thread = self._loop, self._thread
        assert loop is not None
        assert thread is not None

        def stop() -> None:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.call_later(0.01, loop.stop)

        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(stop)
        thread.join(END_SECONDS)


_background: Final = _Background()


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine in the background."""
    return _background.submit(work)
