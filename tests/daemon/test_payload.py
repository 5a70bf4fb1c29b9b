"""Ranges of files by address: exactly those bytes, however little a socket takes and whoever else maps the files."""

from __future__ import annotations

import gc
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.errors import DiskFailed
from quiver.store import OpenFile
from quiver.transport.sockets import NotReady
from quiver_cacheserver.serving.payload import Payload

CONTENTS = [np.random.default_rng(seed).bytes(200_000) for seed in range(3)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("payload")
    made = [folder / str(at) for at in range(len(CONTENTS))]
    for path, content in zip(made, CONTENTS, strict=True):
        path.write_bytes(content)
    return made


def sent(payload: Payload, buffer_bytes: int = 0) -> bytes:
    """Send a payload to its end; return what arrived."""
    ours, other = socket.socketpair()
    with ours, other:
        if buffer_bytes:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        ours.setblocking(False)
        got = bytearray()
        while not payload.done:
            try:
                payload.send(ours)
            except NotReady:
                got += other.recv(1 << 16)
        ours.shutdown(socket.SHUT_WR)
        while more := other.recv(1 << 16):
            got += more
        return bytes(got)


def payload_of(files: list[OpenFile], rows: list[tuple[int, int, int]], head: bytes = b"") -> Payload:
    numbers, offsets, lengths = np.asarray(rows, np.int64).reshape(-1, 3).T.copy()
    return Payload(files, numbers, offsets, lengths, head)


ROW = st.tuples(st.integers(0, 2), st.integers(0, 100_000), st.integers(0, 9_000))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(ROW, max_size=40), head=st.binary(max_size=50), times=st.sampled_from([1, 1, 60]))
def test_what_is_sent_is_the_head_and_the_ranges_in_order(
    paths: list[Path], rows: list[tuple[int, int, int]], head: bytes, times: int
) -> None:
    rows = rows * times  # more than one call takes
    expected = head + b"".join(CONTENTS[number][at : at + size] for number, at, size in rows)
    for buffer_bytes in (0, 4096):
        payload = payload_of([OpenFile(path) for path in paths], rows, head)
        assert (payload.head_bytes, payload.size_bytes) == (len(head), len(expected) - len(head))
        assert sent(payload, buffer_bytes) == expected


def test_a_file_that_several_threads_map_at_once_stays_mapped_for_each(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find no mapping and make one; the file keeps the last. The other's address must not become anything else."""
    file = OpenFile(paths[0])
    mapped, both = OpenFile.map, threading.Barrier(2)

    def slowly(self: OpenFile) -> memoryview:
        view = mapped(self)
        both.wait(20)
        return view

    monkeypatch.setattr(OpenFile, "map", slowly)
    payloads = [payload_of([file], [(0, 0, 200_000)]) for _ in range(2)]
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda each=each: got.append(sent(each, 4096))) for each in payloads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert got == [CONTENTS[0]] * 2


@pytest.mark.fault("C8")
def test_a_file_that_became_shorter_is_the_disks_failure(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(100_000))
    payload = payload_of([OpenFile(path)], [(0, 0, 100_000)])
    with path.open("r+b") as file:
        file.truncate(10)
    with pytest.raises(DiskFailed, match="became shorter"):
        sent(payload)
