"""The global generators of this process as something that several threads share: who may draw from them, and when.

Fetching threads, the training loop and a random transform all draw from the generators of ``random``, ``numpy.random``
and torch. Samples are made in one of two ways. Either *seeded*, one thread at a time and while no batch is made
unseeded: the states that the program has are put aside, and put back afterwards. The first batch is made so. If its
samples draw nothing, later ones are made *unseeded*, any number of batches at once: then no generator may have changed
meanwhile, else the samples are discarded and made again, seeded.

The training loop takes no part in this, so it could draw in the middle of a seeded sample. Therefore, after the first
batch, which the loop waits for, seeded samples are made in the loop's own thread until the loop was seen not to draw
for ``QUIET_STEPS`` steps, and from then on in the fetching threads; when it draws later, in its own thread again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from quiver import forks
from quiver_client.seeding import Globals, seed_globals

QUIET_STEPS: Final = 16  # of the loop, observed one after another
WATCHED_STEPS: Final = 16  # once it was quiet, one step of so many is observed
TURN_SECONDS: Final = 0.005  # for how long one thread has the generators while others wait
Result = TypeVar("Result")


class _Generators:
    """A lock that many share to draw nothing, and one has alone to draw. A thread that has it alone may share it."""

    def __init__(self) -> None:
        self._changed = forks.condition()
        self._sharing = 0
        self._waiting = 0
        self._alone: int | None = None  # the thread that has it
        self._depth = 0
        self._mine = threading.local()

    @contextmanager
    def shared(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._changed:
            is_nested = self._alone == me or bool(getattr(self._mine, "shares", 0))
            while not is_nested and (self._alone is not None or self._waiting):
                self._changed.wait()
            self._sharing += not is_nested
        self._mine.shares = getattr(self._mine, "shares", 0) + 1
        try:
            yield
        finally:
            self._mine.shares -= 1
            with self._changed:
                self._sharing -= not is_nested
                self._changed.notify_all()

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Give up what this thread has of the lock, and have it again at the end."""
        me, shares = threading.get_ident(), int(getattr(self._mine, "shares", 0))
        depth = self._depth if self._alone == me else 0
        is_counted = bool(shares) and not depth
        with self._changed:
            self._sharing -= is_counted
            if depth:
                self._alone, self._depth = None, 0
            self._changed.notify_all()
        self._mine.shares = 0
        try:
            yield
        finally:
            self._mine.shares = shares
            with self._changed:
                self._waiting += bool(depth)
                while (self._alone is not None and (depth or is_counted)) or (depth and self._sharing):
                    self._changed.wait()
                self._waiting -= bool(depth)
                self._sharing += is_counted
                if depth:
                    self._alone, self._depth = me, depth

    @contextmanager
    def alone(self) -> Iterator[None]:
        me = threading.get_ident()
        if getattr(self._mine, "shares", 0) and self._alone != me:
            yield  # a transform reads another loader: to wait for its own thread would be to wait for ever
            return
        with self._changed:
            if self._alone != me:
                self._waiting += 1
                try:
                    while self._sharing or self._alone is not None:
                        self._changed.wait()
                finally:
                    self._waiting -= 1
                self._alone = me
            self._depth += 1
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                if not self._depth:
                    self._alone = None
                self._changed.notify_all()


_generators = _Generators()
_taken = threading.local()  # ``turns``: those that this thread has, the first one first


def _in_child() -> None:
    """Start over in a forked child: threads that had the generators are not in it."""
    global _generators, _taken
    _generators, _taken = _Generators(), threading.local()


os.register_at_fork(after_in_child=_in_child)


@contextmanager
def lent() -> Iterator[None]:
    """Wait for other threads here: they may use the generators meanwhile.

    A transform may read another loader, whose threads need the generators that the transform's own thread has.
    """
    turns: list[Turn] = getattr(_taken, "turns", [])
    for turn in reversed(turns):
        turn.step_aside()
    try:
        with _generators.given_up():
            yield
    finally:
        for turn in turns:
            turn.step_back()


