"""A daemon's place in the ring, kept in etcd.

The registry runs its own tasks between ``async with``'s two ends and never fails because of etcd: while etcd does not
answer, the last ring stays. The pure ``quiver.membership`` decides what to do about etcd; this module carries it out.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import secrets
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, assert_never
from urllib.parse import urlsplit

import msgspec

from quiver import membership as m
from quiver.errors import Misconfigured, NotFound, Unavailable
from quiver.expiring import Expiring
from quiver.ring import Member, Ring, check_member
from quiver_cacheserver.rack.addresses import is_loopback, parse_endpoints
from quiver_cacheserver.rack.etcd import Etcd, Inbox
from quiver_cacheserver.rack.registry import check_rack

log = logging.getLogger(__name__)

TTL_SECONDS: Final = 10.0
LOG_EVERY_SECONDS: Final = 30.0  # at most one line of a kind
_CHECK_ETCD: Final = "Check that etcd runs there and that --etcd names it"


class EtcdRegistry:
    """The rack as etcd has it: ``/quiver/racks/<rack>/members/<node>``, each key under its daemon's lease.

    One task supervises: it connects and carries out actions until the connection is lost, then backs off and connects
    again, to the next endpoint if there are several. The lease outlives connections, so a short outage changes nothing
    in etcd.
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
        self._logged: Expiring[str, None] = Expiring(clock=clock)

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
        """The whole state as a value, for tests and for debugging."""
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
        self._closing = True  # aetcd can swallow a cancellation while it shuts down a watcher
        if self._task is not None:
            self._task.cancel()
        try:
            await self._group.__aexit__(None, None, None)
        finally:
            await self._leave()

    async def changed(self) -> None:
        await self._news.wait()

    async def drain(self) -> None:
        if not await self._stand(msgspec.structs.replace(self._state.own, state="draining")):
            log.warning(
                "%s has not confirmed that this daemon drains; its peers will notice when its key expires",
                self._endpoint,
            )

    async def undrain(self) -> None:
        if not await self._stand(msgspec.structs.replace(self._state.own, state="up")):
            log.warning("%s has not confirmed that this daemon is up again; it will once it answers", self._endpoint)

    async def _stand(self, own: Member) -> bool:
        """Publish this daemon in another state; return whether that was confirmed in time."""
        self._learn(m.OwnChanged(own))
        self._inbox.wake()
        return await self._wait_for(lambda: self.registered, 2 * self._timeout_seconds)

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
        """Carry out what is due and learn from the results, until the connection is lost or must be replaced."""
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
                            self._learn(before)  # the watch delivered these in the meantime: it missed nothing
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
        """Take one step, and wake the waiters if the ring or this daemon's standing changed."""
        before = self._state
        self._state, action = m.step(before, event, self._clock())
        after = self._state
        if after.ring is not before.ring:
            log.info("the ring of rack %s has %d members", after.rack, len(after.ring.members))
        if isinstance(event, m.Listed):
            self._failure, self._reached = "", True
            if (problem := self.problem) and self._log_now("problem"):
                log.warning("%s", problem)
        if after.ignored_total > before.ignored_total and self._log_now("ignored"):
            log.warning("ignored %d records under %s that describe no member", after.ignored_total, after.prefix)
        if after.taken is not None and self._log_now("taken"):
            log.error(_taken(after.own, after.taken))
        if _standing(after) != _standing(before):
            self._tell()
        return action

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _warn(self, error: Unavailable) -> None:
        self._failure = str(error)
        if self._log_now("away"):
            count = len(self._state.ring.members)
            log.warning(
                "%s; serving on with the last ring (%d members, %.0f s old) and trying again. %s",
                *(error, count, self.age_seconds, _CHECK_ETCD),
            )

    def _log_now(self, what: str) -> bool:
        """Return whether to log a line of this kind now, and count it as logged: one in ``LOG_EVERY_SECONDS``."""
        if what in self._logged:
            return False
        self._logged.set(what, None, LOG_EVERY_SECONDS)
        return True

    async def _leave(self) -> None:
        """Revoke the lease; without it, the others wait for the lease to expire."""
        if not self._state.lease:
            return
        try:
            async with Etcd(self._endpoint, min(1.0, self._timeout_seconds)) as etcd:
                await etcd.revoke(self._state.lease)
        except (Unavailable, NotFound) as error:
            log.info("the lease was not revoked and will expire: %s", error)
        self._learn(m.LeaseLost())


def _standing(state: m.State) -> tuple[object, ...]:
    """Return the part of the state that waiters wait for: all but the timers."""
    return id(state.ring), state.registered, state.taken, state.connected, state.watching, len(state.kept)


def _apart(ring: Ring, own: Member) -> str:
    """Return a problem if a member has a loopback address in a ring of several machines, where it cannot be reached."""
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
