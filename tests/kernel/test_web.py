"""Objects of an HTTP server: by ranges, on connections that are kept, and never from where it redirects to."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable

import pytest

from quiver.errors import Forbidden, NotFound, QuiverError, Unavailable
from quiver.location import Location
from quiver.origin.proxies import proxy_for
from quiver.origin.web import WebStore
from quiver.origin.web_answers import NoRanges
from tests.support.servers import HostileServer, ok

DATA = bytes(range(256)) * 16


def store(server: HostileServer, **more: float) -> WebStore:
    settings = {"request_seconds": 5.0, "attempts_seconds": 5.0, **more}
    return WebStore(Location.parse(f"{server.url}/d/"), attempts=3, **settings)


def part(start: int, end: int, *headers: str) -> bytes:
    return ok(DATA[start:end], f"Content-Range: bytes {start}-{end - 1}/{len(DATA)}", *headers, status="206 Partial")


def answering(*answers: bytes) -> Callable[[socket.socket, bytes], None]:
    """Send these, one after the other, and the last one ever after; an empty one closes the connection."""
    left = list(answers)

    def answer(connection: socket.socket, request: bytes) -> None:
        data = left.pop(0) if len(left) > 1 else left[0]
        if data:
            connection.sendall(data)
        if not data or data.endswith(b"cut"):
            connection.shutdown(socket.SHUT_RDWR)

    return answer


def test_ranges_come_on_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    with HostileServer(answering(part(10, 300))) as server:
        origin = store(server)
        for _ in range(5):
            assert origin.get_range("a b/50%.png", start=10, end=300) == DATA[10:300]
        origin.close()
        assert len(server._connections) == 1
    assert server.requests[0].startswith(b"GET /d/a%20b/50%25.png HTTP/1.1\r\n")
    assert b"Range: bytes=10-299\r\n" in server.requests[0]


def test_the_end_of_an_object_comes_as_it_is() -> None:
    with HostileServer(answering(part(4000, 4096))) as server:
        assert store(server).get_range("x", start=4000, end=9000) == DATA[4000:]


def test_a_whole_object_comes_in_pieces_and_says_what_it_is() -> None:
    headers = ("ETag: w", "Last-Modified: Wed, 01 Jan 2025 00:00:00 GMT")
    with HostileServer(answering(ok(DATA, *headers))) as server:
        origin = store(server)
        whole = origin.get("x")
        assert (whole.meta["size"], whole.meta["e_tag"], whole.meta["last_modified"].year) == (4096, "w", 2025)
        pieces = list(whole.stream(min_chunk_size=1000))
        assert b"".join(pieces) == DATA
        assert [len(piece) for piece in pieces] == [1000] * 4 + [96]
        assert origin.get("x").bytes() == DATA
        origin.close()
        assert len(server._connections) == 1


def test_an_object_that_nobody_reads_leaves_no_connection_open() -> None:
    ended = threading.Event()

    def answer(connection: socket.socket, request: bytes) -> None:
        connection.sendall(ok(DATA))
        assert not connection.recv(1)
        ended.set()

    with HostileServer(answer) as server:
        assert store(server).get("x").meta["size"] == len(DATA)
        assert ended.wait(10)


@pytest.mark.fault("O3")
@pytest.mark.parametrize(
    "first",
    [
        *(ok(b"", status="503 Busy"), ok(b"", "Retry-After: 0", status="429 Slow"), part(0, 50)[:-10] + b"cut", b""),
        ok(b"", status="500 Oops"),
    ],
)
def test_what_may_pass_is_tried_again(first: bytes) -> None:
    with HostileServer(answering(first, part(0, 50))) as server:
        assert store(server).get_range("x", start=0, end=50) == DATA[:50]
        assert len(server.requests) == 2


@pytest.mark.fault("O3")
def test_a_pause_that_the_server_asks_for_is_not_waited_past_the_deadline() -> None:
    with HostileServer(answering(ok(b"", "Retry-After: 100", status="503 Busy"))) as server:
        with pytest.raises(Unavailable, match="status 503"):
            store(server).get_range("x", start=0, end=50)
        assert len(server.requests) == 1


def test_a_connection_that_the_server_closed_meanwhile_is_replaced_at_once() -> None:
    with HostileServer(answering(part(0, 50), b"", part(0, 50))) as server:
        origin = store(server, attempts_seconds=0.0)
        assert origin.get_range("x", start=0, end=50) == DATA[:50]
        assert origin.get_range("x", start=0, end=50) == DATA[:50]
        origin.close()


@pytest.mark.fault("O3", "S6")
@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (ok(b"", status="404 No"), NotFound, "does not exist"),
        (ok(b"", status="403 No"), Forbidden, "refuses to answer"),
        (ok(b"", status="401 No"), Forbidden, "refuses to answer"),
        (ok(b"", status="416 No"), Unavailable, "416"),
        (ok(DATA), NoRanges, "no byte ranges"),
        (part(1, 51), Unavailable, "another range"),
        (part(0, 51), Unavailable, "another range"),
        (part(0, 50, "Content-Encoding: gzip"), Unavailable, "compresses"),
        (
            ok(b"", "Location: https://u:p@else/?sign=hush", status="302 F"),
            Forbidden,
            "redirects, which is not followed",
        ),
        (
            ok(b"", "Location: https://else.example/x?sign=hush", status="307 F"),
            Forbidden,
            "redirects to https://else.ex",
        ),
        (b"SSH-2.0-server\r\n", Unavailable, "does not answer"),
    ],
)
def test_what_else_a_server_may_say_is_an_error_that_says_so(answer: bytes, kind: type[QuiverError], says: str) -> None:
    with HostileServer(answering(answer)) as server:
        origin = store(server, attempts_seconds=0.0)
        with pytest.raises(kind, match=says) as caught:
            origin.get_range("x", start=0, end=50)
        origin.close()
    assert "hush" not in str(caught.value)


@pytest.mark.fault("O3")
def test_a_server_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def drip(connection: socket.socket, request: bytes) -> None:
        connection.sendall(part(0, 50)[:-50])
        while not server.gone.wait(0.05):
            connection.sendall(b"x")

    with HostileServer(drip) as server, pytest.raises(Unavailable, match="no whole answer"):
        store(server, request_seconds=0.3, attempts_seconds=0.0).get_range("x", start=0, end=50)


def test_a_proxy_of_the_environment_is_asked_for_the_whole_url(monkeypatch: pytest.MonkeyPatch) -> None:
    with HostileServer(answering(part(0, 50))) as server:
        monkeypatch.setenv("http_proxy", server.url.replace("http://", "http://me:hush@"))
        monkeypatch.setenv("no_proxy", "near.example")
        far = Location.parse("http://far.example/d/")
        origin = WebStore(far, request_seconds=5.0, attempts=1, attempts_seconds=0.0)
        assert origin.get_range("x", start=0, end=50) == DATA[:50]
        origin.close()
        assert server.requests[0].startswith(b"GET http://far.example/d/x HTTP/1.1\r\n")
        assert b"Proxy-Authorization: Basic bWU6aHVzaA==\r\n" in server.requests[0]
        assert proxy_for(Location.parse("http://near.example/d/")) is None


async def test_who_awaits_gets_the_same() -> None:
    with HostileServer(answering(part(0, 4096), ok(DATA), part(0, 4096), ok(DATA))) as server:
        origin = store(server)
        assert await origin.get_range_async("x", start=0, end=4096) == DATA
        assert await (await origin.get_async("x")).bytes_async() == DATA
        ranged = await origin.get_async("x", options={"range": (0, 4096)})
        assert [len(piece) async for piece in ranged.stream(min_chunk_size=3000)] == [3000, 1096]
        assert (await origin.head_async("x"))["size"] == 4096
        origin.close()
    assert b"Range: bytes=0-4095\r\n" in server.requests[2]


async def test_who_stops_awaiting_leaves_no_thread_behind() -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang(connection: socket.socket, request: bytes) -> None:
        loop.call_soon_threadsafe(asked.set)
        server.gone.wait(60)

    with HostileServer(hang) as server:
        origin = store(server, request_seconds=60.0, attempts_seconds=0.0)
        reading = asyncio.ensure_future(origin.get_range_async("x", start=0, end=50))
        await asked.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert origin._threads is not None
        await loop.run_in_executor(None, origin._threads.shutdown)  # and not the minute that the request may take
        origin.close()
