"""One tree of errors, which callers tell apart by class and never by message.

Every error says what happened, to what, and what to do. Exceptions of other libraries are mapped to these where they
arise. All transports encode errors the same way: ``answer_of`` turns an error into the code, status and retry time that
a daemon answers, and ``error_from`` turns those into the error that the client raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import ClassVar, Final, NamedTuple

MESSAGE_CHARS_MAX: Final = 4096
RETRY_SECONDS_MAX: Final = 60.0  # the longest that a daemon can make a client wait
RETRY_SECONDS: Final = 1.0  # for retryable errors without a time of their own


class QuiverError(Exception):
    """Base of everything that Quiver raises on purpose.

    ``retryable``: the same request may succeed later, so an answer says when to retry (``Retry-After``).
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    retry_after_seconds: float = 0.0


class BadRequest(QuiverError):
    """The request is invalid; retrying does not help."""

    code = "bad_request"
    status = 400


class Misconfigured(QuiverError):
    """A flag, an environment variable or an operator's file is wrong."""

    code = "misconfigured"
    status = 400


class NotFound(QuiverError):
    """The named thing is not here; it may be elsewhere."""

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
        self.positions = tuple(positions)  # of the wrong samples in the shard, if known


class Changed(QuiverError):
    """An origin object changed or vanished since it was indexed. Names the object and the lost samples."""

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

    ``lasting``: waiting does not help, as with a wrong certificate. ``retry_after_seconds``: what the other side
    requested, or 0.
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
    """A peer's answer ended early: either the peer died, or the shard on its disk is damaged."""


class Forbidden(QuiverError):
    """The origin refuses these credentials or this user, the operator does not allow it, or a token lacks a right."""

    code = "forbidden"
    status = 403


class Unauthenticated(QuiverError):
    """The daemon accepts no request without a valid token. It says no more than that: not what is wrong with one."""

    code = "unauthenticated"
    status = 401


class NotAllowed(Forbidden):
    """The operator of this daemon does not allow it to read the origin. No failure: a client reads it instead."""


class OverCapacity(QuiverError):
    """There is no room for the request now, or too much is under way."""

    code = "over_capacity"
    status = 503
    retryable = True

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class DiskFailed(QuiverError):
    """The local disk refuses writes (full, read-only, I/O error). What is on it is still served."""

    code = "disk_failed"
    status = 503
    retryable = True


# -- over the wire -----------------------------------------------------------------------------------------------------


class ErrorAnswer(NamedTuple):
    """What a daemon answers instead of a result. ``retry_after_seconds`` is 0 if retrying does not help."""

    code: str
    status: int
    message: str
    retry_after_seconds: float

    @property
    def headers(self) -> dict[str, str]:
        """The headers that say when to retry."""
        return {"Retry-After": str(max(ceil(self.retry_after_seconds), 1))} if self.retry_after_seconds else {}


def answer_of(error: QuiverError) -> ErrorAnswer:
    """Return the answer to a request that failed with this error."""
    pause = (error.retry_after_seconds or RETRY_SECONDS) if error.retryable else 0.0
    return ErrorAnswer(error.code, error.status, message_of(error), pause)


def error_from(code: str, message: str, url: str, *, status: int = 0, retry_after_seconds: float = 0.0) -> QuiverError:
    """Return the error that an answer means to the client: the inverse of ``answer_of``.

    ``url`` is the daemon's. ``status`` decides for answers without a known code, such as those to ``HEAD``. The
    daemon's own failures (``origin_changed``, ``disk_failed``, ``unavailable``, ``internal``) become ``Unavailable``.
    """
    known = code if code in _FROM_ANSWER else _BY_STATUS.get(status, "")
    if not known:
        return Unavailable(url, f"answers {' '.join(filter(None, [str(status or ''), code]))}: {message}")
    seconds = min(retry_after_seconds, RETRY_SECONDS_MAX) if retry_after_seconds > 0 else 0.0  # NaN, too
    return _FROM_ANSWER[known](url, message, seconds)


def message_of(error: Exception) -> str:
    """Return an error's text for an answer, truncated: it may quote input of any length."""
    text = str(error)
    return text if len(text) <= MESSAGE_CHARS_MAX else text[:MESSAGE_CHARS_MAX] + "…"


def _by_message(kind: type[QuiverError]) -> Callable[[str, str, float], QuiverError]:
    return lambda url, message, _: kind(f"{url}: {message}")


_BY_STATUS: Final = {kind.status: kind.code for kind in (NotFound, Unauthenticated)}
_FROM_ANSWER: Final[dict[str, Callable[[str, str, float], QuiverError]]] = {
    **{kind.code: _by_message(kind) for kind in (BadRequest, Misconfigured, NotFound, Forbidden, Unauthenticated)},
    Corrupt.code: lambda url, message, _: Corrupt(message, f"peer {url}"),
    OverCapacity.code: lambda url, message, seconds: OverCapacity(f"{url}: {message}", seconds),
}
