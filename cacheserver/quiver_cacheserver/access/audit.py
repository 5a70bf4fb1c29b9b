"""The audit log: a line of JSON for each refused request, without digests and without tokens.

Whoever is refused decides how often, so the lines are bounded: a few per caller and reason, and a few in all. The next
line says how many were left out, and the counters count every refusal.
"""

from __future__ import annotations

import datetime
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from quiver_cacheserver.access.caller import Caller
from quiver_cacheserver.log_limits import Limit

LOGGER: Final = "quiver.audit"
LINES_MAX: Final = 5  # per minute, caller and reason
LINES_MAX_IN_ALL: Final = 120  # per minute: a line has at most 500 bytes

log = logging.getLogger(LOGGER)


class Audit:
    """Counts and logs refusals. Safe from threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.refusals: Counter[str] = Counter()  # by reason; those that a daemon can know start at 0
        self._each = Limit(LINES_MAX, clock=clock)
        self._all = Limit(LINES_MAX_IN_ALL, clock=clock)
        self._left_out = 0
        self._lock = threading.Lock()

    def refused(self, caller: Caller, verb: str, reason: str) -> None:
        """Record a refusal. ``caller``: as far as it is known."""
        with self._lock:
            self.refusals[reason] += 1
            who = caller.tenant or caller.address
            if not (self._each.passes(f"{reason} {who}") and self._all.passes("")):
                self._left_out += 1
                return
            left_out, self._left_out = self._left_out, 0
        log.info(
            json.dumps(
                {
                    "event": "refused",
                    "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
                    "address": caller.address,
                    "tenant": caller.tenant,
                    "domain": caller.domain,
                    "route": verb,
                    "reason": reason,
                    "left_out": left_out,
                }
            )
        )
