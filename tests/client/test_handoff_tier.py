"""Shards of the daemon on this host, mapped: the same samples, no room kept, and TCP whenever the socket is no help."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import pickle
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from quiver.errors import Forbidden
from quiver.peer import PeerClient
from quiver.ring import Member, Ring
from quiver.transport.handoff import USED, FileStatus, HandoffRequest, Verb, files_answer, held_answer, hello_answer
from quiver.wire import RANGE, ReadRequest
from quiver_client import Dataset
from quiver_client.rack import handoff_tier as handoff_module
from quiver_client.rack import local_daemons as local_module
from quiver_client.rack.handoff_tier import HandoffTier
from quiver_client.rack.local_daemons import LocalDaemon, LocalDaemons
from quiver_client.stats import Stats
from tests.daemon.test_needs import Consumer
from tests.kernel.test_handoff import server
from tests.support.daemon import Daemon, rack_of
from tests.support.data import Files, make_files, make_shard, random_files, shard_bytes_of
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("patient_reads")

Make = Callable[..., Dataset]
FIELDS = ["image", "__key__"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("small"), random_files(60, seed=1), shard_bytes="64KiB")


@pytest.fixture(scope="module")
def served(small: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon alone with a socket."""
    where = tmp_path_factory.mktemp("served")
    with Daemon(where / "data", "--socket", str(where / "s"), origins=[small.folder]) as daemon:
        fill([daemon], small)
        yield daemon


def fill(daemons: list[Daemon], files: Files) -> None:
    """Have each daemon hold every shard: who owns what is then the reader's affair."""
    manifest = files.opened()
    for daemon in daemons:
        peer = PeerClient(daemon.url)
        peer.put_manifest(manifest.digest, files.manifest.read_bytes())
        shards = tuple(manifest.shard_digest(number) for number in range(manifest.shard_count))
        ranges = np.zeros(len(shards), RANGE)
        ranges["shard"], ranges["length"] = np.arange(len(shards)), 1
        statuses, _ = peer.read(ReadRequest(manifest.digest, shards, ranges, 20_000))
        assert not statuses.any()
        peer.close()
    for daemon in daemons:
        until(lambda daemon=daemon: daemon.metric("quiver_reads_in_flight") == 0, what="what was served is counted")


def read_all(made: Dataset, files: Files, batch: int = 7) -> None:
    order = np.random.default_rng(3).permutation(len(made)).tolist()
    for at in range(0, len(order), batch):
        for sample in made.__getitems__(order[at : at + batch]):
            assert sample["image"] == files.content[sample["__key__"]]


def tier_of(made: Dataset) -> HandoffTier:
    return cast(HandoffTier, made._open().tiers[0])


