"""A rate limit on log lines, per situation.

What fails for one shard fails for the next hundred, and any client can make requests fail. A situation is a place in
the code that logs, identified by its format string. Metrics count what the log omits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

WINDOW_SECONDS: Final = 60.0
DISTINCT_MAX: Final = 5  # distinct lines of one situation in a window
SITUATIONS_MAX: Final = 256


class Limit:
    """Passes a few lines per key and window, and counts nothing: the caller does. Not safe from threads."""

    def __init__(
        self,
        lines_max: int,
        keys_max: int = SITUATIONS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lines_max = lines_max
        self._keys_max = keys_max
        self._clock = clock
        self._windows: OrderedDict[str, tuple[float, int]] = OrderedDict()  # when it began, and lines since then

    def passes(self, key: str) -> bool:
        """Count a line; return whether to log it. The least recently seen key is forgotten first."""
        now = self._clock()
        since, lines = self._windows.pop(key, (now, 0))
        if now - since >= WINDOW_SECONDS:
            since, lines = now, 0
        self._windows[key] = since, lines + 1
        while len(self._windows) > self._keys_max:
            self._windows.popitem(last=False)
        return lines < self._lines_max


class _Situation:
    def __init__(self, since: float) -> None:
        self.since = since
        self.said: set[str] = set()
        self.left_out = 0


class RepeatFilter(logging.Filter):
    """Passes a few distinct warnings per situation and window. Add it to a handler; safe from threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._situations: OrderedDict[tuple[str, str], _Situation] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        key = (record.name, str(record.msg))
        line = record.getMessage()
        left_out = 0
        if record.levelno >= logging.WARNING:
            failed = repr(record.exc_info[1]) if record.exc_info else ""  # a different error makes a different line
            with self._lock:
                left_out = self._counted(key, line + failed)
            if left_out < 0:
                return False
        more = f" (and {left_out} more like it in the last {WINDOW_SECONDS:.0f} s or more)" if left_out else ""
        record.msg, record.args = line + more, ()
        return True

    def _counted(self, key: tuple[str, str], line: str) -> int:
        """Return how many lines were omitted before this one, or -1 if this one is omitted."""
        now = self._clock()
        situation = self._situations.setdefault(key, _Situation(now))
        self._situations.move_to_end(key)
        while len(self._situations) > SITUATIONS_MAX:
            self._situations.popitem(last=False)
        left_out = 0
        if now - situation.since >= WINDOW_SECONDS:
            left_out = situation.left_out
            situation = self._situations[key] = _Situation(now)
        if line in situation.said or len(situation.said) >= DISTINCT_MAX:
            situation.left_out += 1
            return -1
        situation.said.add(line)
        return left_out
