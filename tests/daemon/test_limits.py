"""What one client may take of a daemon, over real sockets: others are served whatever it does.

Clients of different addresses are sockets bound to different ones of 127.0.0.0/8.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import resource
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from quiver.digest import Digest
from quiver.errors import BadRequest
from quiver.peer import PeerClient
from quiver.ring import Member
from quiver.transport.stream import PATH, PROTOCOL
from quiver.wire import RANGE, RangeStatus, ReadRequest
from quiver_cacheserver.budget import HELD_MAX, RATES, Cost, RefillRate, Resource
from quiver_cacheserver.logs import FORMAT, OneLine
from quiver_cacheserver.node import Node
from quiver_cacheserver.rack.peers import MANIFEST_ASKED_MAX, RackPeers
from quiver_cacheserver.rack.registry import StaticRegistry
from quiver_cacheserver.serving import listening, requests, sender, streams, transfers
from tests.support.daemon import Daemon
from tests.support.data import Files, make_shard, shard_bytes_of
from tests.support.inside import in_process, url_of
from tests.support.waiting import until

MIB = 1 << 20
BIG, BIG_DATA = make_shard([np.random.default_rng(3).bytes(8 * MIB) for _ in range(2)])  # more than sockets hold
SMALL, SMALL_DATA = make_shard([b"small" * 100])
Address = tuple[str, int]
UPGRADE = f"GET {PATH} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: {PROTOCOL}\r\n\r\n".encode()
GREEDY, HONEST = "127.0.0.1", "127.0.0.2"


@contextlib.contextmanager
def connected(address: Address, source: str = GREEDY, receive_bytes: int = 0) -> Iterator[socket.socket]:
    with socket.socket() as sock:
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(60)
        sock.bind((source, 0))
        sock.connect(address)
        yield sock


def request(method: str, path: str, body: bytes = b"", size: int | None = None) -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body) if size is None else size}\r\n\r\n".encode()
        + body
    )


def answer_of(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of the next answer; status 0 if the connection is closed instead."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while b"\r\n\r\n" not in data:
            more = sock.recv(1)
            if not more:
                return 0, {}, b""
            data += more
        lines = data.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        body = b""
        while len(body) < int(headers.get("content-length", 0)) and (more := sock.recv(MIB)):
            body += more
        return int(lines[0].split(" ")[1]), headers, body
    return 0, {}, b""


def asked(address: Address, data: bytes, source: str = GREEDY) -> tuple[int, dict[str, str], bytes]:
    with connected(address, source) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
        return answer_of(sock)


def metric(address: Address, name: str, source: str = HONEST) -> float:
    status, _, body = asked(address, request("GET", "/metrics"), source)
    assert status == 200
    found = re.search(rf"^{re.escape(name)} (\S+)$", body.decode(), re.MULTILINE)
    assert found, name
    return float(found[1])


def under_way(address: Address, what: Resource) -> float:
    return metric(address, f'quiver_under_way{{limit="{what}"}}')


def refused(address: Address, what: Resource | Cost) -> float:
    return metric(address, f'quiver_limit_refusals_total{{limit="{what}"}}')


def read_of(digest: Digest, length: int, wait_ms: int = 0, manifest: Digest | None = None) -> bytes:
    ranges = np.zeros(1, RANGE)
    ranges["length"] = length
    return request("POST", "/v1/read", ReadRequest(manifest, (digest,), ranges, wait_ms).encode())


def is_closed(sock: socket.socket) -> bool:
    """Wait for the other end to close it."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(MIB):
            pass
    return True


def over_capacity(answer: tuple[int, dict[str, str], bytes]) -> bool:
    status, headers, body = answer
    return status == 503 and b'"over_capacity"' in body and int(headers["retry-after"]) > 0


