"""What a training loop sees when things go wrong: exact epochs, never a wrong byte, and no stall without an end."""

from __future__ import annotations

import itertools
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.digest import Digest
from quiver.errors import Changed, Unavailable
from quiver.transport.liveness import Patience
from quiver.wire import RangeStatus, ReadRequest
from quiver_client import Dataset
from quiver_client.rack import members as members_module
from quiver_client.rack import tier as rack_module
from tests.support.daemon import Daemon, rack_of
from tests.support.data import Files, make_files, random_files, rebased, shard_bytes_of
from tests.support.etcd import free_ports
from tests.support.servers import HostileServer, counting_origin, ok
from tests.support.waiting import until

Make = Callable[..., Dataset]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Of so many shards that a daemon without any, at ports that chance gave, is out of the question."""
    return make_files(tmp_path_factory.mktemp("small"), random_files(60, seed=1), shard_bytes="64KiB")


@pytest.fixture
def own_rack(small: Files, tmp_path: Path) -> Iterator[list[Daemon]]:
    """Three daemons to be killed."""
    with rack_of(3, tmp_path / "rack", origins=[small.folder]) as daemons:
        yield daemons


def epoch(made: Dataset, files: Files, at_batch: Callable[[int], None] = lambda batch: None) -> float:
    """Read every sample once in random order, compare, and return the longest that a batch took, in seconds."""
    order = np.random.default_rng(3).permutation(len(made)).tolist()
    seen: list[str] = []
    slowest = 0.0
    for batch, at in enumerate(range(0, len(order), 8)):
        at_batch(batch)
        begun = time.monotonic()
        for sample in made.__getitems__(order[at : at + 8]):
            assert sample["image"] == files.content[sample["__key__"]]
            seen.append(sample["__key__"])
        slowest = max(slowest, time.monotonic() - begun)
    assert sorted(seen) == sorted(files.content)
    return slowest


FIELDS = ["image", "__key__"]


@pytest.mark.fault("M1")
def test_a_daemon_killed_in_an_epoch_costs_no_sample_and_no_error(
    dataset: Make, small: Files, own_rack: list[Daemon]
) -> None:
    made = dataset(small.manifest, own_rack[0].url, fields=FIELDS)
    slowest = epoch(made, small, lambda batch: own_rack[0].kill() if batch == 3 else None)
    assert slowest < 8
    epoch(made, small)
    stats = made.stats()
    assert stats["fallbacks"] > 0, "the fault really fired"
    assert stats["samples_rack"] + stats["samples_origin"] == 120
    assert stats["samples_rack"] > 60


@pytest.mark.fault("M2")
def test_when_all_daemons_die_the_epoch_ends_from_the_origin(
    dataset: Make, small: Files, own_rack: list[Daemon], caplog: pytest.LogCaptureFixture
) -> None:
    made = dataset(small.manifest, own_rack[0].url, fields=FIELDS)

    def kill(batch: int) -> None:
        if batch == 3:
            for daemon in own_rack:
                daemon.kill()

    assert epoch(made, small, kill) < 8
    epoch(made, small)
    assert made.stats()["samples_origin"] >= 60
    assert 0 < len(caplog.records) < 12, "a dead rack must not flood a log"


@pytest.mark.fault("M1")
def test_a_frozen_daemon_costs_one_bounded_stall(
    dataset: Make, small: Files, own_rack: list[Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = dataset(small.manifest, own_rack[0].url, fields=FIELDS)
    epoch(made, small)
    begun = time.monotonic()
    slowest = epoch(made, small, lambda batch: own_rack[1].signal(signal.SIGSTOP) if batch == 2 else None)
    assert slowest < 2, "this client's patience, and once that of the daemon that asks the frozen one for a shard"
    assert time.monotonic() - begun < 6, "one stall, and not one a batch"
    assert made.stats()["fallbacks"] > 0
    tier: Any = made._open().tiers[1]
    until(lambda: tier._members.is_unresponsive(own_rack[1].url))
    asked, race = list[str](), tier._hedges.race

    def counted(batch: Any, late: Any, *rest: Any, **more: Any) -> Any:
        asked.append(late.peer.url)
        return race(batch, late, *rest, **more)

    monkeypatch.setattr(tier._hedges, "race", counted)
    epoch(made, small)
    assert asked
    assert own_rack[1].url not in asked, "hedges would hide that it is asked for every batch"
    own_rack[1].signal(signal.SIGCONT)


# -- daemons that lie -------------------------------------------------------------------------------------------------


class Fake:
    """A daemon in disguise: says of the ring what it is told, takes manifests, and answers reads as it likes."""

    def __init__(self, files: Files, reads: Callable[[Fake, ReadRequest, socket.socket], None]) -> None:
        self.members: list[Any] = []
        self.reads = reads
        self.read_count = 0
        manifest = files.opened()
        self.shards = dict(shard_bytes_of(manifest, number) for number in range(manifest.shard_count))
        self.server = HostileServer(self._answer)
        self.members = [{"id": "fake", "url": self.server.url, "weight": 2**40}]

    @property
    def url(self) -> str:
        return self.server.url

    def honest(self, request: ReadRequest) -> tuple[bytes, bytes]:
        body = b""
        for asked in request.ranges:
            shard = self.shards[request.shards[int(asked["shard"])]]
            body += shard[int(asked["offset"]) : int(asked["offset"]) + int(asked["length"])]
        return bytes([RangeStatus.PRESENT]) * len(request.ranges), body

    def _answer(self, connection: socket.socket, raw: bytes) -> None:
        head, _, body = raw.partition(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n")[0].split(b" ")
        if path == b"/v1/ring":
            view = {"rack": "default", "replicas": 1, "members": self.members}
            connection.sendall(ok(json.dumps(view).encode()))
        elif path == b"/v1/read":
            self.read_count += 1
            self.reads(self, ReadRequest.decode(body), connection)
        elif method == b"HEAD":
            connection.sendall(ok(b"", length=1))
        else:
            connection.sendall(ok(b""))


def _flipped(fake: Fake, request: ReadRequest, connection: socket.socket) -> None:
    statuses, body = fake.honest(request)
    connection.sendall(ok(statuses + bytes([body[0] ^ 1]) + body[1:]))


def _all_wrong(fake: Fake, request: ReadRequest, connection: socket.socket) -> None:
    statuses, body = fake.honest(request)
    connection.sendall(ok(statuses + b"\xaa" * len(body)))


def _short(fake: Fake, request: ReadRequest, connection: socket.socket) -> None:
    statuses, body = fake.honest(request)
    connection.sendall(ok(statuses + body[:-5]))


def _long(fake: Fake, request: ReadRequest, connection: socket.socket) -> None:
    statuses, body = fake.honest(request)
    connection.sendall(ok(statuses + body + b"more"))


def _dies(fake: Fake, request: ReadRequest, connection: socket.socket) -> None:
    statuses, body = fake.honest(request)
    connection.sendall(ok(statuses + body[:100], length=len(statuses) + len(body)))
    connection.shutdown(socket.SHUT_RDWR)


def _resets(fake: Fake, request: ReadRequest, connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def _garbage(fake: Fake, request: ReadRequest, connection: socket.socket) -> None:
    connection.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")


def _statuses(fake: Fake, request: ReadRequest, connection: socket.socket) -> None:
    connection.sendall(ok(bytes([77]) * len(request.ranges)))


def _error(fake: Fake, request: ReadRequest, connection: socket.socket) -> None:
    connection.sendall(ok(b"<html>", status="500 Internal Server Error"))


def _overloaded(fake: Fake, request: ReadRequest, connection: socket.socket) -> None:
    body = b'{"error": "over_capacity", "message": "busy"}'
    connection.sendall(ok(body, "Retry-After: 0", status="503 Service Unavailable"))


def _filling(fake: Fake, request: ReadRequest, connection: socket.socket) -> None:
    connection.sendall(ok(bytes([RangeStatus.FILLING]) * len(request.ranges)))


def _no_manifest(fake: Fake, request: ReadRequest, connection: socket.socket) -> None:
    connection.sendall(ok(bytes([RangeStatus.NO_MANIFEST]) * len(request.ranges)))


def _silent(fake: Fake, request: ReadRequest, connection: socket.socket) -> None:
    fake.server.gone.wait(30)


def _drips(fake: Fake, request: ReadRequest, connection: socket.socket) -> None:
    statuses, body = fake.honest(request)
    for at, byte in enumerate(ok(statuses + body)):
        connection.sendall(bytes([byte]))
        if fake.server.gone.wait(0.05 if at > 200 else 0):
            return


def _drips_in_the_head(fake: Fake, request: ReadRequest, connection: socket.socket) -> None:
    for _ in range(10_000):
        connection.sendall(b"H")
        if fake.server.gone.wait(0.05):
            return


LIES = [
    *(_flipped, _all_wrong, _short, _long, _dies, _resets, _garbage, _statuses, _error),
    *(_overloaded, _filling, _no_manifest, _silent, _drips, _drips_in_the_head),
]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits that are seconds in life, cut down so that tests meet their ends."""
    monkeypatch.setattr(members_module, "IN_RACK", Patience(silence_seconds=0.4))
    monkeypatch.setattr(rack_module, "WAIT_MS", 100)
    monkeypatch.setattr(rack_module, "FILL_SECONDS_MAX", 1.0)


