"""Waiting for an origin that does not answer: for minutes, with jitter and one warning, and then a clear error.

Only reads of samples that are needed now wait here. Prefetches fail at once and are retried later, so that resident
samples are still handed out, and an origin that is down holds no thread, lock or space (docs/adr/0014).
"""

from __future__ import annotations

import logging
import os
import re
import select
import time
from collections.abc import Callable
from typing import Final

from quiver import forks
from quiver.backoff import Backoff
from quiver.errors import Misconfigured, Unavailable
from quiver.origin.base import READ_SECONDS
from quiver.origin.origin_process import parent_of_worker

log = logging.getLogger("quiver_client")

VARIABLE: Final = "QUIVER_ORIGIN_PATIENCE"
PATIENCE_SECONDS: Final = 300.0  # a store that throttles or restarts is back by then; one that is gone is not
PATIENCE_SECONDS_MAX: Final = 7 * 86400.0
PAUSE_SECONDS: Final = 0.5  # at most, before the first retry; doubled before each further one
PAUSE_SECONDS_MAX: Final = 5.0  # others may fill the cache meanwhile, so a read looks there again this often
PAUSE_JITTER: Final = 7 / 8  # of each pause is drawn at random: many readers meet the same outage
READ_SECONDS_MIN: Final = 1.0
LOOK_SECONDS: Final = 0.5  # how often a worker checks that its parent still runs
_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")


def patience_seconds() -> float:
    """Return how long to wait for an origin that does not answer. Raises ``Misconfigured``."""
    text = os.environ.get(VARIABLE, "").strip().lower()
    if not text:
        return PATIENCE_SECONDS
    found = _DURATION.fullmatch(text)
    seconds = float(found[1]) * _UNITS[found[2]] if found else -1.0
    if not 0 <= seconds <= PATIENCE_SECONDS_MAX:
        raise Misconfigured(f"{VARIABLE}={text!r}: write how long to wait for an origin: 90s, 5m, 2h; 0 for not at all")
    return seconds


class OriginWait:
    """How long one read waits: until when, and the retries so far."""

    __slots__ = ("backoff", "until")

    def __init__(self, until: float) -> None:
        self.until = until
        self.backoff = Backoff(PAUSE_SECONDS, PAUSE_SECONDS_MAX, jitter=PAUSE_JITTER)


class OriginPatience:
    """How long one process waits for one origin. Safe from threads."""

    def __init__(self, origin: str, seconds: float) -> None:
        self._origin = origin
        self._seconds = seconds
        self._closing = forks.event()
        self._lock = forks.lock()
        self._silent_since = 0.0  # when the warning that the origin does not answer was logged; 0: it answers

    @property
    def read_seconds(self) -> float:
        """The deadline of one read. Several fit into the patience: the cache's, this process's, and a retry of both."""
        return min(READ_SECONDS, max(self._seconds / 3, READ_SECONDS_MIN))

    def begin(self) -> OriginWait:
        """Begin a read, and its patience."""
        return OriginWait(time.monotonic() + self._seconds)

    def wait(self, waiting: OriginWait, error: Unavailable, missing: Callable[[], str]) -> None:
        """Wait before a read is retried. Raises ``Unavailable`` if a retry cannot help, or patience is exhausted."""
        if error.lasting or self._closing.is_set():
            raise error
        left = waiting.until - time.monotonic()
        if left <= 0:
            raise self._given_up(error, missing()) from error
        self.say(error, missing())
        self._pause(min(waiting.backoff.fail(), left))
        if self._closing.is_set():
            raise error

    def answered(self) -> None:
        """Note that the origin answered: its next silence gets a warning of its own."""
        if self._silent_since:
            with self._lock:
                since, self._silent_since = self._silent_since, 0.0
            if since:
                log.info("%s answers again, after %.0f s", self._origin, time.monotonic() - since)

    def close(self) -> None:
        """End all waits."""
        self._closing.set()

    def say(self, error: Unavailable, missing: str) -> None:
        """Log once that this process waits for the origin, and which samples are missing."""
        with self._lock:
            if self._silent_since:
                return
            self._silent_since = time.monotonic()
        after = f" It asked not to retry for {error.retry_after_seconds:.0f} s." if error.retry_after_seconds else ""
        log.warning(
            "%s\nWaiting for the origin, up to %.0f s (%s): %s are not in the cache.%s Resident samples are served.",
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
            " a run resumed by load_state_dict(loader.state_dict()) continues exactly here"
        )
        return Unavailable(
            error.who,
            f"{error.why}; {waited}. {advice}",
            retry_after_seconds=error.retry_after_seconds,
            lasting=True,
        )

    def _pause(self, seconds: float) -> None:
        """Wait. A DataLoader worker whose parent has ended exits instead: no process waits for its samples."""
        until = time.monotonic() + seconds
        with parent_of_worker() as parent:
            while (left := until - time.monotonic()) > 0 and not self._closing.wait(min(left, LOOK_SECONDS)):
                if parent is not None and _is_readable(parent):
                    raise SystemExit(1)


def _is_readable(fd: int) -> bool:
    poll = select.poll()  # unlike ``select``, it accepts descriptors above 1023
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
