"""The one interface by which a consumer tells its needs, whoever hears them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from quiver.residency import Report


class Exchange(Protocol):
    """Where needs are told. Used by one thread, up to twenty times a second; must never take long."""

    orphaned: npt.NDArray[np.bool_] | None
    """By shard, whether nobody will bring it in, since whoever should does not answer; ``None``: no shard is."""

    def report(self, report: Report, *, leaving: bool = False) -> npt.NDArray[np.uint8]:
        """Say what this consumer needs; return by shard 0 for what is not resident, else 1 + how many others need it.

        ``leaving``: the consumer is done and needs nothing any more.
        """
        ...

    def close(self) -> None: ...