@pytest.mark.fault("N1")
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__.strip("_"))
def test_a_daemon_that_lies_delivers_no_wrong_byte_and_stalls_no_epoch(
    dataset: Make, small: Files, impatient: None, lie: Any
) -> None:
    fake = Fake(small, lie)
    with fake.server:
        made = dataset(small.manifest, fake.url, fields=FIELDS)
        begun = time.monotonic()
        epoch(made, small)
        assert time.monotonic() - begun < 10
        assert fake.read_count > 0
        assert fake.read_count < 200, "nobody is asked in a frenzy"
        stats = made.stats()
        assert stats["samples_origin"] > 0
        if lie in (_flipped, _all_wrong):
            assert stats["corruptions"] > 0
        made.close()


@pytest.mark.fault("N1")
def test_wrong_bytes_are_delivered_by_none_even_if_only_one_sample_is_wrong(
    dataset: Make, small: Files, impatient: None
) -> None:
    """A liar that tells the truth mostly: the one wrong sample is fetched again, the others are kept."""

    def mostly(fake: Fake, request: ReadRequest, connection: socket.socket) -> None:
        statuses, body = fake.honest(request)
        if fake.read_count % 2:
            body = body[:-1] + bytes([body[-1] ^ 255])
        connection.sendall(ok(statuses + body))

    fake = Fake(small, mostly)
    with fake.server:
        made = dataset(small.manifest, fake.url, fields=FIELDS)
        epoch(made, small)
        stats = made.stats()
        assert stats["corruptions"] > 0
        assert stats["samples_rack"] > 20, "what was right is kept, until it is wrong again and again"
        made.close()


