"""What the leader decided in the passes that it reads, and how far each follower is. Values only: no socket, no clock.

A pass has the same number in all ranks: that of the loader's n-th begun pass. A follower joins it, is sent its batches
in order, and leaves it. The leader is at most ``AHEAD_MAX`` batches ahead of what the slowest follower has drawn, so no
more batches than that are kept, however long a follower pauses. Loops may be nested: then several passes are open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from quiver_client.loader.replicas.messages import Batch, Drawn, Join, Left, Message

AHEAD_MAX: Final = 64  # batches
EARLY_MAX: Final = 64  # passes that a follower has begun and the leader has not


class Reading:
    """How far one follower is in one pass."""

    def __init__(self, *, has_joined: bool, left: Left | None) -> None:
        self.has_joined = has_joined
        self.sent = 0  # batches
        self.drawn = 0
        self.left = left
        self.was_told_end = False


class PassLog:
    """The decisions of one pass."""

    def __init__(self, number: int, readings: dict[int, Reading]) -> None:
        self.number = number
        self.readings = readings  # by the follower's rank
        self.ended: Left | None = None  # how the leader left the pass
        self._batches: deque[bytes] = deque()  # those that some follower has yet to be sent
        self._dropped = 0  # earlier batches

    @property
    def kept(self) -> int:
        return len(self._batches)

    @property
    def decided(self) -> int:
        return self._dropped + len(self._batches)

    @property
    def behind(self) -> list[int]:
        """The followers that read the pass, or have yet to begin it."""
        return [rank for rank, each in self.readings.items() if each.left is None]

    @property
    def slow(self) -> list[int]:
        """The followers that keep the leader from deciding the next batch."""
        return [rank for rank in self.behind if self.readings[rank].drawn <= self.decided - AHEAD_MAX]

    @property
    def unsent(self) -> list[int]:
        """The followers that were not sent all of it yet."""
        return [rank for rank in self.behind if self.readings[rank].sent != self.decided]

    def decide(self, decision: bytes) -> None:
        self._batches.append(decision)
        self.forget()

    def next_for(self, rank: int) -> Message | None:
        """Return the next message for a follower, as sent from now on; ``None`` if there is none."""
        each = self.readings[rank]
        if not each.has_joined or each.left is not None:
            return None
        if each.sent < self.decided:
            decision = self._batches[each.sent - self._dropped]
            each.sent += 1
            self.forget()
            return Batch(self.number, decision)
        if self.ended is not None and not each.was_told_end:
            each.was_told_end = True
            return self.ended
        return None

    def forget(self) -> None:
        """Drop the batches that every follower was sent, or will never be."""
        least = min((self.readings[rank].sent for rank in self.behind), default=self.decided)
        while self._dropped < least:
            self._batches.popleft()
            self._dropped += 1


class DecisionLog:
    """The open passes of a leader. ``followers``: their ranks."""

    def __init__(self, followers: Iterable[int]) -> None:
        self.followers = tuple(followers)
        self.passes: dict[int, PassLog] = {}  # those that the leader or a follower has yet to leave
        self.last = 0  # number of the last pass that began
        self.lost: dict[int, str] = {}  # followers whose connection ended, and why
        self._early: dict[tuple[int, int], Left | None] = {}  # by rank and pass: begun before the leader began it

    def __repr__(self) -> str:
        states = ", ".join(f"{each.number}: {each.decided} batches, {each.kept} kept" for each in self.passes.values())
        return f"DecisionLog({states})"

    @property
    def behind(self) -> list[int]:
        """The followers that have yet to leave a pass that the leader has left. While there are any, none begins."""
        left = [each for each in self.passes.values() if each.ended is not None]
        return sorted({rank for each in left for rank in each.behind})

    @property
    def unsent(self) -> list[int]:
        """The followers that were not sent all of some pass yet."""
        return sorted({rank for each in self.passes.values() for rank in each.unsent})

    @property
    def missing(self) -> list[int]:
        """The followers whose connection ended before they had all of some pass, or before they began it."""
        return sorted(
            rank
            for rank in self.lost
            for each in self.passes.values()
            if each.readings[rank].left is None and not each.readings[rank].was_told_end
        )

    # -- what the leader does -----------------------------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """A pass begins. Nobody must be ``behind``."""
        readings = {}
        for rank in self.followers:
            has_joined = (rank, number) in self._early
            readings[rank] = Reading(has_joined=has_joined, left=self._early.pop((rank, number), None))
        self.passes[number] = PassLog(number, readings)
        self.last = number

    def end(self, number: int, consumed: int, *, at_end: bool) -> None:
        """The leader leaves a pass."""
        log = self.passes.get(number)
        if log is not None:
            log.ended = Left(number, consumed, at_end)
            self._prune(log)

    def broken_off(self, number: int, consumed: int) -> int | None:
        """Return a follower that left a pass after fewer batches than these, ``None`` if none did."""
        log = self.passes.get(number)
        for rank, each in log.readings.items() if log is not None else ():
            if each.left is not None and each.left.consumed < consumed:
                return rank
        return None

    # -- what a follower does -----------------------------------------------------------------------------------------

    def connected(self, rank: int) -> None:
        self.lost.pop(rank, None)

    def disconnected(self, rank: int, why: str) -> None:
        """A connection ended. ``why`` is empty if the follower said that it would."""
        if why:
            self.lost[rank] = why
            return
        for log in list(self.passes.values()):
            each = log.readings[rank]
            if each.has_joined and each.left is None:
                each.left = Left(log.number, each.drawn, at_end=False)
                self._prune(log)

    def closed(self) -> None:
        """All connections were closed on purpose. Who was sent nothing of a pass yet may connect again, and join it."""
        self.lost.clear()
        self._early.clear()
        for log in self.passes.values():
            for each in log.readings.values():
                each.has_joined = each.has_joined and each.sent > 0

    def hear(self, rank: int, message: Message) -> bool:
        """Take in what a follower says; return whether it makes sense."""
        if not isinstance(message, Join | Drawn | Left):
            return False
        if message.number > self.last:
            return self._hear_early(rank, message)
        log = self.passes.get(message.number)
        if log is None:
            return isinstance(message, Drawn)  # it was on its way when the pass ended
        each = log.readings[rank]
        match message:
            case Join():
                if each.has_joined or each.left is not None:
                    return False
                each.has_joined = True
            case Drawn(batches=batches):
                if not each.drawn <= batches <= each.sent:
                    return False
                each.drawn = batches
            case Left():
                if not each.has_joined or each.left is not None:
                    return False
                each.left = message
                log.forget()
                self._prune(log)
        return True

    def next_for(self, rank: int) -> Message | None:
        """Return the next message for a follower, as sent from now on; ``None`` if there is none."""
        for log in self.passes.values():
            message = log.next_for(rank)
            if message is not None:
                return message
        return None

    def _hear_early(self, rank: int, message: Join | Drawn | Left) -> bool:
        key = rank, message.number
        if isinstance(message, Join):
            self._early[key] = None
            return sum(each[0] == rank for each in self._early) <= EARLY_MAX
        if isinstance(message, Left) and key in self._early:
            self._early[key] = message
            return True
        return False

    def _prune(self, log: PassLog) -> None:
        if log.ended is not None and not log.behind:
            self.passes.pop(log.number, None)
