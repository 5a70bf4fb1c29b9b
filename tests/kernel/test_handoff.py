"""Open files over a Unix socket: the wire, and what a reader makes of a server that says anything."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from quiver import membership as m
from quiver.membership.record import write
from quiver.ring import SOCKET_BYTES_MAX, Member, Ring
from quiver.wire import RingView, decode_json

LONGEST = "/" + "s" * (SOCKET_BYTES_MAX - 1)
NO_SOCKETS: list[Any] = [
    *("", "relative", "@abstract", "\0abstract", LONGEST + "x", "/run/a\nb", "/run/ä", "/"),
    *(5, None, True, ["/run/q"], {"a": [[]]}, 1e300),
]


@pytest.mark.parametrize("path", ["/run/quiver/socket", "/a b", LONGEST])
def test_a_ring_and_a_record_name_the_socket_of_a_member(path: str) -> None:
    member = Member("a", "http://a:1", 5.0, socket=path)
    ring = Ring.of("r", [member])
    assert decode_json(msgspec.json.encode(RingView.of(ring)), RingView, "it").ring() == (ring, 0)
    seat = m.read("a", m.Entry("k", write(member, "s"), 1, 1))
    assert seat is not None
    assert seat.member == member


@pytest.mark.parametrize("path", NO_SOCKETS, ids=repr)
def test_a_socket_that_cannot_be_one_costs_itself_and_not_the_member(path: object) -> None:
    entry = {"id": "a", "url": "http://a:1", "weight": 5.0, "state": "up", "socket": path}
    body = json.dumps({"rack": "r", "replicas": 1, "members": [entry]}).encode()
    assert decode_json(body, RingView, "it").ring() == (Ring.of("r", [Member("a", "http://a:1", 5.0)]), 0)
    seat = m.read("a", m.Entry("k", json.dumps({**entry, "session": "s"}).encode(), 1, 1))
    assert seat is not None
    assert seat.member == Member("a", "http://a:1", 5.0)


def test_a_record_and_a_ring_of_a_daemon_without_a_word_on_sockets_are_read() -> None:
    entry = {"id": "a", "url": "http://a:1", "weight": 5.0, "session": "s"}
    seat = m.read("a", m.Entry("k", json.dumps(entry).encode(), 1, 1))
    assert seat is not None
    assert seat.member.socket == ""
    body = json.dumps({"rack": "r", "replicas": 1, "members": [entry]}).encode()
    assert decode_json(body, RingView, "it").ring()[0].members[0].socket == ""
