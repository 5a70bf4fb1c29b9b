"""A pool of threads for calls that may block for long; neither ``close`` nor the exit waits for them.

At exit the interpreter joins every thread of a ``ThreadPoolExecutor``, which accepts no more work: one request to a
stopped daemon would delay Ctrl-C, and needs could not be withdrawn. The threads here are daemon threads. At exit they
get a moment to finish, with all other threads (``process_exit``); those that block for longer are abandoned.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar

from quiver import forks
from quiver_client import process_exit

P = ParamSpec("P")
T = TypeVar("T")

END_SECONDS: Final = 1.0  # how long ``shutdown`` waits


class ThreadPool(Executor):
    """``ThreadPoolExecutor`` that nothing waits for at exit. Safe from threads; useless in a forked child."""

    def __init__(self, workers_max: int, thread_name_prefix: str) -> None:
        self._workers_max = workers_max
        self._name = thread_name_prefix
        self._lock = forks.lock()
        self._idle = threading.Semaphore(0)
        self._work: _Work = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False
        weakref.finalize(self, self._work.put, None).atexit = False  # once the pool is garbage, its threads end
        process_exit.call_at_exit(self.stop, process_exit.Phase.POOLS)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call ``fn`` in a thread. Raises ``RuntimeError`` if the pool is closed, or if no thread can be started."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._workers_max:
                self._start()
            self._work.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more work. ``wait`` for running calls, but no longer than ``END_SECONDS``."""
        with self._lock:
            self._closed = True
        if cancel_futures:  # without the lock: what is called back may hold locks under which others submit
            _cancel(self._work)
        self._work.put(None)
        if wait:
            process_exit.join(self._threads, END_SECONDS)

    def stop(self) -> None:
        """Cancel everything but the running calls."""
        self.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        try:
            thread = process_exit.start(_serve, f"{self._name}_{len(self._threads)}", self._work, self._idle)
        except RuntimeError:  # too many threads, or the interpreter exits: the pool's other threads do the work
            if not self._threads:
                raise
        else:
            self._threads.append(thread)


_Work = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


def _serve(work: _Work, idle: threading.Semaphore) -> None:
    while (item := work.get()) is not None:
        future, call = item
        del item
        _do(future, call)
        del future, call
        idle.release()
    work.put(None)  # for the next thread


def _do(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - raised to whoever asks for the result
        future.set_exception(error)
        del future  # which refers to the exception, which refers to this frame
    else:
        future.set_result(result)


def _cancel(work: _Work) -> None:
    try:
        while True:
            item = work.get_nowait()
            if item is not None:
                item[0].cancel()
    except Empty:
        return