def test_a_shard_that_does_not_come_is_left_to_the_origin_however_many_others_come(
    dataset: Make, tmp_path: Path, impatient: None
) -> None:
    files = make_files(tmp_path, random_files(40, seed=5, low=1000, high=1500), shard_bytes="24KiB")
    stuck = files.opened().shard_digest(0)
    asked: list[float] = []

    def one_by_one(fake: Fake, request: ReadRequest, connection: socket.socket) -> None:
        fake.server.gone.wait(0.15)
        left = [request.shards[number] != stuck for number in request.ranges["shard"].tolist()]
        asked.extend([time.monotonic()] * (stuck in request.shards))
        _, body = fake.honest(ReadRequest(None, request.shards, request.ranges[left][:1], 0))
        told = np.full(len(left), RangeStatus.FILLING, np.uint8)
        told[left.index(True) if True in left else len(left) :][:1] = RangeStatus.PRESENT
        connection.sendall(ok(told.tobytes() + body))

    fake = Fake(files, one_by_one)
    with fake.server:
        made = dataset(files.manifest, fake.url, fields=FIELDS)
        begun = time.monotonic()
        assert len(made.__getitems__(list(range(40)))) == 40
        assert time.monotonic() - begun > 2.0
        assert asked[-1] - asked[0] < 1.5
        assert made.stats()["samples_origin"] > 0
        made.close()


