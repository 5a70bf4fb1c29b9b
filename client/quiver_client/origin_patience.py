"""Waiting for an origin that does not answer: for minutes, with full jitter, said once; and then a clear error.

Only who needs a sample now waits here. What is fetched ahead gives up at once and is tried again later, so that what
is resident goes on being handed out, and no thread, lock or room is held by an origin that is down (docs/adr/0014).
"""

from __future__ import annotations

import logging
import os
import random
import re
import select
import time
from collections.abc import Callable
from typing import Final

from quiver import forks
from quiver.errors import Misconfigured, Unavailable
from quiver.origin.base import READ_SECONDS
from quiver.origin.isolated import parent_of_worker

log = logging.getLogger("quiver_client")

VARIABLE: Final = "QUIVER_ORIGIN_PATIENCE"
PATIENCE_SECONDS: Final = 300.0  # a store that throttles or is restarted is back by then; a pass of no progress is not
PATIENCE_SECONDS_MAX: Final = 7 * 86400.0
PAUSE_SECONDS: Final = 0.5  # up to so long before the first repetition, and up to twice as long before each further one
PAUSE_SECONDS_MAX: Final = 5.0  # what is missing may come into the cache meanwhile: look now and then
READ_SECONDS_MIN: Final = 1.0
LOOK_SECONDS: Final = 0.5  # how often a worker looks whether its parent still is
_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")


def patience_seconds() -> float:
    """Return for how long an origin that does not answer is waited for. Raises ``Misconfigured``."""
    text = os.environ.get(VARIABLE, "").strip().lower()
    if not text:
        return PATIENCE_SECONDS
    found = _DURATION.fullmatch(text)
    seconds = float(found[1]) * _UNITS[found[2]] if found else -1.0
    if not 0 <= seconds <= PATIENCE_SECONDS_MAX:
        raise Misconfigured(f"{VARIABLE}={text!r}: write how long to wait for an origin: 90s, 5m, 2h; 0 for not at all")
    return seconds


class Wait:
    """One read, which may have to wait."""

    __slots__ = ("failures", "until")

    def __init__(self, until: float) -> None:
        self.until = until
        self.failures = 0


class OriginPatience:
    """Of one process with one origin. Safe from threads."""

    def __init__(self, origin: str, seconds: float) -> None:
        self._origin = origin
        self._seconds = seconds
        self._closing = forks.event()
        self._lock = forks.lock()
        self._since = 0.0  # when it was said that the origin does not answer; 0: it does

    @property
    def read_seconds(self) -> float:
        """How long one read may take: the cache is asked, the origin for the cache, the origin, and all of it again."""
        return min(READ_SECONDS, max(self._seconds / 3, READ_SECONDS_MIN))

    def begin(self) -> Wait:
        """Begin a read: this is when its patience begins as well."""
        return Wait(time.monotonic() + self._seconds)

    def wait(self, waiting: Wait, error: Unavailable, missing: Callable[[], str]) -> None:
        """Wait before a read is repeated. Raises ``Unavailable`` where that does not help, or not any more."""
        if error.lasting or self._closing.is_set():
            raise error
        left = waiting.until - time.monotonic()
        if left <= 0:
            raise self._given_up(error, missing()) from error
        self.say(error, missing())
        waiting.failures += 1
        most = min(PAUSE_SECONDS * 2.0 ** min(waiting.failures - 1, 16), PAUSE_SECONDS_MAX)
        self._pause(min(random.uniform(most / 8, most), left))  # noqa: S311
        if self._closing.is_set():
            raise error

    def answered(self) -> None:
        """The origin delivered something: the next time that it does not is another one, to be said again."""
        if self._since:
            with self._lock:
                since, self._since = self._since, 0.0
            if since:
                log.info("%s answers again, after %.0f s", self._origin, time.monotonic() - since)

    def close(self) -> None:
        """Let nobody wait any longer."""
        self._closing.set()

    def say(self, error: Unavailable, missing: str) -> None:
        """Say once what is waited for."""
        with self._lock:
            if self._since:
                return
            self._since = time.monotonic()
        after = f" It asks to be left alone for {error.retry_after_seconds:.0f} s." if error.retry_after_seconds else ""
        log.warning(
            "%s\nWaiting for the origin, up to %.0f s (%s): %s are not in the cache.%s What is resident goes on.",
            error,
            self._seconds,
            VARIABLE,
            missing,
            after,
        )

    def _given_up(self, error: Unavailable, missing: str) -> Unavailable:
        waited = f"waited {self._seconds:.0f} s for it: {missing} are not in the cache"
        advice = (
            f"Check that the origin {self._origin} can be reached from here, or wait longer ({VARIABLE}=30m);"
            " a run resumed by load_state_dict(loader.state_dict()) goes on exactly here"
        )
        return Unavailable(
            error.who,
            f"{error.why}; {waited}. {advice}",
            retry_after_seconds=error.retry_after_seconds,
            lasting=True,
        )

    def _pause(self, seconds: float) -> None:
        """Wait, though not in a worker of a DataLoader whose parent is gone: it has nobody to read for, and ends."""
        until = time.monotonic() + seconds
        with parent_of_worker() as parent:
            while (left := until - time.monotonic()) > 0 and not self._closing.wait(min(left, LOOK_SECONDS)):
                if parent is not None and _is_readable(parent):
                    raise SystemExit(1)


def _is_readable(fd: int) -> bool:
    poll = select.poll()  # which takes any number of a descriptor
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
