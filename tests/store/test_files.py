"""Files held open and mapped, and which of the files of one name is meant."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from quiver.errors import DiskFailed
from quiver.store import Kind, MemoryInventory, OpenFile, Store
from tests.support.data import make_shard


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_mapping_keeps_no_descriptor_and_ends_with_its_last_view(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(os.urandom(100_000))
    view = OpenFile(path).map()
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and path == fd.resolve()]
    part = view[70_000:70_010]
    del view
    gc.collect()
    assert mapped(path)
    assert part == path.read_bytes()[70_000:70_010]
    assert part.readonly
    del part
    gc.collect()
    assert not mapped(path)


def test_a_file_without_bytes_is_an_empty_view(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert bytes(OpenFile(tmp_path / "a").map()) == b""


def test_a_descriptor_that_is_adopted_is_closed_with_its_file_and_at_once_if_it_is_no_regular_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    before = descriptors()
    file = OpenFile.adopt(os.open(tmp_path / "a", os.O_RDONLY))
    assert (file.size_bytes, bytes(file.map())) == (3, b"abc")
    del file
    with pytest.raises(OSError, match="not a regular file"):
        OpenFile.adopt(os.open(tmp_path, os.O_RDONLY))
    gc.collect()
    assert descriptors() == before


def test_a_file_that_its_modes_forbid_to_open_is_mapped_all_the_same(tmp_path: Path) -> None:
    """What is passed was opened by somebody who may: it must not be opened anew."""
    (tmp_path / "a").write_bytes(b"abc")
    file = OpenFile(tmp_path / "a")
    (tmp_path / "a").chmod(0)
    child = os.fork()
    if not child:
        try:
            os.setuid(os.getuid() or 65534)
            os._exit(0 if bytes(file.map()) == b"abc" else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_every_file_of_a_name_is_an_edition_of_its_own(tmp_path: Path) -> None:
    digest, data = make_shard([b"x" * 1000])
    seen = []
    for _ in range(2):
        store = Store.open(tmp_path, 1 << 20, shared=False)
        inventory = store.inventory
        assert isinstance(inventory, MemoryInventory)
        seen.append(inventory.edition(digest))
        for _ in range(2):
            store.put(Kind.SHARD, digest, data)
            seen.append(inventory.edition(digest))
        inventory.touched(Kind.SHARD, digest)
        assert inventory.edition(digest) == seen[-1]
        store.drop(Kind.SHARD, digest)
        assert inventory.edition(digest) == 0
        store.put(Kind.SHARD, digest, data)
        store.close()
    assert seen[0] == 0
    assert len(set(seen)) == 6


@pytest.mark.fault("C8")
def test_what_was_written_and_became_shorter_is_an_error_and_no_signal(tmp_path: Path) -> None:
    digest, data = make_shard([b"x" * 10_000])
    store = Store.open(tmp_path, 1 << 20, shared=False)
    with store.reserve(Kind.SHARD, digest, len(data)) as writing:
        writing.write(data)
        os.truncate(writing.path, 100)
        with pytest.raises(DiskFailed, match="cannot be read"):
            writing.content()
    store.close()
