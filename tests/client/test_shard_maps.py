"""The maps of a process: bounded, and of no use to a child."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

from quiver.store import OpenFile
from quiver_client.shard_maps import ShardMaps


def view(content: bytes = b"abc") -> memoryview:
    return memoryview(content)


def content(maps: ShardMaps[Any], shard: int) -> bytes:
    buffer = maps.get(shard)
    assert buffer is not None
    return bytes(buffer.view)


def test_the_least_recently_used_goes_first() -> None:
    maps: ShardMaps[None] = ShardMaps(2)
    for shard in (1, 2):
        maps.put(shard, view(), None)
    assert content(maps, 1) == b"abc"
    maps.put(3, view(), None)
    assert [maps.get(shard) is not None for shard in (1, 2, 3)] == [True, False, True]
    assert len(maps) == 2
    maps.clear()
    assert len(maps) == 0


def test_several_are_had_at_once_and_use_is_told_once() -> None:
    maps: ShardMaps[str] = ShardMaps()
    for shard in (1, 2, 3):
        maps.put(shard, view(bytes([shard])), f"note {shard}")
    assert maps.mapped() == [(1, "note 1", True), (2, "note 2", True), (3, "note 3", True)]
    assert maps.get_all([2, 9]) == {2: maps.get(2)}
    assert [used for _, _, used in maps.mapped()] == [False, False, True]  # 2 was moved to the end
    assert not any(used for _, _, used in maps.mapped())


def test_a_map_that_was_replaced_is_not_dropped_for_the_old_ones_sake() -> None:
    maps: ShardMaps[int] = ShardMaps()
    maps.put(1, view(b"old"), 1)
    maps.put(1, view(b"new"), 2)
    maps.drop(1, note=1)
    assert maps.note(1) == 2
    assert content(maps, 1) == b"new"
    maps.drop(1, note=2)
    assert maps.get(1) is None
    maps.drop(1)


def test_a_child_that_was_forked_keeps_none_of_its_parents_maps(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(10_000))
    maps: ShardMaps[None] = ShardMaps()
    maps.put(1, OpenFile(path).map(), None)
    gc.disable()
    with maps._lock:  # as a thread may hold it that the child does not have
        child = os.fork()
        if not child:
            try:
                kept = str(path) in Path("/proc/self/maps").read_text() or maps.get(1) is not None
                os._exit(1 if kept else 0)
            finally:
                os._exit(2)
    gc.enable()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert maps.get(1) is not None