# -- reads that wait --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def waiting_for_an_upload(
    files: Files, where: Path, held_max: dict[Resource, int]
) -> Iterator[tuple[Address, bytes, Callable[[], None]]]:
    """A daemon that may read no origin: yield it, a read that waits for an upload, and what ends the wait."""
    manifest = files.opened()
    digest, data = shard_bytes_of(manifest, 0)
    with (
        in_process(where, {SMALL: SMALL_DATA}, held_max=held_max) as address,
        contextlib.closing(PeerClient(url_of(address))) as peer,
    ):
        peer.put_manifest(manifest.digest, files.manifest.read_bytes())
        waits = read_of(digest, 100, 20_000, manifest.digest)
        status, _, body = asked(address, waits)
        assert (status, body[0]) == (200, RangeStatus.UPLOAD), "the first one who asks is chosen"
        yield address, waits, lambda: peer.put_shard(digest, data)


@pytest.mark.fault("S12")
def test_reads_that_wait_for_an_upload_keep_nobody_from_reading_what_is_here(files: Files, tmp_path: Path) -> None:
    with (
        waiting_for_an_upload(files, tmp_path, {Resource.READS: 2}) as (address, waits, upload),
        contextlib.ExitStack() as stack,
    ):
        waiting = [stack.enter_context(connected(address)) for _ in range(12)]
        for sock in waiting:
            sock.sendall(waits)
        until(lambda: under_way(address, Resource.WAITING) == 12)
        for source in (GREEDY, HONEST):
            for _ in range(5):
                assert asked(address, read_of(SMALL, 500), source)[2] == b"\0" + SMALL_DATA[:500]
        upload()
        for sock in waiting:
            status, _, body = answer_of(sock)
            assert (status, body[0], len(body)) == (200, RangeStatus.PRESENT, 101), "all get it, two at a time"
        until(lambda: under_way(address, Resource.WAITING) == under_way(address, Resource.READS) == 0)


@pytest.mark.fault("S12")
def test_reads_that_wait_are_bounded_for_each_address(files: Files, tmp_path: Path) -> None:
    with (
        waiting_for_an_upload(files, tmp_path, {Resource.WAITING: 4}) as (address, waits, upload),
        contextlib.ExitStack() as stack,
    ):
        waiting = [stack.enter_context(connected(address)) for _ in range(3)]
        for sock in waiting:
            sock.sendall(waits)
        until(lambda: under_way(address, Resource.WAITING) == 3)
        assert over_capacity(asked(address, waits))
        assert refused(address, Resource.WAITING) == 1
        honest = stack.enter_context(connected(address, HONEST))
        honest.sendall(waits)
        until(lambda: under_way(address, Resource.WAITING) == 4)
        upload()
        for sock in (*waiting, honest):
            assert answer_of(sock)[2][0] == RangeStatus.PRESENT


def test_a_reader_who_goes_while_it_waits_leaves_its_place(files: Files, tmp_path: Path) -> None:
    with waiting_for_an_upload(files, tmp_path, {}) as (address, waits, upload):
        with connected(address) as sock:
            sock.sendall(waits)
            until(lambda: under_way(address, Resource.WAITING) == 1)
        upload()
        until(lambda: under_way(address, Resource.WAITING) == under_way(address, Resource.READS) == 0)
        assert metric(address, "quiver_reads_in_flight") == 0


@pytest.mark.fault("S3")
def test_readers_who_take_their_answers_slowly_leave_a_place_to_others(tmp_path: Path) -> None:
    with (
        in_process(
            tmp_path, {SMALL: SMALL_DATA, BIG: BIG_DATA}, send_bytes=4096, held_max={Resource.READS: 4}
        ) as address,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(3):
            stack.enter_context(connected(address, receive_bytes=4096)).sendall(read_of(BIG, len(BIG_DATA)))
        until(lambda: under_way(address, Resource.READS) == 3)
        assert over_capacity(asked(address, read_of(SMALL, 500)))
        assert asked(address, read_of(SMALL, 500), HONEST)[2] == b"\0" + SMALL_DATA[:500]


@pytest.mark.fault("S3")
def test_streams_of_one_address_leave_some_to_others_and_silent_ones_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "IDLE_SECONDS", 0.5)
    with (
        in_process(tmp_path, held_max={Resource.STREAMS: 4}) as address,
        contextlib.ExitStack() as stack,
    ):
        opened = [stack.enter_context(connected(address)) for _ in range(3)]
        for sock in opened:
            sock.sendall(UPGRADE)
            assert sock.recv(12) == b"HTTP/1.1 101"
        assert over_capacity(asked(address, UPGRADE))
        assert asked(address, UPGRADE, HONEST)[0] == 101
        assert all(map(is_closed, opened))
        until(lambda: under_way(address, Resource.STREAMS) == 0)