def maps_of(folder: Path, of_these: str = "") -> int:
    """How many files under the folder this process has mapped, removed ones too, or ``(deleted)`` ones only."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(str(folder) in line and of_these in line for line in lines)


def descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


# -- what is read -----------------------------------------------------------------------------------------------------


def test_samples_of_the_host_tier_are_those_of_the_rack_tier_and_no_byte_goes_over_tcp(
    dataset: Make, small: Files, served: Daemon
) -> None:
    before = served.metric("quiver_served_bytes_total")
    made = dataset(small.manifest, served.url, fields=FIELDS, verify="full")
    read_all(made, small)
    stats = made.stats()
    assert stats["samples_host"] == stats["samples"] == len(small.content)
    assert stats["bytes_host"] == sum(map(len, small.content.values()))
    assert (stats["bytes_rack"], stats["bytes_origin"], stats["misses_host"]) == (0, 0, 0)
    assert served.metric("quiver_served_bytes_total") == before
    assert served.metric("quiver_handed_files_total") >= small.opened().shard_count


def test_what_is_not_resident_is_brought_in_by_the_rack_tier_and_mapped_from_then_on(
    dataset: Make, small: Files, tmp_path: Path
) -> None:
    with Daemon(tmp_path / "data", "--socket", str(tmp_path / "s"), origins=[small.folder]) as daemon:
        made = dataset(small.manifest, daemon.url, fields=FIELDS)
        read_all(made, small)
        first = made.stats()
        assert first["misses_host"] == small.opened().shard_count
        assert first["samples_rack"] > 0
        assert first["samples_host"] + first["samples_rack"] == 60
        read_all(made, small)
        assert made.stats()["samples_host"] == first["samples_host"] + 60
        assert made.stats()["misses_host"] == first["misses_host"]


def test_warming_a_rack_is_done_by_the_rack_tier(small: Files, tmp_path: Path) -> None:
    from quiver.plan import plan_shards
    from quiver_client.config import parse_cache
    from quiver_client.session import Session

    with Daemon(tmp_path / "data", "--socket", str(tmp_path / "s"), origins=[small.folder]) as daemon:
        manifest = small.opened()
        session = Session(manifest, parse_cache(daemon.url), "off", introduce=True)
        assert session.fill(plan_shards(manifest, np.arange(manifest.shard_count))) == {}
        assert daemon.status()["shards"] == manifest.shard_count
        session.close()


def test_in_a_rack_on_one_host_each_shard_is_mapped_from_its_owner_though_only_one_daemon_is_named(
    dataset: Make, small: Files, tmp_path: Path
) -> None:
    """The ring is given: it tells no other socket than that of the daemon that was asked for it."""

    def make(where: Path, *flags: str, **more: Any) -> Daemon:
        return Daemon(where, *flags, "--socket", f"{where}.s", origins=[small.folder], **more)

    with rack_of(3, tmp_path, make=make) as daemons:
        fill(daemons, small)
        made = dataset(small.manifest, daemons[2].url, fields=FIELDS)
        read_all(made, small)
        assert made.stats()["samples_host"] == 60
        assert min(daemon.metric("quiver_handed_files_total") for daemon in daemons) > 0


def test_the_daemon_of_this_host_is_one_of_many_and_the_others_are_read_over_tcp(
    dataset: Make, small: Files, tmp_path: Path
) -> None:
    def make(where: Path, *flags: str, **more: Any) -> Daemon:
        own = [] if sockets else ["--socket", f"{where}.s"]
        sockets.append(where)
        return Daemon(where, *flags, *own, origins=[small.folder], **more)

    sockets: list[Path] = []
    with rack_of(3, tmp_path, make=make) as daemons:
        fill(daemons, small)
        made = dataset(small.manifest, daemons[1].url, fields=FIELDS)  # which does not know the other's socket
        read_all(made, small)
        read_all(made, small)
        stats = made.stats()
        assert stats["samples_host"] > 0
        assert stats["samples_rack"] > 0
        assert stats["samples_host"] + stats["samples_rack"] == 120
        assert stats["misses_host"] == 0, "only what a daemon of this host owns is asked of it"
        assert daemons[0].metric("quiver_handed_files_total") > 0


def child_reads(pickled: bytes, content: dict[str, bytes], out: Any) -> None:
    made = pickle.loads(pickled)
    for sample in made.__getitems__(list(range(len(made)))):
        assert sample["image"] == content[sample["__key__"]]
    out.put((made.stats()["samples_host"], made.stats()["samples"]))
    made.close()


@pytest.mark.fault("E4")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_map_for_themselves(dataset: Make, small: Files, served: Daemon, method: str) -> None:
    made = dataset(small.manifest, served.url, fields=FIELDS)
    read_all(made, small)
    context = multiprocessing.get_context(method)
    out = context.Queue()
    child = context.Process(target=child_reads, args=(pickle.dumps(made), small.content, out))
    child.start()
    assert out.get(timeout=60) == (60, 60)
    child.join(30)
    assert child.exitcode == 0
    read_all(made, small)
    assert made.stats()["samples_host"] == 120
    out.close()
    out.join_thread()


@pytest.mark.fault("E4")
def test_a_dataset_used_before_a_fork_works_in_the_child_and_keeps_none_of_the_parents_maps(
    dataset: Make, small: Files, served: Daemon
) -> None:
    made = dataset(small.manifest, served.url, fields=FIELDS)
    read_all(made, small)
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            if not maps_of(served.data_dir):
                read_all(made, small)
                code = 0 if made.stats()["samples_host"] == 60 else 3
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    read_all(made, small)
    assert made.stats()["samples_host"] == 120


def test_threads_read_through_one_tier(dataset: Make, small: Files, served: Daemon) -> None:
    made = dataset(small.manifest, served.url, fields=FIELDS)
    threads = [threading.Thread(target=read_all, args=(made, small, size)) for size in (1, 3, 7, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.stats()["samples_host"] == made.stats()["samples"] == 240


# -- room -------------------------------------------------------------------------------------------------------------


@pytest.mark.fault("C5")
def test_a_shard_that_made_way_while_mapped_stays_readable_and_is_let_go_of(
    dataset: Make, small: Files, tmp_path: Path
) -> None:
    manifest = small.opened()
    capacity = int(manifest.tables.shard_sizes.sum()) + manifest.path.stat().st_size + 10_000
    flags = ("--socket", str(tmp_path / "s"))
    with Daemon(tmp_path / "data", *flags, origins=[small.folder], capacity=str(capacity)) as daemon:
        fill([daemon], small)
        made = dataset(small.manifest, daemon.url, fields=FIELDS)
        read_all(made, small)
        assert maps_of(tmp_path / "data") == manifest.shard_count
        held = tier_of(made)._maps
        views = {shard: held.get(shard) for shard in range(manifest.shard_count)}
        with Consumer(daemon, small, put=False) as consumer:
            consumer.tell(0)  # nobody needs anything of it: so it makes way, read a moment ago or not
            digest, data = make_shard([os.urandom(150_000)])
            consumer.peer.put_shard(digest, data)
        there = {path.name for path in daemon.files()}
        gone = [shard for shard in views if str(manifest.shard_digest(shard)) not in there]
        assert gone, "the fault really fired"
        for shard in gone:
            buffer = views[shard]
            assert buffer is not None
            assert bytes(buffer.view) == shard_bytes_of(manifest, shard)[1]
        del buffer
        views.clear()
        until(lambda: not maps_of(tmp_path / "data", "(deleted)"), seconds=10)
        assert maps_of(tmp_path / "data") == manifest.shard_count - len(gone), "and nothing else was let go of"
        read_all(made, small)
        assert made.stats()["misses_host"] == len(gone)


def test_what_the_daemon_drops_is_let_go_of_within_the_tidy_time_though_nobody_reads(
    dataset: Make, small: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff_module, "TIDY_SECONDS", 0.2)
    with Daemon(tmp_path / "data", "--socket", str(tmp_path / "s"), origins=[small.folder]) as daemon:
        fill([daemon], small)
        made = dataset(small.manifest, daemon.url, fields=FIELDS)
        read_all(made, small)
        kept = tier_of(made)._maps.get(0)
        assert kept is not None
        digest = small.opened().shard_digest(0)
        path = next(path for path in daemon.files() if path.name == str(digest))
        held = bytes(kept.view)
        with path.open("rb") as file:
            path.unlink()
            peer = PeerClient(daemon.url)
            peer.put_shard(digest, held)  # another file by that name, and a map of the old one
            peer.close()
            del kept
            until(lambda: f"{digest} (deleted)" not in Path("/proc/self/maps").read_text(), seconds=5)
            assert os.fstat(file.fileno()).st_nlink == 0
        others = small.opened().shard_count - 1
        assert maps_of(tmp_path / "data") == others, "and nothing else was let go of"
        read_all(made, small)
        assert maps_of(tmp_path / "data") == others + 1


def test_maps_of_a_daemon_that_died_serve_on_and_are_let_go_of_after_a_while(
    dataset: Make, small: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff_module, "TIDY_SECONDS", 0.1)
    with Daemon(tmp_path / "data", "--socket", str(tmp_path / "s"), origins=[small.folder]) as daemon:
        fill([daemon], small)
        made = dataset(small.manifest, daemon.url, fields=FIELDS)
        read_all(made, small)
        daemon.kill()
        read_all(made, small)
        assert made.stats()["samples_host"] == 120
        monkeypatch.setattr(handoff_module, "KEEP_SECONDS", 0.1)
        until(lambda: maps_of(tmp_path / "data") == 0)


def test_closing_lets_go_of_maps_descriptors_and_threads(small: Files, served: Daemon) -> None:
    made = Dataset(small.manifest, served.url, fields=FIELDS)
    made.close()
    before = descriptors()
    read_all(made, small)
    assert maps_of(served.data_dir) == small.opened().shard_count
    assert descriptors() < before + 12, "no descriptor for a map"
    made.close()
    assert maps_of(served.data_dir) == 0
    assert descriptors() <= before
    assert not [thread for thread in threading.enumerate() if thread.name == "quiver-host"]


# -- when the socket is no help ---------------------------------------------------------------------------------------


def as_a_daemon(daemon: Daemon, path: Path, answer: Callable[[socket.socket, int, bytes], None]) -> Any:
    """Put another server in the place of a daemon's socket."""
    path.unlink()
    del daemon
    return server(path, answer)


