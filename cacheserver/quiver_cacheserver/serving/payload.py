"""Ranges of files on their way to a reader, without passing through this process.

A thread gives the kernel slices of mapped files, many in one call: nothing is copied here, no Python step is taken a
byte, and the interpreter's lock is free meanwhile. A cold page is read from disk inside that call, so it holds up that
thread and nobody else; a disk that fails there is an error of the call and not a signal. Where a reader takes nothing
for a moment the thread is given back, and the event loop waits for him.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import time
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Executor
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt

from quiver.digest import Digest
from quiver.errors import DiskFailed
from quiver.store import OpenFile

SLICES_MAX: Final = 1024  # of one call: the kernel's IOV_MAX
STINT_BYTES: Final = 16 << 20  # then it is the next reader's turn
STINT_SECONDS: Final = 1.0  # or then: a reader may take little at a time without ever being waited for
PATIENCE_MS: Final = 20  # of a thread; a reader who is slower is waited for without one

Ints = npt.NDArray[np.int64]


class Payload:
    """What is to be sent of some files, in order: ``(n,)`` which file, and offset and length in bytes."""

    def __init__(self, files: Sequence[OpenFile], numbers: Ints, offsets: Ints, lengths: Ints) -> None:
        self.size_bytes = int(lengths.sum())
        self.head = b""  # sent before the ranges, and not counted
        self.shards: Sequence[Digest] = ()  # that the files are, to be verified again if one cannot be read
        self._files = files
        self._views: dict[int, memoryview] = {}
        # What is asked for back to back is one range.
        ends = offsets + lengths
        begins = np.ones(len(numbers), bool)
        begins[1:] = (numbers[1:] != numbers[:-1]) | (offsets[1:] != ends[:-1])
        firsts = np.flatnonzero(begins)
        self._numbers, self._offsets = numbers[firsts], offsets[firsts]
        self._lengths = np.add.reduceat(lengths, firsts) if len(firsts) else lengths
        self._next = 0  # range
        self._slices: list[memoryview] = []
        self._ends: list[int] = []  # of the slices, from the first one's start
        self._sent = 0  # bytes of the slices

    def push(self, sock: socket.socket, stopped: list[bool]) -> tuple[int, bool]:
        """In a thread: send what the reader takes; return how many bytes that were, and whether he is to be waited for.

        ``stopped`` ends it at the next turn once there is something in it. Raises ``OSError`` of the reader's socket,
        and ``DiskFailed`` of a disk that does not give out what it holds.
        """
        poller = select.poll()
        poller.register(sock, select.POLLOUT)
        total, ends_at = 0, time.monotonic() + STINT_SECONDS
        while total < STINT_BYTES and time.monotonic() < ends_at and not stopped and self._prepare():
            first = bisect_right(self._ends, self._sent)
            vector = self._slices[first:]
            vector[0] = vector[0][self._sent - (self._ends[first - 1] if first else 0) :]
            try:
                count = sock.sendmsg(vector)
            except BlockingIOError:
                if not poller.poll(PATIENCE_MS):
                    return total, True
                continue
            except OSError as error:
                if error.errno == errno.EFAULT:  # a page that cannot be had is told of as an address that is none
                    raise DiskFailed("a shard's file cannot be read, or became shorter") from error
                raise
            self._sent += count
            total += count
        return total, False

    @property
    def done(self) -> bool:
        sent = not self._ends or self._sent >= self._ends[-1]
        return sent and self._next >= len(self._numbers) and not self.head

    def _prepare(self) -> bool:
        """Have slices that are not sent yet; return whether there are any."""
        if self._ends and self._sent < self._ends[-1]:
            return True
        part = slice(self._next, self._next + SLICES_MAX - 1)
        numbers, starts = self._numbers[part], self._offsets[part]
        ends = starts + self._lengths[part]
        for number in np.unique(numbers).tolist():
            if number not in self._views:
                self._views[number] = self._files[number].mapped()
        views = self._views
        cuts = zip(numbers.tolist(), starts.tolist(), ends.tolist(), strict=True)
        self._slices = [views[number][start:end] for number, start, end in cuts]
        if self.head:
            self._slices.insert(0, memoryview(self.head))
            self.head = b""
        self._ends = list(accumulate(map(len, self._slices)))
        self._sent, self._next = 0, self._next + len(numbers)
        return bool(self._ends) and self._ends[-1] > 0


class Line:
    """A reader's connection, written to beside the transport that owns it and that has nothing left to write."""

    def __init__(self, transport: asyncio.Transport) -> None:
        given = transport.get_extra_info("socket")
        self._socket = socket.socket(fileno=os.dup(given.fileno()))
        self._socket.setblocking(False)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    async def push(self, payload: Payload, threads: Executor) -> tuple[int, bool]:
        """``Payload.push`` in a thread, which has let go of the socket whatever happens here."""
        stopped: list[bool] = []
        pushing = asyncio.get_running_loop().run_in_executor(threads, payload.push, self._socket, stopped)
        try:
            return await asyncio.shield(pushing)
        except asyncio.CancelledError:
            stopped.append(True)
            with contextlib.suppress(OSError, DiskFailed):
                await pushing
            raise

    async def writable(self) -> None:
        """Wait until the reader takes something."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_writer(self._socket, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(self._socket)