JUNK: dict[str, Callable[[str], list[Any]]] = {
    "no members": lambda url: [],
    "junk": lambda url: [None, 7, "x", {}, {"id": "a"}, {"id": 5, "url": []}, {"id": "b", "url": url, "weight": "?"}],
    "odd URLs": lambda url: [
        {"id": f"n{at}", "url": odd}
        for at, odd in enumerate(
            ["", "file:///etc/passwd", "http://", "http://a:0", "http://[", "gopher://x", "http://x/../y"]
        )
    ],
    "many dead": lambda url: [{"id": f"n{at}", "url": "http://127.0.0.1:9"} for at in range(1000)],
    "ten thousand": lambda url: [{"id": f"n{at}", "url": f"http://127.0.0.1:{1 + at % 1000}"} for at in range(10_000)],
    "one id twice": lambda url: [{"id": "n", "url": "http://127.0.0.1:9"}, {"id": "n", "url": url}],
    "weights": lambda url: [{"id": "n", "url": url, "weight": w} for w in (0, -1, 1e300, 1e-300)],
    "itself and the dead": lambda url: [{"id": "a", "url": url}, {"id": "b", "url": "http://127.0.0.1:9"}],
}


@pytest.mark.fault("M5", "M7")
@pytest.mark.parametrize("what", JUNK)
def test_no_ring_can_break_an_epoch(dataset: Make, small: Files, impatient: None, what: str) -> None:
    def honest(fake: Fake, request: ReadRequest, connection: socket.socket) -> None:
        statuses, body = fake.honest(request)
        connection.sendall(ok(statuses + body))

    fake = Fake(small, honest)
    with fake.server:
        made = dataset(small.manifest, fake.url, fields=FIELDS)
        fake.members = JUNK[what](fake.url)
        made.close()
        made._session = None  # a worker's: it meets the ring without being introduced
        begun = time.monotonic()
        epoch(made, small)
        assert time.monotonic() - begun < 12
        made.close()


@pytest.mark.fault("M7")
@pytest.mark.usefixtures("patient_reads")
def test_a_ring_that_is_no_ring_is_survived(dataset: Make, small: Files, own_rack: list[Daemon]) -> None:
    def answer(connection: socket.socket, raw: bytes) -> None:
        connection.sendall(ok(b'{"rack": 5}'))

    with HostileServer(answer) as server:
        made = dataset(small.manifest, f"{server.url},{own_rack[0].url}", fields=FIELDS)
        epoch(made, small)
        assert made.stats()["samples_rack"] == 60
        with pytest.raises(Unavailable):
            Dataset(small.manifest, server.url)


# -- the origin -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Daemon]]:
    """A daemon that may read what tests make, and one that may not."""
    where = tmp_path_factory.mktemp("daemons")
    with Daemon(where / "a", origins=[tmp_path_factory.getbasetemp()]) as may, Daemon(where / "b") as may_not:
        yield {"rack": may, "rack that may not read it": may_not}


_seeds = itertools.count(1000)


@pytest.fixture(params=["embedded", "rack", "rack that may not read it"])
def fragile(request: pytest.FixtureRequest, tmp_path: Path, daemons: dict[str, Daemon]) -> tuple[Files, str]:
    """A dataset of one's own, to be damaged, and a cache that has nothing of it."""
    files = make_files(tmp_path, random_files(40, seed=next(_seeds)))
    daemon = daemons.get(request.param)
    return files, daemon.url if daemon else f"file://{tmp_path}/cache"


