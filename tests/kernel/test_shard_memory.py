"""Memory of shards is reused once nobody can see it any more, and what is kept of it is bounded."""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from quiver.shard_memory import ShardMemory

PIECE = 1 << 20


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def test_memory_that_nobody_refers_to_is_taken_again() -> None:
    memory = ShardMemory(2, PIECE)
    first = memory.take(1000)
    at = address(first)
    assert len(first) == 1000
    assert not first.readonly
    del first
    assert memory.idle_bytes == PIECE
    again = memory.take(PIECE)
    assert (address(again), len(again), memory.idle_bytes) == (at, PIECE, 0)


@pytest.mark.parametrize(
    "keep",
    [
        lambda view: view[10:20],
        lambda view: memoryview(view).cast("B"),
        lambda view: np.frombuffer(view, np.uint8)[5:],
        lambda view: np.asarray(view)[5:].view(np.int8),
        lambda view: view[:16].cast("Q"),
    ],
    ids=["slice", "cast", "array of a buffer", "array", "words"],
)
def test_memory_is_not_reused_while_any_view_of_it_lives(keep: object) -> None:
    memory = ShardMemory(2, PIECE)
    whole = memory.take(1000)
    at = address(whole)
    kept = keep(whole)  # type: ignore[operator]
    del whole
    assert memory.idle_bytes == 0
    other = memory.take(1000)
    assert address(other) != at
    del kept
    assert memory.idle_bytes == PIECE


def test_a_fill_that_fails_leaves_its_memory_to_the_next_one() -> None:
    memory = ShardMemory(1, PIECE)

    def failing() -> int:
        view = memory.take(100)
        at = address(view)
        view[:7] = b"garbage"
        raise ValueError(at)

    with pytest.raises(ValueError, match=r"^\d+$") as caught:
        failing()
    assert memory.idle_bytes == 0, "the traceback still names it"
    (at,) = caught.value.args
    del caught
    assert address(memory.take(100)) == at


def test_no_more_is_kept_than_was_allowed_and_what_is_larger_is_not_kept() -> None:
    memory = ShardMemory(2, PIECE)
    taken = [memory.take(10) for _ in range(5)]
    assert len({address(view) for view in taken}) == 5
    del taken
    assert memory.idle_bytes == 2 * PIECE
    large = memory.take(PIECE + 1)
    assert len(large) == PIECE + 1
    assert memory.idle_bytes == 2 * PIECE
    del large
    assert memory.idle_bytes == 2 * PIECE


def test_what_is_idle_goes_back_to_the_system() -> None:
    memory = ShardMemory(2, PIECE)
    memory.take(10)
    memory.drop_if_idle(60.0)
    assert memory.idle_bytes == PIECE
    memory.drop_if_idle(0.0)
    assert memory.idle_bytes == 0


def test_many_threads_never_share_memory() -> None:
    memory = ShardMemory(4, PIECE)

    def fill(number: int) -> bool:
        view = memory.take(PIECE)
        mark = bytes([number % 251]) * 4096
        for at in range(0, PIECE, 4096):
            view[at : at + 4096] = mark
        return all(view[at : at + 4096] == mark for at in range(0, PIECE, 4096))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(fill, range(200)))
    assert memory.idle_bytes <= 4 * PIECE


def test_a_child_that_was_forked_does_not_write_into_its_parents_memory() -> None:
    memory = ShardMemory(2, PIECE)
    held = memory.take(4)
    held[:] = b"mine"
    memory.take(4)[:] = b"idle"
    child = os.fork()
    if not child:
        try:
            held[:] = b"hers"
            taken = memory.take(4)
            os._exit(0 if taken != b"idle" and memory.idle_bytes == 0 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert held == b"mine"
    assert memory.idle_bytes == PIECE


def test_where_the_system_has_no_huge_pages_memory_comes_in_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(mmap.mmap):
        def madvise(self, *args: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Small)
    view = ShardMemory(1, PIECE).take(1000)
    view[:] = b"x" * 1000
    assert bytes(view[:3]) == b"xxx"