# -- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.fault("S3")
def test_an_upload_that_drips_is_ended_and_reserves_nothing_before_its_first_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "SILENCE_SECONDS", 0.5)
    with in_process(tmp_path) as address, connected(address) as sock:
        sock.sendall(request("PUT", f"/v1/shards/{BIG}", BIG_DATA[:10], len(BIG_DATA)))
        until(lambda: under_way(address, Resource.UPLOADS) == 1)
        assert metric(address, "quiver_resident_bytes") == 0
        began = time.monotonic()
        sock.settimeout(0.05)
        for _ in range(400):  # a byte now and then
            sock.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                assert sock.recv(20).startswith(b"HTTP/1.1 400")
                break
        else:
            pytest.fail("it goes on")
        assert time.monotonic() - began < 10
        until(lambda: under_way(address, Resource.UPLOADS) == 0)


@pytest.mark.fault("S3")
def test_uploads_of_one_address_leave_a_place_to_others(tmp_path: Path) -> None:
    with in_process(tmp_path, held_max={Resource.UPLOADS: 4}) as address, contextlib.ExitStack() as stack:
        for _ in range(3):
            head = request("PUT", f"/v1/shards/{BIG}", b"", len(BIG_DATA))
            stack.enter_context(connected(address)).sendall(head)
        until(lambda: under_way(address, Resource.UPLOADS) == 3)
        put = request("PUT", f"/v1/shards/{SMALL}", SMALL_DATA)
        assert over_capacity(asked(address, put))
        assert asked(address, put, HONEST)[0] == 201
        assert refused(address, Resource.UPLOADS) == 1


@pytest.mark.fault("S12")
def test_bodies_are_bounded_by_what_they_announce_for_each_address(tmp_path: Path) -> None:
    with (
        in_process(tmp_path, {SMALL: SMALL_DATA}, held_max={Resource.BODY_BYTES: 4 * MIB}) as address,
        connected(address) as sock,
    ):
        sock.sendall(request("POST", "/v1/read", b"", 3 * MIB))
        until(lambda: under_way(address, Resource.BODY_BYTES) == 3 * MIB)
        assert over_capacity(asked(address, request("POST", "/v1/read", b"", MIB)))
        assert asked(address, read_of(SMALL, 500), HONEST)[0] == 200


# -- whole files ------------------------------------------------------------------------------------------------------


@pytest.mark.fault("S12")
def test_whole_shards_are_sent_to_a_bounded_number_at_once(tmp_path: Path) -> None:
    whole = request("GET", f"/v1/shards/{BIG}")
    with (
        in_process(
            tmp_path, {SMALL: SMALL_DATA, BIG: BIG_DATA}, send_bytes=4096, held_max={Resource.FILES: 4}
        ) as address,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(3):
            stack.enter_context(connected(address, receive_bytes=4096)).sendall(whole)
        until(lambda: under_way(address, Resource.FILES) == 3)
        assert over_capacity(asked(address, whole))
        assert asked(address, request("GET", f"/v1/shards/{SMALL}"), HONEST)[2] == SMALL_DATA


@pytest.mark.fault("S3")
def test_whoever_takes_a_whole_shard_a_little_at_a_time_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender, "SEND_SECONDS_MAX", 0.5)
    with (
        in_process(tmp_path, {BIG: BIG_DATA}, send_bytes=4096) as address,
        connected(address, receive_bytes=4096) as sock,
    ):
        sock.sendall(request("GET", f"/v1/shards/{BIG}"))

        def is_cut_off() -> bool:
            with contextlib.suppress(ConnectionError):
                sock.recv(1_000)
            return "an answer was cut off" in caplog.text

        until(is_cut_off)
        until(lambda: under_way(address, Resource.FILES) == 0)


