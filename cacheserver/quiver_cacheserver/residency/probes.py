"""Which jobs an operator has asked for a series of probes: the answers to their reports say so until one has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from quiver.domain import Domain
from quiver.expiring import Expiring
from quiver.residency import ConsumerReport

ASKED_MAX: Final = 256  # jobs at once
ASKED_SECONDS: Final = 1800.0  # for which a request counts: probes take a hundredth of the loop's time


class ProbeRequests:
    """Requests by job, and by the sharing domain in which they count; ``None``: in all. Belongs to the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._asked: Expiring[tuple[Domain | None, str], int] = Expiring(ASKED_MAX, clock=clock)

    def ask(self, job: str, domain: Domain | None, series: int) -> None:
        """Ask a job, which has ended so many series, for another one."""
        self._asked.set((domain, job), series, ASKED_SECONDS)

    def answered(self, report: ConsumerReport, domain: Domain) -> bool:
        """Return whether this consumer is asked for probes; a request that its report answers is forgotten."""
        if not len(self._asked):
            return False
        wanted = False
        for scope in (domain, None):
            series = self._asked.get((scope, report.identity.job))
            if series is not None and report.measured.probe_series > series:
                self._asked.pop((scope, report.identity.job))
            elif series is not None:
                wanted = True
        return wanted
