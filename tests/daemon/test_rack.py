"""Daemons together: one origin read per shard, neighbours before the origin, nothing from where they may not read."""

from __future__ import annotations

import re
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.digest import Digest
from quiver.peer import PeerClient
from quiver.store import Kind
from quiver.store.inventory import file_of
from quiver.wire import RANGE, RECHECK, RangeStatus, ReadRequest
from quiver_client import Dataset
from tests.daemon.test_routes import read
from tests.support.daemon import Daemon, Patient, rack_of
from tests.support.data import Files, make_files, random_files, rebased, rewritten, shard_bytes_of
from tests.support.etcd import Etcd
from tests.support.servers import counting_origin
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("patient_reads")

MIB = 1 << 20


@pytest.fixture
def small(tmp_path: Path) -> Files:
    return make_files(tmp_path, random_files(60, seed=1))


def put_manifest(daemon: Daemon, files: Files) -> Digest:
    digest = files.opened().digest
    assert daemon.ask("PUT", f"/v1/manifests/{digest}", files.manifest.read_bytes())[0] == 201
    return digest


def whole_dataset(files: Files, cache: str, **more: Any) -> Dataset:
    """Read every sample once, in batches, and compare it with the file."""
    dataset = Dataset(files.manifest, cache, fields=["image", "__key__"], **more)
    order = np.random.default_rng(0).permutation(len(dataset)).tolist()
    for at in range(0, len(order), 16):
        for sample in dataset.__getitems__(order[at : at + 16]):
            assert sample["image"] == files.content[sample["__key__"]]
    return dataset


def origin_bytes(daemons: list[Daemon]) -> int:
    return sum(int(daemon.metric("quiver_origin_read_bytes_total")) for daemon in daemons)


@pytest.mark.fault("O1")
def test_thirty_readers_of_a_cold_dataset_cost_one_origin_read_of_each_shard(tmp_path: Path, small: Files) -> None:
    with rack_of(2, tmp_path / "rack", origins=[small.folder], make=Patient) as daemons:
        manifest = small.opened()
        put_manifest(daemons[0], small)
        shards = [manifest.shard_digest(number) for number in range(manifest.shard_count)]
        rows = [(number, 0, 100) for number in range(len(shards))]
        barrier = threading.Barrier(30)

        def reader(_: int) -> set[RangeStatus]:
            barrier.wait()
            return set(read(daemons[0], shards, rows, manifest.digest, wait=20_000)[0])

        with ThreadPoolExecutor(30) as pool:
            assert all(statuses == {RangeStatus.PRESENT} for statuses in pool.map(reader, range(30)))
        assert origin_bytes(daemons) == small.total_bytes()
        assert daemons[0].status()["fills"] == len(shards)


@pytest.mark.fault("O1")
def test_a_rack_reads_the_origin_once_however_many_clients_and_users_read(tmp_path: Path, small: Files) -> None:
    renamed = {f"other/{i:03}.bin": data for i, data in enumerate(reversed(small.content.values()))}
    other = make_files(tmp_path / "second", renamed)
    with rack_of(3, tmp_path / "rack", origins=[small.folder, other.folder], make=Patient) as daemons:
        for daemon in daemons:
            whole_dataset(small, daemon.url).close()
        assert origin_bytes(daemons) == small.total_bytes()
        resident = sum(daemon.status()["resident_bytes"] for daemon in daemons)
        manifests = sum(path.stat().st_size for daemon in daemons for path in daemon.files("manifests"))
        dataset = Dataset(other.manifest, daemons[1].url, fields=["data", "__key__"])
        for sample in dataset.__getitems__(list(range(len(dataset)))):
            assert sample["data"] == renamed[sample["__key__"]]
        assert dataset.stats()["bytes_origin"] == 0
        dataset.close()
        assert origin_bytes(daemons) == small.total_bytes(), "the same content under other names is not read again"
        after = sum(daemon.status()["resident_bytes"] for daemon in daemons)
        now = sum(path.stat().st_size for daemon in daemons for path in daemon.files("manifests"))
        assert after - resident == now - manifests


