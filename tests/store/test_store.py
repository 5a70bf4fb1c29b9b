"""The store on disk: bounded, by one recipe, and right whatever is lying around or going wrong."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quiver.digest import Digest
from quiver.errors import Corrupt, DiskFailed, Misconfigured, NotFound, OverCapacity
from quiver.store import Evict, Kind, Store, Writing, idle_of, put_with_room
from quiver.store import disk as disk_module
from quiver.store import inventory as inventory_module
from quiver.store.disk import OPEN_FILES_MAX, QUARANTINE_FILES_MAX
from quiver.store.inventory import file_of, sweep
from tests.support.data import make_shard
from tests.support.waiting import until

MIB = 1 << 20


@pytest.fixture(params=[False, True], ids=["owned", "shared"])
def shared(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def store(tmp_path: Path, shared: bool) -> Iterator[Store]:
    with contextlib.closing(Store.open(tmp_path / "store", MIB, shared=shared)) as opened:
        yield opened


def shard_of(number: int, size: int = 1000) -> tuple[Digest, bytes]:
    return make_shard([number.to_bytes(4, "little") * (size // 4)])


def resident(store: Store[Any]) -> set[Digest]:
    return {file.digest for file in store.inventory.held(Kind.SHARD)}


def idle(store: Store, *digests: Digest) -> None:
    """Make shards look as if they had not been read for an hour."""
    inventory: Any = store.inventory
    for digest in digests:
        if hasattr(inventory, "_files"):
            table = inventory._files[Kind.SHARD]
            table._used[table.rows[digest]] -= 3600
        else:
            past = inventory.now() - 3600
            os.utime(file_of(store.root, Kind.SHARD, digest), (past, past))


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def on_disk(store: Store) -> int:
    return sum(path.stat().st_size for kind in Kind for path in (store.root / kind).rglob("*") if path.is_file())


def leftovers(store: Store) -> list[Path]:
    return list((store.root / "tmp").iterdir())


def test_what_was_put_is_there_also_after_a_restart(tmp_path: Path, shared: bool) -> None:
    held = [shard_of(i) for i in range(5)]
    with contextlib.closing(Store.open(tmp_path, MIB, shared=shared)) as store:
        for digest, data in held:
            store.put(Kind.SHARD, digest, data)
        store.put(Kind.MANIFEST, held[0][0], b"a manifest")
        size = store.resident_bytes()
    with contextlib.closing(Store.open(tmp_path, MIB, shared=shared)) as store:
        assert store.resident_bytes() == size == on_disk(store)
        for digest, data in held:
            assert bytes(store.load(digest, len(data))) == data
            store.check(digest)
        assert store.open_file(Kind.MANIFEST, held[0][0]).size_bytes == 10


def test_a_put_that_fails_leaves_nothing(store: Store) -> None:
    digest, data = shard_of(1)

    def partly(then: Callable[[Writing], object]) -> None:
        with store.reserve(Kind.SHARD, digest, len(data)) as writing:
            assert store.resident_bytes() == len(data), "reserved room counts"
            writing.write(data[:500])
            then(writing)

    with pytest.raises(ZeroDivisionError):
        partly(lambda writing: 1 / 0)
    with pytest.raises(Corrupt, match="more than"), store.reserve(Kind.SHARD, digest, 10) as writing:
        writing.write(data)
    with pytest.raises(Corrupt, match="500 bytes where"):
        partly(Writing.commit)
    with store.reserve(Kind.SHARD, digest, len(data)) as writing:
        writing.write(data)  # and not committed
    assert store.resident_bytes() == 0 == on_disk(store)
    assert not leftovers(store)
    with pytest.raises(NotFound):
        store.load(digest, len(data))


def test_putting_the_same_again_counts_it_once(store: Store) -> None:
    digest, data = shard_of(1)
    for _ in range(3):
        store.put(Kind.SHARD, digest, data)
    assert store.resident_bytes() == len(data)


def test_the_capacity_is_never_exceeded_and_what_is_in_use_stays(store: Store) -> None:
    held = [shard_of(i, 200_000) for i in range(8)]
    for digest, data in held[:5]:
        store.put(Kind.SHARD, digest, data)
    with pytest.raises(OverCapacity, match="in use") as caught:
        put_with_room(store, Kind.SHARD, *held[5], idle_of(store))
    assert caught.value.retryable
    idle(store, held[0][0], held[1][0])
    decide = idle_of(store, lambda digest: True if digest == held[0][0] else None)
    put_with_room(store, Kind.SHARD, *held[5], decide)
    assert store.resident_bytes() <= MIB
    store.load(held[0][0], 300_000)
    with pytest.raises(NotFound):
        store.load(held[1][0], 300_000)
    with pytest.raises(OverCapacity):
        put_with_room(store, Kind.SHARD, *held[6], decide)
    assert not leftovers(store)


def test_exactly_what_is_said_is_evicted_and_nothing_if_that_is_not_enough(store: Store[Any]) -> None:
    held = [shard_of(i, 200_000) for i in range(8)]
    for digest, data in held[:5]:
        store.put(Kind.SHARD, digest, data)
    before = resident(store)
    lacking = store.lacking(len(held[5][1]))
    assert 0 < lacking <= len(held[0][1])
    for evict in ([], [(Kind.SHARD, held[7][0])], [(Kind.MANIFEST, held[0][0])]):
        with pytest.raises(OverCapacity, match="in use"):
            store.put(Kind.SHARD, *held[5], evict)
        assert resident(store) == before
    store.put(Kind.SHARD, *held[5], [(Kind.SHARD, held[3][0]), (Kind.SHARD, held[1][0])])
    assert resident(store) == before - {held[3][0], held[1][0]} | {held[5][0]}
    assert store.resident_bytes() == on_disk(store) <= MIB


def test_who_finds_its_room_taken_decides_again(store: Store[Any]) -> None:
    held = [shard_of(i, 200_000) for i in range(8)]
    for digest, data in held[:5]:
        store.put(Kind.SHARD, digest, data)
    left = [digest for digest, _ in held[:5]]
    asked: list[int] = []

    def decide(lacking_bytes: int) -> Evict:
        asked.append(lacking_bytes)
        digest = left.pop()
        if len(asked) == 1:  # somebody else evicts it first, and takes the room
            store.put(Kind.SHARD, *held[6], [(Kind.SHARD, digest)])
        return [(Kind.SHARD, digest)]

    put_with_room(store, Kind.SHARD, *held[5], decide)
    assert len(asked) == 2
    assert resident(store) == {*left, held[5][0], held[6][0]}


def test_more_than_the_capacity_is_refused_with_what_to_do(store: Store) -> None:
    digest, data = shard_of(1, 2 * MIB)
    with pytest.raises(OverCapacity, match="shard-size"):
        store.put(Kind.SHARD, digest, data)
    assert store.resident_bytes() == 0


@pytest.mark.fault("C5")
def test_what_is_mapped_or_open_stays_whole_when_it_is_evicted(store: Store) -> None:
    digest, data = shard_of(1)
    store.put(Kind.SHARD, digest, data)
    mapped, opened = store.load(digest, len(data)), store.open_file(Kind.SHARD, digest)
    store.drop(Kind.SHARD, digest)
    assert not opened.linked
    assert bytes(mapped) == data == bytes(opened.read())
    with pytest.raises(NotFound):
        store.open_file(Kind.SHARD, digest)


def test_maps_and_evicted_files_hold_no_descriptors(store: Store) -> None:
    held = [shard_of(i) for i in range(50)]
    before = open_descriptors()
    maps = []
    for digest, data in held:
        store.put(Kind.SHARD, digest, data)
        maps.append(store.load(digest, len(data)))
    assert open_descriptors() == before
    for digest, _ in held:
        store.open_file(Kind.SHARD, digest)
        store.drop(Kind.SHARD, digest)
    assert open_descriptors() == before
    assert [bytes(view) for view in maps] == [data for _, data in held]


def test_open_files_are_kept_up_to_a_limit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "OPEN_FILES_MAX", 5)
    assert OPEN_FILES_MAX > 5
    before = open_descriptors()
    for i in range(20):
        store.put(Kind.SHARD, *shard_of(i))
        store.open_file(Kind.SHARD, shard_of(i)[0])
    assert open_descriptors() == before + 5


# -- wrong bytes ------------------------------------------------------------------------------------------------------


def damage(store: Store, digest: Digest, how: str) -> None:
    path = file_of(store.root, Kind.SHARD, digest)
    data = bytearray(path.read_bytes())
    match how:
        case "flipped bit":
            data[10] ^= 1
        case "truncated":
            data = data[:-1]
        case "empty":
            data = bytearray()
        case "longer":
            data += b"x"
        case "another shard":
            data = bytearray(shard_of(99)[1])
    path.write_bytes(data)


@pytest.mark.fault("C2")
@pytest.mark.parametrize("opened", [False, True], ids=["at rest", "in use"])
@pytest.mark.parametrize("how", ["flipped bit", "truncated", "empty", "longer", "another shard"])
def test_a_file_that_went_wrong_is_found_put_aside_and_can_be_put_again(store: Store, how: str, opened: bool) -> None:
    digest, data = shard_of(1)
    store.put(Kind.SHARD, digest, data)
    if opened:
        store.open_file(Kind.SHARD, digest)
    damage(store, digest, how)
    with pytest.raises(Corrupt):
        store.check(digest)
    with pytest.raises(NotFound):
        store.open_file(Kind.SHARD, digest)
    assert store.resident_bytes() == 0
    assert [path.name for path in (store.root / "quarantine").iterdir()] == [str(digest)]
    store.put(Kind.SHARD, digest, data)
    store.check(digest)
    assert bytes(store.open_file(Kind.SHARD, digest).read()) == data


@pytest.mark.fault("C2")
def test_a_good_upload_replaces_a_file_that_rotted_unnoticed(store: Store) -> None:
    digest, data = shard_of(1)
    store.put(Kind.SHARD, digest, data)
    damage(store, digest, "flipped bit")
    assert bytes(store.open_file(Kind.SHARD, digest).read()) != data
    store.put(Kind.SHARD, digest, data)
    assert bytes(store.open_file(Kind.SHARD, digest).read()) == data
    store.check(digest)


def test_what_is_quarantined_counts_and_makes_way_first(store: Store) -> None:
    quarter = MIB // 4 - 100
    for number in range(3):
        store.put(Kind.SHARD, *shard_of(number, quarter))
    store.quarantine(Kind.SHARD, shard_of(0, quarter)[0])
    store.put(Kind.SHARD, *shard_of(3, quarter))
    assert len(list((store.root / "quarantine").iterdir())) == 1, "there is room for it still"
    store.put(Kind.SHARD, *shard_of(4, quarter))
    assert list((store.root / "quarantine").iterdir()) == []
    assert {held.digest for held in store.inventory.held(Kind.SHARD)} == {
        shard_of(number, quarter)[0] for number in (1, 2, 3, 4)
    }


def test_quarantine_is_bounded(store: Store) -> None:
    for i in range(QUARANTINE_FILES_MAX + 10):
        digest, data = shard_of(i)
        store.put(Kind.SHARD, digest, data)
        store.quarantine(Kind.SHARD, digest)
    assert len(list((store.root / "quarantine").iterdir())) == QUARANTINE_FILES_MAX


@pytest.mark.fault("C3")
def test_a_file_that_somebody_deleted_is_not_found_and_can_be_put_again(store: Store) -> None:
    digest, data = shard_of(1)
    store.put(Kind.SHARD, digest, data)
    file_of(store.root, Kind.SHARD, digest).unlink()
    with pytest.raises(NotFound):
        store.check(digest)
    assert store.resident_bytes() == 0
    store.put(Kind.SHARD, digest, data)
    store.check(digest)


@pytest.mark.fault("C3")
def test_strays_are_passed_over_and_left_alone(tmp_path: Path, shared: bool) -> None:
    root = tmp_path / "store"
    digest, data = shard_of(1)
    with contextlib.closing(Store.open(root, MIB, shared=shared)) as store:
        store.put(Kind.SHARD, digest, data)
    secret = tmp_path / "secret"
    secret.write_bytes(b"not yours")
    names = [str(Digest.of(bytes([i]))) for i in range(6)]
    for name in names:
        (root / "shards" / name[:2]).mkdir(exist_ok=True)
    places = [root / "shards" / name[:2] / name for name in names]
    places[0].symlink_to(secret)
    os.mkfifo(places[1])
    places[2].mkdir()
    (root / "shards" / "zz").mkdir()
    (root / "shards" / "zz" / names[3]).write_bytes(b"wrong folder")
    (root / "shards" / "file").write_bytes(b"stray")
    (root / "shards" / names[4][:2] / "notes.txt").write_bytes(b"stray")
    (root / "shards" / "link").symlink_to(tmp_path)
    os.mkfifo(root / "tmp" / "fifo")
    (root / "tmp" / "folder").mkdir()
    (root / "notes.txt").write_bytes(b"stray")
    with contextlib.closing(Store.open(root, MIB, shared=shared)) as store:
        assert store.resident_bytes() == len(data)
        assert [held.digest for held in store.inventory.held(Kind.SHARD)] == [digest]
        for name in names[:4]:
            with pytest.raises(NotFound):
                store.open_file(Kind.SHARD, Digest.parse(name))
    assert secret.read_bytes() == b"not yours"
    assert (root / "shards" / "file").exists()


STRAYS: dict[str, Callable[[Path, Path], object]] = {
    "link to a file": lambda place, outside: place.symlink_to(outside),
    "link to nothing": lambda place, outside: place.symlink_to(outside / "nothing"),
    "link to a folder": lambda place, outside: place.symlink_to(outside.parent),
    "folder": lambda place, outside: place.mkdir(),
    "folder with something in it": lambda place, outside: (place.mkdir(), (place / "notes").write_bytes(b"mine")),
    "fifo": lambda place, outside: os.mkfifo(place),
}


@pytest.mark.fault("C3")
@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("make", STRAYS.values(), ids=list(STRAYS))
def test_a_stray_under_a_digest_s_name_is_put_aside_and_the_file_written_anew(
    store: Store, tmp_path: Path, make: Callable[[Path, Path], object], kind: Kind
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"not ours")
    digest, data = shard_of(1)
    store.put(kind, digest, data)
    place = file_of(store.root, kind, digest)
    place.unlink()
    store.forget_open(kind, digest)
    make(place, outside)
    with pytest.raises(NotFound):
        store.open_file(kind, digest)
    assert not store.inventory.held(kind), "what is no file is not held"
    assert store.resident_bytes() == 0
    store.put(kind, digest, data)
    assert bytes(store.open_file(kind, digest).read()) == data
    assert outside.read_bytes() == b"not ours"
    for _ in range(QUARANTINE_FILES_MAX + 2):  # and its place in the quarantine stops nothing
        store.quarantine(kind, digest)
        store.put(kind, digest, data)
    store.drop(kind, digest)
    digest, data = make_shard([bytes(MIB - 200)])
    store.put(kind, digest, data)


@pytest.mark.fault("C3")
def test_a_stray_in_the_place_of_what_is_evicted_does_not_stop_it(tmp_path: Path) -> None:
    with contextlib.closing(Store.open(tmp_path / "store", 10_000, shared=False)) as store:
        digest, data = shard_of(1, 8_000)
        store.put(Kind.SHARD, digest, data)
        idle(store, digest)
        place = file_of(store.root, Kind.SHARD, digest)
        place.unlink()
        place.mkdir()
        store.put(Kind.SHARD, *shard_of(2, 8_000), [(Kind.SHARD, digest)])
        assert [held.digest for held in store.inventory.held(Kind.SHARD)] == [shard_of(2, 8_000)[0]]


@pytest.mark.fault("C3")
def test_a_stray_in_the_place_of_a_folder_of_shards_is_put_aside(store: Store) -> None:
    digest, data = shard_of(1)
    place = file_of(store.root, Kind.SHARD, digest).parent
    place.write_bytes(b"stray")
    with pytest.raises(NotFound):
        store.open_file(Kind.SHARD, digest)
    store.put(Kind.SHARD, digest, data)
    assert bytes(store.open_file(Kind.SHARD, digest).read()) == data


# -- processes --------------------------------------------------------------------------------------------------------


def test_a_folder_is_owned_by_one_daemon(tmp_path: Path) -> None:
    with (
        contextlib.closing(Store.open(tmp_path, MIB, shared=False)),
        pytest.raises(Misconfigured, match=f"{tmp_path} is in use.*--data-dir"),
    ):
        Store.open(tmp_path, MIB, shared=False)
    Store.open(tmp_path, MIB, shared=False).close()


STEPS = {
    "reserved": "os.posix_fallocate",
    "half written": "os.pwrite",
    "synced": "os.fsync",
    "renamed": "pathlib.Path.replace",
}


@pytest.mark.fault("C1")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_writer_that_is_killed_leaves_nothing_partial(tmp_path: Path, shared: bool, step: str, when: str) -> None:
    digest, data = shard_of(7, 40_000)
    owner, _, name = STEPS[step].rpartition(".")
    script = f"""
        import os, pathlib, signal, sys
        from quiver.digest import Digest
        from quiver.store import Kind, Store
        real = {STEPS[step]}
        def dying(*args, **named):
            if {when == "after"}:
                if {name == "pwrite"}:
                    args = (args[0], args[1][:1000], args[2])
                real(*args, **named)
            os.kill(os.getpid(), signal.SIGKILL)
        store = Store.open(pathlib.Path(sys.argv[1]), 1 << 20, shared={shared})
        {owner}.{name} = dying
        store.put(Kind.SHARD, Digest.parse(sys.argv[2]), sys.stdin.buffer.read())
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), str(digest)]
    ended = subprocess.run(command, input=data, check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    with contextlib.closing(Store.open(tmp_path, MIB, shared=shared)) as store:
        complete = step == "renamed" and when == "after"
        assert store.resident_bytes() == (len(data) if complete else 0)
        assert not leftovers(store)
        if complete:
            store.check(digest)
        else:
            with pytest.raises(NotFound):
                store.open_file(Kind.SHARD, digest)
        store.put(Kind.SHARD, digest, data)
        store.check(digest)


def test_processes_that_share_a_folder_fill_the_same_shards_within_the_capacity(tmp_path: Path) -> None:
    script = """
        import pathlib, sys
        from quiver.errors import OverCapacity
        from quiver.store import Kind, Store
        from tests.store.test_store import shard_of
        store = Store.open(pathlib.Path(sys.argv[1]), 1 << 20, shared=True)
        refused = 0
        for i in range(40):
            digest, data = shard_of(i, 40_000)
            try:
                store.put(Kind.SHARD, digest, data)
            except OverCapacity:
                refused += 1
                continue
            assert bytes(store.load(digest, len(data))) == data
            assert store.resident_bytes() <= 1 << 20
        print(refused)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert all(int(output) > 0 for output in outputs), "the capacity must have been felt"
    with contextlib.closing(Store.open(tmp_path, MIB, shared=True)) as store:
        assert MIB - 80_000 < store.resident_bytes() <= MIB
        assert not leftovers(store)
        for held in store.inventory.held(Kind.SHARD):
            store.check(held.digest)


def test_a_file_that_another_process_puts_in_place_meanwhile_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(tmp_path, MIB, shared=True)
    digest, data = shard_of(1, 40_000)
    with store.reserve(Kind.SHARD, digest, len(data)) as writing:
        writing.write(data)

        def sweep_then_commit(root: Path) -> dict[int, int]:
            reserved = sweep(root)
            writing.commit()
            return reserved

        monkeypatch.setattr(inventory_module, "sweep", sweep_then_commit)
        assert store.resident_bytes() == len(data)
    store.close()


@pytest.mark.fault("E8")
def test_a_child_forked_under_the_lock_does_not_keep_it(tmp_path: Path) -> None:
    store = Store.open(tmp_path, MIB, shared=True)
    read_end, write_end = os.pipe()
    with store.inventory.locked():
        child = os.fork()
        if child == 0:  # holds copies of all descriptors until its parent lets it go
            os.close(write_end)
            os.read(read_end, 1)
            os._exit(0)
    done = threading.Event()
    threading.Thread(target=lambda: (store.put(Kind.SHARD, *shard_of(1)), done.set()), daemon=True).start()
    try:
        assert done.wait(5), "the lock is still held by the child"
    finally:
        os.close(write_end)
        os.close(read_end)
        os.waitpid(child, 0)
    store.close()


def test_a_writer_that_lives_keeps_its_room_from_others(tmp_path: Path) -> None:
    one, other = (Store.open(tmp_path, MIB, shared=True) for _ in range(2))
    digest, data = shard_of(1, 600_000)
    with one.reserve(Kind.SHARD, digest, len(data)) as writing:
        assert other.resident_bytes() == len(data)
        with pytest.raises(OverCapacity):
            other.put(Kind.SHARD, *shard_of(2, 600_000))
        writing.write(data)
        writing.commit()
    other.check(digest)
    assert other.resident_bytes() == len(data)


# -- disks that fail --------------------------------------------------------------------------------------------------


FAILURES = [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT, errno.EACCES]


@pytest.mark.fault("C4")
@pytest.mark.parametrize("code", FAILURES, ids=lambda code: errno.errorcode[code])
@pytest.mark.parametrize("call", ["os.posix_fallocate", "os.pwrite", "os.fsync", "pathlib.Path.replace"])
def test_a_disk_that_refuses_is_said_and_serving_goes_on(
    store: Store, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    kept, data = shard_of(1)
    store.put(Kind.SHARD, kept, data)

    def fail(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        with pytest.raises(DiskFailed, match=str(store.root)) as caught:
            store.put(Kind.SHARD, *shard_of(2))
        assert caught.value.retryable
    assert store.resident_bytes() == len(data) == on_disk(store)
    assert not leftovers(store)
    assert bytes(store.load(kept, len(data))) == data
    store.put(Kind.SHARD, *shard_of(2))


@pytest.mark.fault("C4")
def test_a_rename_that_is_not_known_to_last_is_taken_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail_second(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 2:  # the folder, after the file
            raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(os, "fsync", fail_second)
    with pytest.raises(DiskFailed):
        store.put(Kind.SHARD, *shard_of(1))
    assert store.resident_bytes() == 0 == on_disk(store)


@pytest.mark.fault("C4")
def test_a_limit_on_file_sizes_is_a_disk_that_refuses(tmp_path: Path) -> None:
    script = """
        import pathlib, resource, signal, sys
        from quiver.errors import DiskFailed
        from quiver.store import Kind, Store
        from tests.store.test_store import shard_of
        store = Store.open(pathlib.Path(sys.argv[1]), 1 << 20, shared=False)
        store.put(Kind.SHARD, *shard_of(1))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        try:
            store.put(Kind.SHARD, *shard_of(2, 100_000))
        except DiskFailed as error:
            print(error)
        store.check(shard_of(1)[0])
        assert not list((store.root / "tmp").iterdir())
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "too large" in ended.stdout


@pytest.mark.fault("C4")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_full_and_then_read_only_disk_serves_on_and_recovers(tmp_path: Path, shared: bool) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(root)], check=False).returncode:
        pytest.skip("may not mount here")
    try:
        with contextlib.closing(Store.open(root, 100 * MIB, shared=shared)) as store:
            kept, data = shard_of(1, 100_000)
            store.put(Kind.SHARD, kept, data)
            with pytest.raises(DiskFailed, match="full"):
                store.put(Kind.SHARD, *shard_of(2, 600_000))
            assert not leftovers(store)
            store.put(Kind.SHARD, *shard_of(3, 100_000))
            store.close()
            subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
            with pytest.raises(DiskFailed, match=r"[Rr]ead-only"):
                store.put(Kind.SHARD, *shard_of(4, 1000))
            assert bytes(store.load(kept, len(data))) == data
            store.quarantine(Kind.SHARD, kept)  # cannot be moved: no error, and a daemon does not hold it any more
            subprocess.run(["mount", "-o", "remount,rw", str(root)], check=True)
            store.put(Kind.SHARD, *shard_of(4, 1000))
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


