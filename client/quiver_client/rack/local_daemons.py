"""The daemons of the ring that run on this host: found by their sockets, believed when they say who they are.

Every machine of a rack may use the same path, and a ring can hold anything. So a path of the ring is a candidate; the
daemon behind it says its node id, and only then is it that member. A ring that was given (``--peers``) tells of no
socket but that of the daemon that was asked: so the seeds and what else has an address of this host are asked as well.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from quiver import forks
from quiver.errors import QuiverError
from quiver.handoff import HandoffClient, is_this_host
from quiver.ring import Member, Ring
from quiver_client.rack.members import Members
from quiver_client.stats import Stats

LOCAL_MAX: Final = 8  # daemons of one host
PATHS_MAX: Final = 64  # looked at: a ring has 20 to 30 members
ASKED_MAX: Final = 16  # daemons asked what their sockets are
ASK_SECONDS: Final = 60.0
SILENT_SECONDS: Final = 5.0
SILENT_SECONDS_MAX: Final = 60.0
SERVICE_UIDS: Final = (range(1, 1000), range(61184, 65520))  # SYS_UID_MAX; and what systemd gives to DynamicUser=


class LocalDaemon:
    """A daemon on this host, and whether it is worth asking just now. Safe from threads."""

    def __init__(self, client: HandoffClient) -> None:
        self.client = client
        self.heard_at = time.monotonic()
        self._pause_seconds = 0.0
        self._silent_until = 0.0

    @property
    def is_unresponsive(self) -> bool:
        return time.monotonic() < self._silent_until

    def answered(self) -> None:
        self.heard_at = time.monotonic()
        self._pause_seconds = 0.0

    def failed(self) -> None:
        """Do not ask it for a while, and for longer each time."""
        if not self.is_unresponsive:
            self._pause_seconds = min(max(self._pause_seconds * 2, SILENT_SECONDS), SILENT_SECONDS_MAX)
            self._silent_until = time.monotonic() + self._pause_seconds


class LocalDaemons:
    """Which of a ring's members are on this host. ``look`` is for one thread; the rest is safe from any."""

    def __init__(self, members: Members, seeds: Sequence[str], stats: Stats) -> None:
        self._members = members
        self._seeds = seeds
        self._stats = stats
        self._sockets: dict[str, str] = {}  # node id -> socket, as daemons told of themselves
        self._asked: dict[str, float] = {}  # url -> when
        self._here: dict[str, bool] = {}  # host -> whether it is this one
        self._found: dict[str, LocalDaemon] = {}  # by socket
        self._paused: dict[str, LocalDaemon] = {}  # sockets that could not be used, by path
        self._by_url: dict[str, LocalDaemon] = {}
        self._lock = forks.lock()
        self._closed = False

    def at(self, url: str) -> LocalDaemon | None:
        """Return the daemon of the ring at this URL if it is on this host and answers."""
        found = self._by_url.get(url)
        return None if found is None or found.is_unresponsive else found

    def __bool__(self) -> bool:
        return bool(self._by_url)

    def look(self, ring: Ring) -> None:
        """Find the daemons of this host. May wait for the system and for daemons, though not for long."""
        self._ask_for_sockets(ring)
        told = {member.id: member.socket or self._sockets.get(member.id, "") for member in ring.members}
        named: dict[str, set[str]] = {}
        for node, path in told.items():
            if path:
                named.setdefault(path, set()).add(node)
        for path in sorted(named, key=lambda path: -len(named[path]))[:PATHS_MAX]:
            if len(self._found) < LOCAL_MAX or path in self._found:
                self._greet(path, named[path])
        by_url = {}
        for member in ring.members:
            daemon = self._found.get(told[member.id])
            if daemon is not None and daemon.client.node == member.id:
                by_url[member.url] = daemon
        self._by_url = by_url

    def close(self) -> None:
        with self._lock:
            self._closed = True
            found, self._found, self._by_url = list(self._found.values()), {}, {}
        for daemon in found:
            daemon.client.close()

    def _greet(self, path: str, ids: set[str]) -> None:
        """Hear who is behind a path, if that is not known, and keep it if it is one of whom the ring says so."""
        known, paused = self._found.get(path), self._paused.get(path)
        if known is not None and known.client.node not in ids:
            known = None
        if (known is not None and not known.is_unresponsive) or (paused is not None and paused.is_unresponsive):
            return
        owner = self._owner(path)
        if owner is None or (known is not None and owner in known.client.trusted):
            return  # nobody whom one would ask, or the one who is known and silent, and not one who took its place
        daemon = LocalDaemon(HandoffClient(path, [owner]))
        try:
            if daemon.client.hello() in ids:
                self._keep(path, daemon)
                return
            failure = f"{path}: node {daemon.client.node!r} is not one that the ring has there"
        except QuiverError as error:
            failure = str(error)
        daemon.client.close()
        self._stats.warn("socket", f"{failure}; reading over TCP")
        paused = paused or daemon
        paused.failed()
        self._paused[path] = paused

    def _keep(self, path: str, daemon: LocalDaemon) -> None:
        with self._lock:
            if self._closed:
                daemon.client.close()
                return
            former = self._found.pop(path, None)
            self._found[path] = daemon
        if former is not None:
            former.client.close()

    def _owner(self, path: str) -> int | None:
        """Return whose socket is there, unless just anybody put it there. That he listens is seen on connecting.

        Who passes a file can change it after it was checked here, which nobody finds, and shorten it while it is
        mapped, which ends this process. So whoever runs the daemon is trusted as the machine's administrator is: he is
        root, this user, or a system account whose folder it is. Any other account may have made a folder of its own.
        """
        try:
            found, folder = os.lstat(path), Path(path).parent.stat()
        except OSError:
            return None  # the usual case: a daemon of another host
        if not stat.S_ISSOCK(found.st_mode):
            return None
        is_service = any(found.st_uid in uids for uids in SERVICE_UIDS)
        if found.st_uid in (0, os.geteuid()) or (is_service and found.st_uid == folder.st_uid):
            return found.st_uid
        self._stats.warn(
            "socket",
            f"{path}: belongs to user {found.st_uid}, who is neither root, nor you, nor a system account in a folder "
            "of its own; not used, reading over TCP",
        )
        return None

    def _ask_for_sockets(self, ring: Ring) -> None:
        """Ask daemons that may be here, and of whom no socket is known, what theirs is."""
        # A ring that was given knows no capacities. In one that a registry keeps, who names no socket has none.
        unknown = [member for member in ring.members if not member.socket and member.weight <= 1]
        if not unknown:
            return
        now = time.monotonic()
        urls = dict.fromkeys([*self._seeds, *(member.url for member in unknown if self._is_here(member))])
        for url in list(urls)[:ASKED_MAX]:
            if now - self._asked.get(url, -ASK_SECONDS) < ASK_SECONDS or self._members.is_unresponsive(url):
                continue
            self._asked[url] = now
            try:
                told, _ = self._members.peer(url).ring().ring()
            except QuiverError:
                continue  # who reads from it will say so
            self._sockets.update({member.id: member.socket for member in told.members if member.socket})

    def _is_here(self, member: Member) -> bool:
        host = urlsplit(member.url).hostname or ""
        if host not in self._here:
            self._here[host] = is_this_host(host)
        return self._here[host]
