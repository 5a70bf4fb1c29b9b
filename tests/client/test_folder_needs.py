"""Processes that share an embedded cache: what each still needs is brought in ahead, and stays for as long as it is."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from quiver.digest import Digest
from quiver.lookup import as_rows
from quiver.residency import ConsumerReport
from quiver.residency.messages import NeedsReport
from quiver.store import Kind
from quiver_client import Dataset
from quiver_client.embedded.fetching import FolderNeeds
from quiver_client.embedded.fill_locks import FillLocks
from quiver_client.embedded.filling import Outcome
from quiver_client.embedded.lease_files import LeaseFile, leases_in
from quiver_client.embedded.tier import EmbeddedTier
from tests.support.data import Files, rewritten
from tests.support.waiting import until

Make = Callable[..., Dataset]

OTHER = """
    import json, sys, threading
    from tests.client.test_folder_needs import Consumer
    from quiver_client import Dataset

    manifest, cache, lease_seconds, content, left = sys.argv[1:]
    consumer = Consumer(Dataset(manifest, cache), b"other", float(lease_seconds), content=content == "True")
    consumer.left[json.loads(left)] = 255
    ended = threading.Event()
    def told():
        for line in sys.stdin:
            pass
        ended.set()
    threading.Thread(target=told, daemon=True).start()
    while not ended.wait(0.02):
        consumer.report()
        print(json.dumps(sorted(consumer.resident())), flush=True)
    consumer.close()
    print(json.dumps(consumer.dataset.stats()), flush=True)
    consumer.dataset.close()