@pytest.mark.fault("M6")
def test_after_a_join_the_neighbours_are_asked_before_the_origin(tmp_path: Path, small: Files) -> None:
    with Etcd() as etcd:
        flags = ("--etcd", etcd.url, "--rack", "r1")
        first = Patient(tmp_path / "a", *flags, "--node-id", "a", origins=[small.folder])
        second = Patient(tmp_path / "b", *flags, "--node-id", "b", origins=[small.folder])
        with first:
            whole_dataset(small, first.url).close()
            with second:
                until(lambda: all(daemon.metric("quiver_ring_members") == 2 for daemon in (first, second)))
                whole_dataset(small, second.url).close()
                assert second.status()["fills"] > 0, "the newcomer owns its share"
                assert origin_bytes([first, second]) == small.total_bytes()
                assert second.metric("quiver_origin_read_bytes_total") == 0
                assert second.stop() == 0
            until(lambda: first.metric("quiver_ring_members") == 1)
            whole_dataset(small, first.url).close()
            assert origin_bytes([first]) == small.total_bytes()
        assert not re.findall(r"[0-9a-f]{64}", first.log + second.log)


# -- origins ----------------------------------------------------------------------------------------------------------


def outside(how: str, tmp_path: Path, small: Files) -> tuple[Files, list[Path | str]]:
    """Return a dataset and the origins of a daemon that must not read it."""
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    match how:
        case "none allowed":
            return small, []
        case "another prefix":
            return small, [allowed]
        case "a prefix of the name":
            return small, [str(small.folder)[:-1]]
        case "a link inside":
            (allowed / "link").symlink_to(small.folder)
            return rebased(small, f"file://{allowed}/link/", tmp_path / "link.quiver"), [allowed]
        case "a quoted link inside":
            (allowed / "link").symlink_to(small.folder)
            return rebased(small, f"file://{allowed}/%6Cink/", tmp_path / "link.quiver"), [allowed]
        case "files that are links":
            shutil.copytree(small.folder, allowed / "data")
            for path in (allowed / "data").rglob("*.png"):
                target = small.folder / path.relative_to(allowed / "data")
                path.unlink()
                path.symlink_to(target)
            return rebased(small, f"file://{allowed}/data/", tmp_path / "links.quiver"), [allowed]
        case "localhost":
            return rebased(small, f"file://localhost{small.folder}/", tmp_path / "host.quiver"), [allowed]
    raise AssertionError(how)


@pytest.mark.parametrize(
    "how",
    [
        *("none allowed", "another prefix", "a prefix of the name", "a link inside", "a quoted link inside"),
        *("files that are links", "localhost"),
    ],
)
def test_an_origin_that_is_not_allowed_is_read_by_a_client_once_for_all(tmp_path: Path, small: Files, how: str) -> None:
    files, origins = outside(how, tmp_path, small)
    with rack_of(2, tmp_path / "rack", origins=origins, make=Patient) as daemons:
        with ThreadPoolExecutor(4) as pool:
            datasets = list(pool.map(lambda i: whole_dataset(files, daemons[i % 2].url), range(4)))
        stats = [dataset.stats() for dataset in datasets]
        for dataset in datasets:
            dataset.close()
        assert origin_bytes(daemons) == 0
        assert sum(each["bytes_origin"] for each in stats) == small.total_bytes()
        assert sum(each["uploads"] for each in stats) == files.opened().shard_count
        assert sum(len(daemon.files()) for daemon in daemons) == files.opened().shard_count
        assert all(each["samples_origin"] == 0 for each in stats)


def test_a_folder_with_odd_letters_is_allowed_by_its_plain_name(tmp_path: Path) -> None:
    odd = make_files(tmp_path, random_files(9), name="my däta %41 #1")
    with Daemon(tmp_path / "node", origins=[odd.folder]) as daemon:
        whole_dataset(odd, daemon.url).close()
        assert daemon.metric("quiver_origin_read_bytes_total") == odd.total_bytes()


@pytest.mark.fault("O2")
def test_when_the_chosen_uploader_goes_another_is_chosen(tmp_path: Path, small: Files) -> None:
    with Daemon(tmp_path / "node") as daemon:
        manifest = small.opened()
        put_manifest(daemon, small)
        digest, data = shard_bytes_of(manifest, 0)

        def ask(wait: int = 0) -> RangeStatus:
            return read(daemon, [digest], [(0, 0, 10)], manifest.digest, wait=wait)[0][0]

        until(lambda: ask() is RangeStatus.UPLOAD)  # chosen, and then says no more
        assert ask() is RangeStatus.FILLING
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ask, 20_000)
            assert daemon.ask("PUT", f"/v1/shards/{digest}", data)[0] == 201
            assert waiting.result(timeout=5) is RangeStatus.PRESENT, "who waits is answered when the upload arrives"


