"""One tree of situations, which callers tell apart by class and never by message.

Every error says what happened, to what, and what to do. Exceptions of other libraries are mapped to these where they
arise. How an error travels is said here once: ``answer_of`` turns one into the code, status and pause that a daemon
answers, and ``error_from`` turns those into the error that the other side raises; every carrier uses both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import ClassVar, Final, NamedTuple

MESSAGE_CHARS_MAX: Final = 4096
RETRY_SECONDS_MAX: Final = 60.0  # that a daemon can make a client wait
RETRY_SECONDS: Final = 1.0  # for what is retryable and names no pause


class QuiverError(Exception):
    """Base of everything that Quiver raises on purpose.

    ``retryable``: the same request may succeed later, so an answer says when to retry (``Retry-After``).
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    retry_after_seconds: float = 0.0


class BadRequest(QuiverError):
    """The caller asked for something that can never be right; retrying does not help."""

    code = "bad_request"
    status = 400


class Misconfigured(QuiverError):
    """A flag, an environment variable or a file of the operator's is wrong."""

    code = "misconfigured"
    status = 400


class NotFound(QuiverError):
    """What was named is not here; it may be elsewhere."""

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

    ``lasting``: waiting does not help, as with a wrong certificate. ``retry_after_seconds``: what the other side asked
    for, or 0.
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
    """A peer's answer ended early: the peer died, or it is well and the shard on its disk is damaged."""


class Forbidden(QuiverError):
    """The origin refuses these credentials or this user, or no operator allowed it."""

    code = "forbidden"
    status = 403


class NotAllowed(Forbidden):
    """The operator of this daemon did not allow the origin: a client reads it, and nothing has failed."""


class OverCapacity(QuiverError):
    """There is no room, or too much is under way, for what was asked now."""

    code = "over_capacity"
    status = 503
    retryable = True

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class DiskFailed(QuiverError):
    """The local disk refuses writes (full, read-only, input/output error). What is on it is still served."""

    code = "disk_failed"
    status = 503
    retryable = True


# -- over the wire -----------------------------------------------------------------------------------------------------


class ErrorAnswer(NamedTuple):
    """What a daemon answers in place of a result. ``retry_after_seconds`` is 0 where retrying does not help."""

    code: str
    status: int
    message: str
    retry_after_seconds: float

    @property
    def headers(self) -> dict[str, str]:
        """The headers that say when to retry."""
        return {"Retry-After": str(max(ceil(self.retry_after_seconds), 1))} if self.retry_after_seconds else {}


def answer_of(error: QuiverError) -> ErrorAnswer:
    """Return what to answer to a request that failed with this error."""
    pause = (error.retry_after_seconds or RETRY_SECONDS) if error.retryable else 0.0
    return ErrorAnswer(error.code, error.status, message_of(error), pause)


def error_from(code: str, message: str, url: str, *, status: int = 0, retry_after_seconds: float = 0.0) -> QuiverError:
    """Return what an answer means to the client that got it: the inverse of ``answer_of``.

    ``url`` is the daemon's; ``status`` counts for answers without a known code, such as those to ``HEAD``. What the
    daemon met itself (``origin_changed``, ``disk_failed``, ``unavailable``, ``internal``) makes it ``Unavailable``.
    """
    known = code if code in _FROM_ANSWER else NotFound.code if status == NotFound.status else ""
    if not known:
        return Unavailable(url, f"answers {' '.join(filter(None, [str(status or ''), code]))}: {message}")
    seconds = min(retry_after_seconds, RETRY_SECONDS_MAX) if retry_after_seconds > 0 else 0.0  # NaN, too
    return _FROM_ANSWER[known](url, message, seconds)


def message_of(error: Exception) -> str:
    """Return an error's text for an answer, cut: some of what it repeats may be whatever somebody sent."""
    text = str(error)
    return text if len(text) <= MESSAGE_CHARS_MAX else text[:MESSAGE_CHARS_MAX] + "…"


def _by_message(kind: type[QuiverError]) -> Callable[[str, str, float], QuiverError]:
    return lambda url, message, _: kind(f"{url}: {message}")


_FROM_ANSWER: Final[dict[str, Callable[[str, str, float], QuiverError]]] = {
    **{kind.code: _by_message(kind) for kind in (BadRequest, Misconfigured, NotFound, Forbidden)},
    Corrupt.code: lambda url, message, _: Corrupt(message, f"peer {url}"),
    OverCapacity.code: lambda url, message, seconds: OverCapacity(f"{url}: {message}", seconds),
}