def test_a_store_that_cannot_be_made_says_where(tmp_path: Path, shared: bool) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskFailed, match=r"file/store.*another folder"):
        Store.open(tmp_path / "file" / "store", MIB, shared=shared)


@pytest.mark.fault("C3")
@pytest.mark.parametrize(
    "names", [["."], ["tmp"], ["shards"], ["shards", "quarantine"], ["owner", "tmp"]], ids="+".join
)
def test_folders_that_somebody_deletes_are_made_again_and_filled(store: Store[Any], names: list[str]) -> None:
    kept, data = shard_of(1)
    store.put(Kind.SHARD, kept, data)
    for name in names:
        path = store.root / name
        path.unlink() if path.is_file() else shutil.rmtree(path)
    is_lost = not file_of(store.root, Kind.SHARD, kept).exists()
    assert store.lacking(1000) == 0
    store.put(Kind.SHARD, *shard_of(2))
    assert resident(store) == {shard_of(2)[0]} | (set() if is_lost else {kept})
    assert store.resident_bytes() == on_disk(store)
    if is_lost:
        with pytest.raises(NotFound):
            store.open_file(Kind.SHARD, kept)
    store.put(Kind.SHARD, kept, data)
    store.check(kept)
    with pytest.raises(Misconfigured):
        Store.open(store.root, MIB, shared=False)  # it is still owned


