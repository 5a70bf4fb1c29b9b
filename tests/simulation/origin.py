"""The simulated origin: where the data lies. Slow, away, or wrong on the way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Final

from quiver.digest import Digest
from tests.simulation.clock import Process
from tests.simulation.dataset import Data
from tests.simulation.network import Network

SHARD_SECONDS: Final = 0.1
TIMEOUT_SECONDS: Final = 3.0


class Origin(Process):
    """Answers reads of shards and of samples, each after a while, or never."""

    def __init__(self, network: Network, chance: random.Random) -> None:
        super().__init__(network.clock, "origin")
        self._network, self._chance = network, chance
        self.up = True
        self.slowness = 1.0
        self.reads: Counter[Digest] = Counter()
        self.direct = 0

    def read_shard(self, reader: Process, data: Data, shard: Digest, got: Callable[[bytes | None], None]) -> None:
        def answer(content: bytes) -> bytes:
            self.reads[shard] += 1
            return content

        self._read(reader, lambda: answer(data.shards[shard]), got)

    def read_samples(
        self, reader: Process, data: Data, rows: list[int], got: Callable[[list[bytes] | None], None]
    ) -> None:
        """Read samples past the cache, each by itself."""
        self.direct += len(rows)

        def answered(ok: bytes | None) -> None:
            got(None if ok is None else [self._network.payload(data.truth[row]) for row in rows])

        self._read(reader, lambda: b"ok", answered)

    def _read(self, reader: Process, content: Callable[[], bytes], got: Callable[[bytes | None], None]) -> None:
        def handle(origin: Origin, reply: Callable[[bytes], None]) -> None:
            if self.up:
                seconds = SHARD_SECONDS * self.slowness * (0.5 + self._chance.random())
                origin.after(seconds, lambda: reply(self._network.payload(content())))

        self._network.request(reader, self.name, handle, got, TIMEOUT_SECONDS)