class Turn:
    """The use of the generators by one thread, which is interrupted now and then in favour of other threads."""

    def __init__(self, *, confirm: bool) -> None:
        self.has_drawn = False
        self._confirm = confirm  # whether to find out if the samples draw
        self._own: Globals | None = None  # the program's states
        self._seeded: Globals | None = None
        self._aside: Globals | None = None  # the sample's states, while its thread waits for others
        self._held = _generators.alone()
        self._since = 0.0

    def seed(self, seed: int) -> None:
        """Begin a sample."""
        self._see()
        if self._own is not None and time.monotonic() - self._since > TURN_SECONDS:
            self.end()
        if self._own is None:
            self._held = _generators.alone()
            self._held.__enter__()
            self._own, self._since = Globals.now(), time.monotonic()
            _taken.turns = [*getattr(_taken, "turns", []), self]
        seed_globals(seed)
        self._seeded = Globals.now() if self._confirm and not self.has_drawn else None

    def draws(self) -> bool:
        """Whether a sample has drawn from the generators so far."""
        self._see()
        return self.has_drawn

    def end(self) -> None:
        """Put back the states that the program has."""
        self._see()
        own, self._own = self._own, None
        if own is not None:
            own.restore()
            _taken.turns = [turn for turn in getattr(_taken, "turns", []) if turn is not self]
            self._held.__exit__(None, None, None)

    def step_aside(self) -> None:
        """Put back the states that the program has until ``step_back``."""
        assert self._own is not None
        self._aside = Globals.now()
        self._own.restore()

    def step_back(self) -> None:
        """Go on with the sample."""
        assert self._aside is not None
        self._own = Globals.now()
        self._aside.restore()
        self._aside = None

    def _see(self) -> None:
        if self._seeded is not None and self._own is not None:
            self.has_drawn = not self._seeded.same(Globals.now())
            self._seeded = None


class Randomness:
    """What is known of one loader's samples and of the loop that receives them. Picklable: as new in another process.

    ``is_used``: its samples draw from the global generators.
    """

    def __init__(self) -> None:
        self.is_used = False
        self.has_loop = False  # a training loop runs in another thread of this process
        self._has_probed = False  # a batch was made seeded, to find out whether its samples draw
        self._probing = forks.lock()
        self._false_alarms = 0  # changes of a generator that the samples turned out not to have caused
        self._ignored = 0  # further changes that are not looked into
        self._loop_draws = False
        self._quiet_steps = 0
        self._left_with: Globals | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    @contextmanager
    def probe(self) -> Iterator[bool]:
        """Enter with ``True`` for the first batch, which is to be made seeded; other threads wait for what it shows."""
        if self._has_probed:
            yield False
            return
        with self._probing:
            yield not self._has_probed

    @property
    def is_for_loop(self) -> bool:
        """Whether seeded samples have to be made in the training loop's thread."""
        return self.has_loop and (self._loop_draws or self._quiet_steps < QUIET_STEPS)

    def attempt(self, make: Callable[[], Result]) -> tuple[Result, bool]:
        """Make samples unseeded; return whether they may be used.

        If the loop draws at the same time, that looks as if the samples did. They are made again, seeded, to find out.
        Each time that it was the loop, twice as many further changes are ignored.
        """
        with _generators.shared():
            before = Globals.now()
            made = make()
            is_same = before.same(Globals.now())
        if not is_same and self._ignored:
            self._ignored -= 1
            return made, True
        return made, is_same

    @contextmanager
    def alone(self) -> Iterator[Turn]:
        """Have the generators, for samples that ``Turn.seed`` begins."""
        turn = Turn(confirm=not self.is_used)
        try:
            yield turn
        finally:
            turn.end()

    def found(self, *, drawn: bool, is_check: bool) -> None:
        """A batch was made seeded, and its samples drew from the generators or did not.

        ``is_check``: since a generator changed when it was made unseeded.
        """
        self._has_probed = True
        if drawn:
            self.is_used = True
        elif is_check and not self.is_used:
            self._false_alarms += 1
            self._ignored = 2 ** min(self._false_alarms, 16) - 1

    def loop_left(self) -> None:
        """The loop's thread returns to the loop, with a batch."""
        if not self.is_used or self._loop_draws:
            return
        self._quiet_steps += self._left_with is None and self._quiet_steps >= QUIET_STEPS
        if self._quiet_steps < QUIET_STEPS or self._quiet_steps % WATCHED_STEPS == 0:
            with _generators.alone():
                self._left_with = Globals.now()

    def loop_asks(self) -> None:
        """The loop's thread asks for the next batch."""
        left_with, self._left_with = self._left_with, None
        if left_with is not None:
            with _generators.alone():
                is_same = left_with.same(Globals.now())
            self._loop_draws = not is_same
            self._quiet_steps += 1
