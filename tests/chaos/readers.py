"""Many readers in one process, each of which reads a range of every shard from a daemon, all at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Final

import numpy as np

from quiver.errors import Unavailable
from quiver.manifest import Manifest
from quiver.peer import PeerClient
from quiver.wire import RANGE, RangeStatus, ReadRequest

ROUNDS_MAX: Final = 60
PAUSE_SECONDS: Final = 0.2


def read_all(manifest_path: str, count: int, urls: Sequence[str]) -> None:
    """Read by so many threads, spread over the daemons. Raises ``AssertionError`` if one does not get every range."""
    manifest = Manifest.open(manifest_path)
    digests = tuple(manifest.shard_digest(number) for number in range(manifest.shard_count))
    rows = np.zeros(len(digests), RANGE)
    rows["shard"], rows["length"] = np.arange(len(digests)), 100
    begin = threading.Barrier(count)
    unread: list[int] = []

    def read(url: str) -> None:
        left = np.arange(len(digests))
        begin.wait(60)
        with closing(PeerClient(url)) as peer:
            for _ in range(ROUNDS_MAX):
                try:
                    statuses, _ = peer.read(ReadRequest(manifest.digest, digests, rows[left], 10_000, 0))
                except Unavailable:  # overloaded
                    time.sleep(PAUSE_SECONDS)
                    continue
                left = left[statuses != RangeStatus.PRESENT]
                if not len(left):
                    return
        unread.append(len(left))

    threads = [threading.Thread(target=read, args=(urls[number % len(urls)],)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not unread, unread
