"""What one client can make a daemon do and keep, by manifests, reads and reports that cost little to send."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.digest import Digest
from quiver.errors import BadRequest, OverCapacity
from quiver.layout import SHARD_BYTES_MAX
from quiver.lookup import DigestRows
from quiver.manifest import Field, Header, Manifest, ManifestParts, write_manifest
from quiver.residency import Commitments, ConsumerReport, Decision, Lease, Leases, Recipe
from quiver.residency.messages import NeedsReport, NeedsStatus
from quiver.ring import Member
from quiver.store import Kind, Store
from quiver.wire import RANGE, RECHECK, RangeStatus, ReadRequest
from quiver_cacheserver import bounds
from quiver_cacheserver.bounds import FILL_THREADS, FillMemory, check_cost, covered_bytes, open_manifest
from quiver_cacheserver.budget import Cost, RefillRate
from quiver_cacheserver.node import Node
from quiver_cacheserver.origins import allowed
from quiver_cacheserver.rack.registry import StaticRegistry
from quiver_cacheserver.residency import datasets as datasets_module
from quiver_cacheserver.residency.fills import Fills
from quiver_cacheserver.residency.uploads import Uploads
from tests.daemon.test_routes import error_of
from tests.support.daemon import Daemon
from tests.support.data import Files, make_files, random_files

HONEST, HOSTILE = "10.0.0.1", "10.6.6.6"


def manifest_of(where: Path, lengths: Any, origins: Any, firsts: Any, object_bytes: int) -> Path:
    """Write a manifest of samples of one object, of bytes that nobody has."""
    write_manifest(where, parts_of(where, lengths, origins, firsts, object_bytes))
    return where


def parts_of(where: Path, lengths: Any, origins: Any, firsts: Any, object_bytes: int) -> ManifestParts:
    count = len(lengths)
    return ManifestParts(
        header=Header(1, "mixed", 1 << 20, "files", f"file://{where.parent}/", (Field("x", "bytes"),)),
        keys=pa.array([f"{i:08}" for i in range(count)], pa.large_utf8()),
        blob_of=np.arange(count, dtype=np.uint32),
        scalars={},
        digests=np.random.default_rng(0).integers(0, 256, (count, 32), np.uint8),
        xxh3=np.zeros((count, 1), np.uint64),
        lengths=np.asarray(lengths, np.uint64).reshape(-1, 1),
        objects_of=np.zeros(count, np.uint32),
        origins=np.asarray(origins, np.uint64).reshape(-1, 1),
        firsts=np.asarray(firsts, np.int64),
        object_paths=pa.array(["object"], pa.large_utf8()),
        object_sizes=np.array([object_bytes], np.uint64),
        object_etags=pa.array([""], pa.large_utf8()),
        object_mtimes=np.array([1], np.int64),
    )


# -- manifests --------------------------------------------------------------------------------------------------------


@pytest.mark.fault("S7", "S12")
def test_a_manifest_that_names_the_same_bytes_over_and_over_is_refused(tmp_path: Path, lone: Daemon) -> None:
    count = 2_000  # of 32 KiB each, over a file of 64 KiB
    path = manifest_of(
        tmp_path / "m.quiver", np.full(count, 32 << 10), np.arange(count) % 1000, range(0, count + 1, 500), 64 << 10
    )
    status, body, _ = lone.ask("PUT", f"/v1/manifests/{Digest.of(path.read_bytes())}", path.read_bytes())
    assert (status, error_of(body)) == (400, "bad_request")
    assert "named 4 times over at most" in body.decode()


@pytest.mark.fault("S7", "S12")
def test_a_manifest_that_names_the_same_rows_of_parquet_over_and_over_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.quiver"

    def check(rows: Any, fields: tuple[Field, ...], others: Any = 0, paths: tuple[str, ...] = ("object",)) -> None:
        count = len(rows)
        parts = parts_of(path, np.full(count, 60_000), rows, range(0, count + 1, 400), 60_000)
        origins = np.full((count, len(fields)), 0, np.uint64)
        origins[:, 0], origins[:, 1:] = rows, np.reshape(others, (-1, 1))
        many = replace(
            parts,
            header=Header(1, "mixed", 1 << 20, "parquet", f"file://{tmp_path}/", fields),
            origins=origins,
            lengths=np.repeat(parts.lengths, len(fields), axis=1),
            xxh3=np.repeat(parts.xxh3, len(fields), axis=1),
            objects_of=np.arange(count, dtype=np.uint32) % np.uint32(len(paths)),
            object_paths=pa.array(paths, pa.large_utf8()),
            object_sizes=np.full(len(paths), 60_000, np.uint64),
            object_etags=pa.array([""] * len(paths), pa.large_utf8()),
            object_mtimes=np.ones(len(paths), np.int64),
        )
        write_manifest(path, many)
        check_cost(Manifest.open(path))

    image, same = Field("image", "bytes", column="image"), Field("same", "bytes", column="image")
    mask = Field("mask", "bytes", column="mask")
    every = np.arange(4_800)
    check(every, (image,))
    check(every, (image, mask))
    check(every // 2, (image, mask))
    for rows, fields, *more in (
        (every * 0, (image,)),
        (every * 0, (image, mask), every),  # a daemon reads all fields of a sample from the row of the first
        (every // 3, (image, same)),
        (every * 0, (image,), 0, tuple(["object"] * 4_800)),
    ):
        with pytest.raises(BadRequest, match="named 4 times over at most"):
            check(rows, fields, *more)


ranges = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=12)


@given(ranges)
def test_bytes_are_counted_once_however_often_they_are_named(named: list[tuple[int, int, int]]) -> None:
    objects, starts, lengths = (np.array(column, np.uint64) for column in zip(*named, strict=True))
    covered = {(number, at) for number, start, length in named for at in range(start, start + length)}
    assert covered_bytes(objects.astype(np.uint32), starts, lengths) == len(covered)


def test_bytes_of_more_objects_than_one_number_line_holds_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "_OBJECTS_AT_ONCE", 2)
    objects = np.repeat(np.arange(5, dtype=np.uint32), 3)
    starts, lengths = np.tile(np.array([0, 5, 8], np.uint64), 5), np.full(15, 4, np.uint64)
    assert covered_bytes(objects, starts, lengths) == 5 * 11


@pytest.mark.fault("S7", "S12")
def test_a_manifest_with_more_or_larger_shards_than_the_indexer_makes_is_refused(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = SHARD_BYTES_MAX // 2 + 1
    huge = manifest_of(tmp_path / "huge.quiver", [half, half], [0, half], [0, 2], 2 * half)
    with pytest.raises(BadRequest, match="several samples has at most"):
        check_cost(Manifest.open(huge))
    check_cost(Manifest.open(manifest_of(tmp_path / "two.quiver", [half, half], [0, half], [0, 1, 2], 2 * half)))
    monkeypatch.setattr(bounds, "SHARDS_MAX", files.opened().shard_count - 1)
    with pytest.raises(BadRequest, match="with a larger --shard-size"):
        open_manifest(files.manifest, files.opened().digest)


async def test_shards_are_sorted_in_threads_only(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_in: set[int] = set()
    init = DigestRows.__init__

    def watched(self: DigestRows, digests: Any) -> None:
        if len(digests) > 2:  # of a manifest, or of all that is known
            sorted_in.add(threading.get_ident())
        init(self, digests)

    manifest = files.opened()
    node = await asyncio.to_thread(lone_node, files, tmp_path)
    monkeypatch.setattr(DigestRows, "__init__", watched)
    try:
        await asyncio.to_thread(node.store.put, Kind.MANIFEST, manifest.digest, files.manifest.read_bytes())
        left = np.full(manifest.shard_count, 255, np.uint8)
        told = NeedsReport(manifest.digest, ConsumerReport(bytes(16), left, 1e6, 0.0, 30.0)).encode()
        assert (await node.reports.take(told, HONEST)).status is NeedsStatus.TAKEN
        await node.fill_missing(
            [manifest.shard_digest(0)], await node.manifests.get(manifest.digest, HONEST), 20.0, HONEST
        )
        assert node.resident(manifest.shard_digest(0))
    finally:
        await asyncio.to_thread(node.close)
    assert sorted_in
    assert threading.get_ident() not in sorted_in


# -- fills ------------------------------------------------------------------------------------------------------------


@pytest.mark.fault("S12")
def test_fills_share_a_bounded_memory_and_a_large_one_is_alone() -> None:
    memory = FillMemory(100)
    most, now, lock = 0, 0, threading.Lock()
    barrier = threading.Barrier(2, timeout=10)

    def fill(size: int) -> None:
        nonlocal most, now
        with memory.taken(size):
            with lock:
                now += size
                most = max(most, now if now > size else 0)
            if size == 50:
                barrier.wait()  # two of these fit
            with lock:
                now -= size

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fill, [50, 50, 101, 40, 60, 30, 500, 70]))
    assert most == 100
    with pytest.raises(OverCapacity, match="larger than a daemon fills"), memory.taken(bounds.FILL_BYTES_MAX + 1):
        pass


class ByHand(Executor):
    """Runs what it was given when the test says so."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, Future[Any]]] = []

    def submit(self, work: Any, /, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.given.append((work, future))
        return future


def fills_by(threads: Executor) -> Fills:
    commitments = Commitments()
    return Fills(threads, commitments, Uploads(commitments), lambda error: None)


@pytest.mark.fault("S12")
async def test_clients_take_turns_however_much_one_of_them_asks_for() -> None:
    threads, begun = ByHand(), list[str]()
    fills = fills_by(threads)

    def ask(client: str, number: int) -> Any:
        recipe = Recipe(Digest.of(f"{client} {number}".encode()), Digest(bytes(32)))
        return fills.start(Decision(*recipe, 1.0), lambda: begun.append(client), client)

    asked = [ask(HOSTILE, number) for number in range(100)]
    asked += [ask(HONEST, number) for number in range(2)]
    assert len(threads.given) == FILL_THREADS
    assert fills.in_flight == 102
    while threads.given:
        work, future = threads.given.pop(0)
        future.set_result(work())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*asked)
    assert [at for at, client in enumerate(begun) if client == HONEST] == [FILL_THREADS + 1, FILL_THREADS + 3]


