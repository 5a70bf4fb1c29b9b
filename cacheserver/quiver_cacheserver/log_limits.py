"""What keeps a log short: few lines per situation.

Whatever fails for one shard fails for the next hundred, and anybody who can ask a daemon can make it fail. A situation
is the place in the code that logs, known by its format. Metrics count what is left out here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

WINDOW_SECONDS: Final = 60.0
DISTINCT_MAX: Final = 5  # lines of one situation in that time, all different
SITUATIONS_MAX: Final = 256


class _Situation:
    def __init__(self, since: float) -> None:
        self.since = since
        self.said: set[str] = set()
        self.left_out = 0


class RepeatFilter(logging.Filter):
    """Lets pass of each kind of warning a few different ones a minute. Put on a handler; safe from threads."""

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
            failed = repr(record.exc_info[1]) if record.exc_info else ""  # another error is another line
            with self._lock:
                left_out = self._counted(key, line + failed)
            if left_out < 0:
                return False
        more = f" (and {left_out} more like it in the last {WINDOW_SECONDS:.0f} s or more)" if left_out else ""
        record.msg, record.args = line + more, ()
        return True

    def _counted(self, key: tuple[str, str], line: str) -> int:
        """Return how many were left out before this line, -1 if this one is."""
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
