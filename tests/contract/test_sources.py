"""One suite for whoever may have a shard: memory, disk, a daemon, a server that does as it likes, and every origin.

Each source is made good, or broken in one way. Through ``first_verified`` a broken one never yields wrong bytes: the
next source is asked, and the broken one is blamed unless it just does not have the shard.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quiver.digest import Digest
from quiver.errors import Changed, Corrupt, NotFound, QuiverError, Unavailable
from quiver.fill import OriginShards
from quiver.manifest import Manifest
from quiver.origin import open_origin
from quiver.origin.origin_process import ProcessStore
from quiver.origin.remote import RemoteStore
from quiver.peer import PeerClient
from quiver.shard import verified
from quiver.shard_memory import ShardMemory
from quiver.source import MemorySource, ShardSource, first_verified
from quiver.store import Kind, Store
from quiver.store.inventory import file_of
from quiver.transport.liveness import Patience
from quiver_client import index
from tests.support.daemon import Daemon
from tests.support.data import Files, make_files, make_shard, random_files, rebased, shard_bytes_of
from tests.support.servers import HostileServer, counting_origin, ok

SAMPLES = [b"first sample" * 40, b"", b"third sample" * 400]
DIGEST, DATA = make_shard(SAMPLES)
SIZE = len(DATA)


@dataclass
class Case:
    """A source, the shard asked of it, and what it should be."""

    source: ShardSource
    digest: Digest = DIGEST
    data: bytes = DATA


def damaged(data: bytes, how: str) -> bytes:
    match how:
        case "good":
            return data
        case "flipped bit":
            return data[:5] + bytes([data[5] ^ 1]) + data[6:]
        case "flipped bit in the table":
            return data[:-20] + bytes([data[-20] ^ 4]) + data[-19:]
        case "short":
            return data[:-3]
        case "long":
            return data + b"xyz"
        case "empty":
            return b""
        case "garbage":
            return np.random.default_rng(0).bytes(len(data))
    raise AssertionError(how)


WRONG = ("flipped bit", "flipped bit in the table", "short", "long", "empty", "garbage")


# -- the sources ------------------------------------------------------------------------------------------------------


def memory(stack: ExitStack, where: Path, how: str) -> Case:
    return Case(MemorySource({} if how == "absent" else {DIGEST: damaged(DATA, how)}))


def disk(stack: ExitStack, where: Path, how: str, shared: bool = False) -> Case:
    store = stack.enter_context(contextlib.closing(Store.open(where, 1 << 20, shared=shared)))
    if how != "absent":
        store.put(Kind.SHARD, DIGEST, DATA)
        file_of(where, Kind.SHARD, DIGEST).write_bytes(damaged(DATA, how))
    return Case(store)


def shared_disk(stack: ExitStack, where: Path, how: str) -> Case:
    return disk(stack, where, how, shared=True)


def served(stack: ExitStack, answer: Callable[[socket.socket, bytes], None]) -> Case:
    server = stack.enter_context(HostileServer(answer))
    return Case(stack.enter_context(contextlib.closing(PeerClient(server.url, patience=Patience(silence_seconds=0.4)))))


def server(stack: ExitStack, where: Path, how: str) -> Case:
    if how == "absent":
        return served(stack, lambda connection, _: connection.sendall(ok(b"{}", status="404 Not Found")))
    return served(stack, lambda connection, _: connection.sendall(ok(damaged(DATA, how))))


SIMPLE: dict[str, Callable[[ExitStack, Path, str], Case]] = {
    "memory": memory,
    "disk": disk,
    "shared disk": shared_disk,
    "server": server,
}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as entered:
        yield entered


# -- the suite --------------------------------------------------------------------------------------------------------


def assert_good(case: Case) -> None:
    assert bytes(case.source.load(case.digest, len(case.data))) == case.data
    shard, source = first_verified([case.source], case.digest, len(case.data))
    assert (bytes(shard.data), source) == (case.data, case.source)
    assert case.source.name


def assert_absent(case: Case) -> None:
    blamed: list[ShardSource] = []
    with pytest.raises(NotFound):
        case.source.load(case.digest, len(case.data))
    with pytest.raises(NotFound):
        first_verified([case.source], case.digest, len(case.data), lambda source, _: blamed.append(source))
    assert not blamed, "not to have a shard is no fault"


def assert_refused(case: Case, *kinds: type[QuiverError]) -> QuiverError:
    """Whatever the source says, no wrong byte comes of it, it is blamed, and the next source is asked."""
    with pytest.raises(kinds) as caught:
        verified(case.digest, case.source.load(case.digest, len(case.data)), case.source.name)
    blamed: list[tuple[ShardSource, QuiverError]] = []
    good = MemorySource({case.digest: case.data}, "good")
    shard, source = first_verified([case.source, good], case.digest, len(case.data), lambda *told: blamed.append(told))
    assert (bytes(shard.data), source) == (case.data, good)
    # A disk quarantines what was found the first time: the second time it just has not got it.
    assert [told[0] for told in blamed] == [case.source] or isinstance(case.source, Store)
    return caught.value


@pytest.mark.parametrize("make", SIMPLE.values(), ids=list(SIMPLE))
class TestEverySource:
    def test_delivers_what_it_has(self, stack: ExitStack, tmp_path: Path, make: Any) -> None:
        assert_good(make(stack, tmp_path, "good"))

    def test_says_what_it_has_not(self, stack: ExitStack, tmp_path: Path, make: Any) -> None:
        assert_absent(make(stack, tmp_path, "absent"))

    @pytest.mark.parametrize("how", WRONG)
    def test_yields_no_wrong_byte(self, stack: ExitStack, tmp_path: Path, make: Any, how: str) -> None:
        error = assert_refused(make(stack, tmp_path, how), Corrupt)
        assert isinstance(error, Corrupt)
        assert error.source

    @pytest.mark.parametrize("how", WRONG)
    def test_blames_when_alone(self, stack: ExitStack, tmp_path: Path, make: Any, how: str) -> None:
        case = make(stack, tmp_path, how)
        blamed: list[ShardSource] = []
        with pytest.raises(Corrupt):
            first_verified([case.source], case.digest, SIZE, lambda source, _: blamed.append(source))
        assert blamed == [case.source]


def test_a_disk_that_was_wrong_is_not_asked_again(stack: ExitStack, tmp_path: Path) -> None:
    case = disk(stack, tmp_path, "flipped bit")
    with pytest.raises(Corrupt):
        first_verified([case.source], DIGEST, SIZE)
    assert_absent(case)


# -- peers ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("contract") / "data") as running:
        yield running


def test_a_real_daemon_is_a_source(daemon: Daemon) -> None:
    with contextlib.closing(PeerClient(daemon.url)) as peer:
        assert_absent(Case(peer))
        before = daemon.status()["resident_bytes"]
        for how in WRONG[:4]:
            with pytest.raises(Corrupt):
                peer.put_shard(DIGEST, damaged(DATA, how))
        assert_absent(Case(peer))
        assert daemon.status()["resident_bytes"] == before
        assert not list((daemon.data_dir / "tmp").iterdir())
        peer.put_shard(DIGEST, DATA)
        assert peer.has_shard(DIGEST)
        assert_good(Case(peer))
        file_of(daemon.data_dir, Kind.SHARD, DIGEST).write_bytes(damaged(DATA, "flipped bit"))
        assert_refused(Case(peer), Corrupt)


def chunked(connection: socket.socket, _: bytes) -> None:
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (DATA[:100], DATA[100:])) + b"0\r\n\r\n"
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)


def no_length(connection: socket.socket, _: bytes) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + DATA)
    connection.shutdown(socket.SHUT_WR)


def dies_midway(connection: socket.socket, _: bytes) -> None:
    connection.sendall(ok(DATA[: SIZE // 2], length=SIZE))
    connection.shutdown(socket.SHUT_RDWR)


def drips(connection: socket.socket, _: bytes) -> None:
    connection.sendall(ok(b"", length=SIZE))
    for byte in DATA:
        connection.sendall(bytes([byte]))
        if stopped(connection, 0.05):
            return


def drips_its_head(connection: socket.socket, _: bytes) -> None:
    for byte in ok(DATA):
        connection.sendall(bytes([byte]))
        if stopped(connection, 0.05):
            return


def stopped(connection: socket.socket, seconds: float) -> bool:
    """Whether the other side has closed within this time."""
    connection.settimeout(seconds)
    try:
        return not connection.recv(1)
    except TimeoutError:
        return False


def says_nothing(connection: socket.socket, _: bytes) -> None:
    stopped(connection, 5)


def told(*headers: str, status: str = "200 OK", body: bytes = DATA) -> Callable[[socket.socket, bytes], None]:
    return lambda connection, _: connection.sendall(ok(body, *headers, status=status))


def raw(answer: bytes) -> Callable[[socket.socket, bytes], None]:
    def send(connection: socket.socket, _: bytes) -> None:
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)

    return send


HOSTILE: dict[str, Callable[[socket.socket, bytes], None]] = {
    "redirect": told("Location: http://127.0.0.1:9/", status="302 Found"),
    "redirect for ever": told("Location: /v1/shards/" + "0" * 64, status="308 Permanent Redirect"),
    "content encoding": told("Content-Encoding: gzip"),
    "chunked": chunked,
    "unknown length": no_length,
    "absurd length": lambda connection, _: connection.sendall(ok(DATA, length=10**15)),
    "negative length": lambda connection, _: connection.sendall(ok(DATA, length=-5)),
    "length that is none": raw(b"HTTP/1.1 200 OK\r\nContent-Length: lots\r\n\r\n" + DATA),
    "length too long": raw(ok(DATA[:-1], length=SIZE)),
    "dies midway": dies_midway,
    "drips": drips,
    "drips its head": drips_its_head,
    "says nothing": says_nothing,
    "no HTTP": raw(b"220 mail.example.org ESMTP\r\n"),
    "nothing": raw(b""),
    "endless head": lambda connection, _: connection.sendall(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 100_000),
    "long header": lambda connection, _: connection.sendall(b"HTTP/1.1 200 OK\r\nA: " + b"b" * (1 << 20)),
    "continue for ever": raw(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "error": told(status="500 Internal Server Error", body=b"<html>"),
    "forbidden": told(status="403 Forbidden", body=b'{"error": "forbidden", "message": "no"}'),
    "overloaded": told(status="503 Busy", body=b'{"error": "over_capacity", "message": "no"}'),
    "misconfigured": told(status="400 Bad", body=b'{"error": "misconfigured", "message": "no"}'),
    "odd error": told(status="418 Teapot", body=b'{"error": 5}'),
    "partial content": told("Content-Range: bytes 0-1/2", status="206 Partial Content"),
}


@pytest.mark.fault("N1", "N3")
@pytest.mark.parametrize("answer", HOSTILE.values(), ids=list(HOSTILE))
def test_a_peer_that_breaks_the_protocol_is_passed_over(
    stack: ExitStack, answer: Callable[[socket.socket, bytes], None]
) -> None:
    assert_refused(served(stack, answer), QuiverError)


def test_a_peer_that_is_not_there_is_unavailable_and_says_where() -> None:
    with contextlib.closing(PeerClient("http://127.0.0.1:9")) as peer:
        error = assert_refused(Case(peer), Unavailable)
    assert "http://127.0.0.1:9" in str(error)
    assert "running" in str(error)


@pytest.mark.fault("N1")
def test_what_follows_an_answer_does_not_become_the_next_one(stack: ExitStack) -> None:
    """Garbage behind a body is dropped with its connection, or the next request is asked on a new one."""
    case = served(stack, lambda connection, _: connection.sendall(ok(DATA) + ok(damaged(DATA, "garbage"))))
    for _ in range(3):
        with contextlib.suppress(Unavailable):
            data = case.source.load(DIGEST, SIZE)
            with contextlib.suppress(Corrupt):
                assert bytes(verified(DIGEST, data, "peer").data) == DATA


def test_a_connection_that_was_closed_for_idleness_is_no_fault(stack: ExitStack) -> None:
    def once(connection: socket.socket, _: bytes) -> None:
        connection.sendall(ok(DATA))
        connection.shutdown(socket.SHUT_RDWR)

    case = served(stack, once)
    for _ in range(3):
        assert_good(case)


# -- origins ----------------------------------------------------------------------------------------------------------


def parquet_files(where: Path) -> tuple[Path, Path]:
    """Write a Parquet file of images; return it and its manifest."""
    rng = np.random.default_rng(2)
    table = pa.table({"image": [rng.bytes(900) for _ in range(60)], "label": list(range(60))})
    (where / "data").mkdir()
    pq.write_table(table, where / "data" / "images.parquet", row_group_size=25)
    index(where / "data", where / "m.quiver", shard_bytes="16KiB")
    return where / "data" / "images.parquet", where / "m.quiver"


ORIGINS = ("local", "http", "isolated", "parquet")


@dataclass
class Origin:
    """A manifest whose shard 1 is asked for, the file in which its bytes lie, and the source that reads them."""

    manifest: Manifest
    source: OriginShards
    path: Path
    digest: Digest
    data: bytes
    sample: str

    def case(self) -> Case:
        return Case(self.source, self.digest, self.data)


@pytest.fixture(params=ORIGINS)
def origin(request: pytest.FixtureRequest, stack: ExitStack, tmp_path: Path) -> Origin:
    files: Files | None = None
    if request.param == "parquet":
        path, at = parquet_files(tmp_path)
    else:
        files = make_files(tmp_path, random_files(30), shard_bytes="64KiB")
        at = files.manifest
        if request.param != "local":
            server_ = stack.enter_context(counting_origin(files.folder))
            at = rebased(files, server_.url, tmp_path / "remote.quiver").manifest
    manifest = Manifest.open(at)
    samples = stack.enter_context(contextlib.closing(open_origin(manifest, may_fork=request.param == "isolated")))
    kind = {"http": RemoteStore, "isolated": ProcessStore}.get(request.param)
    assert kind is None or isinstance(samples._inner._store, kind)  # type: ignore[attr-defined]
    digest, data = shard_bytes_of(Manifest.open(files.manifest) if files else manifest, 1)
    blob = manifest.shard_blobs(1)[0]
    sample = manifest.keys_of_blobs(np.array([blob]))[0]
    found = files.folder / sample if files else path
    return Origin(manifest, OriginShards(manifest, samples, used_memory().take), found, digest, data, sample)


def used_memory() -> ShardMemory:
    """Return memory that was in use before: what is read must not depend on what was there."""
    memory = ShardMemory(1, 1 << 20)
    memory.take(1 << 20)[:] = np.random.default_rng(2).bytes(1 << 20)
    return memory


def test_an_origin_rebuilds_its_shards(origin: Origin) -> None:
    for number in range(origin.manifest.shard_count):
        digest = origin.manifest.shard_digest(number)
        size = int(origin.manifest.tables.shard_sizes[number])
        shard, _ = first_verified([origin.source], digest, size)
        assert len(shard.data) == size
    assert_good(origin.case())


def test_shards_filled_at_once_in_few_pieces_of_memory_are_those_filled_one_by_one(origin: Origin) -> None:
    manifest, memory = origin.manifest, ShardMemory(2, 96 << 10)
    sizes = manifest.tables.shard_sizes.tolist()
    plain = [bytes(origin.source.load(manifest.shard_digest(number), size)) for number, size in enumerate(sizes)]
    source = OriginShards(manifest, origin.source._origin, memory.take)

    def filled(number: int) -> bytes:
        shard, _ = first_verified([source], manifest.shard_digest(number), sizes[number])
        return bytes(shard.data)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(filled, [*range(len(sizes))] * 3)) == plain * 3
    assert 0 < memory.idle_bytes <= 2 * (96 << 10)


def test_an_origin_does_not_know_shards_of_others(origin: Origin) -> None:
    assert_absent(Case(origin.source, DIGEST, DATA))


def flip(path: Path) -> None:
    """Change bytes all over a file but at its ends, and not its length."""
    raw_ = bytearray(path.read_bytes())
    for at in range(100, len(raw_) - min(2000, len(raw_) // 3), 97):
        raw_[at] ^= 0x55
    path.write_bytes(raw_)


CHANGES: dict[str, Callable[[Path], Any]] = {
    "changed": flip,
    "shorter": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "garbage": lambda path: path.write_bytes(np.random.default_rng(1).bytes(path.stat().st_size)),
}


@pytest.mark.fault("O4")
@pytest.mark.parametrize("how", CHANGES)
def test_an_origin_that_changed_names_object_and_samples(origin: Origin, how: str) -> None:
    CHANGES[how](origin.path)
    blamed: list[QuiverError] = []
    with pytest.raises(Changed) as caught:
        first_verified([origin.source], origin.digest, len(origin.data), lambda _, error: blamed.append(error))
    assert blamed == [caught.value]
    assert origin.path.name in caught.value.url
    assert "quiver index" in str(caught.value)
    if origin.path.suffix != ".parquet" or how == "gone":
        assert origin.sample in caught.value.keys
    assert caught.value.keys
    good = MemorySource({origin.digest: origin.data})
    assert first_verified([origin.source, good], origin.digest, len(origin.data))[1] is good


def test_a_manifest_whose_shard_is_not_named_by_its_samples_is_refused(tmp_path: Path) -> None:
    files = make_files(tmp_path, random_files(30), shard_bytes="64KiB")
    manifest = files.opened()
    wrong = manifest.tables.shard_digests.copy()
    wrong[1, 0] ^= 1
    object.__setattr__(manifest.tables, "shard_digests", wrong)
    with contextlib.closing(open_origin(manifest)) as samples:
        source = OriginShards(manifest, samples)
        with pytest.raises(QuiverError, match="not named by its samples"):
            first_verified([source], manifest.shard_digest(1), int(manifest.tables.shard_sizes[1]))


def test_the_reader_of_an_isolated_store_is_started_again_when_it_dies(stack: ExitStack, tmp_path: Path) -> None:
    files = make_files(tmp_path, random_files(30), shard_bytes="64KiB")
    server_ = stack.enter_context(counting_origin(files.folder))
    manifest = rebased(files, server_.url, tmp_path / "remote.quiver").opened()
    samples = stack.enter_context(contextlib.closing(open_origin(manifest, may_fork=True)))
    source = OriginShards(manifest, samples)
    size = int(manifest.tables.shard_sizes[0])
    first_verified([source], manifest.shard_digest(0), size)
    reader = samples._inner._store._reader[0]  # type: ignore[attr-defined]
    reader.kill()
    reader.wait()
    first_verified([source], manifest.shard_digest(0), size)
    assert samples._inner._store._reader[0].pid != reader.pid  # type: ignore[attr-defined]


def test_an_origin_that_does_not_answer_is_unavailable(stack: ExitStack, tmp_path: Path) -> None:
    files = make_files(tmp_path, random_files(9))
    manifest = rebased(files, "http://127.0.0.1:9/", tmp_path / "remote.quiver").opened()
    samples = stack.enter_context(contextlib.closing(open_origin(manifest)))
    source = OriginShards(manifest, samples)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"):
        first_verified([source], manifest.shard_digest(0), int(manifest.tables.shard_sizes[0]))


def fill(store: Store, source: ShardSource) -> None:
    with store.reserve(Kind.SHARD, DIGEST, SIZE) as writing:
        shard, _ = first_verified([source], DIGEST, SIZE)
        writing.write(shard.data)
        writing.commit()


def test_a_failed_put_leaves_nothing_behind_wherever_it_fails(stack: ExitStack, tmp_path: Path) -> None:
    """The whole way of a fill: reserve, ask sources, write. Whoever lies, the store is as before."""
    store = stack.enter_context(contextlib.closing(Store.open(tmp_path / "store", 1 << 20, shared=False)))
    for how in ("absent", *WRONG):
        with pytest.raises(QuiverError):
            fill(store, memory(stack, tmp_path, how).source)
        assert store.resident_bytes() == 0
        assert not list((tmp_path / "store" / "tmp").iterdir())
        with pytest.raises(NotFound):
            store.open_file(Kind.SHARD, DIGEST)
