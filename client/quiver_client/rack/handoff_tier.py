"""The host tier in front of a rack: shards of the daemons on this host, mapped from open files that they pass.

The daemon stays the owner: it decides what is resident, and fills missing shards when the rack tier requests them. Its
files are mapped here instead of received, so that all processes of the machine share one copy, the page cache. This
tier only saves copies: if there is no socket, or it is silent or sends wrong bytes, the rack tier reads over TCP.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np

from quiver import forks
from quiver.digest import Digest
from quiver.errors import Corrupt, DiskFailed, OverCapacity, QuiverError
from quiver.expiring import Expiring
from quiver.manifest import Manifest
from quiver.ring import Ring
from quiver.transport.handoff import FILES_MAX, HELD_MAX, RECHECK, USED, Handed, Held
from quiver_client import process_exit
from quiver_client.batch import Batch, Positions
from quiver_client.buffers import Buffer
from quiver_client.rack.local_daemons import LocalDaemon, LocalDaemons
from quiver_client.rack.members import Members
from quiver_client.shard_maps import TIDY_SECONDS, ShardMaps
from quiver_client.stats import Stats

T = TypeVar("T")

FIRST_LOOK_SECONDS: Final = 1.0  # that the first batch waits for the daemons on this host to be found
FETCH_SECONDS_MAX: Final = 1.0  # that a batch spends here; the rest comes over TCP
SLOW_SECONDS: Final = 0.5  # a daemon that takes this long to answer is avoided: reading over TCP is faster
AVOID_SECONDS: Final = 30.0  # that a shard with wrong bytes is read over TCP
KEEP_SECONDS: Final = 60.0  # that maps of a silent daemon are kept, since it cannot say whether it evicted them
TELL_SECONDS_MIN: Final = 0.2  # between two times that daemons are told what was read
CLOSE_SECONDS: Final = 1.5  # more than one request to a daemon takes


class _Source(NamedTuple):
    """Which daemon passed a mapped file, and the edition by which the daemon identifies that file."""

    daemon: LocalDaemon
    edition: int


class HandoffTier:
    """Shards mapped from the daemons on this host. One per process and dataset; its thread belongs to the process."""

    name = "host"

    def __init__(self, manifest: Manifest, members: Members, seeds: Sequence[str], stats: Stats) -> None:
        self._manifest = manifest
        self._members = members
        self._stats = stats
        self._locals = LocalDaemons(members, seeds, stats, members.token, lambda: members.introduction)
        self._maps: ShardMaps[_Source] = ShardMaps()
        self._avoided: Expiring[int, None] = Expiring()  # shards of which something was wrong
        self._told_bytes = 0  # of what was read by maps, what daemons were told of
        self._ring: Ring | None = None
        self._lock = forks.lock()
        self._thread: threading.Thread | None = None
        self._looked = forks.event()
        self._closing = forks.event()
        process_exit.call_at_exit(self._closing.set, process_exit.Phase.LOOPS)

    def fetch(self, batch: Batch) -> None:
        # A ring that is stale is asked for by the thread: the daemon that is asked may be stuck.
        ring = self._members.ring or self._members.refresh()
        if ring is not None:
            self._start_thread(ring)
        if not self._locals and not len(self._maps):
            return
        missing = batch.not_verified()
        shards = batch.plan.by_shard(missing)[0].tolist()
        here = self._maps.get_all(shards)
        if self._locals and len(here) < len(shards):
            here.update(self._mapped([shard for shard in shards if shard not in here]))
        batch.put_mapped(missing, here)

    def blame(self, batch: Batch, bad: Positions) -> None:
        """Release the maps, have the daemon verify the files, and read these shards over TCP for a while."""
        for shard in np.unique(batch.plan.shards[bad]).tolist():
            self._avoided.set(shard, None, AVOID_SECONDS)
            source = self._maps.note(shard)
            self._maps.drop(shard)
            if source is not None:
                self._held(source.daemon, [Held(self._manifest.shard_digest(shard), source.edition)], RECHECK)

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            process_exit.join([thread], CLOSE_SECONDS)
        self._maps.clear()
        self._locals.close()

    # -- what is mapped -----------------------------------------------------------------------------------------------

    def _mapped(self, shards: list[int]) -> dict[int, Buffer]:
        """Map those of the shards that the daemons on this host own and hold."""
        wanted: dict[LocalDaemon, list[int]] = {}
        for shard, ranked in zip(shards, self._members.ranked(np.asarray(shards)), strict=True):
            daemon = self._locals.at(ranked[0]) if ranked else None
            if daemon is not None and shard not in self._avoided:
                wanted.setdefault(daemon, []).append(shard)
        deadline = time.monotonic() + FETCH_SECONDS_MAX
        found: dict[int, Buffer] = {}
        for daemon, of_it in wanted.items():
            for some in _parts(of_it, FILES_MAX):
                if time.monotonic() < deadline and not daemon.is_unresponsive:
                    found.update(self._handed(daemon, some))
        self._stats.add("misses_host", sum(map(len, wanted.values())) - len(found))
        return found

    def _handed(self, daemon: LocalDaemon, shards: Sequence[int]) -> dict[int, Buffer]:
        begun = time.monotonic()
        try:
            names = self._manifest.tables.shard_digests[np.asarray(shards)].tobytes()
            handed = daemon.client.files(Digest.many(names))
        except QuiverError as error:
            self._pass_over(daemon, error)
            return {}
        if time.monotonic() - begun < SLOW_SECONDS:
            daemon.answered()
        else:
            daemon.mark_unresponsive()
        found = {}
        for shard, it in zip(shards, handed, strict=True):
            buffer = self._map(shard, it, daemon)
            if buffer is not None:
                found[shard] = buffer
        return found

    def _map(self, shard: int, it: Handed, daemon: LocalDaemon) -> Buffer | None:
        if it.file is None:
            return None
        size_bytes = int(self._manifest.tables.shard_sizes[shard])
        if it.file.size_bytes != size_bytes:
            self._stats.add("corruptions")
            self._avoided.set(shard, None, AVOID_SECONDS)
            what = f"{daemon.client.path}: a file of {it.file.size_bytes} bytes for a shard of {size_bytes}"
            self._stats.warn("socket", f"{what}; reading it over TCP")
            return None
        try:
            return self._maps.put(shard, it.file.map(), _Source(daemon, it.edition))
        except DiskFailed as error:
            self._stats.warn("socket", f"{error}; reading it over TCP")
            return None

    def _pass_over(self, daemon: LocalDaemon, error: QuiverError) -> None:
        if isinstance(error, OverCapacity):  # busy, not broken
            self._stats.add("overloads")
            return
        if isinstance(error, Corrupt):
            self._stats.add("corruptions")
        daemon.mark_unresponsive()
        if not self._closing.is_set():
            self._stats.warn("socket", f"{error}; reading over TCP")

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _start_thread(self, ring: Ring) -> None:
        """Give the thread the ring; the first time, start it and wait a moment for the daemons that it finds."""
        self._ring = ring
        if self._looked.is_set():
            return
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                self._thread = process_exit.start(_maintain, "quiver-host", weakref.ref(self), self._closing)
        self._looked.wait(FIRST_LOOK_SECONDS)
        self._looked.set()

    def maintain(self) -> None:
        """Find the daemons of this host, and unmap what they evicted. The thread calls this every ``TIDY_SECONDS``."""
        if self._looked.is_set():  # before that, a reader waits, and its ring is new
            self._ring = self._members.refresh() or self._ring
        if self._ring is not None:
            self._locals.look(self._ring)
        self._looked.set()
        self._release_evicted()
        self.tell_reads()

    def tell_reads(self) -> None:
        """Tell the daemons of this host how much was read by their files, as they do not see it."""
        read, daemons = self._stats.snapshot()["bytes_host"], self._locals.responding
        if read <= self._told_bytes or not daemons:
            return
        each, self._told_bytes = (read - self._told_bytes) // len(daemons), read
        for daemon in daemons:
            try:
                daemon.client.read(self._manifest.digest, each)
            except QuiverError as error:
                self._pass_over(daemon, error)

    def _release_evicted(self) -> None:
        """Unmap shards that the daemons evicted, which frees the disk space; tell daemons which maps were used."""
        asked: dict[tuple[LocalDaemon, bool], list[tuple[int, _Source]]] = {}
        for shard, source, used in self._maps.mapped():
            asked.setdefault((source.daemon, used), []).append((shard, source))
        for (daemon, used), maps in asked.items():
            for some in _parts(maps, HELD_MAX):
                names = [Held(self._manifest.shard_digest(shard), source.edition) for shard, source in some]
                held = self._held(daemon, names, USED if used else 0)
                for (shard, source), keep in zip(some, held, strict=True):
                    if not keep:
                        self._maps.drop(shard, source)

    def _held(self, daemon: LocalDaemon, held: list[Held], flags: int) -> list[bool]:
        """Return which of these files a daemon still holds; if it is silent, all of them, for ``KEEP_SECONDS``."""
        if not daemon.is_unresponsive:
            try:
                answer = daemon.client.held(held, flags)
            except QuiverError as error:
                self._pass_over(daemon, error)
            else:
                daemon.answered()
                return answer
        return [time.monotonic() - daemon.heard_at < KEEP_SECONDS] * len(held)


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for at in range(0, len(items), size):
        yield items[at : at + size]


def _maintain(tier: weakref.ref[HandoffTier], closing: threading.Event) -> None:
    """Maintain a tier until it is closed, or garbage. Young processes tell more often: some end within an epoch."""
    began = tidied = time.monotonic()
    is_due = True
    while not closing.is_set():
        maintained = tier()
        if maintained is None:
            return
        if is_due:
            maintained.maintain()
            tidied = time.monotonic()
        else:
            maintained.tell_reads()
        del maintained
        now = time.monotonic()
        closing.wait(min(max((now - began) / 4, TELL_SECONDS_MIN), max(tidied + TIDY_SECONDS - now, 0.01)))
        is_due = time.monotonic() - tidied >= TIDY_SECONDS