@pytest.mark.fault("O1")
async def test_a_fill_that_runs_is_joined_and_not_begun_once_more() -> None:
    threads, begun = ByHand(), list[str]()
    fills = fills_by(threads)
    decision = Decision(Digest.of(b"shard"), Digest(bytes(32)), 1.0)
    first, second = [fills.start(decision, lambda: begun.append("once"), client) for client in (HOSTILE, HONEST)]
    assert first is second
    [(work, future)] = threads.given
    future.set_result(work())
    assert isinstance(first, asyncio.Future)
    await first
    assert begun == ["once"]


# -- what is kept -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Files, Files]:
    """Two datasets of ten shards of one sample each, all of one size, below one folder."""
    where = tmp_path_factory.mktemp("pair")
    made = [
        make_files(where, random_files(10, seed=seed, low=60_000, high=60_001), name=name, shard_bytes=61_000)
        for seed, name in ((1, "honest"), (2, "junk"))
    ]
    assert all(files.opened().shard_count == 10 for files in made)
    return made[0], made[1]


SHARD_BYTES = 60_048


def lone_node(files: Files, tmp_path: Path, capacity: int = 64 << 20) -> Node:
    store = Store.open(tmp_path / "store", capacity, shared=False)
    registry = StaticRegistry("r", Member("a", "http://127.0.0.1:9"))
    return Node("0", store, registry, [str(files.folder.parent)])


