"""The fixed orders that consumers read in: for each, the shards of its next samples in the order of their use. Pure.

A consumer whose order is fixed knows every use to come, of this epoch and the next. It sends that list once, under an
identifier; each report says how far it has come. So any order is known exactly, whether it follows from a seed, from
a sampler or from a saved state, and whoever decides computes no permutation.

A client can send long lists. So all lists together have at most ``ENTRIES_MAX`` entries. If that is reached, the
address with the most entries loses a list; a new one is refused only if its own address would then have the most. A
consumer without a list is treated by what it reports as needed soon.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from quiver.digest import Digest

ORDER_ID_BYTES: Final = 16
ORDER_ENTRIES_MAX: Final = 1 << 20  # of one list: a consumer sends the next part when it has read half of it
ENTRIES_MAX: Final = 1 << 24  # of all lists: 4 bytes each, 64 MiB


@dataclass(frozen=True, slots=True, eq=False)
class FixedOrder:
    """A list of uses. ``shards`` ``(n,)``: for each of the next samples, the number of its shard in ``dataset``."""

    dataset: Digest
    identifier: bytes
    shards: npt.NDArray[np.int32]
    client: str = ""


class Orders:
    """The lists by consumer. Used by one thread."""

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._entries_max = entries_max
        self._orders: dict[bytes, FixedOrder] = {}
        self._without: dict[bytes, tuple[bytes, int]] = {}  # by consumer, the list that had no room, and its entries

    def __len__(self) -> int:
        return len(self._orders)

    @property
    def entries(self) -> int:
        return sum(len(it.shards) for it in self._orders.values())

    def get(self, consumer: bytes, dataset: Digest, identifier: bytes) -> FixedOrder | None:
        """Return a consumer's list, if it is the one of this identifier. Another dataset may have fewer shards."""
        found = self._orders.get(consumer)
        return found if found is not None and (found.dataset, found.identifier) == (dataset, identifier) else None

    def put(self, consumer: bytes, order: FixedOrder) -> list[bytes] | None:
        """Keep a consumer's list, which replaces its last one; return the consumers that lose theirs for it.

        ``None``: it is refused, and the consumer has none.
        """
        self.drop(consumer)
        kept = dict(self._orders)  # who is refused costs nobody a list
        entries = sum(len(it.shards) for it in kept.values()) + len(order.shards)
        lost: list[bytes] = []
        while entries > self._entries_max:
            taken: Counter[str] = Counter({order.client: len(order.shards)})
            for it in kept.values():
                taken[it.client] += len(it.shards)
            client, _ = taken.most_common(1)[0]
            if client == order.client:
                self._without[consumer] = order.identifier, len(order.shards)
                return None
            lost.append(max((len(it.shards), name) for name, it in kept.items() if it.client == client)[1])
            entries -= len(kept.pop(lost[-1]).shards)
        for name in lost:
            self._without[name] = self._orders[name].identifier, len(self._orders[name].shards)
        self._orders = kept
        self._orders[consumer] = order
        return lost

    def has_room_for(self, consumer: bytes, identifier: bytes) -> bool:
        """Whether it is of use to ask for a list: not if there was no room for it, and still is not."""
        of, entries = self._without.get(consumer, (b"", 0))
        return of != identifier or self.entries + entries <= self._entries_max

    def drop(self, consumer: bytes) -> None:
        """Forget a consumer's list."""
        self._orders.pop(consumer, None)
        self._without.pop(consumer, None)
