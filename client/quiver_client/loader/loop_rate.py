"""How fast the training loop could read, how fast it does read, and whether it is paused: all three are reported.

A *turn* of the loop: it has received a batch, computes, asks for the next batch, waits, and receives that. What the
loop would read if reading were free, f*, follows from what does not change with the speed of reading: the *step*, from
receiving a batch to asking for the next, and what *making* a batch costs where batches are made, beside the loop.
Batches are made ahead, so the slower of the two determines f*, and time in which the loop waits for data does not count
at all. Were waits counted, a job that an origin holds back would report the speed that it is held to.

Where work is launched on an accelerator, a loop asks for its next batch before the work of its step is done. Then the
accelerator's own time per turn counts as a step, too (``gpu_steps``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

WINDOW_SECONDS: Final = 0.5
WINDOW_TURNS: Final = 16  # and a window has at least so many turns,
WINDOW_SECONDS_MAX: Final = 5.0  # unless it takes longer than this
WEIGHT: Final = 0.5  # of a new window against all before it
PAUSE_SECONDS: Final = (2.0, 30.0)  # bounds: how long without asking for a batch makes a pause
PAUSE_STEPS: Final = 5.0  # and between them, this many of the loop's own steps
STEP_SECONDS_MIN: Final = 1e-6  # of a batch: no loop is faster


class LoopTurn(NamedTuple):
    """What one turn of a loop took.

    ``waited_seconds``: from asking for a batch to receiving it. ``step_seconds``: from receiving the batch before to
    asking for this one, and what the loop's own thread spent on making batches; ``None``: not known, then only waits
    for shards are told apart. ``making_seconds``: of each batch, on all that make batches at once. ``gpu_seconds``: the
    accelerator's work for a step that ended lately, ``None`` if none was measured.
    """

    waited_seconds: float = 0.0
    step_seconds: float | None = None
    making_seconds: float = 0.0
    gpu_seconds: float | None = None


NOT_TIMED: Final = LoopTurn()


@dataclass(frozen=True, slots=True)
class LoopSpeed:
    """What is known of a loop, over its last seconds; zeros until then.

    ``possible``: f*, bytes per second that it would read if reading were free. ``throughput``: that it does read,
    waiting included, and ``waited``: the share of that time in which it waited. ``step_seconds``, ``making_seconds``
    and ``gpu_seconds`` are per batch. ``attained_bytes``: all that it has read.
    """

    possible: float = 0.0
    throughput: float = 0.0
    waited: float = 0.0
    step_seconds: float = 0.0
    making_seconds: float = 0.0
    gpu_seconds: float = 0.0
    batch_bytes: float = 0.0
    batch_samples: float = 0.0
    attained_bytes: float = 0.0


@dataclass(slots=True)
class _Sums:
    """Sums over turns."""

    turns: float = 0.0
    bytes: float = 0.0
    samples: float = 0.0
    seconds: float = 0.0  # all in all
    waited: float = 0.0
    step: float = 0.0
    making: float = 0.0
    gpu: float = 0.0
    gpu_turns: float = 0.0

    def add(self, other: _Sums, keep: float) -> None:
        """Add sums, after multiplying these by ``keep``."""
        for name in _Sums.__slots__:
            setattr(self, name, getattr(self, name) * keep + getattr(other, name))

    @property
    def gpu_seconds(self) -> float:
        """Of the accelerator, per turn."""
        return self.gpu / self.gpu_turns if self.gpu_turns else 0.0


class LoopRate:
    """Measures one loop. Each method costs about a microsecond."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None
        self._starved_seconds = 0.0
        self._attained_bytes = 0.0
        self._window = _Sums()
        self._before = _Sums()
        self._is_warm = False  # a step has ended, and is counted
        self._value = 0.0

    @property
    def value(self) -> float:
        """Bytes per second that the loop would read if reading were free; 0 until known."""
        return self._value

    @property
    def speed(self) -> LoopSpeed:
        """What is known by now."""
        known = self._before
        if not known.turns:
            return LoopSpeed(attained_bytes=self._attained_bytes)
        return LoopSpeed(
            possible=self._value,
            throughput=known.bytes / max(known.seconds, STEP_SECONDS_MIN),
            waited=min(known.waited / max(known.seconds, STEP_SECONDS_MIN), 1.0),
            step_seconds=known.step / known.turns,
            making_seconds=known.making / known.turns,
            gpu_seconds=known.gpu_seconds,
            batch_bytes=known.bytes / known.turns,
            batch_samples=known.samples / known.turns,
            attained_bytes=self._attained_bytes,
        )

    def waited(self, waiting_seconds: float) -> float:
        """Return the share of its time that the loop waited, with the wait that it is in.

        A loop that is stuck receives no batch, so nothing else would say that it waits.
        """
        now = waiting_seconds if waiting_seconds >= WINDOW_SECONDS else 0.0
        if not now:
            return self.speed.waited
        known = (self._before, self._window)
        waited, seconds = sum(it.waited for it in known) + now, sum(it.seconds for it in known) + now
        return min(waited / seconds, 1.0)

    def attained(self, size_bytes: float) -> None:
        """Count what the job read before this process did."""
        self._attained_bytes += size_bytes

    def starved(self, seconds: float) -> None:
        """Record that no batch could be drawn for so long."""
        self._starved_seconds += seconds

    def consumed(self, size_bytes: float, turn: LoopTurn, samples: int = 0) -> None:
        """The loop received a batch; with 0 bytes, one that has nothing of what is measured here."""
        now, last = self._clock(), self._last
        self._last, starved, self._starved_seconds = now, self._starved_seconds, 0.0
        self._attained_bytes += size_bytes
        if last is None:  # what precedes a pass, or a pause, is no turn
            return
        waited, step = turn.waited_seconds, turn.step_seconds
        seconds = now - last
        if step is None:
            step = max(seconds - min(starved, waited), 0.0)
        else:
            seconds = step + waited
        window = self._window
        window.turns += 1
        window.bytes += size_bytes
        window.samples += samples
        window.seconds += seconds
        window.waited += min(waited, seconds)
        window.step += step
        window.making += turn.making_seconds
        if turn.gpu_seconds is not None:
            window.gpu += turn.gpu_seconds
            window.gpu_turns += 1
        if turn.step_seconds is not None and not self._is_warm:
            self._warm_up()
        elif window.seconds >= WINDOW_SECONDS and self._is_full(turn):
            self._learn()

    def pause(self) -> None:
        """The loop does something else: do not count the time until its next batch."""
        self._last, self._starved_seconds = None, 0.0

    def _is_full(self, turn: LoopTurn) -> bool:
        window = self._window
        is_first = not self._before.turns  # known roughly is better than unknown
        return (
            is_first
            or turn.step_seconds is None
            or window.turns >= WINDOW_TURNS
            or window.seconds >= WINDOW_SECONDS_MAX
        )

    def _warm_up(self) -> None:
        """Count the first step of a process, in which models are compiled and libraries loaded, only until another
        one ended."""
        self._is_warm = True
        if self._window.seconds >= WINDOW_SECONDS:
            self._learn()
            self._before = _Sums()
        self._window = _Sums()

    def _learn(self) -> None:
        self._before.add(self._window, 1.0 - WEIGHT)
        self._window = _Sums()
        known = self._before
        seconds = max(known.step, known.making, known.gpu_seconds * known.turns, STEP_SECONDS_MIN * known.turns)
        # What it does read it could read, whatever a few measured steps of a device say.
        self._value = known.bytes / min(seconds, max(known.seconds, STEP_SECONDS_MIN))


