"""Who is in the rack: what one daemon knows of its registry and what it should do next. No network, no clock, no task.

``step(state, event, now)`` takes what happened and returns the new state and the **one** action that is due. The shell
carries it out, and its result is the next event. One action at a time, so nothing is ever decided on a list that a
pending call is about to change.

Invariants, and why they hold:

* After ``Listed`` the members are exactly those listed, and self. A list replaces everything, also one of an etcd that
  lost its data and counts from 1 again; an event of a watch counts only if it is newer than the list, so a replay is
  harmless and a watch that stands still costs a third of the TTL. A watch that misses two lists' news is replaced.
* One's own key is in the list, so it is re-read with it. Gone, overwritten, or under another lease than ours: it is
  registered again, at most once per TTL/10, so that two daemons at odds cannot storm etcd.
* While the registry is away nothing changes: the last ring stays. When it comes back without its data (it counts back,
  or one's own key is gone), or after so long that the leases of living members may have run out, a member that is
  missing is kept for one TTL more, in which it can register again. So an outage of etcd moves no shards.
* Records can come from anybody. What is no record of a member is ignored and counted; the ring is a hint at all times.
"""

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
from quiver.membership.machine import BEHIND_MAX, KEYS_MAX, State, backoff_seconds, begin, step
from quiver.membership.record import VALUE_BYTES_MAX, Entry, Gone, Seat, read, write

__all__ = [
    "BEHIND_MAX",
    "KEYS_MAX",
    "VALUE_BYTES_MAX",
    "Action",
    "Changed",
    "Connected",
    "Entry",
    "Event",
    "Gone",
    "Grant",
    "KeepAlive",
    "LeaseGranted",
    "LeaseKept",
    "LeaseLost",
    "List",
    "Listed",
    "Lost",
    "OwnChanged",
    "Reconnect",
    "Refused",
    "Register",
    "Registered",
    "Seat",
    "State",
    "Tick",
    "Wait",
    "Watch",
    "Watching",
    "backoff_seconds",
    "begin",
    "read",
    "step",
    "write",
]
