"""``--socket``: the files that a daemon passes to readers on its host, and what nobody can do to it by that way."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import re
import resource
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from blockbuster import blockbuster_ctx

from quiver.digest import Digest
from quiver.errors import Misconfigured, OverCapacity
from quiver.identity import Identity
from quiver.introduction import READER_BYTES, Introduction
from quiver.peer import PeerClient
from quiver.ring import Member
from quiver.store import Kind, Store
from quiver.transport.handoff import (
    ANSWER_BYTES_MAX,
    FILES_MAX,
    HELD_MAX,
    RECHECK,
    REQUEST_BYTES_MAX,
    USED,
    FileStatus,
    HandoffAnswer,
    HandoffClient,
    HandoffRequest,
    Held,
    Status,
    Verb,
)
from quiver.wire import RANGE, ReadRequest
from quiver_cacheserver.budget import HELD_MAX as HELD_AT_ONCE
from quiver_cacheserver.budget import Resource
from quiver_cacheserver.node import Node
from quiver_cacheserver.rack.registry import StaticRegistry
from quiver_cacheserver.serving import unix_socket as handoff_module
from quiver_cacheserver.serving.unix_socket import Handoff, bound
from tests.daemon.test_process import GOOD, run
from tests.support.daemon import Daemon, rack_of
from tests.support.data import Files, make_shard, shard_bytes_of
from tests.support.waiting import until

ABSENT = Digest(b"a" * 32)
HELLO = HandoffRequest(Verb.HELLO).encode()


@pytest.fixture(scope="module")
def served(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with a socket that holds all of ``files``."""
    where = tmp_path_factory.mktemp("served")
    with Daemon(where / "data", "--socket", str(where / "s"), "--node-id", "me", origins=[files.folder]) as daemon:
        fill(daemon, files)
        yield daemon


@pytest.fixture
def client(served: Daemon) -> Iterator[HandoffClient]:
    made = HandoffClient(path_of(served), answer_seconds=10)
    yield made
    made.close()


def path_of(daemon: Daemon) -> str:
    return str(daemon.data_dir.parent / "s")


def fill(daemon: Daemon, files: Files) -> None:
    manifest = files.opened()
    peer = PeerClient(daemon.url)
    peer.put_manifest(manifest.digest, files.manifest.read_bytes())
    ranges = np.zeros(manifest.shard_count, RANGE)
    ranges["shard"], ranges["length"] = np.arange(manifest.shard_count), 1
    statuses, _ = peer.read(ReadRequest(manifest.digest, tuple(shards_of(files)), ranges, 20_000))
    assert not statuses.any()
    peer.close()


def shards_of(files: Files) -> list[Digest]:
    manifest = files.opened()
    return [manifest.shard_digest(number) for number in range(manifest.shard_count)]


def raw(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(10)
    until(lambda: let_in(connection, path))
    return connection


def let_in(connection: socket.socket, path: str) -> bool:
    try:
        connection.connect(path)
    except BlockingIOError:  # as many wait to be let in as may
        return False
    return True


def greeted(connection: socket.socket) -> bool:
    """Whether the daemon answers, and does not turn us away in one of the ways in which that can be seen."""
    try:
        connection.send(HELLO)
        answer = connection.recv(ANSWER_BYTES_MAX)
        return bool(answer) and HandoffAnswer.decode(answer).status is Status.OK
    except ConnectionError:
        return False


def descriptors(daemon: Daemon) -> int:
    assert daemon.process is not None
    return len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir()))


# -- what is handed out -----------------------------------------------------------------------------------------------


def test_a_reader_gets_the_very_files_read_only_and_in_order(
    served: Daemon, client: HandoffClient, files: Files
) -> None:
    assert client.hello() == "me"
    before = served.metric("quiver_handed_files_total")
    names = [shards_of(files)[3], ABSENT, shards_of(files)[0]]
    handed = client.files(names)
    assert [it.status for it in handed] == [FileStatus.PRESENT, FileStatus.ABSENT, FileStatus.PRESENT]
    for number, it in ((3, handed[0]), (0, handed[2])):
        assert it.file is not None
        assert bytes(it.file.map()) == shard_bytes_of(files.opened(), number)[1]
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(it.file.fd, b"x")
        assert not os.get_inheritable(it.file.fd)
    assert handed[1].file is None
    assert served.metric("quiver_handed_files_total") == before + 2


