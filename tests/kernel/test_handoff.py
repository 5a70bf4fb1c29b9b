"""Open files over a Unix socket: the wire, and what a reader makes of a server that says anything."""

from __future__ import annotations

import array
import contextlib
import gc
import itertools
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver import membership as m
from quiver.digest import Digest
from quiver.errors import BadRequest, Corrupt, Forbidden, OverCapacity, QuiverError, Unavailable
from quiver.membership.record import write
from quiver.ring import SOCKET_BYTES_MAX, Member, Ring
from quiver.transport.handoff import (
    ANSWER_BYTES_MAX,
    FILES_MAX,
    HELD_MAX,
    IDLE_CONNECTIONS_MAX,
    NODE_ID_BYTES_MAX,
    REQUEST_BYTES_MAX,
    FileStatus,
    HandoffAnswer,
    HandoffClient,
    HandoffRequest,
    Held,
    Status,
    Verb,
    files_answer,
    held_answer,
    hello_answer,
    refusal,
)
from quiver.wire import RingView, decode_json

LONGEST = "/" + "s" * (SOCKET_BYTES_MAX - 1)
NO_SOCKETS: list[Any] = [
    *("", "relative", "@abstract", "\0abstract", LONGEST + "x", "/run/a\nb", "/run/ä", "/"),
    *(5, None, True, ["/run/q"], {"a": [[]]}, 1e300),
]


@pytest.mark.parametrize("path", ["/run/quiver/socket", "/a b", LONGEST])
def test_a_ring_and_a_record_name_the_socket_of_a_member(path: str) -> None:
    member = Member("a", "http://a:1", 5.0, socket=path)
    ring = Ring.of("r", [member])
    assert decode_json(msgspec.json.encode(RingView.of(ring)), RingView, "it").ring() == (ring, 0)
    seat = m.read("a", m.Entry("k", write(member, "s"), 1, 1))
    assert seat is not None
    assert seat.member == member


@pytest.mark.parametrize("path", NO_SOCKETS, ids=repr)
def test_a_socket_that_cannot_be_one_costs_itself_and_not_the_member(path: object) -> None:
    entry = {"id": "a", "url": "http://a:1", "weight": 5.0, "state": "up", "socket": path}
    body = json.dumps({"rack": "r", "replicas": 1, "members": [entry]}).encode()
    assert decode_json(body, RingView, "it").ring() == (Ring.of("r", [Member("a", "http://a:1", 5.0)]), 0)
    seat = m.read("a", m.Entry("k", json.dumps({**entry, "session": "s"}).encode(), 1, 1))
    assert seat is not None
    assert seat.member == Member("a", "http://a:1", 5.0)


def test_a_record_and_a_ring_of_a_daemon_without_a_word_on_sockets_are_read() -> None:
    entry = {"id": "a", "url": "http://a:1", "weight": 5.0, "session": "s"}
    seat = m.read("a", m.Entry("k", json.dumps(entry).encode(), 1, 1))
    assert seat is not None
    assert seat.member.socket == ""
    body = json.dumps({"rack": "r", "replicas": 1, "members": [entry]}).encode()
    assert decode_json(body, RingView, "it").ring()[0].members[0].socket == ""


# -- the codec --------------------------------------------------------------------------------------------------------

digests = st.binary(min_size=32, max_size=32).map(Digest)


@given(st.lists(st.tuples(digests, st.integers(0, 2**64 - 1)), max_size=5), st.sampled_from(Verb), st.integers(0, 3))
def test_a_request_survives_the_wire(entries: list[tuple[Digest, int]], verb: Verb, flags: int) -> None:
    held = [Held(*entry) for entry in entries] if verb is Verb.HELD else [Held(name, 0) for name, _ in entries]
    request = HandoffRequest(verb, tuple(held) if verb is not Verb.HELLO else (), flags)
    assert HandoffRequest.decode(request.encode()) == request
    assert len(request.encode()) <= REQUEST_BYTES_MAX


@settings(max_examples=300)
@given(st.binary(max_size=200), st.integers(0, 3), st.integers(0, 5))
def test_any_message_is_a_request_or_refused(tail: bytes, verb: int, count: int) -> None:
    fields = {"verb": verb, "shards": tail[: count * 32], "editions": list(tail[:count]), "flags": 0}
    for message in (tail, msgspec.msgpack.encode(fields), msgspec.msgpack.encode(fields) + tail):
        with contextlib.suppress(BadRequest):
            request = HandoffRequest.decode(message)
            assert HandoffRequest.decode(request.encode()) == request
            assert len(request.encode()) <= len(message)


