"""What is run and crashed at every change that it makes: a *life* of a process on one folder.

A life says what it has completed (``Say``), in a file outside the folder; its ``check`` compares what a crash left with
what was said. The check is written against the promises alone: it walks the folder itself and knows each byte.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from quiver.digest import Digest
from quiver.store import Kind, Store
from quiver.store.inventory import file_of
from tests.support.data import make_shard

Say = Callable[[str], None]


class Life(Protocol):
    """One scenario. ``said``: what it said before the crash, line by line."""

    name: str
    deterministic: bool  # whether its changes are the same each time

    def prepare(self, root: Path) -> list[str]:
        """Make what is there before, which survives everything; return what was said until then."""
        ...

    def run(self, root: Path, said: list[str], say: Say) -> None:
        """Live to the end."""
        ...

    def recover(self, root: Path, said: list[str], say: Say) -> None:
        """Begin again after a crash; it may be crashed too."""
        ...

    def check(self, root: Path, said: list[str], *, power_cut: bool) -> None:
        """Raise ``AssertionError`` unless a new process finds what was promised. Last: it changes the folder."""
        ...


CAPACITY_BYTES: Final = 200_000
SIZES: Final = (40_000, 40_000, 40_000, 40_000, 60_000, 50_000)
SHARDS: Final = [make_shard([bytes([number + 1]) * (size // 4)] * 3) for number, size in enumerate(SIZES)]
NUMBER_OF: Final = {digest: number for number, (digest, _) in enumerate(SHARDS)}
MANIFEST: Final = b"manifest " * 100
# What is held once this many steps of ``StoreLife.run`` were completed; after the last, which trims, some of these are.
HELD: Final[tuple[set[int], ...]] = (
    {0, 1, 2},
    {0, 1, 2, 3},
    {1, 2, 3, 4},
    {1, 2, 3, 4},
    {2, 3, 4},
    {3, 4},
    {0, 3, 4},
    {0, 3, 4},
    {0, 3, 4},
)


class StoreLife:
    """A store is filled, evicts, quarantines, drops, gives up a write, and trims: a daemon's, or a shared folder."""

    deterministic = True

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared
        self.name = "shared store" if shared else "owned store"

    def _open(self, root: Path, capacity_bytes: int = CAPACITY_BYTES) -> contextlib.closing[Store[Any]]:
        return contextlib.closing(Store.open(root, capacity_bytes, shared=self.shared))

    def prepare(self, root: Path) -> list[str]:
        with self._open(root) as store:
            for number in (0, 1, 2):
                store.put(Kind.SHARD, *SHARDS[number])
        (root / "tmp" / "999999.0123456789abcdef").write_bytes(bytes(50_000))  # of a writer that died long ago
        return []

    def run(self, root: Path, said: list[str], say: Say) -> None:
        with self._open(root) as store:
            store.put(Kind.SHARD, *SHARDS[3])
            say("put 3")
            digest, data = SHARDS[4]
            with store.reserve(Kind.SHARD, digest, len(data), [(Kind.SHARD, SHARDS[0][0])]) as writing:
                for at in range(0, len(data), 25_000):
                    writing.write(data[at : at + 25_000])
                writing.commit()
            say("put 4 in place of 0")
            store.put(Kind.MANIFEST, Digest.of(MANIFEST), MANIFEST)
            say("put a manifest")
            store.quarantine(Kind.SHARD, SHARDS[1][0])
            say("quarantined 1")
            store.drop(Kind.SHARD, SHARDS[2][0])
            say("dropped 2")
            store.put(Kind.SHARD, *SHARDS[0])
            say("put 0 again")
            with store.reserve(Kind.SHARD, SHARDS[5][0], SIZES[5]) as writing:
                writing.write(SHARDS[5][1][:10_000])
            say("gave 5 up")
        with self._open(root, SIZES[4] + SIZES[3]) as store:
            store.trim()
            say("trimmed")

    def recover(self, root: Path, said: list[str], say: Say) -> None:
        with self._open(root) as store:
            store.resident_bytes()  # sweeps

    def check(self, root: Path, said: list[str], *, power_cut: bool) -> None:
        before, after = HELD[len(said)], HELD[min(len(said) + 1, len(HELD) - 1)]
        least = before & after if len(said) < len(HELD) - 2 else set()  # else it trims
        self._check_held(root, least, set(NUMBER_OF.values()) if power_cut else before | after)
        for path in (root / "tmp").iterdir():  # in a shared folder a file without a lock may be about to get it
            os.utime(path, (time.time() - 60,) * 2)
        with self._open(root) as store:
            assert store.resident_bytes() == _bytes_in(root), "what is counted is what is there"
            store.trim()
            assert _bytes_in(root) <= CAPACITY_BYTES
            assert not list((root / "tmp").iterdir()), "what a dead writer left is swept"
            for digest in _shards_in(root):
                store.check(digest)
            for number in (5, 1):
                held = [(Kind.SHARD, digest) for digest in _shards_in(root)]
                store.put(Kind.SHARD, *SHARDS[number], evict=held)
                assert bytes(store.load(SHARDS[number][0], SIZES[number] * 2)) == SHARDS[number][1]
            assert store.resident_bytes() == _bytes_in(root) <= CAPACITY_BYTES
            assert not list((root / "tmp").iterdir())

    def _check_held(self, root: Path, least: set[int], most: set[int]) -> None:
        held = _shards_in(root)
        for digest, data in held.items():
            assert data == SHARDS[NUMBER_OF[digest]][1], f"shard {NUMBER_OF[digest]} is visible and wrong"
        numbers = {NUMBER_OF[digest] for digest in held}
        assert least <= numbers <= most, f"{numbers} are held; {least} must be, and {most} may be"
        for path in (root / "manifests").rglob("*"):
            assert path.is_dir() or path.read_bytes() == MANIFEST


def _shards_in(root: Path) -> dict[Digest, bytes]:
    """Return what has the name of a shard, each read whole."""
    found = {}
    for path in (root / "shards").glob("*/*"):
        digest = Digest.parse(path.name)
        assert path == file_of(root, Kind.SHARD, digest)
        found[digest] = path.read_bytes()
    return found


def _bytes_in(root: Path) -> int:
    return sum(path.stat().st_size for kind in Kind for path in (root / kind).rglob("*") if path.is_file())