def test_files_that_are_handed_over_count_for_the_tenant_of_the_readers_introduction(
    served: Daemon, files: Files
) -> None:
    said = Introduction(b"r" * READER_BYTES, Identity(tenant="vision"), "train")
    client = HandoffClient(path_of(served), answer_seconds=10, introduction=said.encode())
    names = shards_of(files)
    until(lambda: {it.status for it in client.files(names)} == {FileStatus.PRESENT})
    client.close()
    told = served.ask("GET", "/metrics")[1].decode()
    counted = re.search(r'quiver_dataset_read_bytes_total{dataset=".*",tenant="vision",tier="host"} (\S+)', told)
    assert counted is not None, told
    assert float(counted[1]) >= sum(files.opened().tables.shard_sizes)


def test_what_is_not_here_is_not_brought_in(files: Files, tmp_path: Path) -> None:
    with Daemon(tmp_path / "data", "--socket", str(tmp_path / "s"), origins=[files.folder]) as daemon:
        peer = PeerClient(daemon.url)
        peer.put_manifest(files.opened().digest, files.manifest.read_bytes())
        client = HandoffClient(path_of(daemon))
        assert {it.status for it in client.files(shards_of(files))} == {FileStatus.ABSENT}
        assert daemon.status()["shards"] == daemon.status()["fills"] == 0
        client.close()
        peer.close()


def test_a_reader_hears_which_of_its_files_are_still_the_ones_that_the_daemon_holds(
    files: Files, tmp_path: Path
) -> None:
    flags = ("--socket", str(tmp_path / "s"), "--node-id", "me")
    with Daemon(tmp_path / "data", *flags, origins=[files.folder]) as daemon:
        fill(daemon, files)
        client = HandoffClient(path_of(daemon))
        names = shards_of(files)[:4]
        held = [Held(name, it.edition) for name, it in zip(names, client.files(names), strict=True)]
        assert client.held([*held, Held(ABSENT, 0), Held(names[0], held[0].edition + 1)]) == [*[True] * 4, False, False]
        daemon.stop()
        with Daemon(daemon.data_dir, *flags) as again:
            # Not verified since the start: not handed out before it is, and another edition then.
            first = [it.status for it in client.files(names)]
            assert set(first) <= {FileStatus.NOT_NOW, FileStatus.PRESENT}
            until(lambda: {it.status for it in client.files(names)} == {FileStatus.PRESENT})
            assert client.held(held) == [False] * 4
            assert again.status()["corruptions"] == 0
        client.close()


def test_a_file_that_rotted_is_verified_when_a_reader_says_so_and_not_handed_out_again(
    files: Files, tmp_path: Path
) -> None:
    with Daemon(tmp_path / "data", "--socket", str(tmp_path / "s"), origins=[files.folder]) as daemon:
        fill(daemon, files)
        client = HandoffClient(path_of(daemon))
        (name,) = shards_of(files)[:1]
        (it,) = client.files([name])
        path = next(path for path in daemon.files() if path.name == str(name))
        with path.open("r+b") as file:
            file.write(b"rotten")
        assert client.held([Held(name, it.edition)], RECHECK) == [False]
        until(lambda: client.files([name])[0].status is FileStatus.ABSENT)
        until(lambda: daemon.status()["corruptions"] == 1)
        client.close()