"""


class Consumer:
    """A consumer of this process. ``left`` ``(shards,)`` is what it tells; ``content``: with what it has ahead."""

    def __init__(
        self, dataset: Dataset, name: bytes = b"here", lease_seconds: float = 30.0, *, content: bool = False
    ) -> None:
        self.dataset = dataset
        self.tier = cast(EmbeddedTier, dataset._open().tiers[0])
        self.needs = FolderNeeds(dataset.manifest, self.tier)
        self.name = name.ljust(16, b".")
        self.lease_seconds = lease_seconds
        self.content = content
        self.left = np.zeros(dataset.manifest.shard_count, np.uint8)
        self.seen = self.left.copy()

    def need(self, shards: Iterable[int]) -> None:
        self.left[:] = 0
        self.left[list(shards)] = 255

    def report(self, *, leaving: bool = False) -> np.ndarray[Any, np.dtype[np.uint8]]:
        ahead = 1e12 if self.content and (self.seen[self.left > 0] > 0).any() else 0.0
        told = ConsumerReport(self.name, self.left.copy(), 0.0, ahead, self.lease_seconds)
        self.seen = self.needs.report(told, leaving=leaving)
        assert self.tier.store.resident_bytes() <= self.tier.store.capacity_bytes
        return self.seen

    def resident(self) -> set[int]:
        return set(np.flatnonzero(self.seen).tolist())

    def until_resident(self, shards: Iterable[int]) -> None:
        wanted = set(shards)
        until(lambda: self.report() is not None and wanted <= self.resident(), what=f"{wanted} are resident")

    def until_needed(self, shard: int, needed: bool | None) -> None:
        digest = self.dataset.manifest.shard_digest(shard)
        until(
            lambda: self.report() is not None and self.needed(digest) is needed,
            what=f"shard {shard} is needed: {needed}",
        )

    def needed(self, digest: Digest) -> bool | None:
        """Return whether somebody needs a shard, as far as is known here; ``None``: nobody reported on its dataset."""
        return {1: True, 0: False, -1: None}[int(self.tier.needs.needed_of(as_rows([digest]))[0])]

    def lease(self) -> Path:
        return leases_in(self.tier.store.root) / self.name.hex()

    def close(self) -> None:
        self.report(leaving=True)
        self.needs.close()


class Other:
    """A consumer of another process, which reports until it is told to end."""

    def __init__(self, manifest: Path, cache: str, shards: Iterable[int], lease_seconds: float, content: bool) -> None:
        command = [sys.executable, "-c", textwrap.dedent(OTHER), str(manifest), cache, str(lease_seconds)]
        self.process = subprocess.Popen(
            [*command, str(content), json.dumps(list(shards))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path])},
        )
        self.line()

    def line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the other process ended"
        return json.loads(line)

    def until_resident(self, shards: Iterable[int]) -> None:
        wanted = set(shards)
        until(lambda: wanted <= set(self.line()), what=f"{wanted} are resident")

    def stats(self) -> dict[str, int]:
        """Let it end in peace, and return its counters."""
        out, _ = self.process.communicate(timeout=30)
        assert self.process.returncode == 0
        counters: dict[str, int] = json.loads(out.splitlines()[-1])
        return counters

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture
def other(files: Files, tmp_path: Path) -> Iterator[Callable[..., Other]]:
    made: list[Other] = []

    def make(
        shards: Iterable[int],
        capacity: int = 1 << 30,
        lease_seconds: float = 30.0,
        manifest: Path = files.manifest,
        content: bool = False,
    ) -> Other:
        made.append(Other(manifest, cache_of(tmp_path, capacity), shards, lease_seconds, content))
        return made[-1]

    yield make
    for each in made:
        each.kill()


@pytest.fixture
def consumer(dataset: Make, files: Files, tmp_path: Path) -> Iterator[Callable[..., Consumer]]:
    made: list[Consumer] = []

    def make(capacity: int = 1 << 30, manifest: Path = files.manifest, **named: Any) -> Consumer:
        made.append(Consumer(dataset(manifest, cache_of(tmp_path, capacity)), **named))
        return made[-1]

    yield make
    for each in made:
        each.needs.close()


def cache_of(folder: Path, capacity: int) -> str:
    return f"file://{folder}/cache?capacity={capacity}"


def room_for(files: Files, shards: Iterable[int], more: int) -> int:
    """Return the bytes of the shards, and of ``more`` of any."""
    sizes = files.opened().tables.shard_sizes
    return int(sizes[list(shards)].sum()) + more * int(sizes.max())


def everything(consumer: Consumer) -> range:
    return range(consumer.dataset.manifest.shard_count)


# -- fetching ---------------------------------------------------------------------------------------------------------


def test_what_a_consumer_needs_is_brought_in_with_no_read(consumer: Callable[..., Consumer]) -> None:
    made = consumer()
    made.need([1, 3, 5])
    made.until_resident([1, 3, 5])
    assert made.resident() == {1, 3, 5}
    made.need(everything(made))
    made.until_resident(everything(made))
    count = made.dataset.manifest.shard_count
    until(lambda: made.dataset.stats()["fills"] == count, what="the last, which was seen before it was counted, is")
    stats = made.dataset.stats()
    assert stats["bytes_origin"] == made.dataset.manifest.total_bytes
    assert stats["samples"] == stats["misses_host"] == 0
    assert made.seen.max() == 1, "nobody else needs anything"
    assert made.tier.origin.estimate.rate > 0


def test_two_processes_on_one_dataset_read_the_origin_once(
    consumer: Callable[..., Consumer], other: Callable[..., Other]
) -> None:
    made = consumer()
    theirs = other(everything(made))
    made.need(everything(made))
    made.until_resident(everything(made))
    made.until_needed(0, True)
    assert (made.seen == 2).all(), "one other needs it all"
    theirs.until_resident(everything(made))
    read = made.dataset.stats()["bytes_origin"] + theirs.stats()["bytes_origin"]
    assert read == made.dataset.manifest.total_bytes
    made.report()
    assert (made.seen == 1).all(), "the other is gone"


@contextlib.contextmanager
def filling(consumer: Consumer, shard: int) -> Iterator[None]:
    """Be another process that fills a shard."""
    locks = FillLocks(consumer.tier.store.root, threading.Event())
    with locks.held(consumer.dataset.manifest.shard_digest(shard)):
        yield


def test_what_another_process_fills_is_not_filled_again(consumer: Callable[..., Consumer]) -> None:
    made = consumer()
    made.need([0, 1, 2, 3, 4])
    with filling(made, 0):
        made.until_resident([1, 2, 3, 4])
        assert made.dataset.manifest.shard_digest(0) not in {decision.shard for decision in made.needs._fetching}
        assert 0 not in made.resident()
    made.until_resident([0])  # it died on the way


def test_closing_does_not_wait_for_a_process_that_is_suspended_in_a_fill(consumer: Callable[..., Consumer]) -> None:
    made = consumer()
    fetch = made.tier.filler.fetch_ahead
    with filling(made, 0):
        fetched = fetch(made.tier.decider.for_reader(0))
        until(fetched.running)
        made.dataset.close()
        assert fetched.result(20) is Outcome.FAILED
        assert made.tier.filler.locks.under_way() == [made.dataset.manifest.shard_digest(0)], "its holder keeps it"
    assert fetch(made.tier.decider.for_reader(1)).result(20) is Outcome.FAILED, "it is closed"


def test_an_origin_that_fails_is_not_asked_in_a_frenzy(
    consumer: Callable[..., Consumer], files: Files, tmp_path: Path
) -> None:
    lost = rewritten(files.manifest, tmp_path / "lost.quiver", lambda header: header.update(base="file:///nowhere/"))
    made = consumer(manifest=lost)
    made.need(everything(made))
    tries: list[Digest] = []
    fetch, failures = made.tier.filler.fetch_ahead, made.tier.filler.failures
    made.tier.filler.fetch_ahead = lambda decision: tries.append(decision.shard) or fetch(decision)  # type: ignore[method-assign, func-returns-value]
    until(lambda: made.report() is not None and len(failures.waiting()) >= 5)
    assert len(tries) < 15
    assert made.resident() == set()
    assert len(set(tries)) == len(tries), "each of them once for now"


# -- making way -------------------------------------------------------------------------------------------------------


def test_what_nobody_needs_makes_way_and_what_another_process_needs_does_not(
    consumer: Callable[..., Consumer], other: Callable[..., Other], files: Files
) -> None:
    capacity = room_for(files, [0, 1, 2], more=3)
    theirs = other([0, 1, 2], capacity)
    theirs.until_resident([0, 1, 2])
    made = consumer(capacity)
    for mine in ([3, 4, 5], [6, 7, 8], [9, 10, 11]):
        made.need(mine)
        made.until_resident(mine)
        assert {0, 1, 2} <= made.resident()
    assert theirs.stats()["fills"] == 3, "what it needed was always there"
    made.need([12, 13, 14, 15, 16])
    made.until_needed(0, False)
    made.until_resident([12, 13, 14])


def test_a_starving_process_takes_the_place_of_what_another_one_needs(
    consumer: Callable[..., Consumer], other: Callable[..., Other], files: Files
) -> None:
    capacity = room_for(files, range(5), more=0)
    content = consumer(capacity)
    content.need(range(5))
    content.until_resident(range(5))
    content.close()
    other(range(5), capacity, content=True)
    made = consumer(capacity)
    sizes = made.dataset.manifest.tables.shard_sizes
    mine = min(range(5, len(sizes)), key=lambda shard: int(sizes[shard]))
    made.need([mine])
    made.until_resident([mine])
    until(lambda: made.report() is not None and len(made.resident()) == 5, what="one of theirs made way, and one alone")
    assert mine in made.resident()


def test_a_plain_reader_drops_nothing_that_somebody_needs(
    consumer: Callable[..., Consumer], files: Files, dataset: Make, tmp_path: Path
) -> None:
    capacity = room_for(files, [0, 1, 2], more=0)
    made = consumer(capacity)
    made.need([0, 1, 2])
    made.until_resident([0, 1, 2])
    for path in (made.tier.store.root / "shards").rglob("??/*"):
        os.utime(path, (1, 1))  # read by nobody for years
    plain = dataset(files.manifest, cache_of(tmp_path, capacity))
    samples = plain.__getitems__(range(len(plain)))
    assert [sample["image"] for sample in samples] == files.expected([plain.manifest.key(i) for i in range(len(plain))])
    until(lambda: made.report() is not None)
    assert plain.stats()["fills"] == 0
    made.tier.decider.look(at_once=True)
    made.report()
    assert made.resident() == {0, 1, 2}


def test_another_manifest_with_the_same_shards_counts(
    consumer: Callable[..., Consumer], other: Callable[..., Other], files: Files, tmp_path: Path
) -> None:
    twin = rewritten(files.manifest, tmp_path / "twin.quiver", lambda header: header.update(base="file:///elsewhere/"))
    made = consumer()
    made.need([0, 1])
    made.until_resident([0, 1])
    theirs = other([0], manifest=twin)
    until(lambda: made.report()[0] == 2, what="the other one's need is heard")
    assert made.seen[1] == 1
    made.need([5])
    made.until_needed(0, True)
    made.until_needed(1, False)
    theirs.kill()
    made.until_needed(0, False)


def test_a_manifest_that_cannot_be_had_is_passed_over(
    consumer: Callable[..., Consumer], other: Callable[..., Other], files: Files, tmp_path: Path
) -> None:
    twin = rewritten(files.manifest, tmp_path / "twin.quiver", lambda header: header.update(base="file:///elsewhere/"))
    other([0], manifest=twin)
    shutil.copy(files.manifest, tmp_path / "swapped")
    (tmp_path / "swapped").replace(twin)  # something else lies there by now
    made = consumer()
    made.need([1])
    until(lambda: made.report() is not None and made.tier.needs._unreadable)
    made.until_resident([1])
    made.until_needed(0, False)


# -- leases -----------------------------------------------------------------------------------------------------------


def test_a_killed_process_needs_nothing_at_once(
    consumer: Callable[..., Consumer], other: Callable[..., Other], files: Files
) -> None:
    theirs = other([0, 1], lease_seconds=60)
    made = consumer()
    made.need([5])
    made.until_needed(0, True)
    theirs.kill()
    made.until_needed(0, False)
    assert [path.name for path in made.lease().parent.iterdir() if path.name[0] != "."] == [made.lease().name]


@pytest.mark.fault("E5")
def test_a_suspended_process_needs_nothing_after_its_lease_and_all_again_when_it_wakes(
    consumer: Callable[..., Consumer], other: Callable[..., Other]
) -> None:
    theirs = other([0, 1], lease_seconds=1)
    made = consumer()
    made.need([5])
    made.until_needed(0, True)
    theirs.process.send_signal(signal.SIGSTOP)
    made.until_needed(0, False)
    theirs.process.send_signal(signal.SIGCONT)
    made.until_needed(0, True)
    theirs.stats()
    made.until_needed(0, False)


def test_who_leaves_needs_nothing_and_its_own_dataset_is_in_use_again(consumer: Callable[..., Consumer]) -> None:
    made = consumer()
    made.need([0])
    made.until_resident([0])
    digest = made.dataset.manifest.shard_digest
    assert made.lease().exists()
    assert (made.needed(digest(0)), made.needed(digest(1))) == (True, False)
    made.close()
    assert not made.lease().exists()
    assert made.needed(digest(1)) is True, "somebody may read it plainly"
    assert made.needed(Digest(bytes(32))) is None
    made.report()
    assert made.lease().exists(), "and back again"


def test_a_forked_child_does_not_take_the_lease_back(consumer: Callable[..., Consumer]) -> None:
    made = consumer()
    made.need([0])
    made.until_resident([0])
    made.needs._pid += 1  # as a child sees it
    made.needs.close()
    assert made.lease().exists()
    made.needs._pid -= 1


def test_junk_among_the_leases_is_ignored(consumer: Callable[..., Consumer], tmp_path: Path) -> None:
    made = consumer()
    made.need([1])
    made.until_resident([1])
    folder = made.lease().parent
    real = made.lease().read_bytes()
    (folder / ("a" * 32)).write_bytes(b"junk")
    (folder / ("b" * 32)).write_bytes(real)  # of another consumer than its name says
    (folder / ("c" * 32)).mkdir()
    os.mkfifo(folder / ("d" * 32))
    (folder / ("e" * 32)).symlink_to(made.lease())
    (folder / "notes.txt").write_text("mine")
    with (folder / ("f" * 32)).open("wb") as file:
        file.truncate(1 << 40)
    held = [LeaseFile(folder, bytes([9 + i]) * 16) for i in range(4)]
    ours = made.dataset.manifest
    for lease, path, dataset in (
        (held[0], ours.path, ours.digest),  # of too few shards
        (held[1], Path("relative"), ours.digest),
        (held[2], Path("/dev/zero"), Digest(b"2" * 32)),
        (held[3], tmp_path, Digest(b"3" * 32)),
    ):
        few = ConsumerReport(lease.consumer, np.full(3, 255, np.uint8), 0.0, 0.0, 60.0)
        lease.write(path, NeedsReport(dataset, few))
    until(lambda: made.report() is not None and len(made.tier.needs._unreadable) == 2)
    made.until_needed(0, False)
    made.need([2])
    made.until_resident([2])
    left = {path.name for path in folder.iterdir()}
    assert left == {
        made.lease().name,
        "notes.txt",
        *("cde"[i] * 32 for i in range(3)),
        *(f"{9 + i:02x}" * 16 for i in range(4)),
    }
    for lease in held:
        lease.remove()


def test_a_crash_between_writing_and_renaming_leaves_nothing_that_matters(
    consumer: Callable[..., Consumer], files: Files
) -> None:
    made = consumer()
    made.need([1])
    made.until_resident([1])
    script = """
        import os, sys
        from pathlib import Path
        import numpy as np
        from quiver.manifest import Manifest
        from quiver.residency import ConsumerReport
        from quiver.residency.messages import NeedsReport
        from quiver_client.embedded.lease_files import LeaseFile
        manifest = Manifest.open(Path(sys.argv[1]))
        Path.replace = lambda *paths: os.kill(os.getpid(), 9)
        report = ConsumerReport(b"x" * 16, np.full(manifest.shard_count, 255, np.uint8), 0.0, 0.0, 60.0)
        LeaseFile(Path(sys.argv[2]), b"x" * 16).write(manifest.path, NeedsReport(manifest.digest, report))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(files.manifest), str(made.lease().parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path])}
    assert subprocess.run(command, check=False, env=environment).returncode == -signal.SIGKILL
    (left,) = made.lease().parent.glob(".*")
    made.until_needed(0, False)
    assert left.exists(), "it might be about to be renamed"
    os.utime(left, (1, 1))
    until(lambda: made.report() is not None and not left.exists())


