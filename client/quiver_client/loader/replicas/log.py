"""What the leader decided in the pass that it reads, and how far each follower is. Values only: no socket, no clock.

A follower joins a pass, is sent its batches in order, and leaves it. The leader is at most ``AHEAD_MAX`` batches ahead
of what the slowest follower has drawn, so no more batches than that are kept, however long a follower pauses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from quiver_client.loader.replicas.messages import Batch, Began, Drawn, Join, Left, Message

AHEAD_MAX: Final = 64  # batches


class Follower:
    """How far one follower is in the leader's pass."""

    def __init__(self) -> None:
        self.is_connected = False
        self.has_joined = False
        self.joins_next = False  # it has left this pass, and has begun the next one
        self.turn = 0  # of its last ``Join``
        self.sent: int | None = None  # batches; None: not even that the pass began
        self.drawn = 0
        self.left: Left | None = None
        self.told_end = False
        self.lost = ""  # why its connection ended, unless it said that it would

    @property
    def is_behind(self) -> bool:
        """Whether it reads the pass, or has yet to begin it."""
        return self.left is None


class DecisionLog:
    """The decisions of the leader's current pass. ``followers``: their ranks."""

    def __init__(self, followers: Iterable[int]) -> None:
        self.followers = {rank: Follower() for rank in followers}
        self.number = -1  # of the pass
        self.ended: Left | None = None  # how the leader left the pass
        self._batches: deque[bytes] = deque()  # those that some follower has yet to be sent
        self._dropped = 0  # earlier batches of the pass

    def __repr__(self) -> str:
        return f"DecisionLog(pass {self.number}, {self.decided} batches, {len(self._batches)} kept)"

    @property
    def decided(self) -> int:
        """Batches of this pass that were decided."""
        return self._dropped + len(self._batches)

    @property
    def behind(self) -> list[int]:
        """The followers that have yet to leave the pass. While there are any, no other pass begins."""
        return [rank for rank, each in self.followers.items() if each.is_behind] if self.number >= 0 else []

    @property
    def slow(self) -> list[int]:
        """The followers that keep the leader from deciding the next batch."""
        limit = self.decided - AHEAD_MAX
        return [rank for rank, each in self.followers.items() if each.is_behind and each.drawn <= limit]

    @property
    def unsent(self) -> list[int]:
        """The followers that were not sent all of the pass yet."""
        return [rank for rank, each in self.followers.items() if each.is_behind and each.sent != self.decided]

    @property
    def lost(self) -> list[int]:
        """The followers whose connection ended before they had all of the pass, or before they began it."""
        return [rank for rank, each in self.followers.items() if each.lost and each.is_behind and not each.told_end]

    def broken_off(self, consumed: int) -> int | None:
        """Return a follower that left the pass before the leader's batch of this number, ``None`` if none did."""
        for rank, each in self.followers.items():
            if each.left is not None and each.left.consumed <= consumed:
                return rank
        return None

    # -- what the leader does -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A pass begins. Nobody must be ``behind``."""
        self.number += 1
        self.ended = None
        self._batches.clear()
        self._dropped = 0
        for each in self.followers.values():
            each.has_joined, each.joins_next = each.joins_next, False
            each.sent, each.drawn, each.left, each.told_end = None, 0, None, False

    def decide(self, decision: bytes) -> None:
        """A batch was drawn."""
        self._batches.append(decision)
        self._forget()

    def end(self, consumed: int, *, at_end: bool) -> None:
        """The leader leaves the pass."""
        self.ended = self.ended or Left(consumed, at_end)

    # -- what a follower does -----------------------------------------------------------------------------------------

    def connected(self, rank: int) -> None:
        each = self.followers[rank]
        each.is_connected, each.lost = True, ""

    def disconnected(self, rank: int, why: str) -> None:
        """A connection ended. ``why`` is empty if the follower said that it would."""
        each = self.followers[rank]
        each.is_connected, each.lost = False, why
        if not why and each.has_joined and each.left is None:
            each.left = Left(each.drawn, at_end=False)

    def hear(self, rank: int, message: Message) -> bool:
        """Take in what a follower says; return whether it makes sense."""
        each = self.followers[rank]
        match message:
            case Join():
                each.turn = message.turn
                if each.has_joined and each.left is None:
                    return False
                if self.number < 0 or each.left is not None:
                    each.joins_next = True
                else:
                    each.has_joined = True
            case Drawn(batches=batches):
                if each.left is None and each.has_joined:
                    if not each.drawn <= batches <= (each.sent or 0):
                        return False
                    each.drawn = batches
            case Left():
                if each.has_joined and each.left is None:
                    each.left = message
                    self._forget()
                elif each.joins_next:
                    each.joins_next = False  # it gave the next pass up before that began
            case _:
                return False
        return True

    def next_for(self, rank: int) -> Message | None:
        """Return the next message for a follower, as sent from now on; ``None`` if there is none."""
        each = self.followers[rank]
        if not each.has_joined or each.left is not None:
            return None
        if each.sent is None:
            each.sent = 0
            return Began(each.turn)
        if each.sent < self.decided:
            batch = self._batches[each.sent - self._dropped]
            each.sent += 1
            self._forget()
            return Batch(batch)
        if self.ended is not None and not each.told_end:
            each.told_end = True
            return self.ended
        return None

    def _forget(self) -> None:
        """Drop the batches that every follower was sent, or will never be."""
        least = min((each.sent or 0 for each in self.followers.values() if each.is_behind), default=self.decided)
        while self._dropped < least:
            self._batches.popleft()
            self._dropped += 1