@pytest.fixture
def node(pair: tuple[Files, Files], tmp_path: Path) -> Iterator[Node]:
    """A daemon of ten shards, without a loop."""
    with contextlib.closing(lone_node(pair[0], tmp_path, 10 * SHARD_BYTES + 1000)) as made:
        yield made


def filled(node: Node, manifest: Manifest, client: str) -> int:
    """Read a dataset on behalf of a client; return how many of its shards are here then."""
    for number in range(manifest.shard_count):
        with contextlib.suppress(OverCapacity):
            node.filler.fill(manifest.shard_digest(number), manifest, client)
    return held(node, manifest)


def held(node: Node, manifest: Manifest) -> int:
    return sum(node.held(manifest.shard_digest(number)) for number in range(manifest.shard_count))


def age(node: Node, seconds: float) -> None:
    inventory: Any = node.store.inventory
    for kind in Kind:
        inventory._files[kind]._used -= seconds


@pytest.mark.fault("S12")
def test_what_others_read_of_late_is_not_pushed_out_by_what_nobody_needs(pair: tuple[Files, Files], node: Node) -> None:
    honest, junk = (files.opened() for files in pair)
    assert filled(node, honest, HONEST) == 10
    age(node, 120.0)
    assert filled(node, junk, HOSTILE) == 5
    assert held(node, honest) == 5, "one that holds as much as the others pushes out no more"
    assert filled(node, junk, HOSTILE) == 5
    age(node, 3600.0)
    assert filled(node, honest, HONEST) == 10, "nobody came back for the junk"


