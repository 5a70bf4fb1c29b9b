"""How long a training loop waits for other ranks: a warning after a while that says for whom, then an error."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from quiver.errors import Unavailable

log = logging.getLogger("quiver_client")

TIMEOUT_SECONDS: Final = 300.0  # unless the loader was given a timeout: ranks compile and save for minutes
WARN_SECONDS: Final = 10.0


class Patience:
    """Of one loader. A wait counts from the moment when the loop waits: prefetching may wait for ever."""

    def __init__(self, timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_seconds = timeout_seconds or TIMEOUT_SECONDS
        self._clock = clock
        self._since: float | None = None
        self._has_warned = False
        self.is_exhausted = False  # it has raised

    def begin(self) -> None:
        """The loop waits from now on."""
        self._since, self._has_warned = self._clock(), False

    def end(self) -> None:
        """The loop waits no longer."""
        self._since = None

    def check(self, who: Callable[[], str], what: str) -> None:
        """Warn, or raise ``Unavailable``, if the loop has waited for long. ``who`` is to do ``what``."""
        if self._since is None:
            return
        seconds = self._clock() - self._since
        if seconds >= self._timeout_seconds:
            self.is_exhausted = True
            raise Unavailable(
                who(),
                f"{what}: waited {seconds:.0f} s. All ranks of a group iterate their loaders together;"
                " give the loader a longer timeout= if one pauses for longer",
                lasting=True,
            )
        if seconds >= min(WARN_SECONDS, self._timeout_seconds / 2) and not self._has_warned:
            self._has_warned = True
            log.warning("replicas: %s: %s; waiting for %.0f s so far", who(), what, seconds)
