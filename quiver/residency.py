"""What makes way when room is wanted: a pure function.

Recency is a bad guide under epochs: with a dataset larger than the cache, least-recently-used drops every shard just
before it is read again. So what is needed is never dropped for something else; the newcomer is refused and read from
the origin instead. What is needed is what jobs report (``quiver.need``). Of a dataset that nobody reports on, which a
stock loader reads, all is taken to be needed until it was not read for ``IDLE_SECONDS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from quiver.digest import Digest

IDLE_SECONDS: Final = 60.0  # longer than the pause between two epochs' reads, shorter than anyone waits for room


class Held(NamedTuple):
    """A thing on disk: how large it is and when it was last read (seconds on the caller's clock)."""

    digest: Digest
    size_bytes: int
    used: float


def choose_victims(
    held: Iterable[Held], free_bytes: int, needed: Callable[[Digest], bool | None], now: float
) -> list[Held] | None:
    """Return what to drop so that ``free_bytes`` become free, idle the longest first; ``None`` if that cannot be.

    ``needed`` says whether somebody needs it, and ``None`` where nobody said: then being idle decides.
    """
    if free_bytes <= 0:
        return []
    victims = []
    for item in sorted(held, key=lambda item: item.used):
        need = needed(item.digest)
        if need or (need is None and now - item.used < IDLE_SECONDS):
            continue
        victims.append(item)
        free_bytes -= item.size_bytes
        if free_bytes <= 0:
            return victims
    return None
