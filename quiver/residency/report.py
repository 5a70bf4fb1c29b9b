"""A consumer's report of its needs: a value. A *consumer* is one rank of one job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from quiver.identity import NOBODY, Identity

CONSUMER_BYTES: Final = 16
FULL: Final = 255  # "all of the shard" in a report


@dataclass(frozen=True, slots=True)
class Measured:
    """What a consumer measured of itself.

    ``throughput``: bytes per second that it read lately, waiting included. ``waited``: the share of that time in which
    it waited for data, 0 to 1. ``attained_bytes``: what it has read since its job began. ``probe_series``: how many
    series of probes have ended; ``probed_hits`` and ``probed_misses``: the throughput that the last one measured with
    everything in the cache and with nothing, 0 if it could not.
    """

    throughput: float = 0.0
    waited: float = 0.0
    attained_bytes: float = 0.0
    probe_series: int = 0
    probed_hits: float = 0.0
    probed_misses: float = 0.0


NOT_MEASURED: Final = Measured()


@dataclass(frozen=True, slots=True, eq=False)
class ConsumerReport:
    """What a consumer still needs. ``left`` ``(shards,)``: 255ths of each shard that are to be read, rounded up.

    ``identity`` says whose consumer it is, ``dataset_name`` what people call the dataset. ``reader``: who reads for it
    (``quiver.introduction``), empty for unknown. ``order`` identifies a list of all uses to come, of which ``order_at``
    are done; ``uses`` is that list, if sent.

    ``hold``: nobody reads yet. What is listed is kept for a job that will resume here, and not fetched, until a
    consumer begins that needs nothing else of the dataset, or the lease expires.
    """

    consumer: bytes
    left: npt.NDArray[np.uint8]
    rate: float  # f*: bytes per second that the consumer would read if it never waited for data; 0: unknown yet
    ahead_bytes: float  # resident bytes of what is left, as far as the consumer knows
    lease_seconds: float
    soon: tuple[int, ...] = ()  # with a fixed order: the next shards, in this order
    ordered: bool = False
    order: bytes = b""  # 16 bytes; empty: the uses to come are not known
    order_at: int = 0
    uses: npt.NDArray[np.int32] | None = None  # (n,): shards in the order of their use
    identity: Identity = NOBODY
    dataset_name: str = ""
    measured: Measured = NOT_MEASURED
    reader: bytes = b""
    hold: bool = False

    @property
    def pace(self) -> float:
        """Bytes per second that the consumer does read: when it comes to its uses follows from this, not from what it
        could read. 0: unknown yet."""
        return self.measured.throughput or self.rate


def rounded_up(left: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return ``left`` of ``counts`` samples per shard as 255ths: 0 for nothing, and never 0 for something."""
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(counts > 0, left / counts, 0.0)
    exact: npt.NDArray[np.uint8] = np.ceil(np.clip(shares, 0.0, 1.0) * FULL).astype(np.uint8)
    return exact
