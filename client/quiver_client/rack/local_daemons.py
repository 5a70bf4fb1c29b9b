"""The daemons of the ring that run on this host: found by their Unix sockets, identified by the node ids they report.

Every machine of a rack may use the same path, and a ring may contain anything. So a path in the ring is a candidate: it
belongs to a member only once the daemon behind it has reported that member's node id. A static ring (``--peers``)
contains only the socket of the daemon that sent it, so the seeds and the members with an address of this host are asked
as well.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from quiver import forks
from quiver.backoff import Backoff
from quiver.errors import QuiverError
from quiver.expiring import Expiring
from quiver.ring import Member, Ring
from quiver.token_source import NO_TOKEN, TokenSource
from quiver.transport.handoff import HandoffClient, is_this_host
from quiver_client.rack.members import Members
from quiver_client.stats import Stats

LOCAL_MAX: Final = 8  # daemons of one host
PATHS_MAX: Final = 64  # that are tried; a ring has 20 to 30 members
ASKED_MAX: Final = 16  # daemons asked for the paths of their sockets
ASK_SECONDS: Final = 60.0  # between two such questions to one daemon
UNRESPONSIVE_SECONDS: Final = 5.0  # how long a daemon that failed is avoided; doubled at each failure
UNRESPONSIVE_SECONDS_MAX: Final = 60.0
SERVICE_UIDS: Final = (range(1, 1000), range(61184, 65520))  # up to SYS_UID_MAX; and systemd's DynamicUser=


class LocalDaemon:
    """A daemon on this host, and whether it responds. Safe from threads."""

    def __init__(self, client: HandoffClient) -> None:
        self.client = client
        self.heard_at = time.monotonic()
        self._lock = forks.lock()
        self._backoff = Backoff(UNRESPONSIVE_SECONDS, UNRESPONSIVE_SECONDS_MAX)

    @property
    def is_unresponsive(self) -> bool:
        """Whether it failed so recently that it is avoided."""
        return self._backoff.is_waiting

    def answered(self) -> None:
        with self._lock:
            self.heard_at = time.monotonic()
            self._backoff.succeed()

    def mark_unresponsive(self) -> None:
        """Avoid it for a while, and for longer after each failure in a row."""
        with self._lock:
            if not self._backoff.is_waiting:  # else another thread has counted this failure
                self._backoff.fail()


class LocalDaemons:
    """Which of a ring's members are on this host. ``look`` is for one thread; the rest is safe from any."""

    def __init__(
        self,
        members: Members,
        seeds: Sequence[str],
        stats: Stats,
        token: TokenSource = NO_TOKEN,
        introduction: Callable[[], str] = str,
    ) -> None:
        """``token``, and what ``introduction`` returns: sent to each daemon."""
        self._members = members
        self._seeds = seeds
        self._stats = stats
        self._token = token
        self._introduction = introduction
        self._sockets: dict[str, str] = {}  # node id -> path, as each daemon reported its own
        self._asked: Expiring[str, None] = Expiring()  # URLs of daemons that were asked for their paths
        self._here: dict[str, bool] = {}  # host -> whether it is this host
        self._found: dict[str, LocalDaemon] = {}  # by path
        self._unusable: dict[str, LocalDaemon] = {}  # by path, daemons whose sockets cannot be used
        self._by_url: dict[str, LocalDaemon] = {}
        self._lock = forks.lock()
        self._closed = False

    def at(self, url: str) -> LocalDaemon | None:
        """Return the daemon of the ring at this URL if it is on this host and responds."""
        found = self._by_url.get(url)
        return None if found is None or found.is_unresponsive else found

    def __bool__(self) -> bool:
        return bool(self._by_url)

    @property
    def responding(self) -> list[LocalDaemon]:
        """The daemons of this host that respond."""
        return [daemon for daemon in set(self._by_url.values()) if not daemon.is_unresponsive]

    def look(self, ring: Ring) -> None:
        """Find the daemons of this host. Blocks for a short time on name resolution and on daemons."""
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
        """Ask the unknown daemon behind a path for its node id, and keep it if the ring has that node there."""
        known, unusable = self._found.get(path), self._unusable.get(path)
        if known is not None and known.client.node not in ids:
            known = None
        if (known is not None and not known.is_unresponsive) or (unusable is not None and unusable.is_unresponsive):
            return
        owner = self._owner(path)
        if owner is None or (known is not None and owner in known.client.trusted):
            return  # no trusted daemon; or the known one, which does not respond and was not replaced
        daemon = LocalDaemon(HandoffClient(path, [owner], token=self._token, introduction=self._introduction()))
        try:
            if daemon.client.hello() in ids:
                self._keep(path, daemon)
                return
            failure = f"{path}: node {daemon.client.node!r} is not one that the ring has there"
        except QuiverError as error:
            failure = str(error)
        daemon.client.close()
        self._stats.warn("socket", f"{failure}; reading over TCP")
        unusable = unusable or daemon
        unusable.mark_unresponsive()
        self._unusable[path] = unusable

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
        """Return the user id of the socket's owner, ``None`` if that account is not trusted.

        A process that passes a file can modify it after it was verified here, undetected, and can truncate it while it
        is mapped, which ends this process by SIGBUS. So the account that runs the daemon must be as trusted as the
        machine's administrator: root, this user, or a system account that owns the folder. Any other account may have
        made a folder of its own. ``HandoffClient`` checks on connecting that this account listens.
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
        """Ask daemons that may run here, and whose socket is unknown, for its path."""
        # A static ring has no capacities. In a ring kept in etcd, a member without a path has no socket.
        unknown = [member for member in ring.members if not member.socket and member.weight <= 1]
        if not unknown:
            return
        urls = dict.fromkeys([*self._seeds, *(member.url for member in unknown if self._is_here(member))])
        for url in list(urls)[:ASKED_MAX]:
            if url in self._asked or self._members.is_unresponsive(url):
                continue
            self._asked.set(url, None, ASK_SECONDS)
            try:
                told, _ = self._members.peer(url).ring().ring()
            except QuiverError:
                continue  # a read from it will log why
            self._sockets.update({member.id: member.socket for member in told.members if member.socket})

    def _is_here(self, member: Member) -> bool:
        host = urlsplit(member.url).hostname or ""
        if host not in self._here:
            self._here[host] = is_this_host(host)
        return self._here[host]
