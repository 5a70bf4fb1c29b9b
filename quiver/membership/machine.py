"""The state of a daemon's membership and its one transition function. ``quiver.membership`` has the invariants."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from quiver.membership.events import (
    Action,
    Changed,
    Connected,
    Event,
    Grant,
    KeepAlive,
    LeaseGranted,
    LeaseKept,
    LeaseLost,
    List,
    Listed,
    Lost,
    OwnChanged,
    Reconnect,
    Refused,
    Register,
    Registered,
    Tick,
    Wait,
    Watch,
    Watching,
)
from quiver.membership.record import Entry, Gone, Seat, read, write
from quiver.ring import MEMBERS_MAX, Member, Ring

KEYS_MAX: Final = 4 * MEMBERS_MAX
"""Keys read from the rack's folder, junk included; keys past this are neither read nor counted."""
BEHIND_MAX: Final = 2
"""Lists in a row with changes that the watch did not deliver. One may be a race of milliseconds; two: it is stuck."""


@dataclass(frozen=True)
class State:
    """What a daemon knows of its rack. ``begin`` makes the first state; ``step`` makes each next one."""

    rack: str
    own: Member
    session: str
    replicas: int
    ttl_seconds: float
    ring: Ring
    listed_at: float
    """When the folder was last read, or the daemon started: the age of the ring."""
    heard_at: float
    """When the registry last answered anything: leases may have expired unseen since."""
    connected: bool = False
    watching: bool = False
    lease: int = 0
    revision: int = 0
    keys: Mapping[str, int] = field(default_factory=dict)
    """Every key known, junk included, and the revision of its last change."""
    seats: Mapping[str, Seat] = field(default_factory=dict)
    """Members by id, from the keys that hold a valid record."""
    kept: Mapping[str, Member] = field(default_factory=dict)
    """Members that were missing after an outage, until ``settled_at``."""
    settled_at: float = -math.inf
    own_lease: int = 0
    own_value: bytes = b""
    rival_since: float | None = None
    taken: Member | None = None
    """Another living daemon with this node's id, once it has outlived a TTL."""
    behind: int = 0
    ignored_total: int = 0
    beat_at: float = math.inf
    list_at: float = math.inf
    register_at: float = -math.inf

    @property
    def prefix(self) -> str:
        return f"/quiver/racks/{self.rack}/members/"

    @property
    def key(self) -> str:
        return self.prefix + self.own.id

    @property
    def value(self) -> bytes:
        """The JSON that the own key should hold."""
        return write(self.own, self.session)

    @property
    def registered(self) -> bool:
        """Whether the own key was as it should be when last seen. Says nothing while the registry does not answer."""
        return bool(self.lease) and self.own_lease == self.lease and self.own_value == self.value

    @property
    def rival(self) -> Member | None:
        """The holder of this node's id at another address. At the same address it is this daemon before a restart."""
        seat = self.seats.get(self.own.id)
        if seat is None or seat.session == self.session or seat.member.url == self.own.url:
            return None
        return seat.member


def begin(rack: str, own: Member, session: str, replicas: int, ttl_seconds: float, now: float) -> State:
    """Return the initial state of a daemon: a ring of one."""
    ring = Ring.of(rack, [own], replicas)
    return State(rack, own, session, replicas, ttl_seconds, ring, listed_at=now, heard_at=now)


def step(state: State, event: Event, now: float) -> tuple[State, Action]:
    """Return the state after the event, and the action that is due. ``now``: seconds on any monotonic clock."""
    after = _rivalled(_settled(_learned(state, event, now), now), now)
    if after.seats is not state.seats or after.kept is not state.kept or after.own is not state.own:
        ring = _ring(after)
        after = after if ring == state.ring else replace(after, ring=ring)
    return after, _due(after, now)


def backoff_seconds(attempt: int, ttl_seconds: float, draw: float) -> float:
    """Return the pause in seconds before the ``attempt``-th attempt to reach the registry; ``draw`` in [0, 1).

    At most TTL/3, so that a daemon is back before its lease expires in an etcd that restarted. Half of it is jitter, so
    that the daemons of a rack do not reconnect all at once.
    """
    return min(ttl_seconds / 3, 0.1 * 2.0 ** min(attempt, 10)) * (0.5 + draw / 2)


def _due(state: State, now: float) -> Action:
    """Return the most urgent action. Keeping the lease comes first: everything else can be repeated."""
    if not state.connected:
        return Wait(math.inf)
    if state.lease and now >= state.beat_at:
        return KeepAlive(state.lease)
    if state.behind >= BEHIND_MAX:
        return Reconnect()
    if now >= state.list_at:
        return List()
    if not state.watching:
        return Watch(state.revision + 1)
    times = [state.list_at]
    if state.lease:
        times.append(state.beat_at)
    if state.kept:
        times.append(state.settled_at)
    if state.rival is not None:
        times.append(_outlived_at(state) if state.taken is None else math.inf)
    elif not state.registered:
        if not state.lease:
            return Grant()
        if now >= state.register_at:
            return Register(state.key, state.value, state.lease, state.keys.get(state.key, 0))
        times.append(state.register_at)
    return Wait(min(times))


