"""The origins that a daemon may read: opened for manifests, and watched.

If a rack cannot read its origin, it caches nothing and still looks healthy, since clients read the origin themselves.
So each ``--origin`` is probed when the daemon starts, after a failed fill, and as long as it does not work, without
reading any object. ``/readyz``, ``/v1/status`` and, once, the log report the result. Fills do not depend on it: they
read the origin whatever the probe found.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Final

from quiver.digest import Digest
from quiver.errors import Changed, Corrupt, Forbidden, NotAllowed, QuiverError
from quiver.location import Location, shown
from quiver.manifest import Manifest
from quiver.origin import SampleOrigin, open_origin
from quiver.origin.probing import probe
from quiver.wire import OK, UNCHECKED
from quiver_cacheserver.config import allowed
from quiver_cacheserver.origins.unresponsive import GuardedOrigin, UnresponsiveOrigins

log = logging.getLogger(__name__)

OPEN_MAX: Final = 64
OPEN_BYTES_MAX: Final = 1 << 30  # of the manifests that open origins keep in memory; a larger one alone
LOOK_SECONDS: Final = 1.0  # how soon after a failed fill its origin is probed
TRY_SECONDS: Final = 0.9  # between two probes of one origin, at least
PROBE_SECONDS_MAX: Final = 15.0  # an origin that takes longer does not answer
PROBES_MAX: Final = 8  # at a time


@dataclass(slots=True, eq=False)
class _Watched:
    """One ``--origin``."""

    prefix: str
    locations: tuple[Location, ...]
    state: str = UNCHECKED
    proven: bool = False  # a read or a listing succeeded
    refused: str = ""  # its error message when it refused a fill
    suspected: bool = True
    tried: float = -inf
    trying: asyncio.Future[bool] | None = None


class Origins:
    """Origins by prefix. ``of`` and ``failed`` are safe from threads; ``watch`` belongs to the event loop."""

    def __init__(self, prefixes: Iterable[str], count: Callable[[int], None]) -> None:
        self._count = count
        self._watched = [_Watched(shown(prefix), allowed(prefix)) for prefix in dict.fromkeys(prefixes)]
        self._open: OrderedDict[Digest, tuple[SampleOrigin, int]] = OrderedDict()  # and the size of its manifest
        self._troubled = UnresponsiveOrigins()
        self._lock = threading.Lock()

    def close(self) -> None:
        for origin, _ in list(self._open.values()):
            origin.close()

    @property
    def states(self) -> dict[str, str]:
        """The state of each prefix: ``ok``, ``unchecked``, or why it cannot be read."""
        return {watched.prefix: watched.state for watched in self._watched}

    def of(self, manifest: Manifest, name: Digest | None = None) -> SampleOrigin:
        """Return the origin of a manifest. Raises ``NotAllowed`` if it lies outside of all prefixes.

        ``name``: the manifest's in its sharing domain. Each domain has its own: what was read for one, and is kept in
        memory, does not spare another its read.
        """
        found = self._above(manifest)
        if found is None:
            raise NotAllowed("this daemon may not read that origin; its operator can allow it with --origin")
        watched, within = found
        with self._lock:
            name = name or manifest.digest
            known = self._open.get(name)
            if known is not None:
                self._open.move_to_end(name)
                return known[0]
            size_bytes = len(manifest.content)
            while self._open and (len(self._open) >= OPEN_MAX or self._open_bytes() + size_bytes > OPEN_BYTES_MAX):
                self._open.popitem(last=False)  # not closed: another thread may be reading it

            def delivered(read_bytes: int) -> None:
                watched.proven, watched.refused = True, ""
                self._count(read_bytes)

            origin = GuardedOrigin(open_origin(manifest, within=within, count=delivered), self._troubled)
            self._open[name] = origin, size_bytes
        return origin

    def _open_bytes(self) -> int:
        return sum(size_bytes for _, size_bytes in self._open.values())

    def failed(self, manifest: Manifest, error: QuiverError) -> None:
        """Probe the origin of a failed fill soon, unless the error concerns single objects."""
        found = self._above(manifest)
        if found is None or isinstance(error, NotAllowed | Changed | Corrupt):
            return
        if isinstance(error, Forbidden):
            found[0].refused = str(error)
        found[0].suspected = True

    def _above(self, manifest: Manifest) -> tuple[_Watched, Location] | None:
        """Return the prefix that contains a manifest's base, and by which of its names; the widest if several do."""
        base = Location.parse(manifest.header.base)
        found = [
            (watched, location)
            for watched in self._watched
            for location in watched.locations
            if location.contains(base)
        ]
        return min(found, key=lambda each: len(each[1].names), default=None)

    # -- watching -----------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Probe the origins that may not work, until cancelled."""
        while self._watched:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Probe the origins that are due, once and concurrently; wait for them briefly."""
        now = time.monotonic()
        for watched in self._watched:
            if watched.trying is not None:
                if now - watched.tried > PROBE_SECONDS_MAX:
                    self._found(watched, f"no answer in {PROBE_SECONDS_MAX:.0f} s")
            elif self._is_due(watched, now):
                watched.tried, watched.suspected = now, False
                future = _probed(watched.locations[0])
                watched.trying = future
                future.add_done_callback(partial(self._tried, watched))
        trying = [watched.trying for watched in self._watched if watched.trying is not None]
        if trying:  # one that hangs does not delay the others
            await asyncio.wait(trying, timeout=LOOK_SECONDS)

    def _is_due(self, watched: _Watched, now: float) -> bool:
        """Whether to probe an origin now: one that may not work, not too often, and few at a time."""
        running = sum(each.trying is not None for each in self._watched)
        doubtful = watched.suspected or watched.state != OK
        return doubtful and now - watched.tried >= TRY_SECONDS and running < PROBES_MAX

    def _tried(self, watched: _Watched, done: asyncio.Future[bool]) -> None:
        watched.trying = None
        if done.cancelled():
            return
        try:
            watched.proven |= done.result()
        except QuiverError as error:
            watched.proven = False
            self._found(watched, str(error))
            return
        except Exception as error:  # libraries raise what they do not document: report it, and probe again
            log.debug("a probe failed", exc_info=error)
            self._found(watched, f"{type(error).__name__}: {error}")
            return
        self._found(watched, OK if watched.proven or not watched.refused else watched.refused)

    def _found(self, watched: _Watched, state: str) -> None:
        before, watched.state = watched.state, shown(state, 500)
        if watched.state == before:
            return
        if watched.state != OK:
            log.warning(
                "--origin %s cannot be read: %s; clients read it themselves until it can", watched.prefix, state
            )
        elif before != UNCHECKED:
            log.info("--origin %s can be read again", watched.prefix)


def _probed(location: Location) -> asyncio.Future[bool]:
    """Probe an origin in a thread that does not keep the process alive: a server that hangs must not delay the exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[bool] = loop.create_future()

    def settle(readable: bool, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(readable)

    def run() -> None:
        readable, error = False, None
        try:
            readable = probe(location)
        except Exception as caught:  # noqa: BLE001 - whoever awaits the future decides what it means
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits
            loop.call_soon_threadsafe(settle, readable, error)

    threading.Thread(target=run, name="quiver-origins", daemon=True).start()
    return future