class LoopPauses:
    """Tells a loop that pauses, to validate for instance, from one that is training."""

    def __init__(self) -> None:
        self._is_asking = False
        self._waits_since: float | None = None
        self._last = 0.0
        self._step_seconds = 0.0

    def begin(self, now: float) -> None:
        """A pass begins."""
        self._is_asking, self._last, self._step_seconds = False, now, 0.0
        self._waits_since = None

    def asked(self, now: float) -> None:
        """The loop waits for a batch."""
        self._is_asking, self._waits_since = True, now

    def passed_over(self) -> None:
        """The loop received a batch that has nothing of what is measured here."""
        self._waits_since = None

    def waiting_seconds(self, now: float) -> float:
        """Return for how long the loop has waited for the batch that it asked for; 0 if it waits for none."""
        return now - self._waits_since if self._waits_since is not None else 0.0

    def consumed(self, now: float) -> None:
        """The loop received a batch."""
        self._is_asking, self._step_seconds, self._last = False, now - self._last, now
        self._waits_since = None

    def is_paused(self, now: float) -> bool:
        """Whether the loop has received a batch and, for longer than a few steps, has not asked for the next one."""
        least, most = PAUSE_SECONDS
        return not self._is_asking and now - self._last > min(max(PAUSE_STEPS * self._step_seconds, least), most)
