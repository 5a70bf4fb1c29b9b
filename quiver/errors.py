"""One tree of situations, so that a caller asks ``.retryable`` instead of matching messages.

Every error says what happened, to what, and what to do. Exceptions of other libraries are mapped to these at the edge
where they arise; ``code`` and ``status`` are the one table between them and HTTP, used in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class QuiverError(Exception):
    """Base of everything that Quiver raises on purpose."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False


class BadRequest(QuiverError):
    """The caller asked for something that can never be right; asking again does not help."""

    code = "bad_request"
    status = 400


class Misconfigured(QuiverError):
    """A flag, an environment variable or a file of the operator's is wrong."""

    code = "misconfigured"
    status = 400


class NotFound(QuiverError):
    """The thing named is not here; it may be elsewhere."""

    code = "not_found"
    status = 404


class Corrupt(QuiverError):
    """Bytes do not hash to their name. ``source`` says who is to blame: a peer, a disk, an upload, an origin."""

    code = "corrupt"
    status = 422

    def __init__(self, what: str, source: str, positions: Sequence[int] = ()) -> None:
        super().__init__(f"{source}: {what}")
        self.what = what
        self.source = source
        self.positions = tuple(positions)  # which samples of a shard, where that is known


class Changed(QuiverError):
    """An origin object changed or vanished since it was indexed. Names the object and the samples that are lost."""

    code = "origin_changed"
    status = 409

    def __init__(self, url: str, why: str, keys: Sequence[str] = ()) -> None:
        named = ", ".join(repr(key) for key in keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
        affected = f"; affected: {named}" if keys else ""
        super().__init__(
            f"{url} {why} since it was indexed{affected}. Restore the object, or run `quiver index` again."
        )
        self.url = url
        self.keys = tuple(keys)
        self.why = why


class Unavailable(QuiverError):
    """A peer, an origin or etcd does not answer, or not in time.

    ``lasting``: waiting does not help, as with a certificate that is wrong. ``retry_after_seconds``: what the other
    side asked for, or 0.
    """

    code = "unavailable"
    status = 503
    retryable = True

    def __init__(self, who: str, why: str, *, retry_after_seconds: float = 0.0, lasting: bool = False) -> None:
        super().__init__(f"{who}: {why}")
        self.who = who
        self.why = why
        self.retry_after_seconds = retry_after_seconds
        self.lasting = lasting


class BrokenOff(Unavailable):
    """An answer ended early: of a peer that died, or of one that is well and whose shard is damaged."""


class Forbidden(QuiverError):
    """The origin refuses the credentials, or to be read by this user; or it is not one that is allowed."""

    code = "forbidden"
    status = 403


class NotAllowed(Forbidden):
    """The origin is not one that the operator of this daemon allows: a client reads it, and nothing has failed."""


class OverCapacity(QuiverError):
    """There is no room, now, for what was asked."""

    code = "over_capacity"
    status = 503
    retryable = True

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class DiskFailed(QuiverError):
    """The local disk refuses to write (full, read-only, input/output error). What is there is still served."""

    code = "disk_failed"
    status = 503
    retryable = True