def node_of(daemon: Daemon) -> str:
    return str(daemon.status()["id"])


@pytest.fixture
def own(small: Files, tmp_path: Path) -> Iterator[Daemon]:
    """A daemon whose socket may be spoilt."""
    with Daemon(tmp_path / "data", "--socket", str(tmp_path / "s"), origins=[small.folder]) as daemon:
        fill([daemon], small)
        yield daemon


def greeting(name: str, then: Callable[[socket.socket, bytes], None]) -> Callable[[socket.socket, int, bytes], None]:
    def answer(connection: socket.socket, number: int, request: bytes) -> None:
        if number == 0:
            connection.send(hello_answer(name))
        else:
            then(connection, request)

    return answer


def read_over_tcp(made: Dataset, small: Files) -> float:
    """Read everything; return how long the slowest batch took."""
    slowest = 0.0
    for at in range(0, 60, 6):
        begun = time.monotonic()
        for sample in made.__getitems__(list(range(at, at + 6))):
            assert sample["image"] == small.content[sample["__key__"]]
        slowest = max(slowest, time.monotonic() - begun)
    assert made.stats()["samples_rack"] == made.stats()["samples"] == 60
    return slowest


def test_a_socket_that_is_gone_costs_nothing(
    dataset: Make, small: Files, own: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "s").unlink()
    assert read_over_tcp(dataset(small.manifest, own.url, fields=FIELDS), small) < 2
    assert not caplog.records, "as on every host of the rack that has no daemon"


