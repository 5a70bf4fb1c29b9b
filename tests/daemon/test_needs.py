"""``POST /v1/needs``: what consumers need is fetched, what nobody needs makes way, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from blockbuster import blockbuster_ctx

from quiver.digest import Bytes, Digest
from quiver.errors import BadRequest, Corrupt
from quiver.manifest import Manifest
from quiver.peer import PeerClient
from quiver.residency import CONSUMERS_MAX, ConsumerReport
from quiver.residency.messages import NEEDS_TYPE, REPORT_BYTES_MAX, NeedsAnswer, NeedsReport, NeedsStatus
from quiver.ring import Member
from quiver.store import Kind, Store
from quiver.store.inventory import file_of
from quiver.wire import RANGE, RangeStatus, ReadRequest
from quiver_cacheserver.node import Node
from quiver_cacheserver.rack.registry import StaticRegistry
from quiver_cacheserver.residency import decider as decider_module
from quiver_cacheserver.residency import reports as reports_module
from quiver_cacheserver.residency.decider import Decider
from quiver_cacheserver.serving.app import make_app
from tests.daemon.test_routes import error_of, read
from tests.support.daemon import Daemon, Patient, rack_of
from tests.support.data import Files, make_files, random_files, shard_bytes_of
from tests.support.servers import HostileServer, ok
from tests.support.waiting import until

MIB = 1 << 20
PLENTY = 1e12  # bytes ahead of a consumer that has no reason to hurry


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """16 shards of one sample each, all of one size."""
    content = random_files(16, seed=3, low=60_000, high=60_001)
    files = make_files(tmp_path_factory.mktemp("even"), content, shard_bytes=61_000)
    assert set(files.opened().tables.shard_sizes.tolist()) == {60_048}
    assert files.opened().shard_count == 16
    return files


class Consumer:
    """One rank of a job, as a daemon hears of it."""

    def __init__(self, daemon: Daemon, files: Files, name: int = 1, *, put: bool = True) -> None:
        self.manifest = files.opened()
        self.name = name.to_bytes(16, "big")
        self.peer = PeerClient(daemon.url)
        self.daemon = daemon
        if put:
            self.peer.put_manifest(self.manifest.digest, files.manifest.read_bytes())

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *_: object) -> None:
        self.peer.close()

    def tell(
        self,
        left: dict[int, int] | int,
        *,
        ahead: float = 0.0,
        rate: float = 1e6,
        lease: float = 30.0,
        leaving: bool = False,
    ) -> NeedsAnswer:
        """Report what is left, by shard or the same of all."""
        shards = np.zeros(self.manifest.shard_count, np.uint8)
        if isinstance(left, int):
            shards[:] = left
        else:
            shards[list(left)] = list(left.values())
        return self.peer.needs(
            NeedsReport(self.manifest.digest, ConsumerReport(self.name, shards, rate, ahead, lease), leaving)
        )

    def held(self) -> set[int]:
        """Return which shards are on the daemon's disk."""
        root = self.daemon.data_dir
        digests = (self.manifest.shard_digest(number) for number in range(self.manifest.shard_count))
        return {number for number, it in enumerate(digests) if file_of(root, Kind.SHARD, it).exists()}


def capacity_for(manifest: Manifest, shards: int) -> str:
    """Return a capacity of so many shards, the manifest, and not one shard more."""
    largest = int(manifest.tables.shard_sizes.max())
    return f"{shards * largest + manifest.path.stat().st_size + largest // 2}"


@contextlib.contextmanager
def small_daemon(files: Files, where: Path, shards: int) -> Iterator[Daemon]:
    with Daemon(where / "node", origins=[files.folder], capacity=capacity_for(files.opened(), shards)) as daemon:
        yield daemon


def test_what_is_needed_is_fetched_without_any_read(even: Files, tmp_path: Path) -> None:
    with Daemon(tmp_path / "node", origins=[even.folder]) as daemon, Consumer(daemon, even) as consumer:
        answer = consumer.tell({1: 255, 3: 9})
        assert answer.status is NeedsStatus.TAKEN
        assert not answer.seen.any()
        until(lambda: consumer.held() == {1, 3})
        until(lambda: np.flatnonzero(consumer.tell({1: 255, 3: 9}).seen).tolist() == [1, 3])
        assert daemon.metric("quiver_consumers") == 1
        assert daemon.metric("quiver_need_fetches_total") == 2
        assert daemon.metric("quiver_forced_drops_total") == 0
        consumer.tell(0, leaving=True)
        assert daemon.metric("quiver_consumers") == 0


