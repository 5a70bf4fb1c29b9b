"""Where a daemon learns who else is in its rack: a fixed list, or etcd. The rest of the daemon sees a ``Registry``.

A registry always has a ring: at first the daemon alone, and when etcd goes away the last one. It runs its own tasks
between ``async with``'s two ends and never fails for etcd's sake; what to do about etcd is decided by the pure
``quiver.membership`` and only carried out here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import re
import secrets
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Protocol, Self, assert_never
from urllib.parse import urlsplit

import msgspec
import xxhash

from quiver import membership as m
from quiver.errors import Misconfigured, NotFound, Unavailable
from quiver.ring import Member, Ring, check_member, check_url
from quiver_cacheserver.addresses import is_loopback, parse_endpoints
from quiver_cacheserver.etcd import Etcd, Inbox

log = logging.getLogger(__name__)

TTL_SECONDS: Final = 10.0
LOG_EVERY_SECONDS: Final = 30.0
_CHECK_ETCD: Final = "Check that etcd runs there and that --etcd names it"
_RACK = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


class Registry(Protocol):
    """Who is in the rack, as far as this daemon knows."""

    @property
    def ring(self) -> Ring:
        """The ring now. It is replaced, never mutated."""

    @property
    def own(self) -> Member:
        """This daemon as it stands in the ring."""

    @property
    def age_seconds(self) -> float:
        """For how long the ring has not been confirmed."""

    @property
    def ignored_total(self) -> int:
        """Records seen that describe no member."""

    @property
    def registered(self) -> bool:
        """Others can see this daemon, as far as it knows."""

    @property
    def problem(self) -> str:
        """What an operator should look at, and what to do about it; empty while all is well."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Leave the rack."""

    async def changed(self) -> None:
        """Return when something has changed: the ring, ``registered``, the connection. Check, then wait, in a loop."""

    async def drain(self) -> None:
        """Own nothing from now on, but stay in the ring so that others can still ask. Returns within a few seconds."""

    async def wait_until_registered(self, timeout_seconds: float | None = None) -> bool:
        """Return whether others can see this daemon by then. Raises ``Misconfigured`` if its node id is taken.

        Without a time it waits while the registry answers, long enough to tell a living holder of the id from a dead
        one, and not for a registry that is away: a daemon starts without it.
        """


class StaticRegistry:
    """The rack as the operator wrote it down: ``--peers``, or a daemon alone. Nobody is asked and nobody is told.

    Every daemon must come to the same ring, so with peers a node's name is made of its URL and all weigh the same:
    ``--node-id`` and capacities are known only to the daemon that has them.
    """

    age_seconds = 0.0
    ignored_total = 0
    registered = True

    def __init__(self, rack: str, member: Member, peers: Sequence[str] = (), replicas: int = 1) -> None:
        check_rack(rack)
        check_member(member)
        # Its socket is known to this daemon alone: readers on this host ask it for the ring, and find it there.
        self._own = member if not peers else Member(static_id(member.url), check_url(member.url), socket=member.socket)
        members = {static_id(url): Member(static_id(url), check_url(url)) for url in peers}
        self.problem = ""
        if peers and self._own.id not in members:
            self.problem = f"{self._own.url} is not among --peers: added, here only; name it there, or --advertise it"
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
        """Own nothing in the ring that this daemon gives out. Its peers are not told: restart them without it."""
        self._own = msgspec.structs.replace(self._own, state="draining")
        others = [member for member in self._ring.members if member.id != self._own.id]
        self._ring = Ring.of(self._ring.rack, [*others, self._own], self._ring.replicas)
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def wait_until_registered(self, timeout_seconds: float | None = None) -> bool:
        return True


def static_id(url: str) -> str:
    """Return the node id of a daemon known by its URL alone: on every daemon the same, for two URLs never."""
    parts = urlsplit(check_url(url))
    host, port = (parts.hostname or "").lower(), parts.port or 80
    name = f"{host}-{port}"
    if re.fullmatch(r"[a-z0-9][a-z0-9.-]*", host) and len(name) <= 64:
        return name
    told = re.sub(r"[^a-z0-9.]+", "-", host).strip("-.")[:32]
    return f"host-{told}-{port}-{xxhash.xxh3_64_hexdigest(host.encode())}"[:64]


def check_rack(rack: str) -> str:
    """Return the rack's name if it can be part of a key in etcd."""
    if not _RACK.fullmatch(rack):
        raise Misconfigured(f"not a rack name: {rack[:80]!r}; use up to 64 letters, digits, dots, dashes, underscores")
    return rack


