"""The harness itself: each toxic and each fault of the origin happens and is counted, and each validator can fail."""

from __future__ import annotations

import asyncio
import http.client
import random
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3

from tests.chaos import origin as faults
from tests.chaos import toxics, validators
from tests.chaos.framing import Answers, Part, Requests
from tests.chaos.history import History, Job, Sample, read_history
from tests.chaos.origin import ChaosOrigin, Fault, chaos_origin
from tests.chaos.proxy import Network, Proxy
from tests.chaos.validators import Expected, Violation
from tests.support.http_server import Request, http_server
from tests.support.waiting import until

BODY = bytes(range(256)) * 256


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    def answer(request: Request) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(BODY)))
        request.end_headers()
        request.wfile.write(BODY if request.command == "GET" else b"")
        if request.headers["Connection"] == "close":
            raise ConnectionAbortedError  # closes it

    with http_server(answer) as url:
        yield url


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(seed=1) as made:
        yield made


@pytest.fixture
def proxy(network: Network, server: str) -> Iterator[Proxy]:
    made = network.proxy("server", server)
    yield made
    made.close()


def raw(proxy: Proxy, requests: int = 1, timeout: float = 10.0) -> bytes:
    """Return all bytes that come until the connection ends, or for so long."""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=timeout) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * (requests - 1))
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        found = b""
        while data := connection.recv(1 << 16):
            found += data
        return found


def test_without_a_toxic_every_byte_passes(proxy: Proxy) -> None:
    answer = raw(proxy, 3)
    assert answer.count(BODY) == 3
    assert not proxy.fired
    assert proxy.connections == 1