@pytest.mark.fault("S12")
def test_junk_that_is_in_use_gives_way_to_one_who_holds_less(pair: tuple[Files, Files], node: Node) -> None:
    honest, junk = (files.opened() for files in pair)
    assert filled(node, junk, HOSTILE) == 10
    node.manifests.opened.add(junk.digest, junk)
    node.manifests.opened._used[junk.digest] = 1e12  # named again and again
    assert filled(node, honest, HONEST) == 5
    assert filled(node, junk, HOSTILE) == 5, "and not the other way round"


def test_what_several_clients_read_is_nobody_s_to_give_up(pair: tuple[Files, Files], node: Node) -> None:
    honest, junk = (files.opened() for files in pair)
    filled(node, honest, HONEST)
    node.manifests.opened.add(honest.digest, honest)
    node.manifests.opened._used[honest.digest] = 1e12
    node.holders.read([honest.shard_digest(number) for number in range(10)], "10.0.0.2")
    assert filled(node, junk, HOSTILE) == 0


@pytest.mark.fault("S12")
def test_one_who_had_too_much_evicted_takes_its_own_room_alone(pair: tuple[Files, Files], node: Node) -> None:
    honest, junk = (files.opened() for files in pair)
    node.budgets.rates[Cost.EVICTIONS] = RefillRate(0.0, 2)
    filled(node, honest, HONEST)
    age(node, 3600.0)
    assert filled(node, junk, HOSTILE) == 2
    assert held(node, honest) == 8
    assert filled(node, honest, HONEST) == 8


