"""Where a daemon learns who else is in its rack. The rest of the daemon sees a ``Registry``.

A registry always has a ring: at first the daemon alone. ``StaticRegistry`` is told the members by the operator;
``etcd_registry`` keeps them in etcd.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Protocol, Self

import msgspec

from quiver.errors import Misconfigured
from quiver.ring import Member, Ring, check_member, check_url, static_id

log = logging.getLogger(__name__)

_RACK: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


class Registry(Protocol):
    """The members of the rack, as far as this daemon knows."""

    @property
    def ring(self) -> Ring:
        """The current ring. It is replaced, never mutated."""

    @property
    def own(self) -> Member:
        """This daemon as it stands in the ring."""

    @property
    def age_seconds(self) -> float:
        """Seconds since the ring was last confirmed."""

    @property
    def ignored_total(self) -> int:
        """The number of records seen that describe no valid member."""

    @property
    def registered(self) -> bool:
        """Whether others can see this daemon, as far as it knows."""

    @property
    def problem(self) -> str:
        """What is wrong and what the operator should do about it; empty if nothing is."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Leave the rack."""

    async def changed(self) -> None:
        """Return after the ring, ``registered`` or the connection has changed. Check, then wait, in a loop."""

    async def drain(self) -> None:
        """Own no shards from now on, but stay in the ring so that peers can still ask. Returns within a few seconds."""

    async def undrain(self) -> None:
        """Own shards again. Returns within a few seconds."""

    async def wait_until_registered(self, timeout_seconds: float | None = None) -> bool:
        """Return whether others can see this daemon within the timeout. Raises ``Misconfigured`` if its id is taken.

        Without a timeout it waits while the registry answers, long enough to tell a living holder of the id from a dead
        one. It does not wait for a registry that does not answer: a daemon starts without it.
        """


class StaticRegistry:
    """The rack as the operator wrote it down: ``--peers``, or a daemon alone. It talks to nobody.

    Every daemon must compute the same ring, so with peers a node's id is derived from its URL and all members have the
    same weight: only the daemon itself knows its ``--node-id`` and its capacity.
    """

    age_seconds = 0.0
    ignored_total = 0
    registered = True

    def __init__(self, rack: str, member: Member, peers: Sequence[str] = (), replicas: int = 1) -> None:
        check_rack(rack)
        check_member(member)
        # Only this daemon knows its socket: readers on this host ask it for the ring, and find the socket there.
        self._own = member if not peers else Member(static_id(member.url), check_url(member.url), socket=member.socket)
        members = {static_id(url): Member(static_id(url), check_url(url)) for url in peers}
        self.problem = ""
        if peers and self._own.id not in members:
            self.problem = (
                f"{self._own.url} is not among --peers; only this daemon adds it: add it to --peers, or --advertise it"
            )
            log.warning("%s", self.problem)
        members[self._own.id] = self._own
        self._ring = Ring.of(rack, members.values(), replicas)
        self._news = asyncio.Event()

    @property
    def ring(self) -> Ring:
        return self._ring

    @property
    def own(self) -> Member:
        return self._own

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        return None

    async def changed(self) -> None:
        await self._news.wait()

    async def drain(self) -> None:
        """Own nothing in the ring that this daemon hands out. Its peers are not notified: restart them without it."""
        self._stand(msgspec.structs.replace(self._own, state="draining"))

    async def undrain(self) -> None:
        self._stand(msgspec.structs.replace(self._own, state="up"))

    def _stand(self, own: Member) -> None:
        """Replace this daemon in the ring."""
        self._own = own
        others = [member for member in self._ring.members if member.id != self._own.id]
        self._ring = Ring.of(self._ring.rack, [*others, self._own], self._ring.replicas)
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def wait_until_registered(self, timeout_seconds: float | None = None) -> bool:
        return True


def check_rack(rack: str) -> str:
    """Return the rack's name if it is valid as a part of a key in etcd; raise ``Misconfigured`` if not."""
    if not _RACK.fullmatch(rack):
        raise Misconfigured(f"not a rack name: {rack[:80]!r}; use up to 64 letters, digits, dots, dashes, underscores")
    return rack
