"""Manifests that name somebody else's shards and a wrong place for their samples: they harm who reads by them alone."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.digest import Digest
from quiver.errors import Changed, NotAllowed, Unavailable
from quiver.residency import ConsumerReport, Decision, Recipe
from quiver.residency.messages import NeedsReport, NeedsStatus
from quiver.store import Kind
from quiver.wire import RangeStatus
from quiver_cacheserver.residency import fills as fills_module
from quiver_cacheserver.residency import uploads as uploads_module
from quiver_cacheserver.residency.fills import FAILURE_SECONDS, Fills
from quiver_cacheserver.residency.uploads import UPLOAD_SECONDS, UPLOADS_PER_ADDRESS
from tests.daemon.test_costs import HONEST, HOSTILE, ByHand, fills_by, lone_node
from tests.daemon.test_rack import origin_bytes, put_manifest, whole_dataset
from tests.daemon.test_routes import read
from tests.support.daemon import Daemon
from tests.support.data import Files, make_files, random_files, rebased
from tests.support.origins import HANG, scripted_origin

pytestmark = pytest.mark.usefixtures("patient_reads")

RIGHT, JUNK, OTHER = (Digest(bytes([number]) * 32) for number in (1, 2, 3))
SHARD = Digest(bytes(32))


@pytest.fixture
def small(tmp_path: Path) -> Files:
    return make_files(tmp_path, random_files(40, seed=1))


def read_all(daemon: Daemon, files: Files, wait: int, times: int = 1) -> set[RangeStatus]:
    """Ask for every shard, a few at a time as a client that wants to be chosen would; return what came last."""
    manifest = files.opened()
    shards = [manifest.shard_digest(number) for number in range(manifest.shard_count)]
    told: set[RangeStatus] = set()
    for _ in range(times):
        told = set()
        for at in range(0, len(shards), 4):
            some = shards[at : at + 4]
            told |= set(read(daemon, some, [(i, 0, 9) for i in range(len(some))], manifest.digest, wait)[0])
    return told


@pytest.mark.fault("S7")
@pytest.mark.parametrize("junk", ["not allowed", "missing objects"])
@pytest.mark.fault("S12")
def test_a_junk_manifest_of_somebody_s_shards_keeps_nobody_from_filling_them(
    tmp_path: Path, small: Files, junk: str
) -> None:
    (tmp_path / "empty").mkdir()
    base = "file:///nowhere/" if junk == "not allowed" else f"file://{tmp_path}/empty/"
    lie = rebased(small, base, tmp_path / "lie.quiver")
    with Daemon(tmp_path / "node", origins=[small.folder, tmp_path / "empty"]) as daemon:
        put_manifest(daemon, lie)
        put_manifest(daemon, small)
        assert RangeStatus.PRESENT not in read_all(daemon, lie, 500, times=2)
        begun = time.monotonic()
        assert read_all(daemon, small, 5_000) == {RangeStatus.PRESENT}
        assert time.monotonic() - begun < 5
        dataset = whole_dataset(small, daemon.url)
        assert dataset.stats()["samples_origin"] == 0
        dataset.close()
        assert origin_bytes([daemon]) == small.total_bytes()
        assert read_all(daemon, lie, 0) == {RangeStatus.PRESENT}, "what is here is here for all"


def test_a_fill_that_hangs_on_a_junk_manifest_s_origin_is_not_waited_for(tmp_path: Path, small: Files) -> None:
    with scripted_origin(small.folder, lambda name: HANG) as slow:
        lie = rebased(small, slow.url, tmp_path / "lie.quiver")
        with Daemon(tmp_path / "node", origins=[small.folder, slow.url]) as daemon:
            put_manifest(daemon, lie)
            put_manifest(daemon, small)
            shard = small.opened().shard_digest(0)
            begun = time.monotonic()
            assert read(daemon, [shard], [(0, 0, 9)], lie.opened().digest, 500)[0] == [RangeStatus.FILLING]
            assert time.monotonic() - begun < 10, "no read waits longer than it said"
            assert slow.held.acquire(timeout=5)
            begun = time.monotonic()
            statuses = read(daemon, [shard], [(0, 0, 9)], small.opened().digest, 20_000)[0]
            assert statuses == [RangeStatus.PRESENT]
            assert time.monotonic() - begun < 10


def test_manifests_that_share_shards_cost_one_origin_read_of_each(tmp_path: Path, small: Files) -> None:
    copies = []
    for number in range(6):
        shutil.copytree(small.folder, tmp_path / f"copy{number}")
        copies.append(rebased(small, f"file://{tmp_path}/copy{number}/", tmp_path / f"copy{number}.quiver"))
    with Daemon(tmp_path / "node", origins=[tmp_path]) as daemon:
        for files in copies:
            put_manifest(daemon, files)
        with ThreadPoolExecutor(len(copies)) as pool:
            told = list(pool.map(lambda files: read_all(daemon, files, 20_000), copies))
        assert told == [{RangeStatus.PRESENT}] * len(copies)
        assert origin_bytes([daemon]) == small.total_bytes()


async def test_junk_reports_on_somebody_s_shards_keep_nobody_s_from_being_filled(tmp_path: Path, small: Files) -> None:
    lie = rebased(small, "file:///nowhere/", tmp_path / "lie.quiver")
    node = await asyncio.to_thread(lone_node, small, tmp_path)
    driver = asyncio.create_task(node.follow_needs())
    try:
        for files in (lie, small):
            data = await asyncio.to_thread(files.manifest.read_bytes)
            await asyncio.to_thread(node.store.put, Kind.MANIFEST, files.opened().digest, data)

        async def tell(files: Files, number: int, client: str) -> Any:
            manifest = files.opened()
            left = np.full(manifest.shard_count, 255, np.uint8)
            told = NeedsReport(
                manifest.digest, ConsumerReport(number.to_bytes(16, "big"), left, 1e6, 0.0, 30.0)
            ).encode()
            return await node.reports.take(told, client)

        async with asyncio.timeout(20):
            while not (await tell(lie, 1, HOSTILE)).uploads:  # noqa: ASYNC110  it is told when it asks
                await asyncio.sleep(0.05)
            assert (await tell(small, 2, HONEST)).status is NeedsStatus.TAKEN
            while node.shard_count < small.opened().shard_count:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        driver.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await driver
        await asyncio.to_thread(node.close)


@pytest.mark.fault("S12")
def test_a_fill_that_cannot_succeed_evicts_nothing(tmp_path: Path) -> None:
    made = make_files(tmp_path, random_files(20, seed=1, low=60_000, high=60_001), shard_bytes=61_000)
    gone = make_files(tmp_path, random_files(20, seed=2, low=60_000, high=60_001), name="gone", shard_bytes=700_000)
    shutil.rmtree(gone.folder)
    gone.folder.mkdir()
    node = lone_node(made, tmp_path, 20 * 60_048 + 20_000)
    with contextlib.closing(node):
        manifest = made.opened()
        for number in range(20):
            node.filler.fill(manifest.shard_digest(number), manifest, HONEST)
        inventory: Any = node.store.inventory
        for kind in Kind:
            inventory._files[kind]._used -= 3600
        for number in range(gone.opened().shard_count):
            with pytest.raises(Changed):
                node.filler.fill(gone.opened().shard_digest(number), gone.opened(), HOSTILE)
        assert node.shard_count == 20


# -- the table itself, with a clock of its own ------------------------------------------------------------------------


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (fills_module, uploads_module):
        monkeypatch.setattr(module, "time", made)
    return made


async def ran(threads: ByHand, error: Exception | None = None) -> None:
    _, future = threads.given.pop(0)
    future.set_exception(error) if error is not None else future.set_result("origin")
    for _ in range(4):
        await asyncio.sleep(0)


def asked(fills: Fills, recipe: Recipe, client: str) -> RangeStatus:
    """Return what a reader is told that may be chosen to upload."""
    status = fills.status(recipe)
    if status is RangeStatus.UPLOAD and not fills.choose_uploader(Decision(*recipe, 1.0), client):
        return RangeStatus.FILLING
    return status


async def not_allowed(fills: Fills, threads: ByHand, recipe: Recipe) -> None:
    begun = fills.start(Decision(*recipe, 1.0), lambda: None)
    await ran(threads, NotAllowed("no"))
    with contextlib.suppress(NotAllowed):
        assert isinstance(begun, asyncio.Future)
        await begun


async def test_another_manifest_s_fill_begins_once_the_first_failed_and_not_before() -> None:
    threads = ByHand()
    fills = fills_by(threads)
    junk = fills.start(Decision(SHARD, JUNK, 1.0), lambda: None, HOSTILE)
    right = fills.start(Decision(SHARD, RIGHT, 1.0), lambda: None, HONEST)
    other = fills.start(Decision(SHARD, OTHER, 1.0), lambda: None, HONEST)
    assert fills.start(Decision(SHARD, RIGHT, 1.0), lambda: None, HOSTILE) is right, "one fill of each manifest"
    assert (len(threads.given), fills.in_flight) == (1, 3)
    await ran(threads, Unavailable("x", "does not answer"))
    assert (len(threads.given), fills.in_flight) == (1, 2)
    assert fills.refusal(Recipe(SHARD, JUNK)) is RangeStatus.FAILED
    assert fills.refusal(Recipe(SHARD, RIGHT)) is None
    await ran(threads)
    assert isinstance(junk, asyncio.Future)
    assert junk.exception() is not None
    assert isinstance(right, asyncio.Future)
    assert isinstance(other, asyncio.Future)
    assert right.done()
    assert other.done()
    assert (len(threads.given), fills.in_flight, fills._commitments.coming) == (0, 0, [])
    fills.close()


async def test_a_failure_is_forgotten_and_not_only_ignored_once_it_is_old(clock: Clock) -> None:
    """Each round of deciding looks at all that are remembered, on the event loop."""
    threads, recipe = ByHand(), Recipe(SHARD, RIGHT)
    fills = fills_by(threads)
    failing = fills.start(Decision(*recipe, 1.0), lambda: None)
    await ran(threads, Unavailable("x", "does not answer"))
    assert isinstance(failing, asyncio.Future)
    assert failing.exception() is not None
    fills.expire()
    assert fills.failed == [recipe]
    clock.now += FAILURE_SECONDS
    fills.expire()
    assert (fills.failed, len(fills._failed)) == ([], 0)


@pytest.mark.fault("S12")
async def test_one_who_lets_an_upload_lapse_is_chosen_after_the_others(clock: Clock) -> None:
    threads, recipe = ByHand(), Recipe(SHARD, RIGHT)
    fills = fills_by(threads)
    await not_allowed(fills, threads, recipe)
    assert asked(fills, recipe, HOSTILE) is RangeStatus.UPLOAD
    assert asked(fills, recipe, HONEST) is RangeStatus.FILLING
    fills.forgo(recipe, HONEST)
    assert fills.uploads.awaits(recipe), "only the one who was chosen can forgo it"
    clock.now += UPLOAD_SECONDS
    assert asked(fills, recipe, HOSTILE) is RangeStatus.FILLING
    assert asked(fills, recipe, HONEST) is RangeStatus.UPLOAD
    clock.now += UPLOAD_SECONDS + 1
    assert asked(fills, recipe, HOSTILE) is RangeStatus.UPLOAD, "if nobody else asks"


@pytest.mark.fault("S12")
async def test_an_address_owes_so_many_uploads_and_no_more(clock: Clock) -> None:
    threads = ByHand()
    fills = fills_by(threads)
    recipes = [Recipe(Digest.of(bytes([number])), RIGHT) for number in range(UPLOADS_PER_ADDRESS + 1)]
    for recipe in recipes:
        await not_allowed(fills, threads, recipe)
    told = [asked(fills, recipe, HOSTILE) for recipe in recipes]
    assert told.count(RangeStatus.UPLOAD) == UPLOADS_PER_ADDRESS
    assert asked(fills, recipes[-1], HONEST) is RangeStatus.UPLOAD
    fills.arrived(recipes[0].shard)
    assert asked(fills, recipes[0], HOSTILE) is RangeStatus.FILLING, "it came"
    clock.now += UPLOAD_SECONDS
    assert asked(fills, recipes[-1], HOSTILE) is RangeStatus.UPLOAD


async def test_another_manifest_s_upload_is_waited_for_a_moment(clock: Clock) -> None:
    threads = ByHand()
    fills = fills_by(threads)
    for manifest in (JUNK, RIGHT):
        await not_allowed(fills, threads, Recipe(SHARD, manifest))
    assert asked(fills, Recipe(SHARD, JUNK), HOSTILE) is RangeStatus.UPLOAD
    assert asked(fills, Recipe(SHARD, RIGHT), HONEST) is RangeStatus.FILLING
    clock.now += fills_module.OTHERS_SECONDS
    assert asked(fills, Recipe(SHARD, RIGHT), HONEST) is RangeStatus.UPLOAD
    fills.arrived(SHARD)
    assert not fills.uploads.awaits(Recipe(SHARD, JUNK))
    assert not fills.uploads.awaits(Recipe(SHARD, RIGHT))