@pytest.mark.fault("S12")
def test_manifests_that_nobody_reads_make_way_for_one_another_before_any_shard(
    pair: tuple[Files, Files], node: Node
) -> None:
    honest = pair[0].opened()
    filled(node, honest, HONEST)
    age(node, 30.0)  # in use
    share = node.store.capacity_bytes // 4
    for number in range(40):
        data = number.to_bytes(4, "big") + bytes(share // 8)
        with (
            contextlib.suppress(OverCapacity),
            node.rooms.reserve(Kind.MANIFEST, Digest.of(data), len(data), HOSTILE) as it,
        ):
            it.write(data)
            it.commit()
            node.holders.filled(Digest.of(data), HOSTILE)
    assert held(node, honest) == 7, "all that comes after the first few has the room of those"
    assert sum(item.size_bytes for item in node.store.inventory.held(Kind.MANIFEST)) < share + SHARD_BYTES


# -- rechecks ---------------------------------------------------------------------------------------------------------


async def test_what_is_being_verified_is_answered_so_whether_or_not_a_manifest_is_named(
    files: Files, tmp_path: Path
) -> None:
    manifest = files.opened()
    digest = manifest.shard_digest(0)
    node = await asyncio.to_thread(lone_node, files, tmp_path)
    free = threading.Event()
    try:
        await asyncio.to_thread(node.filler.fill, digest, manifest)
        check = node.store.check

        def slow(named: Digest) -> None:
            assert free.wait(20)
            check(named)

        node.store.check = slow  # type: ignore[method-assign]
        node.suspect([digest], HONEST)
        for named in (None, manifest):
            await node.fill_missing([digest], named, 0.01, HONEST)
            assert node.absence(digest, {digest}, None) is RangeStatus.FILLING
        free.set()
        await node.fill_missing([digest], None, 20.0, HONEST)
        assert node.resident(digest)
    finally:
        free.set()
        await asyncio.to_thread(node.close)


@pytest.mark.fault("S12")
def test_a_client_has_so_many_bytes_read_again_and_others_are_believed(pair: tuple[Files, Files], node: Node) -> None:
    honest = pair[0].opened()
    filled(node, honest, HONEST)
    shards = [honest.shard_digest(number) for number in range(10)]
    node.budgets.rates[Cost.RECHECK_BYTES] = RefillRate(0.0, 3 * SHARD_BYTES)
    node.suspect(shards, HOSTILE)
    assert sum(not node.resident(shard) for shard in shards) == 3
    node.suspect(shards, HONEST)
    assert sum(not node.resident(shard) for shard in shards) == 6
    node.suspect(shards)
    assert not any(map(node.resident, shards)), "what the daemon found itself costs nobody"


def test_a_resident_shard_is_never_answered_no_manifest_while_it_is_rechecked(files: Files, tmp_path: Path) -> None:
    manifest = files.opened()
    shards = tuple(manifest.shard_digest(number) for number in range(manifest.shard_count))
    rows = np.zeros(len(shards), RANGE)
    rows["shard"], rows["length"] = np.arange(len(shards)), 1
    with Daemon(tmp_path / "node", origins=[files.folder]) as daemon:
        daemon.ask("PUT", f"/v1/manifests/{manifest.digest}", files.manifest.read_bytes())
        read = ReadRequest(manifest.digest, shards, rows, 20_000).encode()
        assert set(daemon.ask("POST", "/v1/read", read)[1][: len(shards)]) == {RangeStatus.PRESENT}
        recheck = ReadRequest(None, shards, rows, 0, RECHECK).encode()
        statuses = set(daemon.ask("POST", "/v1/read", recheck)[1][: len(shards)])
        assert statuses <= {RangeStatus.PRESENT, RangeStatus.FILLING}


@pytest.mark.fault("S12")
async def test_manifests_that_consumers_report_on_take_a_bounded_memory(
    pair: tuple[Files, Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await asyncio.to_thread(lone_node, pair[0], tmp_path)
    sizes = [len(files.opened().content) for files in pair]

    async def tell(number: int, files: Files, leaving: bool = False) -> NeedsStatus:
        manifest = files.opened()
        await asyncio.to_thread(node.store.put, Kind.MANIFEST, manifest.digest, files.manifest.read_bytes())
        left = np.full(manifest.shard_count, 255, np.uint8)
        told = NeedsReport(manifest.digest, ConsumerReport(name(number), left, 1e6, 0.0, 30.0), leaving)
        return (await node.reports.take(told.encode(), HOSTILE)).status

    try:
        monkeypatch.setattr(datasets_module, "DATASET_BYTES_MAX", sum(sizes) - 1)
        assert await tell(0, pair[0]) is NeedsStatus.TAKEN
        assert await tell(1, pair[1]) is NeedsStatus.FULL
        assert await tell(2, pair[0]) is NeedsStatus.TAKEN, "it is known already"
        assert await tell(0, pair[0], leaving=True) is NeedsStatus.TAKEN
        assert await tell(2, pair[0], leaving=True) is NeedsStatus.TAKEN
        assert await tell(1, pair[1]) is NeedsStatus.TAKEN, "nobody reports on the other one"
        assert len(node._datasets) == 1
        monkeypatch.setattr(datasets_module, "DATASET_BYTES_MAX", 1)
        assert await tell(1, pair[1], leaving=True) is NeedsStatus.TAKEN
        assert await tell(0, pair[0]) is NeedsStatus.TAKEN, "a larger one alone"
        assert await tell(0, pair[0], leaving=True) is NeedsStatus.TAKEN
        monkeypatch.setattr(datasets_module, "IDLE_BYTES_MAX", sizes[0] - 1)
        node.decider.step(time.monotonic())
        assert not len(node._datasets)
    finally:
        await asyncio.to_thread(node.close)


@pytest.mark.fault("S12")
def test_origins_that_are_open_keep_manifests_of_bounded_bytes(
    pair: tuple[Files, Files], node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (files.opened() for files in pair)
    one = node.origins.of(first)
    assert node.origins.of(second) is not one
    assert node.origins.of(first) is one
    monkeypatch.setattr(allowed, "OPEN_BYTES_MAX", len(first.content))
    third = Manifest.open(second.path)
    node.origins._open.pop(second.digest)
    node.origins.of(third)
    assert list(node.origins._open) == [second.digest]


# -- consumers --------------------------------------------------------------------------------------------------------


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def lease(client: str, at: float = 0.0, shards: int = 1) -> Lease:
    return Lease(Digest(bytes(32)), shards, at, 30.0, client)


@pytest.mark.fault("S12")
def test_made_up_consumers_never_shut_out_another_address() -> None:
    leases = Leases(consumers_max=10)
    assert leases.take(name(0), lease(HOSTILE)) == []
    assert leases.take(name(0), lease(HOSTILE, 1.0)) == [], "it reports again"
    for number in range(1, 10):
        assert leases.take(name(number), lease(HOSTILE, float(number))) == []
    assert leases.take(name(99), lease(HOSTILE, 20.0)) is None, "that address has most already"
    assert leases.take(name(100), lease(HONEST, 21.0)) == [name(1)], "who reported once, longest ago"
    assert leases.take(name(101), lease(HONEST, 22.0)) == [name(2)]
    assert leases.take(name(100), lease(HONEST, 23.0)) == []
    for number in range(102, 105):
        assert leases.take(name(number), lease(HONEST, 24.0)) is not None
    assert leases.take(name(105), lease(HONEST, 24.0)) is None, "half each"
    assert name(0) in leases
    leases.leave(name(0))
    assert leases.take(name(105), lease(HONEST, 24.0)) == []


@pytest.mark.fault("S12")
def test_reports_on_many_shards_never_shut_out_another_address() -> None:
    leases = Leases(shards_max=100)
    assert leases.take(name(1), lease(HOSTILE, 1.0, shards=60)) == []
    assert leases.take(name(2), lease(HOSTILE, 2.0, shards=40)) == []
    assert leases.take(name(3), lease(HONEST, 3.0, shards=50)) == [name(1)]
    assert leases.take(name(4), lease(HONEST, 3.0, shards=101)) is None
    assert name(4) not in leases


async def test_a_consumer_that_lost_its_place_needs_nothing_any_more(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = files.opened()
    node = await asyncio.to_thread(lone_node, files, tmp_path)
    try:
        await asyncio.to_thread(node.store.put, Kind.MANIFEST, manifest.digest, files.manifest.read_bytes())
        node._needs.leases = Leases(consumers_max=2)

        async def tell(number: int, client: str) -> NeedsStatus:
            left = np.full(manifest.shard_count, 255, np.uint8)
            told = NeedsReport(manifest.digest, ConsumerReport(name(number), left, 1e6, 0.0, 30.0)).encode()
            return (await node.reports.take(told, client)).status

        assert [await tell(number, HOSTILE) for number in range(3)] == [
            NeedsStatus.TAKEN,
            NeedsStatus.TAKEN,
            NeedsStatus.FULL,
        ]
        assert node.consumers == 2
        assert await tell(9, HONEST) is NeedsStatus.TAKEN
        assert node.consumers == 2
        assert node._needs.leases.clients()[manifest.digest] == "", "at two addresses"
        assert await tell(9, HONEST) is NeedsStatus.TAKEN
        node.budgets.charge(HOSTILE, Cost.EVICTIONS, 1e9, asyncio.get_running_loop().time())
        assert node.decider._situation(asyncio.get_running_loop().time(), 1).may_not_force == {name(1)}
    finally:
        await asyncio.to_thread(node.close)