def test_what_readers_use_through_maps_is_in_use_for_the_store(tmp_path: Path) -> None:
    digest, data = make_shard([b"x" * 1000])

    async def ask(path: str, node: Node, flags: int) -> float:
        def asked() -> None:
            client = HandoffClient(path, answer_seconds=10)
            (it,) = client.files([digest])
            (before,) = node.store.inventory.held(Kind.SHARD)
            client.held([Held(digest, it.edition)], flags)
            (after,) = node.store.inventory.held(Kind.SHARD)
            moved.append(after.used - before.used)
            client.close()

        moved: list[float] = []
        await asyncio.to_thread(asked)
        return moved[0]

    async def both() -> list[float]:
        loop = asyncio.get_running_loop()
        node = await loop.run_in_executor(None, lambda: node_at(tmp_path))
        await loop.run_in_executor(None, node.store.put, Kind.SHARD, digest, data)
        with bound(str(tmp_path / "s")) as listener:
            assert listener is not None
            async with Handoff(node, listener):
                with blockbuster_ctx():  # the event loop is never blocked
                    moved = [await ask(str(tmp_path / "s"), node, flags) for flags in (0, USED)]
        await loop.run_in_executor(None, node.close)
        return moved

    unused, used = asyncio.run(both())
    assert unused == 0
    assert used > 0


def node_at(where: Path) -> Node:
    store = Store.open(where / "store", 64 << 20, shared=False)
    registry = StaticRegistry("r", Member("a", "http://127.0.0.1:9"))
    return Node("0", store, registry, [])


def test_a_daemon_that_drains_still_hands_out(files: Files, tmp_path: Path) -> None:
    with Daemon(
        *(tmp_path / "data", "--socket", str(tmp_path / "s"), "--drain-seconds", "20"), origins=[files.folder]
    ) as daemon:
        fill(daemon, files)
        client = HandoffClient(path_of(daemon))
        stop = threading.Event()

        def use() -> None:  # as readers do: who is used is not left
            while not stop.is_set():
                client.files(shards_of(files)[:1])
                stop.wait(0.05)

        with ThreadPoolExecutor(1) as pool:
            using = pool.submit(use)
            daemon.signal(signal.SIGTERM)
            until(lambda: daemon.status()["state"] == "draining")
            assert {it.status for it in client.files(shards_of(files))} == {FileStatus.PRESENT}
            stop.set()
            using.result()
        assert daemon.wait() == 0
        client.close()


# -- the socket itself ------------------------------------------------------------------------------------------------


