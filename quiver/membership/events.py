"""What can happen to a daemon's membership, and what it can do about it. See ``quiver.membership``."""

from __future__ import annotations

from dataclasses import dataclass

from quiver.membership.record import Entry, Gone
from quiver.ring import Member

# What happened ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connected:
    """A new connection to the registry; nothing of a former one counts."""


@dataclass(frozen=True)
class Lost:
    """The connection, the watch or a call failed or ran out of time."""


@dataclass(frozen=True)
class Listed:
    """All keys of the rack's folder as of ``revision``."""

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True)
class Watching:
    """The watch that was asked for stands."""


@dataclass(frozen=True)
class Changed:
    """What the watch brought, in order, at most one change per key."""

    changes: tuple[Entry | Gone, ...]


@dataclass(frozen=True)
class LeaseGranted:
    lease: int


@dataclass(frozen=True)
class LeaseKept:
    """The lease lives for a TTL from now."""


@dataclass(frozen=True)
class LeaseLost:
    """The lease ran out or was revoked."""


@dataclass(frozen=True)
class Registered:
    """The transaction wrote the key, in ``revision``."""

    entry: Entry


@dataclass(frozen=True)
class Refused:
    """The transaction found another value under the key than the one it was to replace."""


@dataclass(frozen=True)
class OwnChanged:
    """This daemon wants to be known differently: it drains."""

    member: Member


@dataclass(frozen=True)
class Tick:
    """Time passed."""


Event = (
    Connected | Lost | Listed | Watching | Changed | LeaseGranted | LeaseKept | LeaseLost | Registered | Refused
    | OwnChanged | Tick
)  # fmt: skip


# What to do ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class List:
    """Read the whole folder; answer ``Listed``."""


@dataclass(frozen=True)
class Watch:
    """Watch the folder from this revision on; answer ``Watching``, then ``Changed`` as it comes."""

    from_revision: int


@dataclass(frozen=True)
class Grant:
    """Get a lease; answer ``LeaseGranted``."""


@dataclass(frozen=True)
class KeepAlive:
    """Renew the lease; answer ``LeaseKept`` or ``LeaseLost``."""

    lease: int


@dataclass(frozen=True)
class Register:
    """Write one's own key if its revision is still ``over`` (0: if absent); answer Registered, Refused or LeaseLost."""

    key: str
    value: bytes
    lease: int
    over: int


@dataclass(frozen=True)
class Reconnect:
    """Give the connection up and begin anew: the watch stands still."""


@dataclass(frozen=True)
class Wait:
    """Nothing is due before ``until``, on the clock that ``now`` is read from."""

    until: float


Action = List | Watch | Grant | KeepAlive | Register | Reconnect | Wait
