"""What makes way when room is wanted: a pure function.

Recency is a bad guide under epochs: with a dataset larger than the cache, least-recently-used drops every shard just
before it is read again. So what is in use is never dropped for something else that is in use; the newcomer is refused
and read from the origin instead, which keeps hits at the cached share. Until jobs report what they still need, *in use*
means: read within ``IDLE_SECONDS``, or part of a dataset that was.
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
    held: Iterable[Held], free_bytes: int, in_use: Callable[[Digest], bool], now: float
) -> list[Held] | None:
    """Return what to drop so that ``free_bytes`` become free, idle the longest first; ``None`` if that cannot be."""
    if free_bytes <= 0:
        return []
    victims = []
    for item in sorted(held, key=lambda item: item.used):
        if now - item.used < IDLE_SECONDS:
            break
        if in_use(item.digest):
            continue
        victims.append(item)
        free_bytes -= item.size_bytes
        if free_bytes <= 0:
            return victims
    return None
