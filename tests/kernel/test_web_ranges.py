"""Ranges received on an event loop: the same bytes and errors as by the standard library's client, in place."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from quiver.errors import Forbidden, NotFound, QuiverError, Unavailable
from quiver.location import Location
from quiver.origin import Extent
from quiver.origin.remote import REQUESTS_AT_ONCE, RemoteStore
from quiver.origin.web import WebStore
from quiver.origin.web_answers import NoRanges, NotNow
from tests.support.servers import HostileServer, ok
from tests.support.tls import make_contexts

DATA = bytes(range(256)) * 4096
SIZE = 300_000


def store(server: HostileServer, request_seconds: float = 5.0) -> WebStore:
    location = Location.parse(f"{server.url}/d/")
    return WebStore(location, request_seconds=request_seconds, attempts=0, attempts_seconds=0.0)


def part(*headers: str, start: int = 0, end: int = SIZE) -> bytes:
    return ok(DATA[start:end], f"Content-Range: bytes {start}-{end - 1}/{len(DATA)}", *headers, status="206 Partial")


def chunked() -> bytes:
    head = f"HTTP/1.1 206 P\r\nContent-Range: bytes 0-{SIZE - 1}/*\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head.encode() + f"{SIZE:x}\r\n".encode() + DATA[:SIZE] + b"\r\n0\r\n\r\n"


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


async def received(origin: WebStore, path: str = "x") -> bytes:
    out = bytearray(SIZE + 1)
    count = await origin.receive_range(path, 0, SIZE, memoryview(out)[:SIZE])
    assert out[count:] == bytes(SIZE + 1 - count)
    return bytes(out[:count])


async def test_ranges_come_in_place_on_one_connection_and_progress_is_reported() -> None:
    with HostileServer(answering(part())) as server:
        origin = store(server)
        for _ in range(5):
            out, reported = bytearray(SIZE), list[int]()
            assert await origin.receive_range("a b/50%.png", 0, SIZE, memoryview(out), reported.append) == SIZE
            assert out == DATA[:SIZE]
            assert sum(reported) == SIZE
        assert len(server._connections) == 1
        assert origin._threads is None
        by_loop = server.requests[0]
        origin.get_range("a b/50%.png", start=0, end=SIZE)
        assert sorted(by_loop.lower().splitlines()) == sorted(server.requests[-1].lower().splitlines())
        origin.close()


@pytest.mark.parametrize(
    "sizes", [(1,) * 200, (100, 1), (5000,), (4096, 1, 70_000)], ids=["bytes", "head", "early", "pieces"]
)
async def test_an_answer_may_come_in_any_pieces(sizes: tuple[int, ...]) -> None:
    def answer(connection: socket.socket, request: bytes) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = memoryview(part())
        for size in sizes:
            connection.sendall(data[:size])
            data = data[size:]
        connection.sendall(data)

    with HostileServer(answer) as server:
        origin = store(server)
        assert [await received(origin) for _ in range(3)] == [DATA[:SIZE]] * 3
        assert len(server._connections) == 1
        origin.close()


@pytest.mark.parametrize("size", [3_000, 5_000, 20_000, 60_000])
async def test_a_head_may_be_long(size: int) -> None:
    with HostileServer(answering(part(f"X-Long: {'x' * size}"))) as server:
        origin = store(server)
        assert await received(origin) == DATA[:SIZE]
        origin.close()


async def test_a_head_without_end_is_an_error() -> None:
    with HostileServer(answering(b"HTTP/1.1 206 P\r\n" + b"x" * 100_000)) as server:
        origin = store(server)
        with pytest.raises(Unavailable, match="more than 65536 bytes"):
            await received(origin)
        origin.close()


@pytest.mark.fault("O3")
@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (ok(b"", status="404 No"), NotFound),
        (ok(b"", status="403 No"), Forbidden),
        (ok(b"", status="416 No"), Unavailable),
        (ok(b"", "Retry-After: 7", status="503 Busy"), NotNow),
        (ok(b"gone", status="500 Oops"), NotNow),
        (ok(DATA), NoRanges),
        (part(start=1, end=51), Unavailable),
        (part(end=SIZE + 1), Unavailable),
        (part("Content-Encoding: gzip"), Unavailable),
        (ok(b"", "Location: https://else.example/x?sign=hush", status="302 F"), Forbidden),
        (b"SSH-2.0-server\r\n\r\n", Unavailable),
        (part()[:-10] + b"cut", NotNow),
    ],
)
async def test_a_bad_answer_raises_what_the_plain_way_raises(answer: bytes, kind: type[QuiverError]) -> None:
    with HostileServer(answering(answer)) as server:
        origin, plain = store(server), store(server)
        with pytest.raises(kind) as caught:
            await received(origin)
        with pytest.raises(kind) as expected:
            plain.get_range("x", start=0, end=SIZE)
        origin.close()
        plain.close()
    assert type(caught.value) is type(expected.value)
    if not answer.endswith(b"cut"):
        assert str(caught.value) == str(expected.value)
    if isinstance(caught.value, Unavailable) and isinstance(expected.value, Unavailable):
        assert caught.value.retry_after_seconds == expected.value.retry_after_seconds
        assert caught.value.lasting == expected.value.lasting


@pytest.mark.parametrize(
    "answer",
    [
        chunked(),
        b"HTTP/1.1 100 Continue\r\n\r\n" + part(),
        part().replace(b"HTTP/1.1", b"HTTP/1.0"),
        part("X-Folded: a\r\n b"),
        part(f"Content-Length: {SIZE}"),
    ],
    ids=["chunked", "interim", "1.0", "folded", "twice"],
)
async def test_other_forms_that_http_allows_are_received_by_the_standard_library(answer: bytes) -> None:
    with HostileServer(answering(answer)) as server:
        origin = store(server)
        assert [await received(origin) for _ in range(2)] == [DATA[:SIZE]] * 2
        assert len(server.requests) == 3  # the form is not tried again
        origin.close()


async def test_the_end_of_an_object_comes_as_it_is() -> None:
    with HostileServer(answering(part(end=1000))) as server:
        origin = store(server)
        assert await received(origin) == DATA[:1000]
        origin.close()


@pytest.mark.fault("O3")
@pytest.mark.parametrize("more", [b"x", b"HTTP/1.1 200 OK\r\n\r\n"])
async def test_a_server_that_sends_more_than_it_announced_does_not_answer_the_next_request_with_it(more: bytes) -> None:
    with HostileServer(answering(part(end=100) + more, part())) as server:
        origin = store(server)
        with pytest.raises(NotNow, match="more than it announced"):
            await received(origin)
        assert await received(origin) == DATA[:SIZE]
        assert len(server._connections) == 2
        origin.close()


async def test_what_a_server_sends_unasked_closes_the_connection() -> None:
    loop, sent = asyncio.get_running_loop(), asyncio.Event()
    go = threading.Event()

    def answer(connection: socket.socket, request: bytes) -> None:
        connection.sendall(part())
        if len(server.requests) == 1:
            go.wait(10)
            connection.sendall(part(start=SIZE, end=2 * SIZE))
            loop.call_soon_threadsafe(sent.set)

    with HostileServer(answer) as server:
        origin = store(server)
        assert await received(origin) == DATA[:SIZE]
        go.set()
        await sent.wait()
        assert await received(origin) == DATA[:SIZE]
        assert len(server._connections) == 2
        origin.close()


async def test_a_connection_that_the_server_closed_meanwhile_is_replaced_at_once() -> None:
    with HostileServer(answering(part(), b"", part())) as server:
        origin = store(server)
        assert await received(origin) == DATA[:SIZE]
        assert await received(origin) == DATA[:SIZE]
        assert len(server.requests) == 3
        origin.close()


async def test_a_connection_that_the_server_will_close_is_not_kept() -> None:
    with HostileServer(answering(part("Connection: close"))) as server:
        origin = store(server)
        assert [await received(origin) for _ in range(2)] == [DATA[:SIZE]] * 2
        assert len(server._connections) == 2
        origin.close()


async def test_a_server_that_drips_is_given_up() -> None:
    def drip(connection: socket.socket, request: bytes) -> None:
        connection.sendall(part()[:-50])
        while not server.gone.wait(0.05):
            connection.sendall(b"x" if len(server.requests) < 2 else b"")

    with HostileServer(drip) as server:
        origin = store(server, request_seconds=0.3)
        with pytest.raises(Unavailable, match="no whole answer"):
            await received(origin)
        origin.close()


async def test_nothing_is_written_to_the_memory_of_a_request_that_was_cancelled() -> None:
    loop, half = asyncio.get_running_loop(), asyncio.Event()
    ended, go = threading.Event(), threading.Event()

    def answer(connection: socket.socket, request: bytes) -> None:
        connection.sendall(part()[: -SIZE // 2])
        loop.call_soon_threadsafe(half.set)
        go.wait(10)
        try:
            while connection.send(part()[-SIZE // 2 :]):
                pass
        except OSError:
            ended.set()

    with HostileServer(answer) as server:
        origin = store(server)
        out = bytearray(SIZE)
        reading = asyncio.ensure_future(origin.receive_range("x", 0, SIZE, memoryview(out)))
        await half.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        before = bytes(out)
        go.set()
        await loop.run_in_executor(None, ended.wait, 10)
        assert ended.is_set()  # the connection is gone
        assert out == before
        origin.close()


async def test_closing_a_store_closes_its_idle_connections() -> None:
    closed = threading.Event()

    def answer(connection: socket.socket, request: bytes) -> None:
        connection.sendall(part())
        if not connection.recv(1):
            closed.set()

    with HostileServer(answer) as server:
        origin = store(server)
        assert await received(origin) == DATA[:SIZE]
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, origin.close)
        assert await loop.run_in_executor(None, closed.wait, 10)


class TlsServer(HostileServer):
    """The server, with TLS."""

    def __init__(self, context: ssl.SSLContext, answer: Callable[[socket.socket, bytes], None]) -> None:
        super().__init__(answer)
        self._context = context
        self.url = self.url.replace("http://", "https://")

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            super()._serve(self._context.wrap_socket(connection, server_side=True))


async def test_ranges_come_through_tls_if_the_certificate_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = make_contexts(tmp_path)
    closed = threading.Event()

    def answer(connection: socket.socket, request: bytes) -> None:
        connection.sendall(part())
        if len(server.requests) == 3 and not connection.recv(1):
            closed.set()

    with TlsServer(contexts.server, answer) as server:
        wrong = store(server)
        with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await received(wrong)
        wrong.close()
        monkeypatch.setattr(ssl, "create_default_context", contexts.client.client)
        origin = store(server)
        assert [await received(origin) for _ in range(3)] == [DATA[:SIZE]] * 3
        assert len(server._connections) == 2
        assert origin._threads is None
        origin.close()
        assert await asyncio.get_running_loop().run_in_executor(None, closed.wait, 10)


async def test_a_proxy_of_the_environment_is_asked_for_the_whole_url(monkeypatch: pytest.MonkeyPatch) -> None:
    with HostileServer(answering(part())) as server:
        monkeypatch.setenv("http_proxy", server.url.replace("http://", "http://me:hush@"))
        monkeypatch.setenv("no_proxy", "near.example")
        far = Location.parse("http://far.example/d/")
        origin = WebStore(far, request_seconds=5.0, attempts=0, attempts_seconds=0.0)
        assert await received(origin) == DATA[:SIZE]
        origin.close()
    assert server.requests[0].startswith(b"GET http://far.example/d/x HTTP/1.1\r\nHost: far.example\r\n")
    assert b"Proxy-Authorization: Basic bWU6aHVzaA==\r\n" in server.requests[0]


def test_a_read_of_many_objects_makes_no_more_requests_at_once_than_a_store_may_have() -> None:
    def answer(connection: socket.socket, request: bytes) -> None:
        number = int(request.split(b"/")[2].split(b" ")[0])
        connection.sendall(part(start=number, end=number + 100))

    with HostileServer(answer) as server:
        origin = RemoteStore(f"{server.url}/d/")
        out = bytearray(100 * 500)
        # Each object is requested from its own number on, so that every answer differs.
        extents = [Extent(str(number), number, 100) for number in range(500)]
        assert origin.read(extents, memoryview(out)) == len(out)
        assert out == b"".join(DATA[number : number + 100] for number in range(500))
        assert len(server.requests) == 500
        assert len(server._connections) <= REQUESTS_AT_ONCE
        origin.close()