@pytest.mark.parametrize(
    "fields",
    [
        {"verb": 3},
        {"verb": -1},
        {"verb": "files"},
        {"verb": 0, "shards": bytes(32)},
        {"verb": 1, "shards": bytes(33)},
        {"verb": 1, "shards": bytes(32 * (FILES_MAX + 1))},
        {"verb": 1, "shards": bytes(32), "editions": [1, 2]},
        {"verb": 2, "shards": bytes(32)},
        {"verb": 2, "shards": bytes(32), "editions": [1, 2]},
        {"verb": 2, "shards": bytes(32), "editions": [-1]},
        {"verb": 2, "shards": bytes(32 * (HELD_MAX + 1)), "editions": [1] * (HELD_MAX + 1)},
        {"verb": 1, "flags": -1},
        {"verb": 1, "flags": 1 << 32},
        {"verb": 1, "more": bytes(REQUEST_BYTES_MAX)},
        {"shards": bytes(32)},
    ],
    ids=lambda fields: ",".join(
        f"{name} {len(value) if hasattr(value, '__len__') else value}" for name, value in fields.items()
    ),
)
def test_a_request_that_breaks_a_limit_or_does_not_add_up_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        HandoffRequest.decode(msgspec.msgpack.encode(fields))


def test_the_largest_messages_are_within_their_bounds() -> None:
    held = tuple(Held(Digest(b"a" * 32), 2**64 - 1) for _ in range(HELD_MAX))
    assert len(HandoffRequest(Verb.HELD, held, 3).encode()) <= REQUEST_BYTES_MAX
    assert len(held_answer([True] * HELD_MAX)) <= ANSWER_BYTES_MAX
    assert len(files_answer([(FileStatus.PRESENT, 2**64 - 1)] * FILES_MAX)) <= ANSWER_BYTES_MAX
    assert len(hello_answer("n" * NODE_ID_BYTES_MAX)) <= ANSWER_BYTES_MAX


# -- a server that says anything --------------------------------------------------------------------------------------

NAME = Digest(b"n" * 32)
HELLO = hello_answer("me")


def answers(*messages: bytes, fds: list[int] | None = None) -> Callable[[socket.socket, int, bytes], None]:
    """Answer each request of a connection with these, in order, descriptors with every one but the first."""

    def answer(connection: socket.socket, number: int, request: bytes) -> None:
        passed = array.array("i", (fds or []) if number else [])
        connection.sendmsg(
            [messages[min(number, len(messages) - 1)]],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)] if passed else [],
        )

    return answer


@contextlib.contextmanager
def acting_as(user: int | None) -> Iterator[None]:
    """Be another user: the kernel notes who it is that begins to listen."""
    before = os.geteuid()
    os.seteuid(before if user is None else user)
    try:
        yield
    finally:
        os.seteuid(before)


@contextlib.contextmanager
def server(path: Path, answer: Callable[[socket.socket, int, bytes], None], user: int | None = None) -> Iterator[Path]:
    """Listen at ``path``, as this user or another. Requests go to ``answer``, with their number on their connection."""
    over = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            for number in itertools.count():
                request = connection.recv(1 << 18)
                if not request or over.is_set():
                    return
                answer(connection, number, request)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                threads.append(threading.Thread(target=serve, args=(connection,)))
                threads[-1].start()

    connections: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        with acting_as(user):
            listener.listen()
        threads = [threading.Thread(target=accept)]
        threads[0].start()
        try:
            yield path
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(10)


@pytest.fixture
def fds(tmp_path: Path) -> Iterator[list[int]]:
    """Descriptors of three files and of what is none."""
    (tmp_path / "file").write_bytes(b"content")
    made = [os.open(tmp_path / "file", os.O_RDONLY) for _ in range(3)] + [os.open(tmp_path, os.O_RDONLY)]
    yield made
    for fd in made:
        os.close(fd)