def test_a_remote_origin_is_read_if_it_is_allowed(tmp_path: Path, small: Files) -> None:
    with counting_origin(small.folder) as origin:
        files = rebased(small, origin.url, tmp_path / "remote.quiver")
        with Daemon(tmp_path / "node", origins=[origin.url]) as daemon:
            whole_dataset(files, daemon.url).close()
            assert daemon.metric("quiver_origin_read_bytes_total") == small.total_bytes() == origin.bytes_sent
        assert set(origin.requests.values()) == {1}


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_wrong_bytes_on_a_disk_are_found_put_aside_and_mended(tmp_path: Path, small: Files) -> None:
    with rack_of(1, tmp_path / "rack", origins=[small.folder]) as (daemon,):
        whole_dataset(small, daemon.url).close()
        for path in daemon.files():
            raw = bytearray(path.read_bytes())
            raw[5] ^= 1
            path.write_bytes(raw)
        dataset = whole_dataset(small, daemon.url)
        shards = small.opened().shard_count
        assert dataset.stats()["corruptions"] >= shards
        assert dataset.stats()["samples_origin"] == 0, "the daemon mended itself in time"
        dataset.close()
        assert daemon.metric("quiver_corruptions_total") == shards
        assert len(list((daemon.data_dir / "quarantine").iterdir())) == min(shards, 16)
        assert origin_bytes([daemon]) == 2 * small.total_bytes()
        whole_dataset(small, daemon.url).close()
        assert daemon.metric("quiver_corruptions_total") == shards


@pytest.mark.fault("N1")
def test_a_neighbour_with_wrong_bytes_is_passed_over_for_the_origin(tmp_path: Path, small: Files) -> None:
    with rack_of(2, tmp_path / "rack", origins=[small.folder], make=Patient) as daemons:
        manifest = small.opened()
        put_manifest(daemons[0], small)
        put_manifest(daemons[1], small)
        digest, data = shard_bytes_of(manifest, 0)
        assert daemons[1].ask("PUT", f"/v1/shards/{digest}", data)[0] == 201
        path = file_of(daemons[1].data_dir, Kind.SHARD, digest)
        path.write_bytes(b"X" + data[1:])
        statuses, got = read(daemons[0], [digest], [(0, 0, 50)], manifest.digest, wait=20_000)
        assert statuses == [RangeStatus.PRESENT]
        assert got == data[:50]
        assert daemons[0].metric("quiver_corruptions_total") == 1


def test_a_restart_keeps_the_shards_and_verifies_them_before_use(tmp_path: Path, small: Files) -> None:
    first = Daemon(tmp_path / "node", origins=[small.folder])
    with first:
        whole_dataset(small, first.url).close()
        resident = first.status()["resident_bytes"]
        assert first.stop() == 0
    wrong, cut, *_ = first.files()
    raw = bytearray(wrong.read_bytes())
    raw[3] ^= 1
    wrong.write_bytes(raw)
    cut.write_bytes(cut.read_bytes()[:-7])
    (tmp_path / "node" / "tmp" / "leftover").write_bytes(b"x" * 1000)
    with Daemon(tmp_path / "node", origins=[small.folder]) as again:
        assert again.status()["resident_bytes"] == resident - 7
        assert again.ask("GET", f"/v1/shards/{wrong.name}")[0] == 404
        dataset = whole_dataset(small, again.url)
        assert dataset.stats()["corruptions"] == 0, "no reader meets what rotted while the daemon was down"
        dataset.close()
        assert again.metric("quiver_corruptions_total") == 2
        assert again.status()["fills"] == 2
        assert not list((tmp_path / "node" / "tmp").iterdir())


def test_a_file_that_somebody_deletes_is_brought_in_again(tmp_path: Path, small: Files) -> None:
    with Daemon(tmp_path / "node", origins=[small.folder]) as daemon:
        whole_dataset(small, daemon.url).close()
        assert daemon.stop() == 0
    with Daemon(tmp_path / "node", origins=[small.folder]) as daemon:
        for path in daemon.files():
            path.unlink()
        whole_dataset(small, daemon.url).close()
        assert daemon.status()["fills"] == small.opened().shard_count