def _learned(state: State, event: Event, now: float) -> State:
    match event:
        case Connected():
            fresh = replace(state, connected=True, watching=False, behind=0, rival_since=None)
            return replace(fresh, beat_at=now, list_at=now, register_at=now)
        case Lost():
            return replace(state, connected=False, watching=False)
        case Listed():
            return _listed(state, event, now)
        case Watching():
            return replace(state, watching=True)
        case Changed(changes):
            return _changed(state, changes)
        case LeaseGranted(lease):
            return replace(state, lease=lease, beat_at=now + state.ttl_seconds / 3, heard_at=now)
        case LeaseKept():
            return replace(state, beat_at=now + state.ttl_seconds / 3, heard_at=now)
        case LeaseLost():
            return replace(state, lease=0)
        case Registered(entry):
            return replace(_changed(state, (entry,)), register_at=now + state.ttl_seconds / 10)
        case Refused():
            return replace(state, list_at=now, register_at=now + state.ttl_seconds / 10)
        case OwnChanged(member):
            return replace(state, own=member, register_at=now)
        case Tick():
            return state


def _listed(state: State, event: Listed, now: float) -> State:
    """Replace what is known by the list."""
    entries = event.entries[:KEYS_MAX]
    keys = {entry.key: entry.revision for entry in entries}
    missed = state.watching and keys != state.keys and len(keys) < KEYS_MAX
    # Leases are renewed every third of their TTL: the first can have expired two thirds after the last sign of life.
    outage = now - state.heard_at >= state.ttl_seconds * 2 / 3 or _lost_data(state, keys, event.revision)
    after = replace(
        state,
        keys={},
        seats={},
        own_lease=0,
        own_value=b"",
        revision=event.revision,
        listed_at=now,
        heard_at=now,
        list_at=now + state.ttl_seconds / 3,
        behind=state.behind + 1 if missed else 0,
        settled_at=now + state.ttl_seconds if outage and state.revision else state.settled_at,
    )
    return _taken_in(state, after, entries)


def _lost_data(state: State, keys: Mapping[str, int], revision: int) -> bool:
    """Whether the listed registry has lost its data: its revision decreased, or the own key is gone.

    Nobody else deletes the own key, and an etcd without its data may have passed the last known revision already.
    """
    return revision < max((state.revision, *state.keys.values())) or (bool(state.own_value) and state.key not in keys)


def _changed(state: State, changes: tuple[Entry | Gone, ...]) -> State:
    """Apply the changes that are newer than both the list and the key."""
    news = [c for c in changes if c.revision > max(state.revision, state.keys.get(c.key, 0))]
    return _taken_in(state, state, news) if news else state


def _taken_in(known: State, state: State, changes: Iterable[Entry | Gone]) -> State:
    """Apply the changes to ``state``. Count new invalid records; keep members that leave while the ring settles."""
    keys, seats, ignored_total = dict(state.keys), dict(state.seats), state.ignored_total
    own_lease, own_value = state.own_lease, state.own_value
    for change in changes:
        name = change.key.removeprefix(state.prefix)
        entry = change if isinstance(change, Entry) else None
        if change.key == state.key:
            own_lease, own_value = (entry.lease, entry.value) if entry else (0, b"")
        seats.pop(name, None)
        keys.pop(change.key, None)
        if entry is None:
            continue
        seat = read(name, entry) if change.key.startswith(state.prefix) else None
        # One place is reserved for self. Of a ring that is too large the first by id stay, so that all daemons agree.
        if len(keys) < KEYS_MAX:
            keys[entry.key] = entry.revision
        others = len(seats) - (state.own.id in seats)
        if seat and (name == state.own.id or others < MEMBERS_MAX - 1):
            seats[name] = seat
        elif known.keys.get(entry.key) != entry.revision:
            ignored_total += 1
    left = {name: seat.member for name, seat in known.seats.items() if name not in seats}
    kept = {name: member for name, member in {**state.kept, **left}.items() if name not in seats}
    return replace(
        state, keys=keys, seats=seats, kept=kept, own_lease=own_lease, own_value=own_value, ignored_total=ignored_total
    )


def _settled(state: State, now: float) -> State:
    """Drop members that were missing after an outage and did not come back in time."""
    if not state.kept or (now < state.settled_at and state.own.id not in state.kept):
        return state
    kept = {} if now >= state.settled_at else {n: m for n, m in state.kept.items() if n != state.own.id}
    return replace(state, kept=kept)


def _rivalled(state: State, now: float) -> State:
    """Track for how long another daemon has held this node's id."""
    rival = state.rival
    since = None if rival is None else state.rival_since
    if rival is not None and since is None and state.connected:
        since = now
    state = state if since == state.rival_since else replace(state, rival_since=since)
    taken = rival if rival is not None and since is not None and now >= _outlived_at(state) else None
    return state if taken == state.taken else replace(state, taken=taken)


def _outlived_at(state: State) -> float:
    """When a dead rival's key must be gone: etcd notices an expired lease up to half a second after its TTL."""
    return (state.rival_since or 0.0) + state.ttl_seconds + 1.0


def _ring(state: State) -> Ring:
    """Return the ring of the listed members, the kept ones, and self unless another daemon holds the id of self."""
    members = {name: seat.member for name, seat in state.seats.items()}
    if state.rival is None:
        members[state.own.id] = state.own
    for name, member in sorted(state.kept.items()):
        if len(members) < MEMBERS_MAX:
            members.setdefault(name, member)
    return Ring.of(state.rack, members.values(), state.replicas)
