"""Answers of a plain HTTP server: their bytes, in one piece or in several, and the errors that they may cause.

An answer holds its connection until it is read to its end or released, so that no answer is taken for another.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from typing import Any, Protocol, TypeVar

from quiver.errors import Unavailable

T = TypeVar("T")


class NotNow(Unavailable):
    """A failure that may pass; ``pause_seconds``: how long the server asks to wait before a retry."""

    def __init__(self, who: str, why: str, pause_seconds: float = 0.0) -> None:
        super().__init__(who, why, retry_after_seconds=pause_seconds)


class NoRanges(Unavailable):
    """The server answers a request for a range with something else."""


class Receiver(Protocol):
    """The store that requested an answer: it bounds how long receiving takes, and reuses connections."""

    def receive(self, path: str, answer: Answer, out: memoryview) -> None:
        """Fill ``out`` from the body. Raises ``Unavailable``."""
        ...

    def release(self, answer: Answer) -> None:
        """Keep the answer's connection if the answer was read to its end; otherwise close it."""
        ...

    async def aside(self, work: Callable[[], T]) -> T:
        """Do blocking work in a thread."""
        ...


class Answer(HTTPResponse):
    """An answer, and the connection on which it came."""

    connection: HTTPConnection

    def receive_some(self, out: memoryview) -> int:
        """Receive into ``out`` what has arrived; wait only while there is nothing. Return its size, 0 at the end."""
        if self.chunked or self.length is None or self.fp is None:
            piece = self.read1(len(out))
            out[: len(piece)] = piece
            return len(piece)
        count = self.fp.readinto1(out[: self.length])  # without a copy, unlike read1; readinto would wait for all bytes
        self.length -= count
        return count


class Whole:
    """An object, or a range of one, whose bytes are still to be received.

    ``meta`` has ``size`` and, of a whole object, ``e_tag`` and ``last_modified``.
    """

    def __init__(self, store: Receiver, path: str, answer: Answer, meta: dict[str, Any]) -> None:
        self.meta = meta
        self._store = store
        self._path = path
        self._answer: Answer | None = answer

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self._release()

    def bytes(self) -> bytearray:
        """Return all of it."""
        return next(iter(self.stream(min_chunk_size=max(self.meta["size"], 1))), bytearray())

    async def bytes_async(self) -> bytearray:
        return await self._store.aside(self.bytes)

    def stream(self, *, min_chunk_size: int) -> Pieces:
        """Return its pieces of this size, the last one smaller. Raises ``Unavailable`` if the answer ends early."""
        return Pieces(self._store, self._pieces(min_chunk_size))

    def _pieces(self, size_bytes: int) -> Iterator[bytearray]:
        left = self.meta["size"]
        try:
            while left and self._answer is not None:
                piece = bytearray(min(left, size_bytes))
                self._store.receive(self._path, self._answer, memoryview(piece))
                left -= len(piece)
                yield piece
        finally:
            self._release()

    def _release(self) -> None:
        """Return the connection to the store: not every caller reads an object to its end."""
        answer, self._answer = self._answer, None
        if answer is not None:
            self._store.release(answer)


class Pieces:
    """The pieces of an answer: an iterator, and an asynchronous one."""

    def __init__(self, store: Receiver, pieces: Iterator[bytearray]) -> None:
        self._store = store
        self._iterator = pieces

    def __iter__(self) -> Iterator[bytearray]:
        return self._iterator

    def __next__(self) -> bytearray:
        return next(self._iterator)

    async def __aiter__(self) -> AsyncIterator[bytearray]:
        while (piece := await self._store.aside(lambda: next(self._iterator, None))) is not None:
            yield piece
