"""The daemon's counters, behind ``/v1/status`` and ``/metrics``. No label is a digest or a path."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from quiver.transport.tls import LABELS


@dataclass(slots=True)
class Counters:
    """Counted since the daemon started. Threads add through ``add`` and ``count``, which do not lose any."""

    origin_read_bytes: int = 0
    served_bytes: int = 0
    uploaded_bytes: int = 0
    handed_over_bytes: int = 0  # to other members, while this daemon drains
    handed_files: int = 0
    reads_in_flight: int = 0
    overloads: int = 0  # without refusals by a budget, which counts its own
    tls_refusals: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(LABELS, 0)))  # handshakes
    connections_closed: Counter[str] = field(
        default_factory=lambda: Counter(idle=0, late=0, room=0, head=0)
    )  # by this daemon
    need_fetches: int = 0
    forced_drops: int = 0
    # Known labels start at 0, so that a rate can be taken from the first one on.
    fills: Counter[str] = field(default_factory=lambda: Counter(peer=0, origin=0, upload=0))
    failures: Counter[str] = field(default_factory=Counter)  # fills that failed, by error code
    corruptions: Counter[str] = field(default_factory=lambda: Counter(disk=0, peer=0, upload=0, origin=0))
    ranges: Counter[str] = field(default_factory=Counter)  # by status
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, name: str, amount: int) -> None:
        with self._lock:
            setattr(self, name, getattr(self, name) + amount)

    def count(self, name: str, label: str, amount: int = 1) -> None:
        with self._lock:
            getattr(self, name)[label] += amount
