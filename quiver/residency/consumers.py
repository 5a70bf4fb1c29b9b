"""What is known of a consumer and of the dataset that it reads: values of ``Needs``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from quiver.digest import Digest
from quiver.residency.orders import FixedOrder
from quiver.residency.report import ConsumerReport

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
U8 = npt.NDArray[np.uint8]

# A starving consumer may have been suspended since its last report; then shards would replace one another endlessly.
EVICTIONS_PER_REPORT: Final = 4  # of needed shards, for one consumer, until it reports again


@dataclass(slots=True, eq=False)
class DatasetNeeds:
    """A dataset that some consumer reports on."""

    slots: Ints  # of each of its shards
    mine: Mask
    mine_share: float  # of the dataset's bytes, those of ``mine``
    shard_bytes: float  # of the largest
    sample_bytes: Floats  # of each shard, on average
    key: int = 0  # the number of its domain's key
    consumers: int = 0
    holds: int = 0  # of the consumers: those that only hold what another one will read
    known: int = 0  # of the others: those all of whose uses to come are known

    @property
    def is_planned(self) -> bool:
        """Whether all uses to come are known of each consumer that reads, and there is one."""
        return 0 < self.consumers - self.holds <= self.known


class Group(NamedTuple):
    """Consumers of one dataset that count once: the trials of a sweep. Any other consumer is a group by itself."""

    name: bytes
    dataset: Digest


@dataclass(slots=True, eq=False)
class Consumer:
    """A consumer's last report, in bytes."""

    name: bytes
    group: Group
    report: ConsumerReport
    reported_at: float
    left: Floats  # bytes, by shard of its dataset
    pending: Mask  # of which shards something is left
    left_mine: Floats  # as ``left``, of what is mine
    local_bytes: float  # of ``left_mine``, those that were resident when it reported
    soon: Ints
    order: FixedOrder | None = None  # all its uses to come, where they are known
    evictions_left: int = EVICTIONS_PER_REPORT

    @property
    def dataset(self) -> Digest:
        return self.group.dataset

    @property
    def is_reading(self) -> bool:
        """Whether it has something left to read, and is no hold: those need what they list, and nothing is fetched."""
        return not self.report.hold and bool(self.pending.any())


class Members:
    """The consumers of one group, and how many of them need each shard."""

    __slots__ = ("_needing", "consumers")

    def __init__(self) -> None:
        self.consumers: dict[bytes, Consumer] = {}
        self._needing: Ints | None = None  # kept only while there are several

    def __len__(self) -> int:
        return len(self.consumers)

    @property
    def pending(self) -> Mask | None:
        """Which shards any of them needs; ``None`` if there are none."""
        if self._needing is not None:
            several: Mask = self._needing > 0
            return several
        return next((it.pending for it in self.consumers.values()), None)

    @property
    def needing(self) -> Ints:
        """How many of them need each shard ``(shards,)``. There is at least one."""
        if self._needing is not None:
            return self._needing
        return next(iter(self.consumers.values())).pending.astype(np.int64)

    def put(self, consumer: Consumer) -> None:
        """Add a consumer, or its new report in place of the last one."""
        self.remove(consumer.name)
        if self.consumers:
            self._needing = self.needing + consumer.pending
        self.consumers[consumer.name] = consumer

    def remove(self, name: bytes) -> None:
        gone = self.consumers.pop(name, None)
        if gone is not None and self._needing is not None:
            self._needing = self._needing - gone.pending if len(self.consumers) > 1 else None