def test_a_socket_of_another_node_is_not_used(dataset: Make, small: Files, own: Daemon, tmp_path: Path) -> None:
    asked: list[bytes] = []

    def then(connection: socket.socket, request: bytes) -> None:
        asked.append(request)

    with as_a_daemon(own, tmp_path / "s", greeting("somebody-else", then)):
        read_over_tcp(dataset(small.manifest, own.url, fields=FIELDS), small)
    assert not asked


@pytest.mark.parametrize("silent_from", [0, 1])
def test_a_silent_socket_costs_one_bounded_stall_and_one_warning(
    dataset: Make, small: Files, own: Daemon, tmp_path: Path, silent_from: int, caplog: pytest.LogCaptureFixture
) -> None:
    name = node_of(own)

    def answer(connection: socket.socket, number: int, request: bytes) -> None:
        if number < silent_from:
            connection.send(hello_answer(name))

    with as_a_daemon(own, tmp_path / "s", answer):
        made = dataset(small.manifest, own.url, fields=FIELDS)
        begun = time.monotonic()
        assert read_over_tcp(made, small) < 3
        assert time.monotonic() - begun < 4, "one stall, and not one a batch"
        until(lambda: caplog.records)  # the thread that looks for daemons may end its wait a moment after the batch
        assert len(caplog.records) == 1
        assert "TCP" in caplog.records[0].message
        made.close()


def wrong_size(connection: socket.socket, request: bytes) -> None:
    count = len(HandoffRequest.decode(request).entries)
    with Path("/proc/self/exe").open("rb") as file:
        passed = struct.pack(f"{count}i", *[file.fileno()] * count)
        told = files_answer([(FileStatus.PRESENT, 7)] * count)
        connection.sendmsg([told], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])


