"""What a draining daemon still has to hand over, and to whom. Pure: no clock, no network.

Each item has its next owners as candidates, the first choice first. It waits in the queue of one of them, and moves on
to the next one that is left if this one refuses it, or is given up. Every item ends once: handed over (``end``), or,
with no candidate left, refused (one of them had no room) or failed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence


class Queues:
    """A queue of items, which are numbers in the order in which they should go, for each receiver."""

    def __init__(self, candidates: Sequence[Sequence[str]]) -> None:
        """``candidates`` by item."""
        self.refused: set[int] = set()
        self.failed: set[int] = set()
        self.gone: set[int] = set()
        self.left = 0  # items that have not ended
        self._full: set[int] = set()  # for which somebody had no room
        self._others = [list(reversed(each)) for each in candidates]  # the next one last
        self._queues: dict[str, list[int]] = {name: [] for each in candidates for name in each}
        self._dropped: set[str] = set()
        for item in range(len(candidates)):
            self.left += 1
            self._move_on(item)

    def __repr__(self) -> str:
        waiting = {name: len(queue) for name, queue in self._queues.items()}
        return f"Queues({self.left} left, waiting {waiting}, {len(self.refused)} refused, {len(self.failed)} failed)"

    @property
    def receivers(self) -> list[str]:
        return [name for name in self._queues if name not in self._dropped]

    def take(self, receiver: str, fits: Callable[[Sequence[int], int], bool]) -> list[int]:
        """Remove the first items of a receiver's queue and return them, as long as one more ``fits`` those before."""
        queue, taken = self._queues[receiver], list[int]()
        while queue and (not taken or fits(taken, queue[0])):
            taken.append(heapq.heappop(queue))
        return taken

    def again(self, receiver: str, items: Iterable[int]) -> None:
        """Put items back into the queue that they were taken from."""
        for item in items:
            heapq.heappush(self._queues[receiver], item)

    def end(self, item: int) -> None:
        """An item that was taken is where it should be."""
        self.left -= 1

    def forget(self, item: int) -> None:
        """An item that was taken cannot be handed over to anybody."""
        self.left -= 1
        self.gone.add(item)

    def refuse(self, item: int, *, full: bool) -> None:
        """The receiver that an item was taken for does not take it. ``full``: it has no room."""
        if full:
            self._full.add(item)
        self._move_on(item)

    def drop(self, receiver: str) -> None:
        """Give a receiver up: what waits for it, and what it would get later, goes to the others."""
        self._dropped.add(receiver)
        waiting, self._queues[receiver] = self._queues[receiver], []
        for item in waiting:
            self._move_on(item)

    def has_other(self, items: Iterable[int]) -> bool:
        """Whether any of these has another candidate."""
        return any(name not in self._dropped for item in items for name in self._others[item])

    def _move_on(self, item: int) -> None:
        others = self._others[item]
        while others:
            receiver = others.pop()
            if receiver not in self._dropped:
                heapq.heappush(self._queues[receiver], item)
                return
        self.left -= 1
        (self.refused if item in self._full else self.failed).add(item)


def by_receiver(candidates: Iterable[Iterable[str]]) -> dict[str, list[int]]:
    """Return the items of which each receiver is a candidate, going once over all of them.

    In the event loop: a daemon may hold a quarter of a million files, and a rack have a thousand members.
    """
    items: dict[str, list[int]] = {}
    for at, each in enumerate(candidates):
        for name in each:
            items.setdefault(name, []).append(at)
    return items
