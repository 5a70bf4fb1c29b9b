"""The holder of each file: the client for which it was filled, as long as no other one reads it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from quiver.digest import Digest
from quiver.residency.eviction import SHARED

HOLDERS_MAX: Final = 4096  # addresses distinguished; files filled for any further ones are shared
PRUNED_FROM: Final = 1024


class Holders:
    """The holder of each file, by number. Safe from threads."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._next = itertools.count(SHARED + 1)
        self._of: dict[Digest, int] = {}
        self._lock = threading.Lock()

    def filled(self, digest: Digest, client: str) -> None:
        """Record that a file was filled on behalf of a client; ``""``: of several, or of none."""
        number = self.number(client)
        if number == SHARED:
            self._of.pop(digest, None)
        else:
            self._of[digest] = number

    def read(self, digests: Iterable[Digest], client: str) -> None:
        """Record that a client reads shards: those filled for another client are shared from now on."""
        own = self._numbers.get(client, SHARED)
        for digest in digests:
            if self._of.get(digest, own) != own:
                self._of.pop(digest, None)

    def number(self, client: str) -> int:
        """Return the number of a client, ``SHARED`` for no single one."""
        if not client:
            return SHARED
        with self._lock:
            if client not in self._numbers and len(self._numbers) >= HOLDERS_MAX:
                live = dict.fromkeys(list(self._of.values()))
                self._numbers = {name: number for name, number in self._numbers.items() if number in live}
                if len(self._numbers) >= HOLDERS_MAX:
                    return SHARED
            return self._numbers.setdefault(client, next(self._next))

    def names(self) -> dict[int, str]:
        """Return the clients by number."""
        with self._lock:
            return {number: name for name, number in self._numbers.items()}

    def of(self, files: Sequence[Digest]) -> npt.NDArray[np.int64]:
        """Return the holder of each of these files."""
        return np.fromiter(map(self._of.get, files, itertools.repeat(SHARED)), np.int64, len(files))

    def prune(self, is_held: Callable[[Digest], bool], count: int) -> None:
        """Forget files that are no longer held, now and then. ``count``: how many files are held."""
        if len(self._of) > count + PRUNED_FROM:
            for digest in [digest for digest in list(self._of) if not is_held(digest)]:
                self._of.pop(digest, None)
