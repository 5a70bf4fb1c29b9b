"""What a process decides for a folder that it shares: evicted is what a decision names, and failures are kept once."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest

from quiver.digest import Digest
from quiver.errors import Changed, DiskFailed, NotFound, OverCapacity, Unavailable
from quiver.residency import ConsumerReport, Decision
from quiver.residency.messages import NeedsReport
from quiver.store import Kind, Store
from quiver_client import Dataset
from quiver_client.embedded.fetching import FETCHES_MAX, FolderNeeds
from quiver_client.embedded.fill_failures import FillFailures
from quiver_client.embedded.filling import Outcome
from quiver_client.embedded.folder_contents import FolderContents
from quiver_client.embedded.lease_files import LEASE_BYTES_MAX, PATH_BYTES_MAX, LeaseFile, LeaseFolder
from quiver_client.embedded.tier import EmbeddedTier
from tests.store.test_store import shard_of
from tests.support.data import Files
from tests.support.waiting import until

Make = Callable[..., Dataset]
YEARS_AGO = (1, 1)


def tier_of(made: Dataset) -> EmbeddedTier:
    return cast(EmbeddedTier, made._open().tiers[0])


def resident(tier: EmbeddedTier) -> set[int]:
    manifest = tier._manifest
    return {
        number
        for number in range(manifest.shard_count)
        if tier.store.inventory.size(Kind.SHARD, manifest.shard_digest(number))
    }


def filled(tier: EmbeddedTier, shards: Iterable[int]) -> None:
    """Fill shards that nobody reads for years afterwards."""
    for shard in shards:
        assert tier.filler.fetch_ahead(tier.decider.for_reader(shard)).result(20) is Outcome.ARRIVED
    for path in (tier.store.root / "shards").rglob("??/*"):
        os.utime(path, YEARS_AGO)
    tier.decider.look(at_once=True)


def need(tier: EmbeddedTier, shards: Iterable[int], name: bytes = b"a consumer") -> ConsumerReport:
    """Report that just these shards are needed, without fetching any; all others of the dataset may be evicted."""
    left = np.zeros(tier._manifest.shard_count, np.uint8)
    left[list(shards)] = 255
    report = ConsumerReport(name.ljust(16, b"."), left, 0.0, 0.0, 30.0)
    tier.needs.report(report)
    return report


def by_size(files: Files) -> list[int]:
    """Return the shards, the smallest first."""
    return np.argsort(files.opened().tables.shard_sizes).tolist()  # type: ignore[no-any-return]


def capacity_of(files: Files, shards: Iterable[int]) -> int:
    return int(files.opened().tables.shard_sizes[list(shards)].sum())


def test_one_report_is_enough_to_fetch_all_that_is_needed(dataset: Make, files: Files, tmp_path: Path) -> None:
    made = dataset(files.manifest, f"file://{tmp_path}/cache")
    count = made.manifest.shard_count
    assert count > 2 * FETCHES_MAX
    needs = FolderNeeds(made.manifest, tier_of(made))
    needs.report(ConsumerReport(b"x" * 16, np.full(count, 255, np.uint8), 0.0, 0.0, 30.0))
    until(lambda: made.stats()["fills"] == count, what="each fetch that ends begins the next")
    assert made.stats()["bytes_origin"] == made.manifest.total_bytes
    needs.close()


def test_nothing_is_fetched_for_a_consumer_that_has_left(dataset: Make, files: Files, tmp_path: Path) -> None:
    made = dataset(files.manifest, f"file://{tmp_path}/cache")
    tier = tier_of(made)
    needs = FolderNeeds(made.manifest, tier)
    report = ConsumerReport(b"x" * 16, np.full(made.manifest.shard_count, 255, np.uint8), 0.0, 0.0, 30.0)
    needs.report(report)
    needs.report(report, leaving=True)
    until(lambda: not needs._fetching, what="what had begun has ended")
    with tier.needs.locked() as known:
        assert not len(known)
        assert not len(known.commitments)
    assert made.stats()["fills"] < made.manifest.shard_count
    needs.close()


def test_a_fill_evicts_what_its_decision_names_and_nothing_else(dataset: Make, files: Files, tmp_path: Path) -> None:
    *small, new = by_size(files)[:4]
    made = dataset(files.manifest, f"file://{tmp_path}/cache?capacity={capacity_of(files, [*small, new]) - 1}")
    tier = tier_of(made)
    filled(tier, small)
    need(tier, [])  # so that any of them may be evicted
    named = tuple(made.manifest.shard_digest(shard) for shard in small[1:])
    size = float(made.manifest.tables.shard_sizes[new])
    decision = Decision(made.manifest.shard_digest(new), made.manifest.digest, size, named)
    with tier.needs.locked() as needs:
        needs.commit(decision)
        assert set(needs.commitments.evicting) == set(named), "gone, as far as any other decision is concerned"
    assert tier.filler.fetch_ahead(decision).result(20) is Outcome.ARRIVED
    assert resident(tier) == {small[0], new}
    with tier.needs.locked() as needs:
        assert not len(needs.commitments)


def test_of_two_processes_that_evict_the_same_shard_the_second_decides_again(
    dataset: Make, files: Files, tmp_path: Path
) -> None:
    *old, mine, theirs = by_size(files)[:4]
    sizes = files.opened().tables.shard_sizes
    capacity = max(capacity_of(files, old), capacity_of(files, [mine, theirs]))
    cache = f"file://{tmp_path}/cache?capacity={capacity}"
    first, second = (tier_of(dataset(files.manifest, cache)) for _ in range(2))
    filled(first, old)
    for tier in (first, second):
        need(tier, [mine, theirs])
        tier.decider.look(at_once=True)
    decisions = [first.decider.for_reader(mine), second.decider.for_reader(theirs)]
    assert {*decisions[0].evict} & {*decisions[1].evict}, "neither knows of the other"
    assert first.filler.fetch_ahead(decisions[0]).result(20) is Outcome.ARRIVED
    assert second.filler.fetch_ahead(decisions[1]).result(20) is Outcome.ARRIVED
    assert {mine, theirs} <= resident(first)
    assert int(sizes[list(resident(first))].sum()) <= capacity
    with second.needs.locked() as needs:
        assert not len(needs.commitments)


def test_who_finds_no_room_after_all_evicts_nothing_and_its_victims_count_as_held(
    dataset: Make, files: Files, tmp_path: Path
) -> None:
    old, mine, theirs, kept = by_size(files)[-4:]
    capacity = capacity_of(files, [kept, theirs])
    cache = f"file://{tmp_path}/cache?capacity={capacity}"
    first, second = (tier_of(dataset(files.manifest, cache)) for _ in range(2))
    filled(first, [kept, old])
    for tier in (first, second):
        need(tier, [kept, mine, theirs])
        tier.decider.look(at_once=True)
    decision = second.decider.for_reader(mine)
    assert first.filler.fetch_ahead(first.decider.for_reader(theirs)).result(20) is Outcome.ARRIVED
    assert second.filler.fetch_ahead(decision).result(20) is Outcome.NO_ROOM
    assert resident(second) == {kept, theirs}
    with second.needs.locked() as needs:
        assert not needs.commitments.evicting
    assert second.store.resident_bytes() <= capacity


def test_what_a_process_did_during_a_scan_is_not_forgotten_by_it(tmp_path: Path) -> None:
    store = Store.open(tmp_path, 1 << 20, shared=True)
    (old, old_data), (new, new_data) = shard_of(1, 1000), shard_of(2, 2000)
    store.put(Kind.SHARD, old, old_data)
    contents = FolderContents(store)
    contents.replace(contents.scan())
    found = contents.scan()
    contents.removed(old)
    contents.added(new, len(new_data))
    contents.replace(found)
    assert set(contents.files) == {new}
    assert contents.occupied_bytes == len(new_data)
    everything = contents.shelf(lambda shards: np.zeros(len(shards), np.int8))
    assert [everything.name(at) for at in range(len(everything))] == [new]
    store.close()


# -- failures ---------------------------------------------------------------------------------------------------------


def test_an_origin_that_does_not_answer_is_left_alone_until_it_does() -> None:
    failures = FillFailures()
    away = Unavailable("origin", "no answer")
    failures.add(1, away)
    assert failures.is_waiting_for_all(for_room=False)
    assert failures.is_origin_failing
    failures.skip(2)
    assert failures.reason(2) is away, "what was not tried has the same reason"
    failures.succeeded(3)
    assert not failures.is_waiting_for_all(for_room=True)
    assert (failures.reason(1), failures.waiting()) == (None, []), "it answers again: any shard may be tried"


def test_reads_that_fail_together_are_one_failure() -> None:
    failures = FillFailures()
    for shard in range(4):
        failures.add(shard, Unavailable("origin", "no answer"))
    assert failures._origin.failures == 1


def test_a_shard_that_is_lost_keeps_no_other_from_being_filled() -> None:
    failures = FillFailures()
    failures.add(1, Changed("file:///a", "vanished"))
    assert (failures.is_waiting(1), failures.is_waiting(2)) == (True, False)
    assert not failures.is_waiting_for_all(for_room=True)
    assert failures.waiting() == [1]


def test_want_of_room_concerns_readers_and_a_failing_disk_everybody() -> None:
    failures = FillFailures()
    failures.add(1, OverCapacity("full", 1.0))
    assert failures.is_waiting_for_all(for_room=True)
    assert not failures.is_waiting_for_all(for_room=False), "who needs a shard may evict what a reader may not"
    failures.found_room()
    assert not failures.is_waiting_for_all(for_room=True)
    for error in (DiskFailed("disk full"), NotFound("the folder was removed")):
        failures.add(2, error)
        assert failures.is_waiting_for_all(for_room=False)
        failures.succeeded(2)


# -- lease files ------------------------------------------------------------------------------------------------------

CONSUMER = b"c" * 16


def told() -> NeedsReport:
    return NeedsReport(Digest(b"d" * 32), ConsumerReport(CONSUMER, np.full(5, 255, np.uint8), 1e6, 0.0, 30.0))


def written(folder: Path, data: bytes) -> int:
    """Be a process that holds a lease file with this content."""
    path = folder / CONSUMER.hex()
    path.write_bytes(data)
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def test_a_lease_is_read_as_it_was_written(tmp_path: Path) -> None:
    lease = LeaseFile(tmp_path, CONSUMER)
    lease.write(Path("/data/m.quiver"), told())
    folder = LeaseFolder(tmp_path)
    ([read], ended) = folder.changes(1e9, own=())
    assert (read.manifest, read.report.manifest, ended) == (Path("/data/m.quiver"), told().manifest, [])
    assert (read.report.report.left == 255).all()
    assert folder.changes(1e9, own=()) == ([], []), "nothing changed"
    lease.remove()
    assert folder.changes(1e9, own=()) == ([], [CONSUMER])


MALFORMED = {
    "empty": lambda report: b"",
    "of an earlier version": lambda report: b"QNL1" + report,
    "of a later version": lambda report: msgspec.msgpack.encode(["quiver-lease-2", b"/m", report]),
    "cut short": lambda report: msgspec.msgpack.encode(["quiver-lease-1", b"/m", report])[:-1],
    "with more behind it": lambda report: msgspec.msgpack.encode(["quiver-lease-1", b"/m", report]) + b"x",
    "with a field too many": lambda report: msgspec.msgpack.encode(["quiver-lease-1", b"/m", report, b""]),
    "path too long": lambda report: msgspec.msgpack.encode(["quiver-lease-1", b"/" * (PATH_BYTES_MAX + 1), report]),
    "path relative": lambda report: msgspec.msgpack.encode(["quiver-lease-1", b"m", report]),
    "path with a NUL": lambda report: msgspec.msgpack.encode(["quiver-lease-1", b"/m\0", report]),
    "path of text": lambda report: msgspec.msgpack.encode(["quiver-lease-1", "/m", report]),
    "report malformed": lambda report: msgspec.msgpack.encode(["quiver-lease-1", b"/m", report[:-1]]),
    "nested too deeply": lambda report: b"\x91" * 100_000,
}


@pytest.mark.parametrize("malformed", MALFORMED)
def test_a_malformed_lease_is_passed_over(tmp_path: Path, malformed: str) -> None:
    fd = written(tmp_path, MALFORMED[malformed](told().encode()))
    folder = LeaseFolder(tmp_path)
    assert folder.changes(1e9, own=()) == ([], [])
    os.close(fd)
    folder.changes(1e9, own=())
    assert not list(tmp_path.iterdir()), "nobody holds it any more"


def test_a_lease_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = written(tmp_path, b"")
    os.ftruncate(fd, LEASE_BYTES_MAX + 1)
    monkeypatch.setattr("os.pread", lambda *args: pytest.fail("it was read"))
    assert LeaseFolder(tmp_path).changes(1e9, own=()) == ([], [])
    os.close(fd)
