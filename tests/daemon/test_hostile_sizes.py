"""Requests of absurd sizes against a real daemon: refused early, with its memory as before, and nobody else delayed."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from quiver.digest import Digest
from quiver.transport.stream import FRAME, RANGES, REFUSAL
from quiver.wire import RANGE, RANGES_MAX, READ_REQUEST_BYTES_MAX, RangeStatus, ReadRequest
from tests.support.daemon import FreshDaemon
from tests.support.data import make_shard
from tests.support.hostile_http import END, UPGRADE, Answer, H, all_answers

MIB = 1 << 20
SHARD, DATA = make_shard([np.random.default_rng(1).bytes(10_000) for _ in range(3)])
GROWTH_BYTES_MAX = 24 * MIB  # of a daemon's peak: an interpreter's heap moves by a few
POSTS = ("/v1/read", "/v1/fill", "/v1/forgo", "/v1/recheck", "/v1/needs")
DEEP = 100_000
NESTED = {
    "JSON": b"[" * DEEP + b"]" * DEEP,
    "JSON objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "arrays": b"\x91" * DEEP + b"\xc0",
    "maps": b"\x81\xa1a" * DEEP + b"\xc0",
    "in an unknown field": b"\x82\xa6shards\xc4\x00\xa1x" + b"\x91" * DEEP + b"\xc0",
    "arrays of 2**32 - 1": b"\xdd\xff\xff\xff\xff" * 1000,
    "a map of 2**32 - 1": b"\xdf\xff\xff\xff\xff",
    "bytes of 2**32 - 1": b"\x81\xa6shards\xc6\xff\xff\xff\xff",
}


class Watched(FreshDaemon):
    """A daemon whose memory can be looked at."""

    def memory(self, name: str) -> int:
        assert self.process is not None
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

    @contextlib.contextmanager
    def flat(self) -> Iterator[None]:
        """Check that its peak does not grow in the block."""
        assert self.process is not None
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        before = self.memory("VmRSS")
        yield
        assert self.memory("VmHWM") - before < GROWTH_BYTES_MAX


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with Watched(tmp_path_factory.mktemp("sizes") / "data") as daemon:
        assert daemon.ask("PUT", f"/v1/shards/{SHARD}", DATA)[0] == 201
        assert asked(daemon, "/v1/read", of(np.zeros(1, RANGE))).status == 200
        yield daemon
        assert "Traceback" not in daemon.log


def of(ranges: np.ndarray) -> bytes:
    return ReadRequest(None, (SHARD,), ranges).encode()


def asked(daemon: Watched, path: str, body: bytes, announced: int | None = None) -> Answer:
    size = len(body) if announced is None else announced
    head = f"POST {path} HTTP/1.1\r\n".encode() + H + b"Content-Length: %d\r\n" % size + END
    answers, left = all_answers(daemon.address, head + body, 1)
    assert len(answers) == 1
    assert not left
    return answers[0]


def streamed(daemon: Watched, sent: bytes) -> tuple[int, bytes]:
    """Send bytes on a stream; return kind and body of the answer, with which the connection ends if it is refused."""
    with socket.create_connection(daemon.address, timeout=20) as sock:
        sock.sendall(UPGRADE + END)
        received = b""
        while not received.endswith(b"\r\n\r\n"):
            received += sock.recv(1)
        with contextlib.suppress(ConnectionError):
            sock.sendall(sent)
        with sock.makefile("rb") as answer:
            _, kind, size = FRAME.unpack(answer.read(FRAME.size))
            body = answer.read(size)
        if kind == REFUSAL and b"bad_request" in body:
            with contextlib.suppress(ConnectionError):  # what was not read of the request resets it
                assert not sock.recv(1)
        return kind, body


@pytest.mark.fault("S4")
def test_a_million_ranges_are_refused_before_they_are_read(daemon: Watched) -> None:
    head = b"QRD1" + struct.pack("<IIII", 1, 10**6, 0, 0) + bytes(64)
    with daemon.flat():
        assert asked(daemon, "/v1/read", head, len(head) + 24 * 10**6).status == 400
        assert asked(daemon, "/v1/read", head + bytes(24 * 100_000)).status == 400, "and as many as fit"
        kind, body = streamed(daemon, struct.pack("<I", len(head) + 24 * 10**6) + head)
        assert (kind, msgspec.json.decode(body)["error"]) == (REFUSAL, "bad_request")


@pytest.mark.fault("S4")
@pytest.mark.parametrize("path", POSTS)
def test_a_body_of_100_mib_is_refused_before_it_is_read(daemon: Watched, path: str) -> None:
    with daemon.flat():
        for _ in range(3):
            assert asked(daemon, path, b'{"a": [' + b"1," * MIB, 100 * MIB).status == 400


@pytest.mark.fault("S4")
@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("nested", NESTED)
def test_a_body_that_is_nested_deep_or_lies_on_its_counts_is_refused(daemon: Watched, path: str, nested: str) -> None:
    with daemon.flat():
        answer = asked(daemon, path, NESTED[nested])
        assert answer.status == 400
        assert len(answer.body) < 5_000


@pytest.mark.fault("S4")
def test_offsets_past_the_end_are_answered_by_status_and_read_nothing(daemon: Watched) -> None:
    edges = [len(DATA), len(DATA) + 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
    rows = [(0, 0, offset, length) for offset in edges for length in (1, 7, 2**20)]
    ranges = np.array([*rows, (0, 0, len(DATA) - 1, 2), (0, 0, len(DATA), 0), (0, 0, 0, 3)], RANGE)
    wanted = bytes([RangeStatus.BAD_RANGE] * (len(rows) + 1) + [0, 0]) + DATA[:3]
    with daemon.flat():
        assert asked(daemon, "/v1/read", of(ranges)).body == wanted
        assert streamed(daemon, struct.pack("<I", len(of(ranges))) + of(ranges)) == (RANGES, wanted)


@pytest.mark.fault("S4")
@pytest.mark.parametrize("lengths", [[2**32 + 1], [2**63, 2**63], [2**64 - 1], [2**31] * 3])
def test_more_bytes_than_an_answer_may_have_are_refused_however_they_add_up(
    daemon: Watched, lengths: list[int]
) -> None:
    ranges = np.zeros(len(lengths), RANGE)
    ranges["length"] = lengths
    with daemon.flat():
        assert asked(daemon, "/v1/read", of(ranges)).status == 400


@pytest.mark.fault("S4")
def test_ranges_that_overlap_take_no_memory_however_many_they_are(daemon: Watched) -> None:
    """65,536 times the same 500 bytes: a request of 1.5 MB, an answer of 33 MB, from one mapped file."""
    ranges = np.zeros(RANGES_MAX, RANGE)
    ranges["offset"] = np.arange(RANGES_MAX) % 400
    ranges["length"] = 500
    body = of(ranges)
    with daemon.flat():
        kind, answer = streamed(daemon, struct.pack("<I", len(body)) + body)
        assert kind == RANGES
        assert len(answer) == RANGES_MAX * 501
        assert not any(answer[:RANGES_MAX])
        at = RANGES_MAX + 777 * 500
        assert answer[at : at + 500] == DATA[377 : 377 + 500]


@pytest.mark.fault("S4")
@pytest.mark.parametrize("size", [0, 1, 3, 55, READ_REQUEST_BYTES_MAX + 1, 2**31, 2**32 - 1])
def test_a_frame_whose_length_lies_ends_the_stream(daemon: Watched, size: int) -> None:
    with daemon.flat():
        kind, body = streamed(daemon, struct.pack("<I", size) + b"QRD1" + bytes(60))
        assert (kind, msgspec.json.decode(body)["error"]) == (REFUSAL, "bad_request")


@pytest.mark.fault("S4")
def test_a_hundred_streams_that_announce_the_most_and_send_nothing_take_no_memory(daemon: Watched) -> None:
    with daemon.flat(), contextlib.ExitStack() as stack:
        for _ in range(100):
            sock = stack.enter_context(socket.create_connection(daemon.address, timeout=20))
            sock.sendall(UPGRADE + END)
            assert sock.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 101"
            with contextlib.suppress(ConnectionError):
                sock.sendall(struct.pack("<I", READ_REQUEST_BYTES_MAX) + b"QRD1")
        assert daemon.ask("GET", "/healthz")[0] == 200
    assert Digest.of(daemon.ask("GET", f"/v1/shards/{SHARD}")[1]) == Digest.of(DATA)
