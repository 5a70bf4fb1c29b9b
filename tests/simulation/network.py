"""The network between processes: late, cut, lossy, and delivering twice or out of order.

A request is answered at most once as its sender sees it; its handler may run twice, or after the sender gave up.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from tests.simulation.clock import Clock, Process

LATENCY_SECONDS: Final = 0.002
Reply = Callable[[Any], None]


class Network:
    """All links. ``cuts``: groups of names; a message between a member and a non-member of a group is lost."""

    def __init__(self, clock: Clock, chance: random.Random) -> None:
        self.clock, self.chance = clock, chance
        self.processes: dict[str, Process] = {}
        self.cuts: list[frozenset[str]] = []
        self.slow: dict[str, float] = {}  # by name, what its latency is multiplied by
        self.loss = self.duplicates = 0.0
        self.corruption = 0.0  # the share of payloads of which a byte is flipped on the way
        self.lost = self.duplicated = self.flipped = 0

    def add(self, process: Process) -> None:
        self.processes[process.name] = process

    def is_cut(self, one: str, other: str) -> bool:
        return any((one in cut) != (other in cut) for cut in self.cuts)

    def request(
        self, sender: Process, to: str, ask: Callable[[Any, Reply], None], answered: Reply, timeout_seconds: float
    ) -> None:
        """Have ``ask(process, reply)`` run at ``to``; call ``answered`` once, with ``None`` if there is no answer."""
        life = sender.life
        open_ = [True]

        def finish(answer: Any) -> None:
            if open_ and sender.life == life:
                open_.clear()
                sender.call(lambda: answered(answer))

        def reply(answer: Any) -> None:
            self._send(to, sender.name, lambda: finish(answer))

        def arrive() -> None:
            process = self.processes.get(to)
            if process is None or not process.alive:
                self._send(to, sender.name, lambda: finish(None))  # connection refused
            else:
                process.call(lambda: ask(process, reply))

        self._send(sender.name, to, arrive)
        self.clock.after(timeout_seconds, lambda: finish(None) if open_ else None)

    def tell(self, sender: Process, to: str, handle: Callable[[Any], None]) -> None:
        """Send without waiting for an answer."""

        def arrive() -> None:
            process = self.processes.get(to)
            if process is not None:
                process.call(lambda: handle(process))

        self._send(sender.name, to, arrive)

    def payload(self, data: bytes) -> bytes:
        """Return bytes as they arrive: as sent, or with a flipped bit, cut short, or with garbage behind them."""
        if not data or self.chance.random() >= self.corruption:
            return data
        self.flipped += 1
        at = self.chance.randrange(len(data))
        kind = self.chance.random()
        if kind < 0.15:
            return data[:at]
        if kind < 0.25:
            return data + bytes(self.chance.randrange(1, 64))
        return data[:at] + bytes([data[at] ^ (1 << self.chance.randrange(8))]) + data[at + 1 :]

    def _send(self, sender: str, to: str, arrive: Callable[[], None]) -> None:
        if self.cuts and self.is_cut(sender, to):
            self.lost += 1
            return
        if self.loss and self.chance.random() < self.loss:
            self.lost += 1
            return
        factor = self.slow.get(sender, 1.0) * self.slow.get(to, 1.0) if self.slow else 1.0
        self.clock.after(LATENCY_SECONDS * factor * (0.5 + self.chance.expovariate(2.0)), arrive)
        if self.duplicates and self.chance.random() < self.duplicates:
            self.duplicated += 1
            self.clock.after(LATENCY_SECONDS * factor * self.chance.expovariate(0.2), arrive)
