"""The right that each verb of the daemon requires: the one table, for every carrier.

The router takes its rights from here and does not start with a route that is missing; streams and the Unix socket ask
for theirs by name. What a read may cause besides reading is listed with it: without the right, the read is answered and
the effect does not happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from quiver.claims import Right
from quiver_cacheserver.access.caller import Caller

PUBLIC: Final = None  # for health checks, which carry no token: these routes say "ok" or "not ready"

STREAM_READ: Final = "stream read"
READ_FILLS: Final = "read fills"
READ_FORGOES: Final = "read forgoes"
READ_RECHECKS: Final = "read rechecks"
SOCKET: Final = "socket "  # and the verb's name in lower case

RIGHTS: Final[Mapping[str, Right | None]] = MappingProxyType(
    {
        # data
        "POST /v1/read": Right.READ,
        "GET /v1/stream": Right.READ,
        STREAM_READ: Right.READ,
        READ_FILLS: Right.FILL,  # a missing shard, for a reader that names its manifest
        READ_FORGOES: Right.FILL,
        READ_RECHECKS: Right.READ,
        "GET /v1/shards/{digest}": Right.READ,
        "PUT /v1/shards/{digest}": Right.FILL,
        "GET /v1/manifests/{digest}": Right.READ,
        "PUT /v1/manifests/{digest}": Right.FILL,
        "socket hello": Right.READ,
        "socket files": Right.READ,
        "socket held": Right.READ,
        # what is to be resident
        "POST /v1/fill": Right.FILL,
        "POST /v1/forgo": Right.FILL,
        "POST /v1/recheck": Right.READ,
        "POST /v1/needs": Right.FILL,  # it makes the daemon fetch and evict
        # leaving the rack
        "POST /v1/handover": Right.OPERATE,  # of daemons, which are members; it makes the daemon fetch and evict
        "POST /v1/drain": Right.OPERATE,
        "GET /v1/drain": Right.OPERATE,
        "DELETE /v1/drain": Right.OPERATE,
        # the daemon itself
        "GET /v1/ring": Right.READ,
        "GET /v1/status": Right.OPERATE,
        "GET /metrics": Right.OPERATE,
        # who reads what: names, those of the caller's sharing domain alone (``Caller.sees``)
        "GET /v1/jobs": Right.OPERATE,
        "GET /v1/datasets": Right.OPERATE,
        "GET /v1/allocation": Right.OPERATE,
        "POST /v1/pin": Right.OPERATE,
        "POST /v1/unpin": Right.OPERATE,
        "POST /v1/evict": Right.OPERATE,
        "POST /v1/probe": Right.OPERATE,
        "GET /healthz": PUBLIC,
        "GET /readyz": PUBLIC,  # the reasons for "not ready" name origins: they are for ``READYZ_REASONS``
        "readyz reasons": Right.OPERATE,
    }
)
READYZ_REASONS: Final = "readyz reasons"


def allows(caller: Caller, verb: str) -> bool:
    """Whether the caller may use a verb of the table. A member may do what daemons do among one another: everything."""
    right = RIGHTS[verb]
    return right is PUBLIC or caller.is_member or right in caller.rights
