"""A pass's uses to come, as a consumer reports them: the shards of its samples in their order, and of the next epoch's.

Made once per pass, and again when half of what was made is read, so that a list has a bounded length however long an
epoch is. Used by the reporting thread alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from quiver.residency.orders import ORDER_ENTRIES_MAX, ORDER_ID_BYTES
from quiver.substitution import Ints
from quiver_client.loader.epoch import Epoch

PART: Final = ORDER_ENTRIES_MAX // 2


class KnownUses(NamedTuple):
    """A list of uses, its identifier, and how many of them are done. ``identifier`` is empty if none are known."""

    identifier: bytes = b""
    at: int = 0
    shards: npt.NDArray[np.int32] | None = None


class KnownOrder:
    """The list of the current pass."""

    def __init__(self, shard_of: Ints, following: Callable[[Epoch], Ints | None], *, part: int = PART) -> None:
        """``shard_of``: of each sample; ``following`` returns the samples of the epoch after another one, in order."""
        self._shard_of, self._following, self._part = shard_of, following, part
        self._epoch: Epoch | None = None
        self._all = np.zeros(0, np.int32)
        self._begin = -1
        self._sent = KnownUses()

    def uses(self, epoch: Epoch, read: int) -> KnownUses:
        """Return the uses to come of a pass of which ``read`` entries are read."""
        if epoch is not self._epoch:
            following = self._following(epoch)
            rest = self._shard_of[following] if following is not None else np.zeros(0, np.int64)
            self._all = np.concatenate([epoch.order.shards, rest]).astype(np.int32)
            self._epoch, self._begin = epoch, -1
        begin = read // self._part * self._part
        if begin != self._begin:
            some = self._all[begin : begin + 2 * self._part]
            self._begin, self._sent = begin, KnownUses(blake3(some.tobytes()).digest(ORDER_ID_BYTES), 0, some)
        return self._sent._replace(at=read - begin) if len(self._all) else KnownUses()