def test_the_capacity_holds_for_a_dataset_that_is_larger(tmp_path: Path) -> None:
    large = make_files(tmp_path, random_files(150, seed=3), shard_bytes="128KiB")
    assert large.total_bytes() > 2 * MIB
    with Daemon(tmp_path / "node", origins=[large.folder], capacity="1MiB") as daemon:
        done = threading.Event()
        seen: list[int] = []

        def watch() -> None:
            while not done.is_set():
                seen.append(sum(path.stat().st_size for path in daemon.files() if path.exists()))
                seen.append(daemon.status()["resident_bytes"])

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for _ in range(2):
                dataset = whole_dataset(large, daemon.url)
                assert dataset.stats()["samples_rack"] > 0
                assert dataset.stats()["samples_origin"] > 0
                dataset.close()
        finally:
            done.set()
            watcher.join()
        assert 0 < max(seen) <= MIB


def test_a_recheck_of_good_shards_keeps_them(tmp_path: Path, small: Files) -> None:
    with Daemon(tmp_path / "node", origins=[small.folder]) as daemon:
        whole_dataset(small, daemon.url).close()
        manifest = small.opened()
        digest, data = shard_bytes_of(manifest, 0)
        ranges = np.zeros(1, RANGE)
        ranges["length"] = 20
        request = ReadRequest(manifest.digest, (digest,), ranges, 20_000, RECHECK)
        peer = PeerClient(daemon.url)
        statuses, got = peer.read(request)
        peer.close()
        assert statuses.tolist() == [RangeStatus.PRESENT]
        assert got.tobytes() == data[:20]
        assert daemon.metric("quiver_corruptions_total") == 0


def test_a_manifest_that_lies_about_a_shard_spoils_it_for_nobody_for_long(tmp_path: Path, small: Files) -> None:
    """Somebody's manifest names a real shard and says that its bytes lie elsewhere: they do not hash, that is all."""
    liar = rewritten(
        small.manifest, tmp_path / "liar.quiver", lambda header: header.update(base=f"file://{tmp_path}/empty/")
    )
    (tmp_path / "empty").mkdir()
    with Daemon(tmp_path / "node", origins=[tmp_path]) as daemon:
        lie = Files(small.folder, liar, small.content)
        put_manifest(daemon, lie)
        put_manifest(daemon, small)
        digest, _ = shard_bytes_of(small.opened(), 0)
        assert read(daemon, [digest], [(0, 0, 9)], lie.opened().digest, wait=20_000)[0] == [RangeStatus.FAILED]
        until(lambda: read(daemon, [digest], [(0, 0, 9)], small.opened().digest, wait=5000)[0] == [RangeStatus.PRESENT])


# -- the end ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def busy(tmp_path: Path, small: Files) -> Iterator[tuple[list[Daemon], list[BaseException], threading.Event]]:
    """Two daemons under readers who never stop."""
    with rack_of(2, tmp_path / "rack", "--drain-seconds", "3", origins=[small.folder]) as daemons:
        done = threading.Event()
        failures: list[BaseException] = []

        def reader() -> None:
            try:
                while not done.is_set():
                    whole_dataset(small, ",".join(daemon.url for daemon in daemons)).close()
            except BaseException as error:  # noqa: BLE001  told to the test
                failures.append(error)

        readers = [threading.Thread(target=reader) for _ in range(2)]
        for thread in readers:
            thread.start()
        until(lambda: sum(daemon.metric("quiver_served_bytes_total") for daemon in daemons) > small.total_bytes())
        yield daemons, failures, done
        done.set()
        for thread in readers:
            thread.join()


@pytest.mark.fault("M6")
def test_a_daemon_that_is_told_to_end_serves_on_until_it_is_left(busy: Any) -> None:
    daemons, failures, done = busy
    leaving = daemons[0]
    leaving.signal(signal.SIGTERM)
    until(lambda: "drains" in leaving.log)
    assert leaving.ask("GET", "/readyz")[0] == 503
    assert leaving.status()["state"] == "draining"
    assert leaving.wait() == 0
    served = daemons[1].metric("quiver_served_bytes_total")
    until(lambda: daemons[1].metric("quiver_served_bytes_total") > served)
    done.set()
    assert not failures
    assert "Traceback" not in leaving.log
