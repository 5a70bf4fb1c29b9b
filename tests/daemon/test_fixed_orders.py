"""A daemon whose readers' orders are known: what it asks for, fetches and keeps, and what is read past it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quiver.peer import PeerClient
from quiver.residency import ConsumerReport
from quiver.residency.messages import NeedsAnswer, NeedsReport, NeedsStatus
from quiver.store import Kind
from quiver.store.inventory import file_of
from quiver.wire import RangeStatus
from quiver_client import DataLoader, Dataset
from tests.daemon.test_routes import read
from tests.support.daemon import Daemon, rack_of
from tests.support.data import Files, make_files, random_files
from tests.support.waiting import until

NAME = bytes(15) + b"\1"
ORDER = b"o" * 16


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """16 shards of one sample each, all of one size."""
    content = random_files(16, seed=5, low=60_000, high=60_001)
    return make_files(tmp_path_factory.mktemp("even"), content, shard_bytes=61_000)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Shards of several samples each."""
    content = random_files(320, seed=6, low=4_000, high=4_001)
    return make_files(tmp_path_factory.mktemp("many"), content, shard_bytes=66_000)


def capacity_for(files: Files, share: float) -> str:
    manifest = files.opened()
    return str(int(share * int(manifest.tables.shard_sizes.sum())) + manifest.path.stat().st_size)


def tell(daemon: Daemon, files: Files, uses: list[int] | None, at: int = 0) -> NeedsAnswer:
    manifest = files.opened()
    left = np.zeros(manifest.shard_count, np.uint8)
    left[(uses or [])[at:]] = 255
    listed = np.asarray(uses, np.int32) if uses is not None else None
    report = ConsumerReport(NAME, left, 6e4, 0.0, 30.0, ordered=True, order=ORDER, order_at=at, uses=listed)
    peer = PeerClient(daemon.url)
    try:
        answer = peer.needs(NeedsReport(manifest.digest, report))
        if answer.status is NeedsStatus.NO_MANIFEST:
            peer.put_manifest(manifest.digest, files.manifest.read_bytes())
            answer = peer.needs(NeedsReport(manifest.digest, report))
        return answer
    finally:
        peer.close()


def held(daemon: Daemon, files: Files) -> set[int]:
    manifest = files.opened()
    digests = (manifest.shard_digest(number) for number in range(manifest.shard_count))
    return {at for at, digest in enumerate(digests) if file_of(daemon.data_dir, Kind.SHARD, digest).exists()}


def test_a_list_that_is_not_known_is_asked_for_once_and_what_is_used_first_is_fetched(
    even: Files, tmp_path: Path
) -> None:
    uses = [9, 3, 7, 1, 0, 2, 4, 5, 6, 8]
    with Daemon(tmp_path / "node", origins=[even.folder], capacity=capacity_for(even, 4.5 / 16)) as daemon:
        assert tell(daemon, even, None).order_wanted
        assert not tell(daemon, even, uses).order_wanted
        assert not tell(daemon, even, None).order_wanted, "it is known now"
        until(lambda: (tell(daemon, even, None), held(daemon, even) == {9, 3, 7, 1})[1])


def test_samples_that_are_not_worth_their_shard_s_room_are_read_past_the_daemon(even: Files, tmp_path: Path) -> None:
    uses = [0, 1, 2, 3] * 9 + [5]
    manifest = even.opened()
    with Daemon(tmp_path / "node", origins=[even.folder], capacity=capacity_for(even, 4.5 / 16)) as daemon:
        tell(daemon, even, uses)
        until(lambda: (tell(daemon, even, uses), held(daemon, even) == {0, 1, 2, 3})[1])
        absent = manifest.shard_digest(5)
        statuses, _ = read(daemon, [absent], [(0, 0, 10)], manifest.digest, wait=20_000)
        assert statuses == [RangeStatus.NO_ROOM]
        assert held(daemon, even) == {0, 1, 2, 3}
        tell(daemon, even, uses, at=37)  # all is read, and nothing of it is needed any more
        statuses, _ = read(daemon, [absent], [(0, 0, 10)], manifest.digest, wait=20_000)
        assert statuses == [RangeStatus.NO_ROOM], "who reports all its uses decides by them"


@pytest.mark.fault("S12")
def test_a_list_for_which_there_is_no_room_is_refused_and_the_report_is_taken(
    even: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Daemon(tmp_path / "node", origins=[even.folder]) as daemon:
        answer = tell(daemon, even, [0] * (1 << 20))
        assert answer.status is NeedsStatus.TAKEN
        assert len(answer.seen) == 16


def test_a_full_shuffle_on_a_scarce_rack_reads_each_epoch_what_the_rack_cannot_hold(
    many: Files, tmp_path: Path
) -> None:
    total = int(many.opened().tables.shard_sizes.sum())
    with rack_of(2, tmp_path, origins=[many.folder], capacity=capacity_for(many, 0.2)) as daemons:
        dataset = Dataset(many.manifest, ",".join(it.url for it in daemons))
        loader = DataLoader(dataset, 8, shuffle=True, substitute=False, seed=1, collate_fn=len)

        def read_of_origin() -> float:
            return dataset.stats()["bytes_origin"] + sum(it.metric("quiver_origin_read_bytes_total") for it in daemons)

        for _ in range(2):
            assert sum(loader) == 320
        before = read_of_origin()
        assert sum(loader) == 320
        assert read_of_origin() - before <= 0.75 * total, "two fifths are cached"
        loader.close()
        dataset.close()
