"""Notices that a spot machine is taken, as three clouds give them and as a file: each begins one drain."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest

from quiver.errors import Misconfigured
from quiver_cacheserver.config import check_notice
from quiver_cacheserver.draining import notice
from quiver_cacheserver.draining.drain import Drain
from quiver_cacheserver.draining.notice import Notice, drain_on_notice, drain_seconds_of, said

NAMES = ("worker-3.rack.example", "worker-3")
AWS = b'{"action": "terminate", "time": "2026-11-22T08:22:00Z"}'
AZURE = b"""{"DocumentIncarnation": 1, "Events": [{"EventId": "A", "EventType": "%s", "ResourceType": "VirtualMachine",
 "Resources": ["%s"], "EventStatus": "Scheduled", "NotBefore": "Mon, 23 Nov 2026 22:26:58 GMT"}]}"""


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"FALSE", b"false\n", b"NONE", b" none ", b"0", b'{"Events": []}', b'{"Events": [{"Ev'),
        b"\n<!DOCTYPE html><html><body>Sign in to the network",
    ],
)
def test_what_is_there_without_a_notice_is_none(content: bytes) -> None:
    assert said(content, NAMES) is None


@pytest.mark.parametrize(
    "content", [b"{}", b'{"error": "try again"}', b"[]", b'["x"]', b"<html><body>502 Bad Gateway</body></html>"]
)
def test_what_a_url_answers_of_another_kind_is_no_notice_and_a_file_with_it_is_one(content: bytes) -> None:
    assert said(content, NAMES) is None
    assert said(content, NAMES, of_file=True) == Notice(None)


@pytest.mark.parametrize("content", [b"TRUE", b"TERMINATE_ON_HOST_MAINTENANCE", b"this file", b"\xff\xfe"])
def test_a_notice_need_not_say_when(content: bytes) -> None:
    assert said(content, NAMES) == Notice(None)


def test_the_time_of_a_notice_is_understood() -> None:
    assert said(AWS, NAMES) == Notice(1795335720.0)
    assert said(AZURE % (b"Preempt", b"WORKER-3"), NAMES) == Notice(1795472818.0)
    assert said(b'{"action": "stop", "time": "soon"}', NAMES) == Notice(None)
    assert said(b'{"time": "2026-11-22T09:22:00.0+01:00"}', NAMES) == Notice(1795335720.0)
    assert said(b"2026-11-22T08:22:00Z\n", NAMES) == Notice(1795335720.0), "as AWS's spot/termination-time says it"


def test_a_notice_whose_time_has_passed_still_hands_over_since_the_machine_is_there() -> None:
    assert drain_seconds_of(Notice(1000.0), 900.0, 20.0) == 98.0
    assert drain_seconds_of(Notice(1000.0), 999.0, 20.0) == 20.0
    assert drain_seconds_of(Notice(1000.0), 5000.0, 20.0) == 20.0, "perhaps its clock is wrong"
    assert drain_seconds_of(Notice(None), 5000.0, 20.0) == 20.0
    assert drain_seconds_of(Notice(1e9), 0.0, 20.0) == 3600.0


def test_an_event_of_another_machine_of_the_set_or_of_another_kind_is_no_notice() -> None:
    assert said(AZURE % (b"Preempt", b"worker-4"), NAMES) is None
    assert said(AZURE % (b"Freeze", b"worker-3"), NAMES) is None


@pytest.mark.parametrize(
    "source", ["evict", "ftp://x/y", "http://", "http://u:p@h/", "/a\nb", "http://h/a b", "http://h:x/"]
)
def test_a_source_that_is_neither_a_path_nor_a_url_is_refused_in_one_line(source: str) -> None:
    with pytest.raises(Misconfigured, match="--eviction-notice") as refused:
        check_notice(source)
    assert "\n" not in str(refused.value)


class Drained:
    """In place of a daemon's drain: keeps what it was asked for."""

    def __init__(self) -> None:
        self.begun: list[float] = []
        self.event = asyncio.Event()

    async def begin(self, deadline_seconds: float, why: str) -> None:
        self.begun.append(deadline_seconds)
        self.event.set()


@contextlib.asynccontextmanager
async def watching(source: str, drain: Drained) -> Any:
    task = asyncio.create_task(drain_on_notice(source, cast(Drain, drain), 20.0, NAMES))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "POLL_SECONDS", 0.02)


async def test_a_file_that_appears_begins_one_drain_and_another_one_once_it_was_gone(tmp_path: Path) -> None:
    path, drain, looks = tmp_path / "evict", Drained(), asyncio.Semaphore(0)
    look = notice._Source.look

    async def counted(self: Any) -> bytes | None:
        content = await look(self)
        looks.release()
        return content

    async def looked_twice() -> None:
        while not looks.locked():
            await looks.acquire()
        for _ in range(3):
            await looks.acquire()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notice._Source, "look", counted)
        async with watching(str(path), drain):
            await looked_twice()
            assert drain.begun == []
            path.write_bytes(b"")
            await asyncio.wait_for(drain.event.wait(), 20)
            await looked_twice()
            assert drain.begun == [20.0]
            path.unlink()
            await looked_twice()
            path.write_text("FALSE")
            await looked_twice()
            assert drain.begun == [20.0]
            drain.event.clear()
            path.write_text("TRUE")
            await asyncio.wait_for(drain.event.wait(), 20)
        assert drain.begun == [20.0, 20.0]


Answer = Callable[[BaseHTTPRequestHandler], tuple[int, bytes]]


@contextlib.contextmanager
def metadata(answer: Answer) -> Iterator[str]:
    """Run a service like that of a cloud's machine; yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            status, body = answer(self)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_a_service_that_demands_a_token_is_asked_with_one_until_the_notice_comes() -> None:
    asked, drain = [], Drained()
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 120))

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        asked.append(request.command)
        if request.command == "PUT":
            return (200, b"secret") if request.path == "/latest/api/token" else (404, b"")
        if request.headers["X-aws-ec2-metadata-token"] != "secret":
            return 401, b""
        assert request.headers["Metadata-Flavor"] == "Google"
        return (404, b"not yet") if len(asked) < 6 else (200, b'{"action": "terminate", "time": "%s"}' % at.encode())

    with metadata(answer) as url:
        async with watching(f"{url}/latest/meta-data/spot/instance-action", drain):
            await asyncio.wait_for(drain.event.wait(), 20)
    assert asked[:4] == ["GET", "PUT", "GET", "GET"]
    assert 60 < drain.begun[0] <= 118


async def test_a_service_that_fails_redirects_or_is_away_gives_no_notice_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = iter([(500, b"TRUE"), (500, b"TRUE"), (302, b"TRUE"), (403, b"TRUE")])
    drain, over = Drained(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def answer(_: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        told = next(answers, None)
        if told is None:
            loop.call_soon_threadsafe(over.set)
        return told or (200, b"FALSE")

    with metadata(answer) as url:
        async with watching(f"{url}/notice", drain):
            await asyncio.wait_for(over.wait(), 20)
    assert drain.begun == []
    told = [record.getMessage() for record in caplog.records if "no eviction notice can be read" in record.getMessage()]
    assert [line.rpartition(" ")[2] for line in told] == ["500", "302", "403"]