# -- a disk that refuses ----------------------------------------------------------------------------------------------


def test_a_folder_that_takes_no_leases_is_said_and_reading_goes_on(
    consumer: Callable[..., Consumer], files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    made = consumer()
    made.lease().parent.write_text("a file where the folder should be")
    made.need([0, 1])
    made.until_resident([0, 1])
    assert "cannot write to" in caplog.text
    assert made.dataset[0]["image"] == files.content[made.dataset.manifest.key(0)]


def test_a_folder_that_was_removed_is_said_and_reading_goes_on(
    consumer: Callable[..., Consumer], files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    made = consumer()
    made.need([0, 1])
    made.until_resident([0, 1])
    shutil.rmtree(made.tier.store.root)
    told = ConsumerReport(made.name, np.full_like(made.left, 255), 0.0, 0.0, 30.0)
    until(lambda: made.needs.report(told) is not None and "cannot write to" in caplog.text)
    assert [made.dataset[i]["image"] for i in range(5)] == files.expected(
        [made.dataset.manifest.key(i) for i in range(5)]
    )
    made.needs.report(told, leaving=True)


def test_a_shard_that_made_way_is_let_go(consumer: Callable[..., Consumer], monkeypatch: pytest.MonkeyPatch) -> None:
    made = consumer()
    made.need(everything(made))
    made.until_resident(everything(made))
    made.dataset.__getitems__(range(len(made.dataset)))
    assert len(made.tier._mapped) == made.dataset.manifest.shard_count
    made.tier.store.drop(Kind.SHARD, made.dataset.manifest.shard_digest(3))
    made.tier._tidied = 0.0
    made.dataset[0]
    assert 3 not in made.tier._mapped
    made.until_resident(everything(made))