LIES: dict[str, Callable[[socket.socket, bytes], None]] = {
    "garbage": lambda connection, request: connection.send(b"garbage") and None,
    "closes": lambda connection, request: connection.shutdown(socket.SHUT_RDWR),
    "files of another size": wrong_size,
    "no descriptors": lambda connection, request: (
        connection.send(files_answer([(FileStatus.PRESENT, 7)] * len(HandoffRequest.decode(request).entries))) and None
    ),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=list(LIES))
def test_a_socket_that_lies_costs_speed_and_is_counted(
    dataset: Make, small: Files, own: Daemon, tmp_path: Path, lie: Callable[[socket.socket, bytes], None]
) -> None:
    with as_a_daemon(own, tmp_path / "s", greeting(node_of(own), lie)):
        made = dataset(small.manifest, own.url, fields=FIELDS)
        assert read_over_tcp(made, small) < 3
        assert made.stats()["corruptions"] > 0 or lie is LIES["closes"]
        made.close()


def passing(own: Daemon, where: Path, more: bytes = b"") -> Callable[[socket.socket, bytes], None]:
    """Pass copies of the daemon's files, with something appended, and hold them all."""
    paths = {path.name: path for path in own.files()}

    def then(connection: socket.socket, request: bytes) -> None:
        asked = HandoffRequest.decode(request)
        if asked.verb is not Verb.FILES:
            connection.send(held_answer([True] * len(asked.entries)))
            return
        with contextlib.ExitStack() as stack:
            fds = []
            for name in [str(entry.digest) for entry in asked.entries]:
                (where / name).write_bytes(paths[name].read_bytes() + more)
                fds.append(stack.enter_context((where / name).open("rb")).fileno())
            told = files_answer([(FileStatus.PRESENT, 7)] * len(fds))
            connection.sendmsg([told], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))])

    return then


def test_the_daemon_hears_which_maps_are_in_use(
    dataset: Make, small: Files, own: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff_module, "TIDY_SECONDS", 0.1)
    told: list[tuple[int, int, set[int]]] = []
    honest = passing(own, tmp_path)

    def then(connection: socket.socket, request: bytes) -> None:
        asked = HandoffRequest.decode(request)
        if asked.verb is Verb.HELD:
            told.append((asked.flags, len(asked.entries), {entry.edition for entry in asked.entries}))
        honest(connection, request)

    with as_a_daemon(own, tmp_path / "s", greeting(node_of(own), then)):
        made = dataset(small.manifest, own.url, fields=FIELDS)
        count = small.opened().shard_count
        for _ in range(2):
            read_all(made, small, batch=60)
            told.clear()
            until(lambda: (0, count, {7}) in told, what="maps that nobody reads")
        assert made.stats()["samples_host"] == 120
        read_all(made, small, batch=60)
        until(lambda: (USED, count, {7}) in told, what="maps in use")
        made.close()


def test_a_file_of_another_size_is_not_used_though_all_its_samples_are_right(
    dataset: Make, small: Files, own: Daemon, tmp_path: Path
) -> None:
    with as_a_daemon(own, tmp_path / "s", greeting(node_of(own), passing(own, tmp_path, b"x"))):
        made = dataset(small.manifest, own.url, fields=FIELDS)
        read_over_tcp(made, small)
        assert made.stats()["corruptions"] == small.opened().shard_count, "once each, and then not asked for again"
        made.close()