def test_the_socket_is_for_the_daemons_user_and_group_and_is_removed_at_the_end(tmp_path: Path) -> None:
    with Daemon(tmp_path / "data", "--socket", str(tmp_path / "s")) as daemon:
        found = (tmp_path / "s").stat()
        assert stat.S_ISSOCK(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == 0o660
        assert daemon.json("/v1/ring")["members"][0]["socket"] == str(tmp_path / "s")
        assert daemon.stop() == 0
        assert not (tmp_path / "s").exists()


def test_the_path_may_stand_in_a_variable_or_in_toml(tmp_path: Path) -> None:
    (tmp_path / "q.toml").write_text(f'socket = "{tmp_path}/from-toml"\n')
    environment = {"QUIVER_CONFIG": str(tmp_path / "q.toml")}
    for expected in ("from-toml", "from-variable"):
        with Daemon(tmp_path / "data", environment=environment) as daemon:
            assert daemon.json("/v1/ring")["members"][0]["socket"] == f"{tmp_path}/{expected}"
            assert stat.S_ISSOCK((tmp_path / expected).stat().st_mode)
        environment["QUIVER_SOCKET"] = f"{tmp_path}/from-variable"


def test_a_daemon_without_the_flag_names_no_socket(lone: Daemon) -> None:
    assert lone.json("/v1/ring")["members"][0]["socket"] == ""


def test_in_a_ring_that_is_given_each_daemon_names_its_own_socket(tmp_path: Path) -> None:
    def make(where: Path, *flags: str, **more: Any) -> Daemon:
        return Daemon(where, *flags, "--socket", f"{where}.s", **more)

    with rack_of(2, tmp_path, make=make) as daemons:
        for daemon in daemons:
            told = {member["url"]: member["socket"] for member in daemon.json("/v1/ring")["members"]}
            assert told == {other.url: f"{other.data_dir}.s" if other is daemon else "" for other in daemons}


def test_the_socket_of_a_daemon_that_was_killed_is_replaced(tmp_path: Path) -> None:
    with Daemon(tmp_path / "a", "--socket", str(tmp_path / "s")) as daemon:
        daemon.kill()
    assert (tmp_path / "s").exists()
    with Daemon(tmp_path / "b", "--socket", str(tmp_path / "s"), "--node-id", "new"):
        client = HandoffClient(str(tmp_path / "s"))
        assert client.hello() == "new"
        client.close()


def test_a_second_daemon_at_one_path_is_refused_in_one_line_and_the_first_serves_on(
    served: Daemon, tmp_path: Path
) -> None:
    code, said = run(*GOOD, "--data-dir", str(tmp_path / "d"), "--socket", path_of(served))
    assert code == 1
    assert said.count("\n") == 1
    assert "--socket" in said
    assert "own" in said
    client = HandoffClient(path_of(served))
    assert client.hello() == "me"
    client.close()


def test_of_daemons_that_start_at_once_at_the_path_of_a_dead_one_one_listens(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    for _ in range(20):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.bind(path)
        ready = threading.Barrier(4)
        done = threading.Barrier(4)

        def start(ready: threading.Barrier = ready, done: threading.Barrier = done) -> bool:
            ready.wait(10)
            try:
                with bound(path):
                    done.wait(10)
                    return True
            except Misconfigured:
                done.wait(10)
                return False

        with ThreadPoolExecutor(4) as pool:
            assert sorted(future.result() for future in [pool.submit(start) for _ in range(4)]) == [*[False] * 3, True]
        assert not Path(path).exists()


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("relative", "absolute"),
        ("/" + "s" * 107, "107"),
        ("{}/none/s", "No such file"),
        ("{}/file", "another kind of file"),
        ("{}/file/s", "Not a directory"),
    ],
)
def test_a_path_that_cannot_be_a_socket_is_refused_by_the_flags_name(tmp_path: Path, path: str, says: str) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    code, said = run(*GOOD, "--data-dir", str(tmp_path / "d"), "--socket", path.format(tmp_path))
    assert code in (1, 2)
    assert said.count("\n") == 1
    assert "--socket" in said
    assert says in said
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_a_socket_of_another_kind_that_lives_is_not_taken(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen()
        with pytest.raises(Misconfigured, match="another process"), bound(path):
            pass
        assert Path(path).exists()


# -- readers without manners ------------------------------------------------------------------------------------------

GARBAGE = {
    "nothing of ours": b"GET / HTTP/1.1\r\n\r\n",
    "one byte": b"Q",
    "no such verb": msgspec.msgpack.encode({"verb": 9}),
    "entries that are not there": msgspec.msgpack.encode({"verb": Verb.HELD, "shards": bytes(32)}),
    "more files than may be": HandoffRequest(Verb.FILES, (Held(ABSENT, 0),) * (FILES_MAX + 1)).encode(),
    "more held than may be": HandoffRequest(Verb.HELD, (Held(ABSENT, 0),) * (HELD_MAX + 1)).encode(),
    "2^32 entries": b"\x82\xa4verb\x02\xa6shards\xc6\xff\xff\xff\xff",
    "too long": bytes(REQUEST_BYTES_MAX + 1),
    "much too long": bytes(150_000),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=list(GARBAGE))
def test_garbage_is_refused_and_the_connection_closed(served: Daemon, client: HandoffClient, garbage: bytes) -> None:
    with raw(path_of(served)) as connection:
        connection.send(garbage)
        assert HandoffAnswer.decode(connection.recv(ANSWER_BYTES_MAX)).status is Status.REFUSED
        assert connection.recv(ANSWER_BYTES_MAX) == b""
    assert client.hello() == "me"
    assert "Traceback" not in served.log


def test_descriptors_that_are_sent_to_a_daemon_do_not_stay_there(served: Daemon, client: HandoffClient) -> None:
    client.hello()
    before = descriptors(served)
    fds = array.array("i", [os.open("/dev/null", os.O_RDONLY)] * 200)
    with raw(path_of(served)) as connection:
        for _ in range(20):
            connection.sendmsg([HELLO], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            assert b"me" in connection.recv(ANSWER_BYTES_MAX)
    os.close(fds[0])
    until(lambda: descriptors(served) <= before)


@pytest.mark.fault("S3")
def test_a_reader_that_does_not_take_its_answers_is_let_go(served: Daemon, files: Files) -> None:
    before = served.metric("quiver_handed_files_total")
    asking = HandoffRequest(Verb.FILES, tuple(Held(name, 0) for name in shards_of(files)[:10])).encode()

    def send_until_closed(connection: socket.socket) -> None:
        while True:
            connection.send(asking)
            time.sleep(0.001)  # many in a row, and each a message that the daemon meets

    with raw(path_of(served)) as connection, pytest.raises(ConnectionError):
        send_until_closed(connection)
    assert served.metric("quiver_handed_files_total") <= before + 10


def test_idle_connections_make_way_for_new_ones_and_leave_nothing(served: Daemon, client: HandoffClient) -> None:
    client.hello()
    before = descriptors(served)
    of_one_user = HELD_AT_ONCE[Resource.SOCKET_CONNECTIONS] * 3 // 4
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(raw(path_of(served))) for _ in range(of_one_user + 100)]
        late = HandoffClient(path_of(served), answer_seconds=10)
        assert late.hello() == "me"
        late.close()
        assert idle[0].recv(1) == b"", "the first of them was let go"
        until(lambda: descriptors(served) < before + of_one_user + 5)
    until(lambda: descriptors(served) <= before)
    assert client.hello() == "me"


@pytest.mark.fault("S3")
async def test_a_silent_reader_is_let_go_at_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_module, "SILENCE_SECONDS", 0.2)
    loop = asyncio.get_running_loop()
    node = await loop.run_in_executor(None, lambda: node_at(tmp_path))
    with bound(str(tmp_path / "s")) as listener:
        assert listener is not None
        async with Handoff(node, listener):

            def stay() -> bytes:
                with raw(str(tmp_path / "s")) as connection:
                    return connection.recv(1)

            assert await asyncio.to_thread(stay) == b""
    await loop.run_in_executor(None, node.close)


