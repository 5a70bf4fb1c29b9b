"""A line on a terminal while the dataset is filled into the cache for the first time: how fast, how far, how long.

    imagenet: origin 312 MB/s, 41 %, 2 min

``FirstFill`` computes, without a clock and without a terminal; ``ProgressLine`` writes. A shard counts once it was seen
resident, whether or not it was evicted since, so the line ends where a cache holds less than the dataset, too. The
thread that reports needs writes it, as it alone learns what arrives, so the line needs no thread of its own.

The cursor stays at the line's beginning: whatever else is written there overwrites it, and a log stays readable. While
a bar of tqdm or a live display of rich is shown, nothing is written at all: they own the terminal's last line.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from quiver import forks
from quiver.rate import Rate
from quiver.substitution import Mask
from quiver_client.loader.consumer import Read

VARIABLE: Final = "QUIVER_PROGRESS"  # 0: show none
SHOWN_SECONDS: Final = 0.5  # between two lines
FIRST_SECONDS: Final = 2.0  # before the first one: what is filled within that needs none
CLEAR: Final = "\r\x1b[2K"
_lock = forks.lock()
_showing: weakref.WeakSet[Any] = weakref.WeakSet()  # the line of this process: one at a time


class FirstFill:
    """How much of the needed shards was seen resident, and how fast more arrives."""

    def __init__(self, shard_bytes: npt.NDArray[np.float64], needed: Mask) -> None:
        """``shard_bytes`` ``(shards,)``; ``needed`` ``(shards,)``: those that a pass reads."""
        self._bytes = np.where(needed, shard_bytes, 0.0)
        self._seen = np.zeros(len(shard_bytes), bool)
        self._total = float(self._bytes.sum())
        self._rate = Rate(window_seconds=2.0, weight=0.3)
        self._done = 0.0
        self._at: float | None = None

    @property
    def is_complete(self) -> bool:
        return self._done >= self._total

    def learn(self, resident: Mask, now: float) -> None:
        """Learn what is resident."""
        self._seen |= resident
        done = float(self._bytes[self._seen].sum())
        if self._at is not None:
            self._rate.add(done - self._done, now - self._at)
        self._done, self._at = done, now

    @property
    def text(self) -> str:
        rate, share = self._rate.value, int(100 * self._done / self._total) if self._total else 100
        parts = [f"origin {rate / 1e6:,.0f} MB/s" if rate >= 1e6 else f"origin {rate / 1e6:.1f} MB/s", f"{share} %"]
        if rate > 0:
            parts.append(duration((self._total - self._done) / rate))
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """Return a duration to one or two digits: ``40 s``, ``2 min``, ``3 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.0f} h"


def is_wanted(progress: bool | None, rank: int) -> bool:
    """Whether this process shows a line. Raises ``ValueError`` if ``progress`` is neither a bool nor ``None``."""
    if progress is not None and not isinstance(progress, bool):
        raise ValueError(f"progress={progress!r}: give True, False, or None to show it unless ${VARIABLE} is 0")
    if progress is None:
        progress = os.environ.get(VARIABLE, "") not in ("0", "false", "no", "off")
    return progress and rank == 0 and sys.stderr is not None and sys.stderr.isatty()


class ProgressLine:
    """The line of one loader, from its first pass until all was resident once, the pass ends, or it is closed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._name, self._shard_bytes = "", np.zeros(0)
        self._fill: FirstFill | None = None
        self._began: float | None = None
        self._shown = 0.0
        self._is_written = self._ended = False

    def measure(self, name: str, shard_bytes: npt.NDArray[np.float64]) -> None:
        """Set what is shown: a dataset's name, and how many bytes its shards have ``(shards,)``."""
        self._name, self._shard_bytes = name, shard_bytes

    def learn(self, epoch: Read, resident: Mask) -> None:
        """Learn which shards are resident ``(shards,)``, and show it."""
        if self._ended:
            return
        now = self._clock()
        if self._fill is None or self._began is None:
            self._fill, self._began = FirstFill(self._shard_bytes, epoch.left > 0), now
        self._fill.learn(resident, now)
        if self._fill.is_complete:
            self.end()
        elif now - self._began >= FIRST_SECONDS and now - self._shown >= SHOWN_SECONDS:
            self._shown = now
            self._show(self._fill.text)

    def end(self) -> None:
        """Remove the line. It does not come again."""
        with _lock:
            self._ended = True
            _showing.discard(self)
            if self._is_written and not _is_occupied():
                _write(CLEAR)
            self._is_written = False

    def _show(self, text: str) -> None:
        with _lock:
            if self._ended or _is_occupied() or any(each is not self for each in _showing):
                return
            _showing.add(self)
            self._is_written = True
            _write(f"{CLEAR}{self._name}: {text}\r")


def _is_occupied() -> bool:
    """Whether another program's display has the last line of the terminal."""
    tqdm: Any = sys.modules.get("tqdm.std")
    if tqdm is not None and len(getattr(tqdm.tqdm, "_instances", ())):
        return True
    rich: Any = sys.modules.get("rich")
    console = getattr(rich, "_console", None)
    return bool(getattr(console, "_live_stack", None) or getattr(console, "_live", None))


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):  # the terminal is gone, or standard error was closed
        pass
