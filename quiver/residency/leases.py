"""The consumers that report needs, each under a lease, and which of them is dropped if there are too many. Pure.

All leases are kept here. A consumer counts until its lease expires, so one that was killed, suspended or cut off pins
nothing for long.

A client can invent consumers. So if the limit is reached, the address with the most leases loses one: first a consumer
that reported only once, then the one that reported longest ago. A newcomer is refused only if its own address would
then have the most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from typing import Final

from quiver.digest import Digest

CONSUMERS_MAX: Final = 1024
REPORTED_SHARDS_MAX: Final = 1 << 24  # in all reports together: 18 bytes each, 300 MiB


@dataclass(frozen=True, slots=True)
class Lease:
    """A consumer's lease: its dataset, the number of shards, and how many seconds it lasts after a report.

    ``client``: the address that the report came from; ``""`` if all consumers have the same.
    """

    dataset: Digest
    shards: int
    reported_at: float
    seconds: float
    client: str = ""
    proven: bool = False  # it reported more than once


class Leases:
    """The leases of all consumers. Used by one thread; the caller passes the time."""

    def __init__(self, consumers_max: int = CONSUMERS_MAX, shards_max: int = REPORTED_SHARDS_MAX) -> None:
        self._consumers_max, self._shards_max = consumers_max, shards_max
        self._leases: dict[bytes, Lease] = {}

    def __contains__(self, consumer: bytes) -> bool:
        return consumer in self._leases

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, consumer: bytes) -> Lease | None:
        return self._leases.get(consumer)

    def take(self, consumer: bytes, lease: Lease) -> list[bytes] | None:
        """Grant a consumer's lease, which replaces its last one; return the consumers that lose theirs for it.

        ``None``: the lease is refused, and the consumer has none afterwards.
        """
        before = self._leases.pop(consumer, None)
        lost: list[bytes] = []
        kept = dict(self._leases)
        while (name := self._loser(kept, lease)) is not None:
            if not name:
                return None
            del kept[name]
            lost.append(name)
        self._leases = kept
        self._leases[consumer] = replace(lease, proven=before is not None)
        return lost

    def leave(self, consumer: bytes) -> None:
        self._leases.pop(consumer, None)

    def expire(self, now: float) -> list[bytes]:
        """Forget the consumers whose lease has expired, and return them."""
        expired = [name for name, lease in self._leases.items() if now - lease.reported_at > lease.seconds]
        for consumer in expired:
            del self._leases[consumer]
        return expired

    def at(self, clients: Set[str]) -> set[bytes]:
        """Return the consumers at these addresses."""
        return {name for name, lease in self._leases.items() if lease.client in clients}

    def clients(self) -> dict[Digest, str]:
        """Return by dataset the address of its consumers, ``""`` if they have several addresses."""
        found: dict[Digest, str] = {}
        for lease in self._leases.values():
            found[lease.dataset] = lease.client if found.get(lease.dataset, lease.client) == lease.client else ""
        return found

    def _loser(self, leases: dict[bytes, Lease], new: Lease) -> bytes | None:
        """Return the consumer to drop for a new lease; ``None`` if there is room, ``b""`` to refuse the new one."""
        taken: Counter[str] = Counter({new.client: 0})
        if len(leases) >= self._consumers_max:
            taken.update(lease.client for lease in leases.values())
            own = taken[new.client] + 1
        elif sum(lease.shards for lease in leases.values()) + new.shards > self._shards_max:
            for lease in leases.values():
                taken[lease.client] += lease.shards
            own = taken[new.client] + new.shards
        else:
            return None
        client, most = taken.most_common(1)[0]
        if client == new.client or own >= most:
            return b""
        theirs = (item for item in leases.items() if item[1].client == client)
        return min(theirs, key=lambda item: (item[1].proven, item[1].reported_at))[0]