PRESENT = (FileStatus.PRESENT, 7)
WRONG: dict[str, tuple[bytes, list[int], type[QuiverError]]] = {
    "garbage": (b"HTTP/1.1 200 OK", [], Corrupt),
    "a head alone": (files_answer([PRESENT])[:16], [0], Corrupt),
    "truncated": (files_answer([PRESENT])[:-1], [0], Corrupt),
    "about two": (files_answer([PRESENT, PRESENT]), [0, 1], Corrupt),
    "no descriptor": (files_answer([PRESENT]), [], Corrupt),
    "two descriptors": (files_answer([PRESENT]), [0, 1], Corrupt),
    "a descriptor for what is absent": (files_answer([(FileStatus.ABSENT, 0)]), [0], Corrupt),
    "no editions": (HandoffAnswer(Status.OK, statuses=bytes([FileStatus.PRESENT])).encode(), [0], Corrupt),
    "two editions": (
        HandoffAnswer(Status.OK, statuses=bytes([FileStatus.PRESENT]), editions=(7, 8)).encode(),
        [0],
        Corrupt,
    ),
    "no such status": (files_answer([(9, 7)]), [], Corrupt),  # type: ignore[list-item]
    "a folder": (files_answer([PRESENT]), [3], Corrupt),
    "more descriptors than may be": (files_answer([PRESENT]), [0, 1, 2] * 30, OverCapacity),
    "too long": (bytes(100_000), [0], Corrupt),
    "busy": (refusal(Status.BUSY), [0], OverCapacity),
    "refused": (refusal(Status.REFUSED), [], Corrupt),
    "an empty message": (b"", [0], Unavailable),
}


@pytest.mark.parametrize(("message", "passed", "raised"), WRONG.values(), ids=list(WRONG))
def test_a_wrong_answer_is_an_error_and_leaves_no_descriptor_open(
    tmp_path: Path, fds: list[int], message: bytes, passed: list[int], raised: type[QuiverError]
) -> None:
    with server(tmp_path / "s", answers(HELLO, message, fds=[fds[at] for at in passed])) as path:
        client = HandoffClient(str(path))
        with pytest.raises(raised, match="s"):
            client.files([NAME])
        client.close()
    before = len(fds)
    assert open_files(tmp_path) == before


def open_files(folder: Path) -> int:
    gc.collect()
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += entry.readlink() in (folder, folder / "file")
    return found


def test_what_is_passed_is_mapped_and_its_descriptors_end_with_the_files(tmp_path: Path, fds: list[int]) -> None:
    told = files_answer([PRESENT, (FileStatus.ABSENT, 0), (FileStatus.NOT_NOW, 0), (FileStatus.PRESENT, 9)])
    with server(tmp_path / "s", answers(HELLO, told, fds=fds[:2])) as path:
        client = HandoffClient(str(path))
        handed = client.files([NAME] * 4)
        assert [(it.status, it.edition) for it in handed] == [(0, 7), (1, 0), (2, 0), (0, 9)]
        assert [it.file is not None for it in handed] == [True, False, False, True]
        for it in handed:
            if it.file is not None:
                assert bytes(it.file.map()) == b"content"
                assert not os.get_inheritable(it.file.fd)
        del handed, it
        assert client.files([]) == []
        client.close()
    assert open_files(tmp_path) == len(fds)


@pytest.mark.parametrize("silent_at", [0, 1])
def test_a_silent_server_costs_a_bounded_wait(tmp_path: Path, silent_at: int) -> None:
    def answer(connection: socket.socket, number: int, request: bytes) -> None:
        if number < silent_at:
            connection.send(HELLO)

    with server(tmp_path / "s", answer) as path:
        client = HandoffClient(str(path), answer_seconds=0.2)
        begun = time.monotonic()
        with pytest.raises(Unavailable, match="in time"):
            client.held([Held(NAME, 7)])
        assert time.monotonic() - begun < 20
        client.close()