def test_an_answer_tells_how_many_others_need_what_is_held(even: Files, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(Daemon(tmp_path / "node", origins=[even.folder]))
        consumers = [stack.enter_context(Consumer(daemon, even, name)) for name in (1, 2, 3)]
        consumers[0].tell({0: 255, 1: 255})
        until(lambda: consumers[0].held() == {0, 1})
        consumers[1].tell({1: 255})
        consumers[2].tell({1: 255})
        until(lambda: consumers[0].tell({0: 255, 1: 255}).seen[:3].tolist() == [1, 3, 0])
        assert consumers[1].tell({1: 255}).seen[:3].tolist() == [2, 3, 0]


def test_what_nobody_needs_makes_way_and_what_is_needed_does_not(even: Files, tmp_path: Path) -> None:
    with small_daemon(even, tmp_path, 4) as daemon, Consumer(daemon, even) as consumer:
        consumer.tell({0: 255, 1: 255, 2: 255, 3: 255})
        until(lambda: consumer.held() == {0, 1, 2, 3})
        consumer.tell({2: 255, 3: 255, 4: 255, 5: 255}, ahead=PLENTY)
        until(lambda: consumer.held() == {2, 3, 4, 5})
        # All room is needed: a reader's shard finds none, and neither does anything else that is needed.
        digest = consumer.manifest.shard_digest(9)
        consumer.tell({2: 255, 3: 255, 4: 255, 5: 255, 6: 255}, ahead=PLENTY)
        statuses, _ = read(daemon, [digest], [(0, 0, 10)], consumer.manifest.digest, wait=20_000)
        assert statuses == [RangeStatus.NO_ROOM]
        assert consumer.held() == {2, 3, 4, 5}
        consumer.tell(0, leaving=True)
        until(lambda: read(daemon, [digest], [(0, 0, 10)], consumer.manifest.digest, wait=20_000)[0] == [0])
        assert daemon.metric("quiver_forced_drops_total") == 0
        assert daemon.status()["resident_bytes"] <= daemon.status()["capacity_bytes"]


def test_a_consumer_that_says_no_more_pins_nothing_past_its_lease(even: Files, tmp_path: Path) -> None:
    with (
        small_daemon(even, tmp_path, 4) as daemon,
        Consumer(daemon, even) as killed,
        Consumer(daemon, even, 2) as living,
    ):
        killed.tell({0: 255, 1: 255, 2: 255, 3: 255}, lease=1.5)
        until(lambda: killed.held() == {0, 1, 2, 3})
        living.tell({4: 255, 5: 255}, ahead=PLENTY)
        until(lambda: living.held() >= {4, 5})
        assert daemon.metric("quiver_consumers") == 1
        assert daemon.metric("quiver_forced_drops_total") == 0


def test_a_dataset_whose_manifest_nobody_has_is_taken_once_it_was_put(even: Files, tmp_path: Path) -> None:
    with (
        Daemon(tmp_path / "node", origins=[even.folder]) as daemon,
        Consumer(daemon, even, put=False) as consumer,
    ):
        answer = consumer.tell({0: 255})
        assert (answer.status, len(answer.seen)) == (NeedsStatus.NO_MANIFEST, 0)
        consumer.peer.put_manifest(consumer.manifest.digest, even.manifest.read_bytes())
        assert consumer.tell({0: 255}).status is NeedsStatus.TAKEN
        until(lambda: consumer.held() == {0})


def test_consumers_of_one_dataset_share_one_read_of_the_origin(even: Files, tmp_path: Path) -> None:
    with (
        rack_of(2, tmp_path / "rack", origins=[even.folder], make=Patient) as daemons,
        contextlib.ExitStack() as stack,
    ):
        consumers = [stack.enter_context(Consumer(daemon, even, name)) for daemon in daemons for name in (1, 2, 3)]
        with ThreadPoolExecutor(len(consumers)) as pool:
            list(pool.map(lambda consumer: consumer.tell(255), consumers))
        ours, theirs = consumers[0], consumers[3]
        everything = set(range(ours.manifest.shard_count))
        until(lambda: ours.held() | theirs.held() == everything)
        assert not ours.held() & theirs.held(), "each fetches what the ring gives it first"
        until(lambda: sum(daemon.metric("quiver_fills_in_flight") for daemon in daemons) == 0)
        read_bytes = sum(daemon.metric("quiver_origin_read_bytes_total") for daemon in daemons)
        assert read_bytes == even.total_bytes()
        assert all(daemon.metric("quiver_origin_read_bytes_total") > 0 for daemon in daemons)


def test_one_who_starves_forces_out_the_shard_with_most_left(even: Files, tmp_path: Path) -> None:
    with small_daemon(even, tmp_path, 4) as daemon, Consumer(daemon, even) as consumer:
        consumer.tell({0: 255, 1: 255, 2: 255, 3: 255})
        until(lambda: consumer.held() == {0, 1, 2, 3})
        left = {0: 2, 1: 2, 2: 40, 3: 2, 7: 255}
        consumer.tell(left, ahead=PLENTY)
        assert consumer.held() == {0, 1, 2, 3}, "one who has enough to read forces nothing"
        consumer.tell(left, ahead=0.0, rate=1.0)
        until(lambda: consumer.held() == {0, 1, 3, 7})
        until(lambda: daemon.metric("quiver_forced_drops_total") == 1)
        assert daemon.status()["resident_bytes"] <= daemon.status()["capacity_bytes"]


def test_one_who_is_suspended_while_it_starves_does_not_turn_the_cache_over(even: Files, tmp_path: Path) -> None:
    with small_daemon(even, tmp_path, 2) as daemon, Consumer(daemon, even) as consumer:
        consumer.tell(255, rate=1e9, lease=2.0)  # so fast that it has nothing ahead of it a moment later
        until(lambda: len(consumer.held()) == 2)
        until(lambda: daemon.metric("quiver_consumers") == 0)
        assert daemon.metric("quiver_forced_drops_total") <= 4


def test_one_who_is_suspended_forces_out_no_more_while_others_report(even: Files, tmp_path: Path) -> None:
    with (
        small_daemon(even, tmp_path, 4) as daemon,
        Consumer(daemon, even) as suspended,
        Consumer(daemon, even, 2) as other,
    ):
        suspended.tell(255, rate=1e9, lease=4.0)
        until(lambda: other.tell(255, ahead=PLENTY) and daemon.metric("quiver_consumers") == 1)
        assert daemon.metric("quiver_forced_drops_total") <= 4


def test_a_shard_that_cannot_be_had_holds_up_no_other_and_is_not_asked_for_in_a_frenzy(tmp_path: Path) -> None:
    files = make_files(tmp_path, random_files(24, seed=5, low=60_000, high=60_001))
    manifest = files.opened()
    broken = manifest.keys_of_blobs(np.asarray(manifest.shard_blobs(0)))
    for key in broken:
        (files.folder / key).unlink()
    with Daemon(tmp_path / "node", origins=[files.folder]) as daemon, Consumer(daemon, files) as consumer:
        consumer.tell(255, rate=0.0)
        until(lambda: consumer.held() == set(range(1, manifest.shard_count)))
        assert daemon.metric("quiver_fill_failures_total") < 10
        for key in broken:
            (files.folder / key).write_bytes(files.content[key])
        until(lambda: bool(consumer.tell(255, rate=0.0).seen.all()))


def test_a_shard_larger_than_the_cache_holds_up_no_other(tmp_path: Path) -> None:
    content = random_files(16, seed=6, low=60_000, high=60_001) | {"a/large.png": bytes(4 * MIB)}
    files = make_files(tmp_path, content)
    sizes = files.opened().tables.shard_sizes
    large = int(np.argmax(sizes))
    with (
        Daemon(tmp_path / "node", origins=[files.folder], capacity="3MiB") as daemon,
        Consumer(daemon, files) as consumer,
    ):
        consumer.tell(255)
        until(lambda: consumer.held() == set(range(len(sizes))) - {large})
        assert daemon.metric("quiver_forced_drops_total") == 0


@pytest.mark.parametrize("shards", [3, 5])
def test_more_than_fits_is_passed_through_without_ever_holding_too_much(
    even: Files, tmp_path: Path, shards: int
) -> None:
    """Two jobs read an epoch, each in an order of its own, whatever is there; both come to an end."""
    with (
        small_daemon(even, tmp_path, shards) as daemon,
        Consumer(daemon, even) as one,
        Consumer(daemon, even, 2) as two,
    ):
        size = int(one.manifest.tables.shard_sizes.max())
        left = [dict.fromkeys(range(one.manifest.shard_count), 255) for _ in range(2)]

        def step() -> bool:
            for consumer, mine in zip((one, two), left, strict=True):
                seen = np.flatnonzero(consumer.tell(mine).seen).tolist()
                ready = [shard for shard in seen if shard in mine]
                consumer.tell(mine, ahead=size * len(ready), rate=2.0 * size)
                if ready:
                    del mine[ready[0]]
            status = daemon.status()
            assert status["resident_bytes"] <= status["capacity_bytes"]
            return not left[0] and not left[1]

        until(step, 60.0)
        read_bytes = daemon.metric("quiver_origin_read_bytes_total")
        assert read_bytes <= 2 * even.total_bytes(), "never more than each for itself"


# -- origins that are not the daemon's to read ------------------------------------------------------------------------


def test_a_consumer_is_asked_to_put_what_the_daemon_may_not_read(even: Files, tmp_path: Path) -> None:
    with (
        Daemon(tmp_path / "node") as daemon,
        Consumer(daemon, even) as first,
        Consumer(daemon, even, 2) as second,
    ):
        asked: dict[int, list[int]] = {1: [], 2: []}

        def told(consumer: Consumer, name: int) -> list[int]:
            uploads = consumer.tell(dict.fromkeys(set(range(16)) - consumer.held(), 255)).uploads
            assert len(uploads) <= 4
            asked[name] += uploads
            return asked[name]

        until(lambda: len(told(first, 1)) == 4)
        until(lambda: told(second, 2))
        assert told(first, 1) == asked[1][:4], "four are one reader's share until they are here"
        for shard in asked[1]:
            first.peer.put_shard(*shard_bytes_of(first.manifest, shard))

        def step() -> bool:
            for consumer, name in ((first, 1), (second, 2)):
                for shard in set(told(consumer, name)) - consumer.held():
                    consumer.peer.put_shard(*shard_bytes_of(consumer.manifest, shard))
            return len(first.held()) == 16

        until(step)
        assert sorted(asked[1] + asked[2]) == list(range(16)), "each was asked of one consumer, once"
        assert daemon.metric("quiver_origin_read_bytes_total") == 0


def test_when_who_was_to_put_a_shard_is_gone_another_is_asked(even: Files, tmp_path: Path) -> None:
    with (
        Daemon(tmp_path / "node") as daemon,
        Consumer(daemon, even) as first,
        Consumer(daemon, even, 2) as second,
    ):
        until(lambda: first.tell({5: 255}).uploads == (5,))
        assert second.tell({5: 255}).uploads == ()
        first.tell(0, leaving=True)
        until(lambda: second.tell({5: 255}).uploads == (5,))
        # It cannot and says so: after a moment it is asked again, and not before.
        request = ReadRequest(second.manifest.digest, (second.manifest.shard_digest(5),), np.zeros(0, RANGE), 0, 2)
        second.peer.read(request)
        assert second.tell({5: 255}).uploads == ()
        until(lambda: second.tell({5: 255}).uploads == (5,))


def test_a_dataset_that_is_not_put_holds_up_no_other(even: Files, tmp_path: Path) -> None:
    content = random_files(8, seed=4, low=60_000, high=60_001)
    files = make_files(tmp_path, content, name="readable", shard_bytes=61_000)
    every = set(range(files.opened().shard_count))
    with (
        Daemon(tmp_path / "node", origins=[files.folder], capacity=capacity_for(even.opened(), 8)) as daemon,
        Consumer(daemon, even) as slow,
        Consumer(daemon, files, 2) as other,
    ):
        assert slow.tell(255).uploads == ()
        until(lambda: daemon.metric("quiver_need_fetches_total") >= 4)
        until(lambda: other.tell(255, rate=0.0) and other.held() == every)
        assert slow.tell(255, ahead=PLENTY).uploads == (), "there is no room to put anything"
        other.tell(0, leaving=True)
        asked: list[int] = []
        until(lambda: asked.extend(slow.tell(255).uploads) or len(asked) == 4)
        other.tell({0: 255, 1: 255, 2: 255}, ahead=PLENTY)
        until(lambda: other.held() >= {0, 1, 2})
        for shard in asked:
            slow.peer.put_shard(*shard_bytes_of(slow.manifest, shard))
        assert slow.held() == set(asked), "room was kept for what it was asked for"


# -- the event loop ---------------------------------------------------------------------------------------------------


async def test_neither_reports_nor_the_driver_block_the_loop(files: Files, tmp_path: Path) -> None:
    node = await asyncio.to_thread(lone_node, files, tmp_path)
    with blockbuster_ctx():
        async with TestClient(TestServer(make_app(node))) as client:
            await everything_needed_comes(client, node, files)
    await asyncio.to_thread(node.close)


async def everything_needed_comes(client: TestClient[Any, Any], node: Node, files: Files) -> None:
    manifest = files.opened()
    content = await asyncio.to_thread(files.manifest.read_bytes)
    left = np.full(manifest.shard_count, 255, np.uint8)
    report = NeedsReport(manifest.digest, ConsumerReport(bytes(16), left, 1e6, 0.0, 30.0)).encode()

    async def tell() -> NeedsAnswer:
        async with client.post("/v1/needs", data=report) as answer:
            assert answer.status == 200
            return NeedsAnswer.decode(await answer.read())

    assert (await tell()).status is NeedsStatus.NO_MANIFEST
    async with client.put(f"/v1/manifests/{manifest.digest}", data=content) as answer:
        assert answer.status == 201
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        driver = tasks.create_task(node.follow_needs())
        while not (await tell()).seen.all():
            pass
        driver.cancel()


def lone_node(files: Files, tmp_path: Path) -> Node:
    store = Store.open(tmp_path / "store", 64 << 20, shared=False)
    registry = StaticRegistry("r", Member("a", "http://127.0.0.1:9"))
    return Node("0", store, registry, [str(files.folder)])


async def test_a_bug_in_deciding_costs_a_round_and_never_the_daemon(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = await asyncio.to_thread(lone_node, files, tmp_path)
    failing = iter([True, True])
    step = Decider.step

    def broken(decider: Decider, now: float, *, fetch: bool) -> None:
        if next(failing, False):
            raise ZeroDivisionError("a bug")
        step(decider, now, fetch=fetch)

    monkeypatch.setattr(Decider, "step", broken)
    monkeypatch.setattr(decider_module, "SUPERVISED_SECONDS", 0.01)
    async with TestClient(TestServer(make_app(node))) as client:
        await everything_needed_comes(client, node, files)
    await asyncio.to_thread(node.close)
    assert caplog.text.count("deciding what to fetch failed") == 2


# -- what is not a report ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"QND1", b"\x81\xa4type\xa5needs", b"{}", b"x" * 10_000, bytes(100)])
@pytest.mark.fault("S4")
def test_a_body_that_is_no_report_is_refused(lone: Daemon, body: bytes) -> None:
    status, answer, _ = lone.ask("POST", "/v1/needs", body)
    assert (status, error_of(answer)) == (400, "bad_request")


@pytest.mark.fault("S4")
def test_a_report_too_large_or_of_other_shards_is_refused(lone: Daemon, files: Files) -> None:
    status, _, headers = lone.ask("GET", "/v1/needs")
    assert (status, headers["allow"]) == (405, "POST")
    head = {"Content-Length": str(REPORT_BYTES_MAX + 1)}
    assert lone.ask("POST", "/v1/needs", b"", head)[0] == 400
    with Consumer(lone, files) as consumer:
        shards = np.zeros(consumer.manifest.shard_count + 1, np.uint8)
        report = NeedsReport(consumer.manifest.digest, ConsumerReport(consumer.name, shards, 0.0, 0.0, 5.0))
        with pytest.raises(BadRequest, match="shards where the manifest has"):
            consumer.peer.needs(report)
        status, body, headers = lone.ask(
            "POST", "/v1/needs", NeedsReport(report.manifest, report.report, True).encode()
        )
        assert (status, headers["content-type"]) == (200, NEEDS_TYPE), "who leaves may say what it likes"
        assert NeedsAnswer.decode(body).status is NeedsStatus.TAKEN


@pytest.mark.fault("S12")
def test_nothing_is_unpacked_of_a_report_on_an_unknown_dataset_or_of_other_shards(
    lone: Daemon, files: Files, tmp_path: Path
) -> None:
    def body_of(manifest: Digest, shards: int) -> bytes:
        body = NeedsReport(manifest, ConsumerReport(bytes(16), np.zeros(shards, np.uint8), 0.0, 0.0, 5.0)).encode()
        fields = msgspec.msgpack.decode(body)
        return msgspec.msgpack.encode(fields | {"left": fields["left"][:-1] + b"?"})

    status, answer, _ = lone.ask("POST", "/v1/needs", body_of(Digest.of(b"nobody has it"), 1 << 24))
    assert (status, NeedsAnswer.decode(answer).status) == (200, NeedsStatus.NO_MANIFEST)
    with Consumer(lone, files) as consumer:
        manifest = consumer.manifest
        for shards, why in ((1 << 24, "where the manifest has"), (manifest.shard_count, "cannot be decompressed")):
            status, answer, _ = lone.ask("POST", "/v1/needs", body_of(manifest.digest, shards))
            assert (status, error_of(answer)) == (400, "bad_request")
            assert why in answer.decode()


async def test_a_large_report_is_unpacked_in_a_thread(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await asyncio.to_thread(lone_node, files, tmp_path)
    unpacked_in: set[int] = set()
    decode = NeedsReport.decode

    def watched(body: Bytes) -> NeedsReport:
        unpacked_in.add(threading.get_ident())
        return decode(body)

    monkeypatch.setattr(NeedsReport, "decode", watched)
    monkeypatch.setattr(reports_module, "INLINE_SHARDS_MAX", files.opened().shard_count - 1)
    async with TestClient(TestServer(make_app(node))) as client:
        await everything_needed_comes(client, node, files)
    await asyncio.to_thread(node.close)
    assert unpacked_in
    assert threading.get_ident() not in unpacked_in


@pytest.mark.fault("S12")
def test_more_consumers_than_a_daemon_keeps_are_told_so(even: Files, tmp_path: Path) -> None:
    with Daemon(tmp_path / "node") as daemon, Consumer(daemon, even) as consumer:
        for name in range(CONSUMERS_MAX):
            consumer.name = name.to_bytes(16, "big")
            assert consumer.tell({}).status is NeedsStatus.TAKEN
        assert consumer.tell({}).status is NeedsStatus.TAKEN, "again is not another"
        consumer.name = b"one too many...."
        assert consumer.tell({}).status is NeedsStatus.FULL
        consumer.name = bytes(16)
        consumer.tell({}, leaving=True)
        consumer.name = b"one too many...."
        assert consumer.tell({}).status is NeedsStatus.TAKEN


@pytest.mark.parametrize(
    "answer",
    [b"", b"nonsense", NeedsAnswer(NeedsStatus.TAKEN, np.zeros(3, np.uint8)).encode()],
    ids=["nothing", "nonsense", "other shards"],
)
def test_an_answer_that_makes_no_sense_is_corrupt(answer: bytes) -> None:
    told = NeedsReport(Digest(bytes(32)), ConsumerReport(bytes(16), np.zeros(5, np.uint8), 0.0, 0.0, 5.0))
    with (
        HostileServer(lambda connection, _: connection.sendall(ok(answer))) as server,
        contextlib.closing(PeerClient(server.url)) as peer,
        pytest.raises(Corrupt),
    ):
        peer.needs(told)
