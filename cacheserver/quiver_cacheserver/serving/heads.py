"""What a connection may send of request heads before they are answered: a few kilobytes, or else of a budget.

aiohttp bounds a line of a head and how many there are, and 32 requests that are sent ahead. That is 32 MiB of each of
thousands of connections, none of which a limit on bodies or on requests counts.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any, Final

from aiohttp import StreamReader

from quiver_cacheserver.budget import Budgets, Resource

HEAD_BYTES_MAX: Final = 16 << 10  # of one head: ours have some hundred bytes, a token and a proxy's headers included
HEADERS_MAX: Final = 64
LINE_BYTES_MAX: Final = 8190


class Heads:
    """The heads that one connection has sent. Belongs to the event loop."""

    __slots__ = ("_address", "_budgets", "_held_bytes", "_partial_bytes", "_payload", "_unanswered", "is_over")

    def __init__(self, budgets: Budgets, address: str) -> None:
        self._budgets = budgets
        self._address = address
        self._partial_bytes = 0  # of a head that is not complete
        self._payload: StreamReader | None = None  # of the last request whose head is complete
        self._unanswered = 0
        self._held_bytes = 0  # for requests that were sent ahead of answers
        self.is_over = (
            False  # no request follows, and what arrives is ignored: after an error aiohttp keeps every piece
        )

    @property
    def in_head(self) -> bool:
        """Whether what arrives next is a head: the body of the last request is complete."""
        return self._payload is None or self._payload.is_eof()

    def receive(self, size_bytes: int, begun: int, queue: deque[Any], *, was_in_head: bool) -> bool:
        """Count what arrived, by which ``begun`` requests in aiohttp's queue began; return whether it is allowed."""
        allowed = self._is_allowed(size_bytes, begun, queue, was_in_head)
        self.is_over = self.is_over or not allowed
        return allowed

    def _is_allowed(self, size_bytes: int, begun: int, queue: deque[Any], was_in_head: bool) -> bool:
        if not begun:
            self._partial_bytes += size_bytes if was_in_head else 0
            return self._partial_bytes <= HEAD_BYTES_MAX
        self._partial_bytes = 0
        last, self._payload = queue[-1]
        if not hasattr(last, "raw_headers"):  # malformed
            self.is_over = True
            last.exc.__traceback__ = None  # its frames keep what arrived, a quarter of a megabyte
        self._unanswered += begun
        if size_bytes > HEAD_BYTES_MAX and any(
            _bytes_of(message) > HEAD_BYTES_MAX for message, _ in _last(queue, begun)
        ):
            return False
        return self._unanswered <= 1 or self._hold(size_bytes)

    def answered(self) -> None:
        """An answer was sent."""
        self._unanswered = max(self._unanswered - 1, 0)
        if not self._unanswered:
            self.release()

    def release(self) -> None:
        """Release what is held: all heads were answered, or the connection is gone."""
        if self._held_bytes:
            self._budgets.release(self._address, Resource.BODY_BYTES, self._held_bytes)
            self._held_bytes = 0

    def _hold(self, size_bytes: int) -> bool:
        if not self._budgets.hold(self._address, Resource.BODY_BYTES, size_bytes):
            return False
        self._held_bytes += size_bytes
        return True


def _last(queue: deque[Any], count: int) -> Any:
    return islice(reversed(queue), count)


def _bytes_of(message: Any) -> int:
    """Return how many bytes the headers of a request have."""
    return sum(len(name) + len(value) for name, value in getattr(message, "raw_headers", ()))