CHANGES: dict[str, tuple[toxics.Toxic, Callable[[bytes], bool]]] = {
    "Latency": (toxics.Latency(0.01), lambda got: got.endswith(BODY)),
    "Bandwidth": (toxics.Bandwidth(8 << 20), lambda got: got.endswith(BODY)),
    "Slices": (toxics.Slices(100), lambda got: got.endswith(BODY)),
    "Truncate": (toxics.Truncate(1000), lambda got: len(got) == 1000),
    "BitFlip": (
        toxics.BitFlip(),
        lambda got: not got.endswith(BODY) and len(got.partition(b"\r\n\r\n")[2]) == len(BODY),
    ),
    "Garbage": (toxics.Garbage(b"more"), lambda got: got.endswith(BODY + b"more")),
    "LyingLength": (toxics.LyingLength(5), lambda got: b"Content-Length: %d\r\n" % (len(BODY) + 5) in got),
    "Head": (
        toxics.Head("302 Found", {"Location": "http://x/"}),
        lambda got: got.startswith(b"HTTP/1.1 302 Found\r\nLoc"),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_toxic_does_what_it_says_and_counts_it(proxy: Proxy, name: str) -> None:
    toxic, changed = CHANGES[name]
    with proxy.toxic(toxic):
        assert changed(raw(proxy))
    assert proxy.fired[name] > 0
    before = proxy.fired[name]
    assert raw(proxy).endswith(BODY), "and once it is removed, nothing more"
    assert proxy.fired[name] == before


def test_a_reset_is_seen_as_one(proxy: Proxy) -> None:
    with proxy.toxic(toxics.Reset(1000)), pytest.raises(ConnectionResetError):
        raw(proxy)
    assert proxy.fired["Reset"] == 1


def test_what_hangs_goes_on_when_the_toxic_is_removed(proxy: Proxy) -> None:
    toxic = toxics.Hang(1000)
    proxy.add(toxic)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        until(lambda: proxy.fired["Hang"])
        proxy.remove(toxic)
        found = b""
        while data := connection.recv(1 << 16):
            found += data
    assert found.endswith(BODY)


def test_a_proxy_that_refuses_is_a_dead_server_and_comes_back_at_its_port(proxy: Proxy) -> None:
    port = proxy.port
    with socket.create_connection(("127.0.0.1", port)) as held:
        held.sendall(b"GET / HTTP/1.1\r\n")
        proxy.refuse()
        with pytest.raises(ConnectionResetError):
            held.recv(1)
    with pytest.raises(ConnectionRefusedError):
        raw(proxy)
    proxy.listen()
    assert proxy.port == port
    assert raw(proxy).endswith(BODY)


def test_chance_comes_from_the_seed(server: str) -> None:
    def changed(seed: int) -> list[bool]:
        with Network(seed) as network:
            proxy = network.proxy("server", server)
            proxy.add(toxics.Head("302 Found", chance=0.5))  # drawn once per answer, however it is cut into pieces
            return [raw(proxy).startswith(b"HTTP/1.1 302") for _ in range(12)]

    one = changed(1)
    assert any(one)
    assert not all(one)
    assert changed(1) == one
    assert changed(2) != one


def test_connections_that_come_together_have_chances_of_their_own(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds, opened, together = list[str](), asyncio.open_connection, asyncio.Event()

    async def opens_slowly(*address: Any, **more: Any) -> Any:
        if proxy.connections == 3:
            together.set()
        await together.wait()
        return await opened(*address, **more)

    def seeded(seed: str) -> random.Random:
        seeds.append(seed)
        return random.Random(seed)

    monkeypatch.setattr("tests.chaos.proxy.asyncio.open_connection", opens_slowly)
    monkeypatch.setattr("tests.chaos.proxy.random", SimpleNamespace(Random=seeded))
    with ThreadPoolExecutor(3) as pool:
        assert all(answer.endswith(BODY) for answer in pool.map(raw, [proxy] * 3))
    assert len(set(seeds)) == 3


def test_pieces_are_found_in_any_cut_of_the_bytes() -> None:
    answers = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcHTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"
    answers += b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + toxics.FRAME.pack(b"QRA1", 0, 2) + b"xy"
    for size in (1, 3, 7, len(answers)):
        requests = Requests()
        requests.feed(b"GET / HTTP/1.1\r\n\r\nHEAD / HTTP/1.1\r\n\r\nGET /v1/stream HTTP/1.1\r\n\r\nQRD1 and more")
        cutter = Answers(requests)
        cuts = [answers[at : at + size] for at in range(0, len(answers), size)]
        pieces = [piece for cut in cuts for piece in cutter.pieces(cut)]
        assert b"".join(piece.data for piece in pieces) == answers
        assert sum(piece.part is Part.END for piece in pieces) == 3
        assert b"".join(piece.data for piece in pieces if piece.part is Part.BODY) == b"abcxy"
        assert sum(piece.part is Part.FRAME for piece in pieces) == 1


def test_what_is_no_http_passes_as_it_is() -> None:
    cutter = Answers(Requests())
    assert [piece.part for piece in cutter.pieces(b"\x16\x03\x01 a TLS record")] == [Part.RAW]


# -- the origin -------------------------------------------------------------------------------------------------------


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[ChaosOrigin]:
    (tmp_path / "a").write_bytes(BODY)
    with chaos_origin(tmp_path) as made:
        yield made


def ask(origin: ChaosOrigin, ranged: str = "bytes=10-19") -> tuple[int, dict[str, str], bytes]:
    host = origin.endpoint.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=10)
    try:
        connection.request("GET", "/a", headers={"Range": ranged})
        answer = connection.getresponse()
        try:
            body = answer.read()
        except http.client.IncompleteRead as error:
            body = error.partial
        return answer.status, dict(answer.getheaders()), body
    finally:
        connection.close()


SENDS: dict[str, tuple[Fault, Callable[[int, dict[str, str], bytes], bool]]] = {
    "429": (faults.throttle("3"), lambda status, told, _: status == 429 and told["Retry-After"] == "3"),
    "503": (faults.throttle("", 503), lambda status, told, _: status == 503 and "Retry-After" not in told),
    "slow": (faults.SLOW, lambda status, told, body: body == BODY[10:2058]),
    "truncated": (faults.TRUNCATED, lambda status, told, body: body == BODY[10:110]),
    "changed": (faults.CHANGED, lambda status, told, body: body == bytes(2048) and told["ETag"] == '"changed"'),
    "gone": (faults.GONE, lambda status, told, body: status == 404),
    "wrong range": (faults.WRONG_RANGE, lambda status, told, body: body == BODY[17:2065]),
    "said": (faults.SAID_WRONG_RANGE, lambda status, told, body: told["Content-Range"].startswith("bytes 17-2064/")),
    "whole object": (faults.WHOLE, lambda status, told, body: status == 200 and body == BODY),
}


@pytest.mark.parametrize("name", SENDS)
def test_an_origin_fails_as_it_is_told_and_counts_it(scripted: ChaosOrigin, name: str) -> None:
    fault, seen = SENDS[name]
    scripted.first(1, fault)
    status, told, body = ask(scripted, "bytes=10-2057")
    assert seen(status, told, body), (status, told, body[:99])
    assert scripted.fired[fault.name] == 1
    assert ask(scripted)[2] == BODY[10:20], "the next one is right"
    assert scripted.asked[-1].sent_bytes == 10


# -- the validators ---------------------------------------------------------------------------------------------------

CONTENT = [bytes([number]) * 10 for number in range(4)]
RIGHT = Expected(tuple(blake3(data).hexdigest() for data in CONTENT), frozenset({blake3(CONTENT[0]).hexdigest()[:10]}))


def history(*indices: int, ended: bool = True, epochs: tuple[int, ...] = (0,), **more: Any) -> History:
    rows = tuple(Sample(0, 0, index, RIGHT.digests[index], "rack", 0.1) for index in indices)
    return replace(History(Job("job", "", ""), rows, (), {}, ended, "", epochs), **more)


def with_wrong_digest() -> History:
    right = history(0, 1, 2, 3)
    return replace(right, samples=(right.samples[0]._replace(digest="f" * 64), *right.samples[1:]))


def held(descriptors: int) -> dict[str, int]:
    return {"pid": 1, "descriptors": descriptors, "threads": 1, "memory": 1, "processes": 0}


def running(status: int | None) -> Any:
    return SimpleNamespace(process=SimpleNamespace(poll=lambda: status), log="")


def fails(check: Callable[[], None]) -> bool:
    try:
        check()
    except Violation:
        return True
    return False


CHECKS: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
    "a wrong digest": (
        lambda: validators.digests_are_right(history(0, 1, 2, 3), RIGHT),
        lambda: validators.digests_are_right(with_wrong_digest(), RIGHT),
    ),
    "a lost sample": (
        lambda: validators.epochs_are_exact([history(0, 1, 2, 3)], RIGHT),
        lambda: validators.epochs_are_exact([history(0, 1, 2)], RIGHT),
    ),
    "an epoch of nothing": (
        lambda: validators.epochs_are_exact([history(ended=False, epochs=())], RIGHT),
        lambda: validators.epochs_are_exact([history()], RIGHT),
    ),
    "a sample twice": (
        lambda: validators.epochs_are_exact([history(0, 2, ended=False, epochs=())], RIGHT),
        lambda: validators.epochs_are_exact([history(0, 0, ended=False, epochs=())], RIGHT),
    ),
    "a sample twice in two ranks": (
        lambda: validators.epochs_are_exact([history(0, 1), history(2, 3)], RIGHT),
        lambda: validators.epochs_are_exact([history(0, 1, 2), history(2, 3)], RIGHT),
    ),
    "an end before its epochs": (
        lambda: validators.epochs_are_exact([history(0, 1, 2, 3)], RIGHT),
        lambda: validators.epochs_are_exact([history(0, 1, 2, 3, job=Job("job", "", "", epochs=2))], RIGHT),
    ),
    "an error": (
        lambda: validators.has_no_error(history()),
        lambda: validators.has_no_error(history(errors=({"message": "x"},))),
    ),
    "an error that does not name": (
        lambda: validators.errors_name(history(errors=(ERROR,)), "a/b", "k1", within_seconds=5),
        lambda: validators.errors_name(history(errors=(ERROR,)), "a/c", within_seconds=5),
    ),
    "an error too late": (
        lambda: validators.errors_name(history(errors=(ERROR,)), within_seconds=5),
        lambda: validators.errors_name(history(errors=(ERROR,)), within_seconds=1),
    ),
    "no error": (
        lambda: validators.errors_name(history(errors=(ERROR,)), within_seconds=5),
        lambda: validators.errors_name(history(), within_seconds=5),
    ),
    "a long wait": (
        lambda: validators.no_wait_exceeds(history(1), 0.2),
        lambda: validators.no_wait_exceeds(history(1), 0.05),
    ),
    "a second read of a shard": (
        lambda: validators.origin_reads_at_most({0: 1.0, 1: 1.0}, mean=1.0, worst=1.0),
        lambda: validators.origin_reads_at_most({0: 1.0, 1: 1.2}, mean=1.0, worst=2.0),
    ),
    "one shard read often": (
        lambda: validators.origin_reads_at_most({0: 0.0, 1: 2.0}, mean=1.0, worst=2.0),
        lambda: validators.origin_reads_at_most({0: 0.0, 1: 2.0}, mean=1.0, worst=1.5),
    ),
    "a digest in a log": (
        lambda: validators.log_is_clean("d", "fine: abcdefabcdef", RIGHT),
        lambda: validators.log_is_clean("d", f"shard {RIGHT.digests[0][:20].upper()}", RIGHT),
    ),
    "a credential in a log": (
        lambda: validators.log_is_clean("d", "fine", RIGHT, ["hunter2"]),
        lambda: validators.log_is_clean("d", "http://me:hunter2@x", RIGHT, ["hunter2"]),
    ),
    "a traceback in a log": (
        lambda: validators.log_is_clean("d", "fine", RIGHT),
        lambda: validators.log_is_clean("d", "Traceback (most recent call last):", RIGHT),
    ),
    "a client that leaks": (
        lambda: validators.client_leaks_nothing(history(held=(held(9), held(20), held(21)))),
        lambda: validators.client_leaks_nothing(history(held=(held(9), held(20), held(40)))),
    ),
    "a daemon that died": (
        lambda: validators.no_daemon_died({0: running(None)}),
        lambda: validators.no_daemon_died({0: running(None), 1: running(-11)}),
    ),
    "a fault that did not fire": (
        lambda: validators.fired({"Reset": 1}, "Reset"),
        lambda: validators.fired({"Reset": 1}, "Reset", "Hang"),
    ),
}
ERROR = {"message": "a/b is gone", "keys": ["k1"], "seconds": 2.0}


@pytest.mark.parametrize("name", CHECKS)
def test_a_validator_passes_what_is_right_and_fails_at(name: str) -> None:
    right, wrong = CHECKS[name]
    right()
    assert fails(wrong)


@pytest.mark.parametrize("what", ["descriptors", "threads", "memory", "processes", "temporary files"])
def test_a_leak_of_a_daemon_is_found(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    held = {"descriptors": 9, "threads": 9, "memory": 9, "processes": 0, "temporary files": 0}
    monkeypatch.setattr(validators.Leaks, "_held", staticmethod(lambda daemon: dict(held)))
    daemon: Any = SimpleNamespace(process=SimpleNamespace(pid=1, poll=lambda: None), data_dir=Path())
    leaks = validators.Leaks([daemon])
    leaks.check(0.1)
    held[what] += 1 << 30
    assert fails(lambda: leaks.check(0.1))


def test_a_history_counts_what_is_committed_and_survives_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "h"
    sample = '{"what": "sample", "epoch": 0, "rank": 0, "index": %d, "digest": "", "tier": "", "seconds": 0}\n'
    commit = '{"what": "commit", "state": {}, "ended_epoch": null}\n'
    start = '{"what": "start"}\n'
    path.write_text(start + sample % 1 + commit + sample % 2 + start + sample % 3 + commit + sample % 4 + '{"wha')
    found = read_history(Job("job", "", ""), path)
    assert [sample.index for sample in found.samples] == [1, 3]
    assert not found.ended