def test_of_members_with_one_path_that_one_is_here_which_the_daemon_says_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every machine of a rack may use the same path."""
    path = str(tmp_path / "s")
    ring = Ring.of("r", [Member(name, f"http://{name}:1", 2.0, socket=path) for name in ("a", "b", "c")])
    found = LocalDaemons(cast(Any, None), (), Stats())
    with server(tmp_path / "s", greeting("b", lambda connection, request: None)):
        found.look(ring)
        assert [member.id for member in ring.members if found.at(member.url) is not None] == ["b"]
        found.look(Ring.of("r", [member for member in ring.members if member.id != "b"]))
        assert not found
        assert "is not one that the ring has there" in caplog.text
    found.close()


def test_a_ring_of_many_sockets_costs_a_bounded_look(tmp_path: Path) -> None:
    asked = []

    def answer(connection: socket.socket, number: int, request: bytes) -> None:
        asked.append(request)
        connection.send(hello_answer("n199"))

    with server(tmp_path / "s", answer):
        for number in range(200):
            (tmp_path / f"s{number}").hardlink_to(tmp_path / "s")
        ring = Ring.of("r", [Member(f"n{n}", f"http://n{n}:1", 2.0, socket=f"{tmp_path}/s{n}") for n in range(200)])
        found = LocalDaemons(cast(Any, None), (), Stats())
        for _ in range(3):
            found.look(ring)
        assert len(asked) == local_module.PATHS_MAX, "and not again at once"
        assert not found
        found.close()


@pytest.mark.fault("C2")
def test_files_of_the_right_size_and_wrong_bytes_are_found_and_read_over_tcp_for_a_while(
    dataset: Make, small: Files, own: Daemon, tmp_path: Path
) -> None:
    manifest = small.opened()
    sizes = {manifest.shard_digest(n): int(manifest.tables.shard_sizes[n]) for n in range(manifest.shard_count)}
    asked: list[HandoffRequest] = []

    def then(connection: socket.socket, request: bytes) -> None:
        decoded = HandoffRequest.decode(request)
        asked.append(decoded)
        if decoded.verb is not Verb.FILES:
            connection.send(held_answer([False] * len(decoded.entries)))
            return
        fds = []
        for entry in decoded.entries:
            (tmp_path / "wrong").write_bytes(os.urandom(sizes[entry.digest]))
            fds.append(os.open(tmp_path / "wrong", os.O_RDONLY))
            (tmp_path / "wrong").unlink()
        told = files_answer([(FileStatus.PRESENT, 7)] * len(fds))
        connection.sendmsg([told], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))])
        for fd in fds:
            os.close(fd)

    with as_a_daemon(own, tmp_path / "s", greeting(node_of(own), then)):
        made = dataset(small.manifest, own.url, fields=FIELDS)
        for at in range(0, 60, 6):
            for sample in made.__getitems__(list(range(at, at + 6))):
                assert sample["image"] == small.content[sample["__key__"]]
        stats = made.stats()
        assert stats["corruptions"] > 0
        assert stats["samples_rack"] == 60
        files = [entry.digest for request in asked if request.verb is Verb.FILES for entry in request.entries]
        assert len(files) == len(set(files)), "once wrong, not asked for again"
        assert any(request.verb is Verb.HELD and request.flags for request in asked), "the daemon is told"
        made.close()
    assert maps_of(tmp_path / "wrong") == 0


@pytest.mark.fault("C2")
def test_rot_on_the_daemons_disk_is_found_through_the_map_quarantined_and_mended(
    dataset: Make, small: Files, own: Daemon
) -> None:
    made = dataset(small.manifest, own.url, fields=FIELDS)
    read_all(made, small)
    path = own.files()[0]
    with path.open("r+b") as file:  # the page cache is one: what is mapped changes as well
        file.write(b"rotten" * 100)
    read_all(made, small)
    assert made.stats()["corruptions"] > 0
    assert made.stats()["samples_origin"] == 0
    until(lambda: own.status()["corruptions"] == 1)
    read_all(made, small)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_user_who_may_not_use_the_socket_reads_over_tcp(dataset: Make, small: Files, tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,  # where others may look for it, unlike in that of a test
        Daemon(tmp_path / "data", "--socket", f"{folder}/s", origins=[small.folder]) as daemon,
    ):
        Path(folder).chmod(0o755)
        fill([daemon], small)
        Path(f"{folder}/s").chmod(0o600)
        made = dataset(small.manifest, daemon.url, fields=FIELDS)
        assert made.manifest
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            logging.getLogger("quiver_client").addHandler(logging.StreamHandler(os.fdopen(writer, "w")))
            code = 1
            with contextlib.suppress(BaseException):
                os.setgroups([])
                os.setgid(os.getgid() or 65534)
                os.setuid(os.getuid() or 65534)
                read_over_tcp(made, small)
                code = 0
            os._exit(code)
        os.close(writer)
        with os.fdopen(reader) as said:
            assert said.read().count("Permission denied") == 1
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("uids", [(321, 0), (321, 4321), (4321, 0), (4321, 4321), (1000, 1000), (65534, 65534)])
def test_a_socket_that_a_stranger_put_there_is_not_used(
    dataset: Make,
    small: Files,
    own: Daemon,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    uids: tuple[int, int],
) -> None:
    """Neither in somebody else's folder nor in his own: he could change a file after it was checked."""
    owner, of_folder = uids
    os.chown(tmp_path / "s", owner, owner)
    os.chown(tmp_path, of_folder, of_folder)
    read_over_tcp(dataset(small.manifest, own.url, fields=FIELDS), small)
    assert f"belongs to user {owner}" in caplog.text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize(("owner", "of_folder"), [(0, 4321), (321, 321), (999, 999), (61184, 61184)])
