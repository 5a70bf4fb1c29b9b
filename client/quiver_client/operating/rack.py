"""Asks all daemons of a rack the same, at once. Those that are away, or older than the question, are named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from quiver.errors import BadRequest, Forbidden, NotFound, QuiverError, Unauthenticated, Unavailable
from quiver.location import shown
from quiver.peer import PeerClient
from quiver.ring import Member, Ring, static_id
from quiver.token_source import TokenSource

T = TypeVar("T")

ASKED_AT_ONCE: Final = 16
PROBLEM_CHARS_MAX: Final = 400


@dataclass(frozen=True, slots=True)
class Asked(Generic[T]):
    """``answers`` by member id; ``errors``: by member id, why it did not answer."""

    rack: str
    answers: dict[str, T]
    errors: dict[str, QuiverError]

    @property
    def problems(self) -> dict[str, str]:
        """Why members did not answer, in one line each."""
        return {member: shown(_said(error), PROBLEM_CHARS_MAX) for member, error in self.errors.items()}

    @property
    def refusals(self) -> dict[str, QuiverError]:
        """The members that did not do what was asked because it cannot be done."""
        return {member: error for member, error in self.errors.items() if isinstance(error, BadRequest)}

    @property
    def values(self) -> list[T]:
        return list(self.answers.values())


def ring_of(urls: Sequence[str]) -> Ring:
    """Return the ring from the first daemon that answers. Raises the error of the last one if none does."""
    failure: QuiverError = Unavailable(", ".join(urls), "no daemon is named")
    token = TokenSource.from_environment()
    for url in urls:
        peer = PeerClient(url, token=token)
        try:
            return peer.ring().ring()[0]
        except QuiverError as error:
            failure = error
        finally:
            peer.close()
    raise failure


def members_of(urls: Sequence[str]) -> tuple[str, tuple[Member, ...]]:
    """Return the rack's name and its members; those of the URLs, if the token may operate and not read the ring."""
    try:
        ring = ring_of(urls)
        return ring.rack, ring.members
    except Forbidden:
        return "the named daemons", tuple(Member(static_id(url), url) for url in dict.fromkeys(urls))


def ask_all(members: tuple[str, Sequence[Member]], verb: Callable[[PeerClient], T]) -> Asked[T]:
    """Ask every member. Raises if a member refuses the token, or if no member answers."""
    rack, to_ask = members
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        told = list(pool.map(lambda member: _ask(member, verb), to_ask))
    answers = {member.id: it for member, it in zip(to_ask, told, strict=True) if not isinstance(it, QuiverError)}
    errors = {member.id: it for member, it in zip(to_ask, told, strict=True) if isinstance(it, QuiverError)}
    if not answers:
        first = next(iter(errors.values()), Unavailable(rack, "the ring has no members"))
        raise type(first)(_said(first)) if _is_older(first) else first
    return Asked(rack, answers, errors)


def _ask(member: Member, verb: Callable[[PeerClient], T]) -> T | QuiverError:
    peer = PeerClient(member.url, node=member.certified_id, token=TokenSource.from_environment())
    try:
        return verb(peer)
    except (Unauthenticated, Forbidden):
        raise  # no rack has members that refuse the token and others that do not: one line is enough
    except QuiverError as error:
        return error
    finally:
        peer.close()


def _said(error: QuiverError) -> str:
    if _is_older(error):
        return f"{str(error).removesuffix(': Not Found')} runs an older version, which does not answer this"
    return str(error)


def _is_older(error: QuiverError) -> bool:
    return isinstance(error, NotFound) and str(error).endswith("Not Found")  # of the route: HTTP's own words