@pytest.mark.fault("O4")
@pytest.mark.parametrize("how", ["changed", "vanished", "shorter", "a folder"])
def test_what_the_origin_lost_is_named_and_its_neighbours_are_read(
    dataset: Make, fragile: tuple[Files, str], how: str
) -> None:
    files, cache = fragile
    made = dataset(files.manifest, cache, fields=FIELDS)
    manifest = made.manifest
    keys = [manifest.key(index) for index in range(len(made))]
    largest = max(range(manifest.shard_count), key=lambda number: len(manifest.shard_blobs(number)))
    neighbours = [i for i in range(len(made)) if int(manifest.tables.blob_of[i]) in manifest.shard_blobs(largest)]
    lost, *others = neighbours
    assert others
    path = files.folder / keys[lost]
    data = path.read_bytes()
    match how:
        case "changed":
            path.write_bytes(bytes(len(data)))
        case "vanished":
            path.unlink()
        case "shorter":
            path.write_bytes(data[:-1])
        case "a folder":
            path.unlink()
            path.mkdir()
    begun = time.monotonic()
    with pytest.raises(Changed) as caught:
        made[lost]
    assert time.monotonic() - begun < 10
    assert keys[lost] in str(caught.value)
    assert caught.value.keys == (keys[lost],)
    assert str(path) in str(caught.value)
    assert "quiver index" in str(caught.value)
    with pytest.raises(Changed, match=re.escape(keys[lost])):
        made.__getitems__([*others, lost])
    for sample in made.__getitems__(others):
        assert sample["image"] == files.content[sample["__key__"]]
    if how != "a folder":
        path.write_bytes(data)
        assert made[lost]["image"] == data, "and when it is back it is read"


@pytest.mark.fault("O5")
def test_an_origin_that_is_down_is_said_and_what_is_cached_trains_on(
    dataset: Make, small: Files, tmp_path: Path
) -> None:
    with counting_origin(small.folder) as origin:
        files = rebased(small, origin.url, tmp_path / "remote.quiver")
        made = dataset(files.manifest, f"file://{tmp_path}/cache", fields=FIELDS)
        known = made[0]["__key__"]
        origin.status = 404
        assert made[0]["__key__"] == known
        shard = int(made.manifest.tables.blob_of[0])
        rows = next(
            made.manifest.shard_blobs(n)
            for n in range(made.manifest.shard_count)
            if shard in made.manifest.shard_blobs(n)
        )
        absent = next(i for i in range(len(made)) if int(made.manifest.tables.blob_of[i]) not in rows)
        with pytest.raises(Changed, match=f"{re.escape(origin.url)}.*vanished"):
            made[absent]
        origin.status = None
        epoch(made, small)
        made.close()


@pytest.mark.fault("C4")
def test_a_disk_that_fails_leaves_the_epoch_exact(
    dataset: Make, small: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = dataset(small.manifest, f"file://{tmp_path}/cache", fields=FIELDS)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    epoch(made, small)
    assert made.stats()["samples_origin"] == 60
    assert "disk is full" in caplog.text


@pytest.mark.fault("C2")
def test_wrong_bytes_in_an_embedded_cache_are_found_and_mended(dataset: Make, small: Files, tmp_path: Path) -> None:
    cache = f"file://{tmp_path}/cache"
    first = dataset(small.manifest, cache, fields=FIELDS)
    epoch(first, small)
    first.close()
    shards = sorted(path for path in (tmp_path / "cache" / "shards").rglob("*") if path.is_file())
    for path in shards[:-1]:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 3] ^= 1
        path.write_bytes(raw)
    shards[-1].write_bytes(shards[-1].read_bytes()[:-100])
    made = dataset(small.manifest, cache, fields=FIELDS)
    epoch(made, small)
    stats = made.stats()
    assert stats["corruptions"] >= len(shards)
    assert stats["samples_origin"] == 0
    assert stats["fills"] == len(shards)
    assert all(Digest.parse(path.name) for path in shards)


@pytest.mark.usefixtures("patient_reads")
def test_a_seed_that_is_dead_is_passed_over_for_the_next(dataset: Make, small: Files, own_rack: list[Daemon]) -> None:
    (port,) = free_ports(1)
    made = dataset(small.manifest, f"http://127.0.0.1:{port},{own_rack[2].url}", fields=FIELDS)
    epoch(made, small)
    assert made.stats()["samples_rack"] == 60


@pytest.mark.fault("M1")
def test_readers_in_threads_survive_a_death_together(dataset: Make, small: Files, own_rack: list[Daemon]) -> None:
    made = dataset(small.manifest, own_rack[0].url, fields=FIELDS)
    failures: list[BaseException] = []
    started = threading.Barrier(5)

    def work() -> None:
        try:
            started.wait()
            for _ in range(4):
                epoch(made, small)
        except BaseException as error:  # noqa: BLE001  told to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    own_rack[2].kill()
    for thread in threads:
        thread.join()
    assert not failures
    assert made.stats()["samples"] == 4 * 4 * 60
