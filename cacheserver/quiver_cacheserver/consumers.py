"""Who reports needs here, under a lease, and who gives way when more want to than a daemon keeps. Pure.

Anybody can make consumers up. So when there is no place left the address that has most loses one: first those that
reported once and never again, then the one that was heard of longest ago. A newcomer is refused only if it would make
its own address the one with most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from typing import Final

from quiver.digest import Digest
from quiver.need import CONSUMERS_MAX

SHARDS_MAX: Final = 1 << 24  # in all reports together: 18 bytes each, 300 MiB


@dataclass(frozen=True, slots=True)
class Lease:
    """One consumer's claim: on which dataset, of how many shards, for how long from its last report on."""

    dataset: Digest
    shards: int
    at: float
    seconds: float
    client: str
    proven: bool = False  # it reported more than once


class Leases:
    """The leases of all consumers. Belongs to the event loop; its caller has the clock."""

    def __init__(self, consumers_max: int = CONSUMERS_MAX, shards_max: int = SHARDS_MAX) -> None:
        self._consumers_max, self._shards_max = consumers_max, shards_max
        self._leases: dict[bytes, Lease] = {}

    def __contains__(self, consumer: bytes) -> bool:
        return consumer in self._leases

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def get(self, consumer: bytes) -> Lease | None:
        return self._leases.get(consumer)

    def take(self, consumer: bytes, lease: Lease) -> list[bytes] | None:
        """Take a consumer's lease, which replaces its last one; return who loses its own for it.

        ``None``: it is refused, and has no lease afterwards.
        """
        before = self._leases.pop(consumer, None)
        gone: list[bytes] = []
        left = dict(self._leases)
        while (name := self._loser(left, lease)) is not None:
            if not name:
                return None
            del left[name]
            gone.append(name)
        self._leases = left
        self._leases[consumer] = replace(lease, proven=before is not None)
        return gone

    def leave(self, consumer: bytes) -> None:
        self._leases.pop(consumer, None)

    def expire(self, now: float) -> None:
        """Forget whose lease ran out."""
        for consumer in [name for name, lease in self._leases.items() if now - lease.at > lease.seconds]:
            del self._leases[consumer]

    def of(self, clients: Set[str]) -> set[bytes]:
        """Return the consumers at these addresses."""
        return {name for name, lease in self._leases.items() if lease.client in clients}

    def client_of(self, dataset: Digest) -> str:
        """Return the address of all consumers of a dataset, ``""`` if they have several."""
        clients = {lease.client for lease in self._leases.values() if lease.dataset == dataset}
        return clients.pop() if len(clients) == 1 else ""

    def _loser(self, leases: dict[bytes, Lease], new: Lease) -> bytes | None:
        """Return who has to go before there is a place for a new lease: ``None``: nobody, ``b""``: the new one."""
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
        return min(theirs, key=lambda item: (item[1].proven, item[1].at))[0]
