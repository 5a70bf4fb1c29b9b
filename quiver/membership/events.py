"""The events of a daemon's membership, and the actions that answer them. See ``quiver.membership``."""

from __future__ import annotations

from dataclasses import dataclass

from quiver.membership.record import Entry, Gone
from quiver.ring import Member

# What happened ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connected:
    """There is a new connection to the registry; nothing of an earlier one counts."""


@dataclass(frozen=True)
class Lost:
    """The connection, the watch or a call failed or timed out."""


@dataclass(frozen=True)
class Listed:
    """All keys of the rack's folder as of ``revision``."""

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True)
class Watching:
    """The requested watch is established."""


@dataclass(frozen=True)
class Changed:
    """The watch delivered changes, in order, at most one per key."""

    changes: tuple[Entry | Gone, ...]


@dataclass(frozen=True)
class LeaseGranted:
    lease: int


@dataclass(frozen=True)
class LeaseKept:
    """The lease lasts for a TTL from now."""


@dataclass(frozen=True)
class LeaseLost:
    """The lease expired or was revoked."""


@dataclass(frozen=True)
class Registered:
    """The transaction wrote the key, in ``revision``."""

    entry: Entry


@dataclass(frozen=True)
class Refused:
    """The transaction found a value under the key that differs from the one that it was to replace."""


@dataclass(frozen=True)
class OwnChanged:
    """This daemon's own record changed: it drains."""

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
    """Watch the folder from this revision on; answer ``Watching``, then ``Changed`` for each change."""

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
    """Write the own key if its revision is still ``over`` (0: absent); answer Registered, Refused or LeaseLost."""

    key: str
    value: bytes
    lease: int
    over: int


@dataclass(frozen=True)
class Reconnect:
    """Close the connection and open another one: the watch is stuck."""


@dataclass(frozen=True)
class Wait:
    """Nothing is due before ``until``, on the clock that ``now`` is read from."""

    until: float


Action = List | Watch | Grant | KeepAlive | Register | Reconnect | Wait