# -- manifests that nobody has ----------------------------------------------------------------------------------------


@pytest.mark.fault("S12")
def test_made_up_manifests_are_not_looked_for_without_end(tmp_path: Path) -> None:
    sought: list[Digest] = []

    def ask_nobody(node: Node) -> None:
        node.budgets.rates[Cost.LOOKUPS] = RefillRate(0.001, 8)
        node.peers.manifest_holders = lambda digest, domain: iter(sought.append(digest) or ())  # type: ignore[method-assign,func-returns-value]

    with in_process(tmp_path, made=ask_nobody) as address, connected(address) as sock:
        for number in range(30):
            sock.sendall(read_of(SMALL, 1, manifest=Digest.of(b"made up %d" % number)))
            assert answer_of(sock)[2] == bytes([RangeStatus.NO_MANIFEST])
        assert 8 <= len(sought) <= 9
        assert refused(address, Cost.LOOKUPS) == 30 - len(sought)
        before = len(sought)
        honest = read_of(SMALL, 1, manifest=Digest.of(b"of another address"))
        for _ in range(2):
            assert asked(address, honest, HONEST)[2] == bytes([RangeStatus.NO_MANIFEST])
        assert len(sought) == before + 1, "it was looked for once: that nobody has it is remembered"


@pytest.mark.fault("S12")
def test_a_manifest_is_sought_at_a_few_members_of_a_large_ring() -> None:
    own = Member("a", "http://127.0.0.1:9")
    peers = [f"http://127.0.0.1:{port}" for port in range(10, 40)]
    neighbours = RackPeers(StaticRegistry("r", own, peers), "a", own.url)
    with contextlib.closing(neighbours):
        asked_of = [peer.url for peer in neighbours.manifest_holders(Digest.of(b"made up"))]
    assert 1 <= len(asked_of) <= MANIFEST_ASKED_MAX <= 8


# -- connections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent", [b"", b"GET", b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: "], ids=["nothing", "a bit", "half"]
)
@pytest.mark.fault("S3")
def test_a_connection_without_a_whole_head_is_closed_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(listening, "HEAD_SECONDS", 0.4)
    with in_process(tmp_path) as address:
        for earlier in (b"", request("GET", "/healthz")):
            with connected(address) as sock:
                if earlier:
                    sock.sendall(earlier)
                    assert answer_of(sock)[0] == 200
                if not sent and earlier:
                    continue  # that is an idle one
                sock.sendall(sent)
                assert is_closed(sock)
        assert metric(address, 'quiver_connections_closed_total{why="late"}') >= 1
        until(lambda: under_way(address, Resource.ARRIVING) == 0)


@pytest.mark.fault("S3")
def test_a_head_that_drips_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HEAD_SECONDS", 0.4)
    with in_process(tmp_path) as address, connected(address) as sock:
        sock.settimeout(0.05)
        sock.sendall(b"GET /healthz HTTP/1.1\r\nA: ")
        for _ in range(400):
            try:
                sock.sendall(b"x")
                over = not sock.recv(1)
            except TimeoutError:
                continue
            except ConnectionError:
                over = True
            assert over, "it was answered"
            break
        else:
            pytest.fail("it goes on")


