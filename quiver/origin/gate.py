"""When requests to a store may be retried: after its own Retry-After, or with full jitter if it sent none.

obstore exposes the status and body of an answer but not its headers. So when a store answers "too many requests", code
of our own, which sees the headers, makes one more request, for one byte. While the gate is closed, no request is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import time
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import urlsplit

BACKOFF_SECONDS: Final = 0.1  # at most, after the first failure; doubled after each further one
BACKOFF_SECONDS_MAX: Final = 10.0
SPREAD_SECONDS: Final = 1.0  # over which requests that waited for a Retry-After are spread
RETRY_AFTER_SECONDS_MAX: Final = 3600.0  # the longest accepted: a wrong header must not stop a daemon for a year
ASK_SECONDS: Final = 5.0  # how long the request for a Retry-After may take
ASK_AGAIN_SECONDS: Final = 5.0  # and how often one is made, at most
HEAD_BYTES_MAX: Final = 1 << 16
_chance: Final = random.SystemRandom()  # the global generator is the training program's


def backoff_seconds(failures: int) -> float:
    """Return how long to wait after so many failures in a row (1 or more): full jitter."""
    return _chance.uniform(0, min(BACKOFF_SECONDS * 2.0 ** min(failures - 1, 16), BACKOFF_SECONDS_MAX))


class Gate:
    """The gate of one store. Belongs to one event loop."""

    def __init__(self) -> None:
        self.in_trouble = False  # the last answer was a failure
        self._opens = 0.0
        self._asked = -ASK_AGAIN_SECONDS
        self._asking = asyncio.Lock()

    async def passed(self, until: float) -> float:
        """Wait until the gate is open and return 0; if it opens after ``until``, return at once the seconds left.

        ``until`` is a time of ``time.monotonic``.
        """
        while self._asking.locked() or self._opens > time.monotonic():
            async with self._asking:
                seconds = self._opens - time.monotonic()
            if seconds <= 0:
                return 0.0
            if time.monotonic() + seconds >= until:
                return seconds
            await asyncio.sleep(seconds + _chance.uniform(0, min(seconds, SPREAD_SECONDS)))
        return 0.0

    def close_for(self, seconds: float) -> None:
        """Close the gate for as long as the store asked."""
        self._opens = max(self._opens, time.monotonic() + min(seconds, RETRY_AFTER_SECONDS_MAX))

    async def ask(self, url: str) -> None:
        """Ask the store how long to wait, unless it was asked just now, and close the gate for that long."""
        async with self._asking:
            if time.monotonic() - max(self._asked, self._opens) < ASK_AGAIN_SECONDS:
                return
            seconds = await _retry_after(url)
            self._asked = time.monotonic()
            self._opens = self._asked + seconds


async def _retry_after(url: str) -> float:
    """Return the Retry-After of the answer to a GET of one byte, in seconds; 0 if there is none."""
    parts = urlsplit(url)
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
    head = f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nRange: bytes=0-0\r\nConnection: close\r\n\r\n"
    with contextlib.suppress(OSError, ValueError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        async with asyncio.timeout(ASK_SECONDS):
            port = parts.port or (443 if secure else 80)
            reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure, limit=HEAD_BYTES_MAX)
            try:
                writer.write(head.encode("ascii"))
                return retry_after_seconds(await reader.readuntil(b"\r\n\r\n"))
            finally:
                writer.transport.abort()
    return 0.0


def retry_after_seconds(head: bytes) -> float:
    """Return the Retry-After of an answer's head, a number of seconds or a date; 0 if it is missing or malformed."""
    status, *lines = head.decode("latin-1").split("\r\n")
    if status.split(" ")[1:2] not in (["429"], ["503"]):
        return 0.0
    for name, _, value in (line.partition(":") for line in lines):
        if name.strip().lower() != "retry-after":
            continue
        return parse_retry_after(value)
    return 0.0


def parse_retry_after(value: str) -> float:
    """Return a Retry-After, a number of seconds or a date, in seconds from now; 0 if it is malformed."""
    value = value.strip()
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        is_number = value.isascii() and value.isdecimal()
        seconds = float(value) if is_number else parsedate_to_datetime(value).timestamp() - time.time()
        return min(max(seconds, 0.0), RETRY_AFTER_SECONDS_MAX)
    return 0.0