def test_a_server_that_nobody_lets_in_costs_no_wait(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, contextlib.ExitStack() as stack:
        listener.bind(str(tmp_path / "s"))
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                waiting.setblocking(False)
                waiting.connect(str(tmp_path / "s"))
        begun = time.monotonic()
        with pytest.raises(Unavailable, match="in time"):
            HandoffClient(str(tmp_path / "s"), answer_seconds=30).hello()
        assert time.monotonic() - begun < 20


@pytest.mark.parametrize("kind", ["nothing", "a file", "a stream", "dead", "forbidden"])
def test_what_is_no_daemons_socket_is_told_apart_from_one_that_may_not_be_used(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM if kind == "a stream" else socket.SOCK_SEQPACKET) as listener:
        if kind == "a file":
            path.touch()
        elif kind != "nothing":
            listener.bind(str(path))
        if kind in ("a stream", "forbidden"):
            listener.listen()
        if kind != "forbidden":
            with pytest.raises(Unavailable, match="cannot be used"):
                HandoffClient(str(path)).hello()
            return
        path.chmod(0)
        child = os.fork()
        if not child:
            code = 1
            try:
                os.setuid(os.getuid() or 65534)
                HandoffClient(str(path)).hello()
            except Forbidden:
                code = 0
            finally:
                os._exit(code)
        tmp_path.chmod(0o755)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


@needs_root
def test_a_stranger_who_listens_under_a_path_of_roots_is_told_nothing(tmp_path: Path) -> None:
    """The path looks right: the socket and its folder are root's."""
    asked: list[bytes] = []

    def answer(connection: socket.socket, number: int, request: bytes) -> None:
        asked.append(request)
        connection.send(HELLO)

    with server(tmp_path / "s", answer, user=4321) as path:
        assert path.stat().st_uid == 0
        for trusted in ([], [0], [4320]):
            with pytest.raises(Forbidden, match="user 4321 listens there"):
                HandoffClient(str(path), trusted).hello()
        assert not asked
        client = HandoffClient(str(path), [4321])
        assert client.hello() == "me"
        client.close()


@needs_root
@pytest.mark.parametrize("user", [0, 4321], ids=["root", "oneself"])
def test_root_and_oneself_are_trusted(user: int) -> None:
    with tempfile.TemporaryDirectory() as folder:  # where others may look for it, unlike in that of a test
        Path(folder).chmod(0o755)
        with server(Path(folder, "s"), answers(HELLO), user=user) as path:
            path.chmod(0o666)
            with acting_as(4321):
                client = HandoffClient(str(path))
                assert client.hello() == "me"
                client.close()


@needs_root
def test_a_socket_that_a_stranger_puts_in_a_daemons_place_is_not_used_by_a_client_that_knows_it(tmp_path: Path) -> None:
    with server(tmp_path / "s", answers(HELLO, held_answer([True]))) as path:
        client = HandoffClient(str(path))
        assert client.held([Held(NAME, 7)]) == [True]
    path.unlink()
    with server(path, answers(HELLO, held_answer([True])), user=4321), pytest.raises(Forbidden, match="user 4321"):
        client.held([Held(NAME, 7)])
    client.close()


def test_a_daemon_that_changes_its_name_is_another_one(tmp_path: Path) -> None:
    names = iter(["me", "you"])

    def answer(connection: socket.socket, number: int, request: bytes) -> None:
        connection.send(hello_answer(next(names)) if number == 0 else b"")

    with server(tmp_path / "s", answer) as path:
        client = HandoffClient(str(path))
        assert client.hello() == "me"
        with pytest.raises(Unavailable, match="belongs to another daemon"):
            client.held([Held(NAME, 7)])
        client.close()


def test_a_connection_that_the_daemon_closed_for_idleness_is_made_anew(tmp_path: Path) -> None:
    idle = threading.Event()

    def answer(connection: socket.socket, number: int, request: bytes) -> None:
        connection.send(HELLO if number == 0 else held_answer([True]))
        if number == 1 and not idle.is_set():
            idle.set()
            connection.shutdown(socket.SHUT_RDWR)

    with server(tmp_path / "s", answer) as path:
        client = HandoffClient(str(path))
        for _ in range(3):
            assert client.held([Held(NAME, 7)]) == [True]
        client.close()


def test_threads_share_a_client_and_keep_few_connections(tmp_path: Path) -> None:
    with server(tmp_path / "s", answers(HELLO, held_answer([True]))) as path:
        client = HandoffClient(str(path), answer_seconds=10)
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(lambda _: client.held([Held(NAME, 7)]) == [True], range(100)))
        assert len(client._dialogue.idle.kept) <= IDLE_CONNECTIONS_MAX
        client.close()


def test_a_child_does_not_use_its_parents_connection(tmp_path: Path) -> None:
    def answer(connection: socket.socket, number: int, request: bytes) -> None:
        told = files_answer([(FileStatus.ABSENT, number)])  # as an edition: which request of its connection this is
        connection.send(HELLO if number == 0 else told)

    with server(tmp_path / "s", answer) as path:
        client = HandoffClient(str(path), answer_seconds=10)
        assert [client.files([NAME])[0].edition for _ in range(2)] == [1, 2]
        child = os.fork()
        if not child:
            try:
                os._exit(client.files([NAME])[0].edition)
            finally:
                os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        assert client.files([NAME])[0].edition == 3, "the parent's connection is as it was"
        client.close()