async def test_a_daemon_that_has_too_much_under_way_says_so_and_counts_it(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    node = await loop.run_in_executor(None, lambda: node_at(tmp_path))
    node.budgets.held_max[Resource.SOCKET_REQUESTS] = 0
    with bound(str(tmp_path / "s")) as listener:
        assert listener is not None
        async with Handoff(node, listener):
            client = HandoffClient(str(tmp_path / "s"))
            with pytest.raises(OverCapacity, match="busy"):
                await asyncio.to_thread(client.hello)
    assert node.budgets.refused[Resource.SOCKET_REQUESTS] == 1
    await loop.run_in_executor(None, node.close)


@pytest.mark.fault("C6")
def test_a_daemon_out_of_descriptors_turns_readers_away_and_recovers(files: Files, tmp_path: Path) -> None:
    """It keeps what it has, says no at once, and goes on when there are some again."""
    with Daemon(tmp_path / "data", "--socket", str(tmp_path / "s"), origins=[files.folder]) as daemon:
        fill(daemon, files)
        client = HandoffClient(path_of(daemon), answer_seconds=10)
        assert daemon.process is not None
        assert client.hello()
        limits = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (descriptors(daemon), limits[1]))
        with contextlib.ExitStack() as stack:
            begun = time.monotonic()
            for _ in range(100):
                connection = stack.enter_context(raw(path_of(daemon)))
                if not greeted(connection):
                    break
            else:
                pytest.fail("nobody was turned away")
            assert time.monotonic() - begun < 5, "told at once, and not by a deadline"
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, limits)
        until(lambda: daemon.ask("GET", "/readyz")[0] == 200)
        assert {it.status for it in client.files(shards_of(files))} == {FileStatus.PRESENT}
        client.close()
