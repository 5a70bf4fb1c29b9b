"""Virtual time: events in the order of their time, processes that sleep and die, and nothing that waits for real."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Final

Call = Callable[[], None]
START: Final = 1000.0
EVENTS_MAX: Final = 100_000  # a seed has two thousand: more is a loop in which no time passes


class Clock:
    """Calls what is due, in the order of time and then in the order of asking. Replaces the module ``time``, too."""

    def __init__(self) -> None:
        self.now = START
        self.events = 0
        self._due: list[tuple[float, int, Call]] = []
        self._numbers = itertools.count()

    def monotonic(self) -> float:
        return self.now

    def after(self, seconds: float, call: Call) -> None:
        heapq.heappush(self._due, (self.now + max(seconds, 0.0), next(self._numbers), call))

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Call what is due until ``done``, or until the time is past ``until``."""
        while self._due and not done():
            if self._due[0][0] > until:
                self.now = until
                return
            self.now, _, call = heapq.heappop(self._due)
            self.events += 1
            if self.events > EVENTS_MAX:
                raise AssertionError(f"liveness: {EVENTS_MAX} events, and the time is only {self.now - START:.1f} s")
            call()


class Process:
    """What can be suspended and killed. Its timers and messages wait while it sleeps, and die with it."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name = clock, name
        self.alive = True
        self.life = 0  # how often it was killed: what belongs to an earlier life is dropped
        self._sleeps = 0
        self._waiting: list[tuple[int, Call]] = []

    def __repr__(self) -> str:
        return self.name

    @property
    def asleep(self) -> bool:
        return self._sleeps > 0

    def call(self, call: Call) -> None:
        """Do it now, or on waking."""
        if not self.alive:
            return
        if self.asleep:
            self._waiting.append((self.life, call))
        else:
            call()

    def after(self, seconds: float, call: Call) -> None:
        life = self.life
        self.clock.after(seconds, lambda: self.call(call) if self.life == life else None)

    def kill(self) -> None:
        self.alive = False
        self.life += 1
        self._waiting.clear()

    def suspend(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long. Deadlines pass meanwhile; what is due happens on waking, stale or not."""
        self._sleeps += 1
        self.clock.after(seconds, self._wake)

    def _wake(self) -> None:
        self._sleeps -= 1
        if not self.asleep:
            waiting, self._waiting = self._waiting, []
            for life, call in waiting:
                if life == self.life:
                    self.call(call)
