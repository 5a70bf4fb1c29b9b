"""A member's record: JSON under ``/quiver/racks/<rack>/members/<node>``. Parsed here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec

from quiver.errors import BadRequest
from quiver.malformed import MALFORMED
from quiver.prepared import prepare
from quiver.ring import Member, check_member, usable_socket

VALUE_BYTES_MAX: Final = 4096
"""A record has some 150 bytes; this leaves room for fields that later versions add."""


class _Record(msgspec.Struct, frozen=True):
    """The JSON value of a member's key. Unknown fields are ignored, so that later versions can add some."""

    url: str
    weight: float
    session: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    state: Literal["up", "draining"] = "up"
    socket: Any = ""  # unchecked: an invalid path must not invalidate the member


@dataclass(frozen=True)
class Entry:
    """A key of the rack's folder as etcd holds it: ``revision`` of its last change, and its ``lease``, 0 for none."""

    key: str
    value: bytes
    revision: int
    lease: int


@dataclass(frozen=True)
class Gone:
    """A key that was deleted, or expired, in ``revision``."""

    key: str
    revision: int


@dataclass(frozen=True)
class Seat:
    """A valid record: the member and its ``session``, which is drawn at random at each start of a daemon."""

    member: Member
    session: str
    lease: int


def read(name: str, entry: Entry) -> Seat | None:
    """Return the member that the entry describes, or None if it describes none."""
    if len(entry.value) > VALUE_BYTES_MAX:
        return None
    try:
        record = msgspec.json.decode(entry.value, type=_Record)
        socket = usable_socket(record.socket)
        member = check_member(Member(name, record.url, record.weight, record.state, socket))
    except (*MALFORMED, BadRequest):
        return None
    if not record.url.isprintable() or " " in record.url:
        return None  # urlsplit ignores line feeds: none may get into a request
    return Seat(member, record.session, entry.lease)


def write(member: Member, session: str) -> bytes:
    """Return the JSON that the member's key should hold: the same bytes for the same member."""
    return msgspec.json.encode(_Record(member.url, member.weight, session, member.state, member.socket))


prepare(_Record)
