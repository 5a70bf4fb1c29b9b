"""Starts the client's threads, and stops and joins them before the interpreter finalizes.

Invariant: no thread that can be stopped within ``EXIT_SECONDS`` runs while the interpreter finalizes.

Until Python 3.14 the interpreter ends a daemon thread by ``pthread_exit``, at the moment the thread takes the GIL back.
That unwinds the thread's stack. Where a C++ destructor is on it, as after every torch operation that released the GIL,
C++ calls ``std::terminate``, and a process that had finished its work dies of SIGABRT. So every thread here is started
by ``start``, is told to stop by an ``atexit`` callback, and is joined. ``atexit`` callbacks run after the user's
non-daemon threads have ended, which may still read a dataset, and before any thread is cut off.

A thread that stays in a blocking call of plain C for longer, as in a read from an origin that hangs, is abandoned:
unwinding C is harmless.
"""

from __future__ import annotations

import atexit
import ctypes
import enum
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

log = logging.getLogger("quiver_client")

EXIT_SECONDS: Final = 1.5  # in all; Ctrl-C promises 2 s, of which the interpreter itself takes half a second
LEAVE_SECONDS: Final = 0.8  # of these, for withdrawing needs, which takes a rack up to 0.75 s
FINISH_SECONDS: Final = 1.2  # by then, threads that still run Python are interrupted


class Phase(enum.Enum):
    """When something is stopped: first the users of thread pools, then the pools, then what no thread uses any more."""

    LOOPS = enum.auto()
    POOLS = enum.auto()
    SESSIONS = enum.auto()


class Thread(threading.Thread):
    """A daemon thread that the exit joins. One that ``leaves`` uses pools while it ends: they stop after it."""

    leaves = False


class Interrupted(SystemExit):
    """Raised in a thread that does not stop when told. ``threading`` does not report a ``SystemExit``."""


_lock = threading.RLock()  # a callback of the garbage collector may run while it is held
_threads: weakref.WeakSet[Thread] = weakref.WeakSet()
_stops: dict[int, tuple[Phase, weakref.WeakMethod[Callable[[], Any]]]] = {}  # in the order of registration
_serial = itertools.count()
_deadline: list[float] = []  # of the exit, once it has begun


def start(target: Callable[..., object], name: str, *args: object, leaves: bool = False) -> Thread:
    """Start a daemon thread that the exit joins. Raises ``RuntimeError`` if no thread can be started."""
    thread = Thread(target=target, name=name, args=args, daemon=True)
    thread.leaves = leaves
    with _lock:
        _threads.add(thread)
    thread.start()
    return thread


def call_at_exit(method: Callable[[], Any], phase: Phase) -> None:
    """Call a bound method at exit, if its object is still alive. Before ``SESSIONS`` it must not block."""
    number = next(_serial)

    def forget(_: object, stops: dict[int, Any] = _stops) -> None:
        stops.pop(number, None)

    _stops[number] = phase, weakref.WeakMethod(method, forget)


def join(threads: Iterable[threading.Thread], seconds: float) -> bool:
    """Wait for threads, at exit no longer than the exit lasts; return whether all have ended."""
    until = min([time.monotonic() + seconds, *_deadline])
    ended = True
    for thread in threads:
        if thread is not threading.current_thread() and thread.ident is not None:
            thread.join(max(until - time.monotonic(), 0.0))
            ended &= not thread.is_alive()
    return ended


def _running() -> list[Thread]:
    with _lock:
        return [thread for thread in _threads if thread.is_alive()]


def _call(phase: Phase) -> None:
    """Call what is registered, the latest first: later objects use earlier ones."""
    for when, reference in reversed(list(_stops.values())):
        method = reference() if when is phase else None
        if method is not None:
            try:
                method()
            except Exception as error:  # noqa: BLE001 - the supervisor of the exit: each gets its turn
                log.debug("at exit: %s: %s", type(error).__name__, error)


def _exit() -> None:
    begun = time.monotonic()
    _deadline.append(begun + EXIT_SECONDS)
    try:
        _call(Phase.LOOPS)
        join([thread for thread in _running() if thread.leaves], LEAVE_SECONDS)
        _call(Phase.POOLS)
        if not join(_running(), begun + FINISH_SECONDS - time.monotonic()):
            _interrupt(_running())
            join(_running(), EXIT_SECONDS)
    except KeyboardInterrupt:  # a second Ctrl-C: stop waiting
        _interrupt(_running())
    if not _running():  # else one of them may hold a lock forever
        _call(Phase.SESSIONS)
    _stops.clear()  # callbacks of weak references that run later would find no modules


def _interrupt(threads: Iterable[threading.Thread]) -> None:
    """Raise in each thread at its next Python bytecode: a transform may be about to process a hundred samples."""
    for thread in threads:
        if thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Interrupted))


def _forget() -> None:
    """Reset in a forked child, which does not have its parent's threads."""
    global _lock, _threads
    _lock, _threads = threading.RLock(), weakref.WeakSet()
    _stops.clear()
    _deadline.clear()


atexit.register(_exit)
os.register_at_fork(after_in_child=_forget)
