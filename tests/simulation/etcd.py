"""A simulated etcd: keys under leases, revisions, watches; and the shell that carries out a daemon's membership.

The decisions are the real ones of ``quiver.membership``: here is only what a registry and a network can do to them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import msgspec

from quiver import membership as m
from quiver.ring import Member, Ring
from tests.simulation.clock import Process
from tests.simulation.network import Network, Reply

RACK: Final = "sim"
CALL_SECONDS: Final = 1.0


class Etcd(Process):
    """One etcd. A fault stops it for a while, loses its data, revokes a lease, or breaks its watches."""

    def __init__(self, network: Network, ttl_seconds: float) -> None:
        super().__init__(network.clock, "etcd")
        self._network, self._ttl_seconds = network, ttl_seconds
        self.up = True
        self.stuck = False  # watches deliver nothing
        self.replays = False  # and deliver everything twice, the second time late
        self.revision = 1
        self._entries: dict[str, m.Entry] = {}
        self._leases: dict[int, float] = {}  # until when
        self._lease_number = 0
        self._watches: dict[str, tuple[int, Callable[[m.Changed], None]]] = {}  # by watcher: the latest watch
        self._watch_number = 0
        self.after(0.5, self._expire)

    # -- what daemons call --------------------------------------------------------------------------------------------

    def answer(self, action: m.Action, client: str, deliver: Callable[[m.Changed], None], reply: Reply) -> None:
        if self.up:
            reply(self._carry_out(action, client, deliver))

    def _carry_out(self, action: m.Action, client: str, deliver: Callable[[m.Changed], None]) -> m.Event:
        match action:
            case m.List():
                return m.Listed(tuple(self._entries.values()), self.revision)
            case m.Watch(from_revision):
                self._watch_number += 1
                self._watches[client] = self._watch_number, deliver
                missed = [each for each in self._entries.values() if each.revision >= from_revision]
                if missed:
                    self._deliver(client, m.Changed(tuple(missed)))
                return m.Watching()
            case m.Grant():
                self._lease_number += 1
                self._leases[self._lease_number] = self.clock.now + self._ttl_seconds
                return m.LeaseGranted(self._lease_number)
            case m.KeepAlive(lease):
                if lease not in self._leases:
                    return m.LeaseLost()
                self._leases[lease] = self.clock.now + self._ttl_seconds
                return m.LeaseKept()
            case m.Register(key, value, lease, over):
                if lease not in self._leases:
                    return m.LeaseLost()
                if (self._entries[key].revision if key in self._entries else 0) != over:
                    return m.Refused()
                return m.Registered(self.write(key, value, lease))
            case _:
                raise AssertionError(f"no call: {action}")

    def write(self, key: str, value: bytes, lease: int = 0) -> m.Entry:
        self.revision += 1
        entry = m.Entry(key, value, self.revision, lease)
        self._entries[key] = entry
        self._tell(m.Changed((entry,)))
        return entry

    def revoke(self, lease: int) -> None:
        self._leases.pop(lease, None)
        for key in [key for key, entry in self._entries.items() if entry.lease == lease]:
            self.delete(key)

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    def delete(self, key: str) -> None:
        if self._entries.pop(key, None) is not None:
            self.revision += 1
            self._tell(m.Changed((m.Gone(key, self.revision),)))

    def keys(self) -> list[str]:
        return list(self._entries)

    def stop(self, *, loses_data: bool) -> None:
        """No answer until ``start``. Watches end with it."""
        self.up = False
        self._watches.clear()
        if loses_data:
            self._entries.clear()
            self._leases.clear()
            self.revision = 1

    def start(self) -> None:
        """As after a restart of etcd, every lease has its whole TTL again."""
        self.up = True
        self._leases = dict.fromkeys(self._leases, self.clock.now + self._ttl_seconds)

    def _expire(self) -> None:
        if self.up:
            for lease in [lease for lease, until in self._leases.items() if until < self.clock.now]:
                self.revoke(lease)
        self.after(0.5, self._expire)

    def _tell(self, changed: m.Changed) -> None:
        for client in list(self._watches):
            self._deliver(client, changed)

    def _deliver(self, client: str, changed: m.Changed) -> None:
        number, deliver = self._watches[client]
        if self.stuck:
            return

        def arrive(_: Any) -> None:
            if self._watches.get(client, (0,))[0] == number:
                deliver(changed)

        self._network.tell(self, client, arrive)
        if self.replays:
            self.after(1.0, lambda: self._network.tell(self, client, arrive))


class Seat:
    """A daemon's place in the ring: carries out what ``membership.step`` says, one action at a time."""

    def __init__(self, daemon: Process, member: Member, network: Network, chance: random.Random, ttl: float) -> None:
        self._daemon, self._network, self._chance = daemon, network, chance
        self._clock = daemon.clock
        self.state = m.begin(RACK, member, f"{daemon.name}.{daemon.life}", 1, ttl, self._clock.now)
        self._attempts = 0
        self._turn = 0  # the call or timer that is due: an answer to an earlier one is dropped
        self._calling = False
        self._early: list[m.Changed] = []
        self.changes = 0

    @property
    def ring(self) -> Ring:
        return self.state.ring

    def connect(self) -> None:
        self._turn += 1
        self._calling = False
        self._early.clear()
        self._take(m.Connected())

    def drain(self) -> None:
        own = msgspec.structs.replace(self.state.own, state="draining")
        self._take(m.OwnChanged(own), interrupts=True)

    def _take(self, event: m.Event, *, interrupts: bool = False) -> None:
        before = self.state
        self.state, action = m.step(before, event, self._clock.now)
        self.changes += self.state.ring is not before.ring
        if not (interrupts and self._calling):
            self._begin(action)

    def _begin(self, action: m.Action) -> None:
        self._turn += 1
        turn = self._turn
        self._calling = False
        match action:
            case m.Wait(until):
                if self._early:
                    self._daemon.after(0.0, lambda: self._next(turn))
                elif until < float("inf"):
                    self._daemon.after(until - self._clock.now, lambda: self._ticked(turn))
            case m.Reconnect():
                self._lost()
            case _:
                self._calling = True
                self._network.request(
                    self._daemon,
                    "etcd",
                    lambda etcd, reply: etcd.answer(action, self._daemon.name, self._changed, reply),
                    lambda event: self._answered(turn, event),
                    CALL_SECONDS,
                )

    def _changed(self, changed: m.Changed) -> None:
        """The watch delivered something: at once if nothing is being called, else before the answer or after it."""
        self._early.append(changed)
        if not self._calling:
            self._next(self._turn)

    def _next(self, turn: int) -> None:
        if turn == self._turn and self._early and not self._calling and self.state.connected:
            self._take(self._early.pop(0))

    def _ticked(self, turn: int) -> None:
        if turn == self._turn:
            self._take(m.Tick())

    def _answered(self, turn: int, event: m.Event | None) -> None:
        if turn != self._turn:
            return
        if event is None:
            self._lost()
            return
        self._attempts = 0
        if isinstance(event, m.Listed):
            while self._early:  # delivered meanwhile: the watch missed nothing
                self.state, _ = m.step(self.state, self._early.pop(0), self._clock.now)
        self._take(event)

    def _lost(self) -> None:
        self._turn += 1
        turn = self._turn
        self._calling = False
        self.state, _ = m.step(self.state, m.Lost(), self._clock.now)
        self._attempts += 1
        pause = m.backoff_seconds(self._attempts, self.state.ttl_seconds, self._chance.random())
        self._daemon.after(pause, lambda: self.connect() if turn == self._turn else None)


def junk(chance: random.Random, members: list[Member]) -> tuple[str, bytes]:
    """Return a hostile key and value: no JSON, deep JSON, no member, or a member at an address that is another's."""
    name = f"x{chance.randrange(3)}"
    kind = chance.randrange(6)
    if kind == 0:
        value = chance.randbytes(40)
    elif kind == 1:
        value = b"[" * 5000
    elif kind == 2:
        value = b'{"url":"http://ghost:1","weight":1e400,"session":"s"}'
    elif kind == 3:
        value = b"x" * 10_000
    elif kind == 4:
        value = m.write(Member(name, "http://ghost:1", 1e9), "ghost")  # valid, and nobody is there
    else:
        value = m.write(Member(name, members[0].url, 1e6), "twin")  # two names of one daemon
    return f"/quiver/racks/{RACK}/members/{name}", value
