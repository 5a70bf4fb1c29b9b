"""Who is in the rack: what one daemon knows of its registry, and what it does next. No network, no clock, no tasks.

``step(state, event, now)`` takes an event and returns the new state and the **one** action that is due. The shell
carries it out, and its result is the next event. Actions are taken one at a time, so no decision rests on a list that a
pending call is about to change. ``events`` has the events and actions, ``machine`` the state and the transition
function, ``record`` a member's record in etcd.

Invariants, and why they hold:

* After ``Listed`` the members are exactly those listed, plus the daemon itself. A list replaces everything, also if
  etcd lost its data and starts at revision 1 again. An event of a watch counts only if it is newer than the list, so a
  replay is harmless and a stuck watch costs a third of the TTL. A watch that misses the changes of two lists is
  replaced.
* The list contains the daemon's own key, which is thus re-read with it. If the key is gone, overwritten, or under
  another lease, the daemon registers it again, at most once per TTL/10, so that two daemons with one id cannot flood
  etcd.
* While etcd does not answer nothing changes: the last ring stays. If etcd comes back without its data (the revision
  decreased, or the daemon's own key is gone), or after so long that the leases of living members may have expired, a
  missing member is kept for one more TTL, in which it can register again. So an outage of etcd moves no shards.
* Records are untrusted. A value that is not a member's record is ignored and counted; the ring is always a hint.
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
