"""Connections that wait, in one epoll, and the few threads that serve those that are ready.

There is no thread that polls and hands over: each worker waits in ``epoll_wait`` for one event at a time, and the
kernel wakes the one that slept last. So a wake-up costs no more than it would for a thread of the connection's own, and
no more workers run than are needed.

Invariant: a channel has one owner. While it waits, it is the poller's (its events are armed, ``EPOLLONESHOT``); once
ready, it is the worker's that took the event; parked, it is the event loop's until ``resume``. Only the owner touches
it, and only a worker closes it, by ``_close``: unregistered first, under the lock. Whoever else wants it to end
(``sweep``, ``end``) shuts the socket down under the same lock, and the owner meets the end of the connection. So no
descriptor is closed twice, nor shut down after it was closed and its number given to another connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from math import inf
from typing import Final

from quiver_cacheserver.budget import HELD_MAX, Budgets, Resource

log = logging.getLogger(__name__)

READABLE: Final = select.EPOLLIN
WRITABLE: Final = select.EPOLLOUT
PARKED: Final = 0  # the event loop will call ``resume``
ENDED: Final = -1
AGAIN: Final = -2  # there is more to do at once, after the other ready channels
WORKERS: Final = HELD_MAX[Resource.SENDS]


class Channel(ABC):
    """A connection that a poller waits for.

    ``sock`` is non-blocking and belongs to the channel. ``deadline``: until when it may wait, by ``time.monotonic``;
    set before ``serve`` returns events. ``late``: the deadline has passed, and the socket was shut down.
    """

    __slots__ = ("client", "deadline", "late", "sock")

    def __init__(self, sock: socket.socket, client: str, deadline: float) -> None:
        self.sock = sock
        self.client = client
        self.deadline = deadline
        self.late = False

    @abstractmethod
    def serve(self) -> int:
        """In a worker: do, for a stint, what does not have to wait for the other end.

        Return the events to wait for, ``AGAIN``, ``PARKED`` or ``ENDED``.
        """

    def close(self) -> None:
        """Close the socket, of which the poller knows nothing any more."""
        self.sock.close()

    @abstractmethod
    def ended(self) -> None:
        """Release what the channel holds. Called once, after ``close``."""


class Poller:
    """Serves channels as they become ready. Safe from threads."""

    def __init__(self, budgets: Budgets, workers: int = WORKERS) -> None:
        self._budgets = budgets
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._channels: dict[int, Channel] = {}
        self._lock = threading.Lock()
        self._turns = threading.Lock()
        self._deferred: OrderedDict[str, deque[Channel]] = OrderedDict()  # ready, of addresses with enough workers
        self._stopped = False
        self._threads = [threading.Thread(target=self._work, name=f"quiver-serve-{at}") for at in range(workers)]

    def __len__(self) -> int:
        return len(self._channels)

    def start(self) -> None:
        self._epoll.register(self._wake, select.EPOLLIN)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End all channels and threads, once. Blocks no longer than a disk access takes."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        if self._threads[0].ident is not None:
            os.eventfd_write(self._wake, 1)
            for thread in self._threads:
                thread.join()
        for channel in list(self._channels.values()):
            self._close(channel)
        self._epoll.close()
        os.close(self._wake)

    # -- channels -----------------------------------------------------------------------------------------------------

    def add(self, channel: Channel, events: int) -> None:
        """Wait for events of a new channel, which belongs to the poller from now on. Raises ``OSError``."""
        fd = channel.sock.fileno()
        with self._lock:
            if self._stopped:
                raise ConnectionAbortedError("the daemon ends")
            self._channels[fd] = channel
            try:
                self._epoll.register(fd, events | select.EPOLLONESHOT)
            except OSError:
                del self._channels[fd]
                raise

    def resume(self, channel: Channel) -> None:
        """On the event loop: have a worker serve a channel that was parked."""
        with self._lock:
            if channel.sock.fileno() >= 0:  # unless the poller was stopped
                self._arm(channel, WRITABLE)

    def end(self, channel: Channel) -> None:
        """Make a channel end, whichever thread owns it now."""
        with self._lock:
            _shut_down(channel)

    def end_all(self, kind: type[Channel] | None = None) -> None:
        """Make all channels end, or all of a kind."""
        with self._lock:
            for channel in self._channels.values():
                if kind is None or isinstance(channel, kind):
                    _shut_down(channel)

    def sweep(self) -> None:
        """Make channels end that waited past their deadlines. Cheap: a comparison per channel."""
        now = time.monotonic()
        with self._lock:
            for channel in self._channels.values():
                if channel.deadline < now:
                    channel.deadline, channel.late = inf, True
                    _shut_down(channel)

    def _arm(self, channel: Channel, events: int) -> None:
        self._epoll.modify(channel.sock.fileno(), events | select.EPOLLONESHOT)

    def _close(self, channel: Channel) -> None:
        with self._lock:
            fd = channel.sock.fileno()
            self._channels.pop(fd, None)
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)  # closing alone does not, while the connection has another descriptor
            channel.close()
        channel.ended()

    # -- workers ------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            channel = self._ready(-1)
            if self._stopped:
                return  # the event stays pending, for the other workers
            while channel is not None and not self._stopped:
                channel = self._turn(channel)

    def _ready(self, seconds: float) -> Channel | None:
        """Take a channel that is ready; this worker owns it then."""
        for fd, _ in self._epoll.poll(seconds, 1):
            return self._channels.get(fd)
        return None

    def _turn(self, channel: Channel) -> Channel | None:
        """Serve a channel, if its address has a worker to spare; return one to serve next, if any is known."""
        channel.deadline = inf
        client = channel.client
        with self._turns:
            if not self._budgets.hold(client, Resource.SENDS, counted=False):
                self._deferred.setdefault(client, deque()).append(channel)
                return None
        following: Channel | None = None
        try:
            events = channel.serve()
            while (
                events == AGAIN and not self._deferred and not self._stopped and (following := self._ready(0)) is None
            ):
                events = channel.serve()  # no other channel is ready: arming this one would only wake another worker
        except Exception:  # a supervisor: a bug costs this connection, and not the worker
            log.exception("a connection was closed")
            events = ENDED
        try:
            if events == ENDED:
                self._close(channel)
            elif events != PARKED:
                self._arm(channel, WRITABLE if events == AGAIN else events)
        except Exception:  # of the same supervisor
            log.exception("a connection could not be closed or waited for")
        with self._turns:
            self._budgets.release(client, Resource.SENDS)
            if self._deferred and following is None:
                following = self._next()
        return following

    def _next(self) -> Channel | None:
        """Take a channel that waited for a worker, of each address in turn."""
        for client, waiting in self._deferred.items():
            if self._budgets.hold(client, Resource.SENDS, counted=False):
                self._budgets.release(client, Resource.SENDS)
                channel = waiting.popleft()
                self._deferred.move_to_end(client)
                if not waiting:
                    del self._deferred[client]
                return channel
        return None


def _shut_down(channel: Channel) -> None:
    """Make the owner see the end of the connection. Shuts down the plain socket: no TLS closing handshake is needed."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(channel.sock, socket.SHUT_RDWR)