@pytest.mark.fault("C3")
def test_a_folder_that_another_daemon_took_after_it_was_deleted_is_left_to_it(tmp_path: Path) -> None:
    with contextlib.closing(Store.open(tmp_path / "s", MIB, shared=False)) as store:
        store.put(Kind.SHARD, *shard_of(1))
        shutil.rmtree(store.root)
        with contextlib.closing(Store.open(tmp_path / "s", MIB, shared=False)) as other:
            shutil.rmtree(store.root / "tmp")
            with pytest.raises(DiskFailed, match="in use by another daemon"):
                store.put(Kind.SHARD, *shard_of(2))
            other.put(Kind.SHARD, *shard_of(3))


@pytest.mark.fault("C3", "C4")
def test_folders_are_not_made_on_another_disk_than_they_were_on(
    store: Store[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(store.root / "tmp")
    monkeypatch.setattr(store._folders, "_device", store.root.stat().st_dev + 1)  # as if that had been mounted here
    with pytest.raises(DiskFailed, match="not mounted"):
        store.put(Kind.SHARD, *shard_of(1))
    assert not (store.root / "tmp").exists()


def test_threads_put_read_and_drop_without_losing_count(store: Store) -> None:
    held = [shard_of(i, 20_000) for i in range(12)]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(40):
                digest, data = held[(seed * 7 + step * 5) % len(held)]
                match (seed + step) % 3:
                    case 0:
                        store.put(Kind.SHARD, digest, data)
                    case 1:
                        with contextlib.suppress(NotFound):
                            assert bytes(store.open_file(Kind.SHARD, digest).read()) == data
                    case 2:
                        store.drop(Kind.SHARD, digest)
        except BaseException as error:  # noqa: BLE001  told to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert store.resident_bytes() == on_disk(store)
    until(lambda: not leftovers(store))


def test_a_store_opened_with_less_capacity_comes_down_to_it(tmp_path: Path, shared: bool) -> None:
    with contextlib.closing(Store.open(tmp_path / "s", MIB, shared=shared)) as store:
        for number in range(8):
            store.put(Kind.SHARD, *shard_of(number, 100_000))
    with contextlib.closing(Store.open(tmp_path / "s", MIB // 4, shared=shared)) as store:
        assert store.resident_bytes() > MIB // 4, "looking drops nothing"
        store.trim()
        assert 0 < store.resident_bytes() <= MIB // 4