def test_a_socket_of_root_or_of_a_system_account_in_its_own_folder_is_used(
    dataset: Make, small: Files, own: Daemon, tmp_path: Path, owner: int, of_folder: int
) -> None:
    os.chown(tmp_path / "s", owner, owner)
    os.chown(tmp_path, of_folder, of_folder)
    made = dataset(small.manifest, own.url, fields=FIELDS)
    read_all(made, small)
    assert made.stats()["samples_host"] == 60


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_who_listens_at_a_socket_of_roots_and_is_not_root_is_read_from_over_tcp(
    dataset: Make, small: Files, own: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """He may have put it there after the path was looked at."""
    (tmp_path / "s").unlink()
    asked = []

    def then(connection: socket.socket, request: bytes) -> None:
        asked.append(request)

    with server(tmp_path / "s", greeting(node_of(own), then), user=4321):
        made = dataset(small.manifest, own.url, fields=FIELDS)
        read_over_tcp(made, small)
        assert "user 4321 listens there" in caplog.text
        assert not asked
        made.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_a_service_that_comes_back_with_another_dynamic_user_is_found_again(tmp_path: Path) -> None:
    ring = Ring.of("r", [Member("me", "http://me:1", 2.0, socket=str(tmp_path / "s"))])
    found = LocalDaemons(cast(Any, None), (), Stats())
    former: LocalDaemon | None = None
    for user in (61184, 61185):
        with server(tmp_path / "s", greeting("me", lambda connection, request: None), user=user) as path:
            for owned in (path, tmp_path):
                os.chown(owned, user, user)
            if former is not None:
                with pytest.raises(Forbidden):
                    former.client.held([])
                former.mark_unresponsive()  # as the tier says of one that cannot be asked
            found.look(ring)
            former = found.at("http://me:1")
            assert former is not None
            assert former.client.hello() == "me"
        path.unlink()
    found.close()


def test_a_daemon_that_comes_back_is_found_again(
    dataset: Make, small: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff_module, "TIDY_SECONDS", 0.1)
    monkeypatch.setattr(local_module, "UNRESPONSIVE_SECONDS", 0.2)
    flags = ("--socket", str(tmp_path / "s"), "--node-id", "me")
    with Daemon(tmp_path / "data", *flags, origins=[small.folder]) as daemon:
        fill([daemon], small)
        made = dataset(small.manifest, daemon.url, fields=FIELDS)
        read_all(made, small)
        port = daemon.address[1]
        daemon.kill()
        with Daemon(tmp_path / "data", *flags, origins=[small.folder], port=port) as again:

            def mapped_anew() -> bool:
                read_all(made, small)
                return again.metric("quiver_handed_files_total") >= small.opened().shard_count

            until(mapped_anew)
            before = made.stats()
            read_all(made, small)
            assert made.stats()["samples_host"] == before["samples_host"] + 60
            made.close()