@pytest.mark.fault("S3")
def test_an_idle_connection_is_closed_and_one_in_use_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(listening, "IDLE_SECONDS", 0.6)
    with in_process(tmp_path) as address, connected(address) as used, connected(address) as idle:
        idle.sendall(request("GET", "/healthz"))
        assert answer_of(idle)[0] == 200
        idle.setblocking(False)

        def is_over() -> bool:
            used.sendall(request("GET", "/healthz"))
            assert answer_of(used)[0] == 200
            with contextlib.suppress(BlockingIOError):
                return idle.recv(1) == b""
            return False

        until(is_over)


@pytest.mark.fault("S3")
def test_an_answer_that_nobody_takes_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "ANSWER_SECONDS", 0.4)
    with in_process(tmp_path, send_bytes=4096) as address, connected(address, receive_bytes=4096) as sock:
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            for _ in range(2_000):
                sock.send(request("GET", "/metrics") * 10)
        until(lambda: metric(address, 'quiver_connections_closed_total{why="late"}') == 1)
        until(lambda: under_way(address, Resource.CONNECTIONS) == 1)  # the one that asks


@pytest.mark.fault("S3")
def test_connections_that_say_nothing_are_bounded_for_each_address(tmp_path: Path) -> None:
    with in_process(tmp_path, held_max={Resource.ARRIVING: 8}) as address, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(address)) for _ in range(9)]
        assert is_closed(silent[-1])
        assert asked(address, request("GET", "/healthz"), HONEST)[0] == 200
        assert refused(address, Resource.ARRIVING) >= 1
        silent[0].sendall(request("GET", "/healthz"))
        assert answer_of(silent[0])[0] == 200, "those that were let in are served"


@pytest.mark.fault("S3")
def test_the_oldest_idle_connections_of_an_address_make_room_for_its_next(tmp_path: Path) -> None:
    with in_process(tmp_path, held_max={Resource.CONNECTIONS: 16}) as address, contextlib.ExitStack() as stack:
        opened = []
        for _ in range(20):
            sock = stack.enter_context(connected(address))
            sock.sendall(request("GET", "/healthz"))
            assert answer_of(sock)[0] == 200
            opened.append(sock)
        until(lambda: sum(map(closed_by_now, opened[:16])) >= 8)
        for sock in opened[-4:]:
            sock.sendall(request("GET", "/healthz"))
            assert answer_of(sock)[0] == 200
        assert asked(address, request("GET", "/healthz"), HONEST)[0] == 200
        assert metric(address, 'quiver_connections_closed_total{why="room"}') >= 8


@pytest.mark.fault("C6")
def test_a_daemon_without_descriptors_serves_on_and_accepts_again(tmp_path: Path) -> None:
    with Daemon(tmp_path / "data") as daemon, connected(daemon.address, HONEST) as old, contextlib.ExitStack() as stack:
        healthy = request("GET", "/healthz")
        old.sendall(healthy)
        assert answer_of(old)[0] == 200
        assert daemon.process is not None
        pid = daemon.process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        highest = max(int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir())
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 5, limits[1]))
        many = [stack.enter_context(connected(daemon.address)) for _ in range(30)]
        for _ in range(5):
            old.sendall(healthy)
            assert answer_of(old)[0] == 200
        until(lambda: any(map(closed_by_now, many)))
        stack.close()
        until(lambda: asked(daemon.address, healthy)[0] == 200)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert daemon.metric("quiver_overloads_total") >= 1
        assert "Traceback" not in daemon.log