class EtcdRegistry:
    """The rack as etcd has it: ``/quiver/racks/<rack>/members/<node>``, each key under its daemon's lease.

    One task supervises: it connects, runs a conversation, and when that is lost waits a little and connects again, to
    the next endpoint if there are several. The lease outlives connections, so a short outage changes nothing in etcd.
    """

    def __init__(
        self,
        endpoints: str,
        rack: str,
        member: Member,
        *,
        replicas: int = 1,
        ttl_seconds: float = TTL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoints = parse_endpoints(endpoints)
        if ttl_seconds < 1:
            raise Misconfigured(f"a lease of {ttl_seconds} s is too short; use at least 1 s (10 s is usual)")
        self._clock = clock
        self._timeout_seconds = max(0.5, ttl_seconds / 3)
        session = secrets.token_hex(8)
        self._state = m.begin(check_rack(rack), check_member(member), session, replicas, ttl_seconds, clock())
        self._endpoint = self._endpoints[0]
        self._group = asyncio.TaskGroup()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._failed_in_a_row = 0
        self._failure = ""  # why etcd was lost, until it answers again
        self._reached = False
        self._inbox = Inbox()
        self._news = asyncio.Event()
        self._rarely = _Rarely(clock)

    @property
    def ring(self) -> Ring:
        return self._state.ring

    @property
    def own(self) -> Member:
        return self._state.own

    @property
    def age_seconds(self) -> float:
        return max(0.0, self._clock() - self._state.listed_at)

    @property
    def ignored_total(self) -> int:
        return self._state.ignored_total

    @property
    def registered(self) -> bool:
        return self._state.registered

    @property
    def problem(self) -> str:
        away = self._clock() - self._state.heard_at
        if self._failure and (not self._reached or away > self._state.ttl_seconds):
            ring = "the last ring" if self._reached else "a ring of this daemon alone"
            return f"{self._failure}; no answer for {away:.0f} s. Serving on with {ring}. {_CHECK_ETCD}"
        return _apart(self.ring, self._state.own)

    @property
    def state(self) -> m.State:
        """All that is known, as a value: for tests and for whoever looks for a fault."""
        return self._state

    def __repr__(self) -> str:
        s = self._state
        return f"EtcdRegistry({s.key}, {self._endpoint}, connected={s.connected}, members={len(s.ring.members)})"

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._task = self._group.create_task(self._supervise(), name="registry")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._closing = True  # aetcd can swallow a cancellation while it shuts a watcher down
        if self._task is not None:
            self._task.cancel()
        try:
            await self._group.__aexit__(None, None, None)
        finally:
            await self._leave()

    async def changed(self) -> None:
        await self._news.wait()

    async def drain(self) -> None:
        self._learn(m.OwnChanged(msgspec.structs.replace(self._state.own, state="draining")))
        self._inbox.wake()
        if not await self._wait_for(lambda: self.registered, 2 * self._timeout_seconds):
            log.warning(
                "%s does not know yet that this daemon drains; its peers find out when it is gone", self._endpoint
            )

    async def wait_until_registered(self, timeout_seconds: float | None = None) -> bool:
        def told() -> bool:
            away = timeout_seconds is None and self._failed_in_a_row >= len(self._endpoints)
            return self.registered or self._state.taken is not None or away

        await self._wait_for(told, 3 * self._state.ttl_seconds if timeout_seconds is None else timeout_seconds)
        if self._state.taken is not None:
            raise Misconfigured(_taken(self._state.own, self._state.taken))
        return self.registered

    async def _wait_for(self, condition: Callable[[], bool], timeout_seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while not condition():
                    await self.changed()
        return condition()

    # The one task -----------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        for endpoint in itertools.cycle(self._endpoints):
            self._endpoint = endpoint
            listed_at = self._state.listed_at
            try:
                async with Etcd(endpoint, self._timeout_seconds) as etcd:
                    await self._converse(etcd)
            except Unavailable as error:
                self._warn(error)
            except Exception as error:
                self._warn(Unavailable(str(endpoint), f"{type(error).__name__}: {error}"))
                log.debug("the conversation with etcd failed", exc_info=error)
            self._learn(m.Lost())
            if self._closing:
                return
            self._failed_in_a_row = 0 if self._state.listed_at > listed_at else self._failed_in_a_row + 1
            self._tell()
            draw = random.random()  # noqa: S311 - jitter
            await asyncio.sleep(m.backoff_seconds(self._failed_in_a_row, self._state.ttl_seconds, draw))

    async def _converse(self, etcd: Etcd) -> None:
        """Do what is due and learn what comes of it, until the connection is lost or to be given up."""
        self._inbox.reset()
        lost: Unavailable | None = None
        pump: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as group:
            try:
                action = self._learn(m.Connected())
                while not isinstance(action, m.Reconnect) and not self._closing:
                    if isinstance(action, m.Watch):
                        changes = await etcd.watch(self._state.prefix, action.from_revision)
                        pump = group.create_task(self._inbox.fill(changes), name="watch")
                        action = self._learn(m.Watching())
                    else:
                        event = await self._carry_out(action, etcd)
                        if isinstance(event, m.Listed) and (before := self._inbox.take()):
                            self._learn(before)  # what the watch brought meanwhile is no news that it missed
                        action = self._learn(event)
            except Unavailable as error:
                lost = error  # a task group would wrap it
            finally:
                if pump is not None:
                    pump.cancel()
        if lost is not None:
            raise lost

    async def _carry_out(self, action: m.Action, etcd: Etcd) -> m.Event:
        match action:
            case m.List():
                return await etcd.list(self._state.prefix)
            case m.Grant():
                return m.LeaseGranted(await etcd.grant(self._state.ttl_seconds))
            case m.KeepAlive(lease):
                return m.LeaseKept() if await etcd.keep_alive(lease) else m.LeaseLost()
            case m.Register(key, value, lease, over):
                try:
                    entry = await etcd.register(key, value, lease, over)
                except NotFound:
                    return m.LeaseLost()
                return m.Registered(entry) if entry else m.Refused()
            case m.Wait(until):
                return await self._inbox.wait(until - self._clock()) or m.Tick()
            case m.Watch() | m.Reconnect():
                raise AssertionError("the conversation handles these")
            case _:
                assert_never(action)

    def _learn(self, event: m.Event) -> m.Action:
        """Take one step, and tell those who wait if the ring or one's own standing changed."""
        before = self._state
        self._state, action = m.step(before, event, self._clock())
        after = self._state
        if after.ring is not before.ring:
            log.info("the ring of rack %s has %d members", after.rack, len(after.ring.members))
        if isinstance(event, m.Listed):
            self._failure, self._reached = "", True
            if (problem := self.problem) and self._rarely("problem"):
                log.warning("%s", problem)
        if after.ignored_total > before.ignored_total and self._rarely("ignored"):
            log.warning("ignored %d records under %s that describe no member", after.ignored_total, after.prefix)
        if after.taken is not None and self._rarely("taken"):
            log.error(_taken(after.own, after.taken))
        if _standing(after) != _standing(before):
            self._tell()
        return action

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _warn(self, error: Unavailable) -> None:
        self._failure = str(error)
        if self._rarely("away"):
            count = len(self._state.ring.members)
            log.warning(
                "%s; serving on with the last ring (%d members, %.0f s old) and trying again. %s",
                *(error, count, self.age_seconds, _CHECK_ETCD),
            )

    async def _leave(self) -> None:
        """Revoke the lease, so that the others need not wait for it to run out. Without etcd it does run out."""
        if not self._state.lease:
            return
        try:
            async with Etcd(self._endpoint, min(1.0, self._timeout_seconds)) as etcd:
                await etcd.revoke(self._state.lease)
        except (Unavailable, NotFound) as error:
            log.info("the lease was not revoked and runs out by itself: %s", error)
        self._learn(m.LeaseLost())


def _standing(state: m.State) -> tuple[object, ...]:
    """What waiters wait for: all but the timers."""
    return id(state.ring), state.registered, state.taken, state.connected, state.watching, len(state.kept)


def _apart(ring: Ring, own: Member) -> str:
    """Say whose address means another machine to each reader: of several machines none can be at a loopback address."""
    local = [member for member in ring.members if is_loopback(urlsplit(member.url).hostname or "")]
    if not local or len(local) == len(ring.members):
        return ""
    named = "this daemon" if own in local else f"node {local[0].id!r}"
    url = own.url if own in local else local[0].url
    return (
        f"{named} is in the ring at {url}, where other machines cannot reach it; "
        "start it with --listen 0.0.0.0:PORT, or with --advertise URL"
    )


def _taken(own: Member, rival: Member) -> str:
    return (
        f"node id {own.id!r} is taken by a living daemon at {rival.url}; this one is {own.url}. "
        "Choose another --node-id, or stop the other daemon"
    )


class _Rarely:
    """True at most once in ``LOG_EVERY_SECONDS`` for a thing."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}

    def __call__(self, what: str) -> bool:
        now = self._clock()
        if now - self._last.get(what, -LOG_EVERY_SECONDS) < LOG_EVERY_SECONDS:
            return False
        self._last[what] = now
        return True