def closed_by_now(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_readers_who_reset_what_they_upgrade_leave_no_traceback(tmp_path: Path) -> None:
    others = [
        read_of(SMALL, 1),
        request("GET", "/v1/ring"),
        request("POST", "/v1/needs", b"QND1", 100),
        request("PUT", f"/v1/shards/{SMALL}", SMALL_DATA[:50], len(SMALL_DATA)),
        request("GET", f"/v1/shards/{SMALL}"),
        b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nnonsense",
        b"\x16\x03\x01\x02\x00",
    ]
    with Daemon(tmp_path / "data") as daemon:
        for data in itertools.chain([UPGRADE] * 20, others * 5):
            with socket.create_connection(daemon.address) as sock:
                sock.settimeout(60)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.sendall(data)
        until(lambda: daemon.metric("quiver_reads_in_flight") == 0)
        assert daemon.stop() == 0
        assert not re.findall("ERROR|Traceback", daemon.log), daemon.log


# -- signals and lines ------------------------------------------------------------------------------------------------


def test_a_hang_up_drains_a_daemon_as_sigterm_does(tmp_path: Path) -> None:
    with Daemon(tmp_path / "data", "--drain-seconds", "0.2") as daemon:
        daemon.signal(signal.SIGHUP)
        assert daemon.wait() == 0
        assert "drains" in daemon.log


def test_a_traceback_does_not_begin_a_line_of_the_log() -> None:
    try:
        raise BadRequest("a\n2026-01-01 00:00:00,000 ERROR quiver: forged\x1b")
    except BadRequest as error:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "failed", (), (type(error), error, error.__traceback__))
    first, *rest = OneLine(FORMAT).format(record).split("\n")
    assert first.endswith("failed")
    assert len(rest) >= 3
    assert all(line.startswith("  ") and line.isprintable() for line in rest)


def test_the_time_for_an_answer_is_longer_than_that_for_a_body() -> None:
    assert requests.ANSWER_SECONDS > requests.BODY_SECONDS_MAX


def test_the_protocol_writes_every_limit_down() -> None:
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text().partition("\n## Limits\n")[2]
    units = {"MiB": MIB, "GiB": 1 << 30}
    for what, most in HELD_MAX.items():
        found = re.search(rf"^\| `{what}` \| ([\d,]+)(?: (MiB|GiB) of)?", text, re.MULTILINE)
        assert found, what
        assert int(found[1].replace(",", "")) * units.get(found[2] or "", 1) == most, what
    for cost, rate in RATES.items():
        found = re.search(rf"^\| `{cost}` [^|]*\| ([\d,]+) \| ([\d,]+) \|", text, re.MULTILINE)
        assert found, cost
        assert [int(number.replace(",", "")) for number in found.groups()] == [rate.per_second, rate.burst], cost


@pytest.mark.fault("S3")
def test_a_reader_that_does_not_take_its_upgrade_is_cut_off_and_is_no_error_of_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Earlier answers fill the buffers of the sockets and leave no room for the head of the 101."""
    monkeypatch.setattr(streams, "BODY_SECONDS_MAX", 0.5)
    with in_process(tmp_path, send_bytes=4096) as address, connected(address, receive_bytes=4096) as sock:
        sock.sendall(request("GET", "/metrics") * 8 + UPGRADE)
        until(lambda: under_way(address, Resource.STREAMS) == 1)
        until(lambda: under_way(address, Resource.STREAMS) == 0)
        assert is_closed(sock)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.fault("S12")
def test_what_is_sent_ahead_of_an_answer_counts_as_held(tmp_path: Path) -> None:
    """Thousands of readers may take their answers slowly."""
    body = read_of(BIG, len(BIG_DATA)).partition(b"\r\n\r\n")[2]
    with (
        in_process(tmp_path, {BIG: BIG_DATA}, send_bytes=4096, held_max={Resource.BODY_BYTES: 100_000}) as address,
        connected(address, receive_bytes=4096) as sock,
        connected(address, receive_bytes=4096) as other,
    ):
        for each, ahead in ((sock, 30_000), (other, 55_000)):
            each.sendall(UPGRADE)
            assert each.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 101"
            while not each.recv(1 << 10).endswith(b"\r\n\r\n"):
                pass
            each.sendall(struct.pack("<I", len(body)) + body + bytes(ahead))
        until(lambda: under_way(address, Resource.BODY_BYTES) == len(body) + 30_000)
        until(lambda: refused(address, Resource.BODY_BYTES) == 1)
        assert is_closed(other)
        sock.close()
        until(lambda: under_way(address, Resource.BODY_BYTES) == 0)
