"""The file around a manifest: only what the writer writes is opened, a wrong bit is found, and nothing is unpacked.

And what was opened stays what it was, whatever becomes of the file.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quiver.digest import Digest
from quiver.errors import BadRequest, Corrupt, DiskFailed, Misconfigured
from quiver.manifest import Manifest, write_manifest
from quiver.manifest import checksums as sums
from quiver.manifest.checksums import CHECKSUMS_KEY
from quiver.manifest.container import MAGIC, take_apart
from quiver.manifest.flatbuffer import Table
from quiver.manifest.schema import METADATA_KEY
from tests.kernel.test_manifest import parts_of, same
from tests.support import golden

HEAD_BYTES = 8 + 8  # of the file's magic, and of a message's marker and length


def refused(path: Path, kind: type[Exception] = BadRequest) -> str:
    with pytest.raises(kind) as caught:
        Manifest.open(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def batch_at(whole: bytes) -> int:
    """Return where the record batch's message begins."""
    return HEAD_BYTES + int.from_bytes(whole[12:16], "little")


def place(whole: bytearray, slot: int, *, of_batch: bool) -> int:
    """Return where a slot of the record batch's message, or of the record batch itself, says where its field is."""
    start = batch_at(whole) + 8
    table = Table.root(memoryview(whole)[start:])
    if of_batch:
        table = table.table(2)
    vtable = table.at - struct.unpack_from("<i", whole, start + table.at)[0]
    return start + int(vtable) + 4 + 2 * slot


def field(whole: bytearray, slot: int, *, of_batch: bool) -> int:
    """Return where a field of the record batch's message, or of the record batch itself, is."""
    at = place(whole, slot, of_batch=of_batch)
    start = batch_at(whole) + 8
    table = Table.root(memoryview(whole)[start:])
    if of_batch:
        table = table.table(2)
    return int(start + table.at + struct.unpack_from("<H", whole, at)[0])


def vector(whole: bytearray, slot: int) -> int:
    """Return where the items of a vector of the record batch begin."""
    at = field(whole, slot, of_batch=True)
    return int(at + struct.unpack_from("<I", whole, at)[0] + 4)


# -- files that others write ------------------------------------------------------------------------------------------


def golden_batch() -> pa.RecordBatch:
    batch = pa.ipc.open_file(str(golden.MANIFEST)).get_batch(0)
    return batch.replace_schema_metadata({METADATA_KEY: batch.schema.metadata[METADATA_KEY]})


def write(path: Path, batch: pa.RecordBatch, *, footer: Any = None, message: Any = None, **options: Any) -> Path:
    with pa.ipc.new_file(str(path), batch.schema, options=pa.ipc.IpcWriteOptions(**options), metadata=footer) as writer:
        writer.write_batch(batch, custom_metadata=message)
    return path


def test_what_arrow_itself_writes_of_a_manifest_is_opened(tmp_path: Path) -> None:
    assert same(Manifest.open(write(tmp_path / "m.quiver", golden_batch())), Manifest.open(golden.MANIFEST))


@pytest.mark.fault("S7")
@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_manifest_compressed_in_the_older_way_is_refused_before_it_is_unpacked(tmp_path: Path, codec: str) -> None:
    """Until V5, what says that a record batch is compressed was metadata of its message."""
    write_manifest(tmp_path / "large.quiver", parts_of(1, samples=200_000))
    batch = pa.ipc.open_file(str(tmp_path / "large.quiver")).get_batch(0)
    batch = batch.replace_schema_metadata({METADATA_KEY: batch.schema.metadata[METADATA_KEY]})
    mark = {"ARROW:experimental_compression": codec}
    path = write(tmp_path / "m.quiver", batch, message=mark, compression=codec)
    whole = bytearray(path.read_bytes())
    at = field(whole, 0, of_batch=False)
    assert whole[at : at + 2] == b"\x04\x00", "V5"
    whole[at] = 3
    at = place(whole, 3, of_batch=True)
    whole[at : at + 2] = bytes(2)  # RecordBatch.compression is absent
    path.write_bytes(whole)
    del batch
    before = pa.default_memory_pool().max_memory()
    assert "V5" in refused(path)
    assert pa.default_memory_pool().max_memory() == before, "nothing was unpacked"


def with_fields(batch: pa.RecordBatch, change: Callable[[pa.Field[Any]], pa.Field[Any]]) -> pa.RecordBatch:
    schema = pa.schema([change(each) for each in batch.schema], batch.schema.metadata)
    return pa.RecordBatch.from_arrays(batch.columns, schema=schema)


@pytest.mark.fault("S7")
def test_metadata_that_no_writer_of_manifests_writes_is_refused(tmp_path: Path) -> None:
    batch, path = golden_batch(), tmp_path / "m.quiver"
    assert "custom metadata" in refused(write(path, batch, message={"a": "b"}))
    assert "custom metadata" in refused(write(path, batch, footer={"a": "b"}))
    assert "V5" in refused(write(path, batch, metadata_version=pa.ipc.MetadataVersion.V4))
    more = batch.replace_schema_metadata({**batch.schema.metadata, b"ARROW:experimental_compression": b"zstd"})
    assert "does not have" in refused(write(path, more))
    extension = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": "x"}
    marked = with_fields(batch, lambda each: each.with_metadata(extension))
    assert "custom metadata" in refused(write(path, marked))


def test_a_dictionary_is_refused(tmp_path: Path) -> None:
    encoded = pa.array(["a"]).dictionary_encode()
    batch = pa.record_batch([encoded], schema=pa.schema([pa.field("samples", encoded.type)], {METADATA_KEY: b"{}"}))
    assert "dictionary" in refused(write(tmp_path / "m.quiver", batch))


@pytest.mark.fault("S7")
def test_a_schema_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    kind: pa.DataType = pa.int8()
    for _ in range(20):
        kind = pa.list_(kind)
    batch = pa.record_batch([pa.array([None], kind)], schema=pa.schema([pa.field("samples", kind)]))
    assert "nested" in refused(write(tmp_path / "m.quiver", batch))
    wide = pa.record_batch([pa.array([1])] * 2000, names=[str(i) for i in range(2000)])
    assert "2000 things where 1024 are allowed" in refused(write(tmp_path / "m.quiver", wide))
    wide = pa.record_batch(
        [pa.StructArray.from_arrays([pa.array([1])] * 600, names=[str(i) for i in range(600)])] * 2, names=["a", "b"]
    )
    assert "more than 1024 fields" in refused(write(tmp_path / "m.quiver", wide))


@pytest.mark.fault("S7")
def test_a_header_that_is_larger_than_any_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quiver.manifest.container._HEAD_BYTES_MAX", 1 << 16)
    batch = golden_batch().replace_schema_metadata({METADATA_KEY: b" " * (1 << 16)})
    assert "are allowed" in refused(write(tmp_path / "m.quiver", batch))


def test_what_follows_or_comes_between_is_refused(tmp_path: Path) -> None:
    whole, path = golden.MANIFEST.read_bytes(), tmp_path / "m.quiver"
    footer_bytes = int.from_bytes(whole[-10:-6], "little")
    footer_at = len(whole) - 10 - footer_bytes
    for wrong in (
        whole + b"x",
        whole + whole,
        whole[:footer_at] + bytes(8) + whole[footer_at:],
        whole[: footer_at - 8] + bytes(8) + whole[footer_at - 8 :],
        whole[: footer_at - 8] + whole[footer_at:],
        whole[:8] + bytes(8) + whole[8:],
    ):
        path.write_bytes(wrong)
        refused(path)


@pytest.mark.fault("S7")
def test_buffers_and_rows_that_are_not_those_of_the_columns_are_refused(tmp_path: Path) -> None:
    whole, path = bytearray(golden.MANIFEST.read_bytes()), tmp_path / "m.quiver"
    frame = take_apart(memoryview(bytes(whole)))
    for slot, count in ((1, len(frame.nodes)), (2, len(frame.buffers))):
        start = vector(whole, slot)
        for number in range(2 * count):
            at = start + 8 * number
            value = struct.unpack_from("<q", whole, at)[0]
            slack = slot == 2 and number % 2  # within the padding a buffer may be longer
            for wrong in (value - 8, value + (64 if slack else 8), 2**63 - 1):
                changed = bytearray(whole)
                struct.pack_into("<q", changed, at, wrong)
                path.write_bytes(changed)
                refused(path)


def test_a_label_that_is_missing_where_none_is_said_to_be_is_refused(tmp_path: Path) -> None:
    parts = parts_of(1)
    parts.scalars["label"] = pa.array([None, *range(29)], pa.int32())
    write_manifest(tmp_path / "m.quiver", parts)
    whole = bytearray((tmp_path / "m.quiver").read_bytes())
    frame = take_apart(memoryview(bytes(whole)))
    number = frame.nodes.index((30, 1))
    struct.pack_into("<q", whole, vector(whole, 1) + 16 * number + 8, 2)
    (tmp_path / "m.quiver").write_bytes(whole)
    assert "damaged" in refused(tmp_path / "m.quiver")
    without = pa.ipc.open_file(pa.py_buffer(bytes(whole)))
    batch = without.get_batch(0).replace_schema_metadata({METADATA_KEY: without.schema.metadata[METADATA_KEY]})
    raw = bytearray(write(tmp_path / "old.quiver", batch).read_bytes())
    struct.pack_into("<q", raw, vector(raw, 1) + 16 * number + 8, 2)
    (tmp_path / "old.quiver").write_bytes(raw)
    assert "nulls" in refused(tmp_path / "old.quiver")


# -- checksums --------------------------------------------------------------------------------------------------------


def test_one_wrong_bit_of_a_label_is_found(tmp_path: Path) -> None:
    whole = bytearray(golden.CHECKED.read_bytes())
    labels = Manifest.open(golden.CHECKED).tables.scalars["label"].to_numpy().tobytes()
    assert whole.count(labels) == 1
    whole[whole.find(labels)] ^= 4
    (tmp_path / "m.quiver").write_bytes(whole)
    assert "chunk 0 of 1 does not match" in refused(tmp_path / "m.quiver")


def test_the_chunk_that_is_damaged_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "CHUNK_BYTES", 1000)
    write_manifest(tmp_path / "m.quiver", parts_of(1))
    whole = bytearray((tmp_path / "m.quiver").read_bytes())
    assert Manifest.open(tmp_path / "m.quiver").has_checksums
    start = batch_at(whole)
    chunks = -(-len(take_apart(memoryview(whole)).batch) // 1000)
    assert chunks > 3
    for number in range(2, chunks):  # the metadata of the message is in the first ones
        wrong = bytearray(whole)
        wrong[start + 1000 * number] ^= 1
        (tmp_path / "m.quiver").write_bytes(wrong)
        assert f"chunk {number} of {chunks} does not match" in refused(tmp_path / "m.quiver")


@pytest.mark.fault("S7")
def test_checksums_that_are_not_those_of_the_file_are_refused(tmp_path: Path) -> None:
    batch = golden_batch()
    header = batch.schema.metadata[METADATA_KEY]
    good = sums.checksums_of(header, batch)
    changes: list[tuple[bytes, bytes]] = [
        (b"4194304", b"4194305"),
        (b'"chunks":["', b'"chunks":["00","'),
        (b'"header":"', b'"header":"0'),
        (b"{", b'{"more":1,'),
        (b"}", b""),
    ]
    for old, new in changes:
        assert good.count(old) == 1
        wrong = batch.replace_schema_metadata({METADATA_KEY: header, CHECKSUMS_KEY: good.replace(old, new)})
        assert "checksum" in refused(write(tmp_path / "m.quiver", wrong))
    other = header.replace(b"example.org", b"example.com")
    assert other != header
    wrong = batch.replace_schema_metadata({METADATA_KEY: other, CHECKSUMS_KEY: good})
    assert "header is damaged" in refused(write(tmp_path / "m.quiver", wrong))


def test_a_manifest_without_checksums_is_checked_by_its_digest_where_that_is_known(tmp_path: Path) -> None:
    whole = bytearray(golden.MANIFEST.read_bytes())
    digest = Digest.of(whole)
    labels = Manifest.open(golden.MANIFEST).tables.scalars["label"].to_numpy().tobytes()
    whole[whole.find(labels)] ^= 4
    (tmp_path / "m.quiver").write_bytes(whole)
    assert not Manifest.open(tmp_path / "m.quiver").has_checksums
    with pytest.raises(Corrupt) as caught:
        Manifest.open(tmp_path / "m.quiver", digest)
    for part in (str(tmp_path / "m.quiver"), digest.short, Digest.of(whole).short):
        assert part in str(caught.value)
    assert Manifest.open(golden.MANIFEST, digest).digest == digest


# -- mutations --------------------------------------------------------------------------------------------------------

NUMBERS = (0, 1, 3, 8, 64, 255, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1)
Change = tuple[str, int, int]
changes_of_bytes = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.integers(0, 10**6), st.integers(0, 7)),
        st.tuples(st.just("number"), st.integers(0, 10**6), st.integers(0, len(NUMBERS) - 1)),
        st.tuples(st.just("copy"), st.integers(0, 10**6), st.integers(0, 10**6)),
        st.tuples(st.just("insert"), st.integers(0, 10**6), st.integers(1, 64)),
        st.tuples(st.just("delete"), st.integers(0, 10**6), st.integers(1, 64)),
    ),
    min_size=1,
    max_size=3,
)


def mutated(whole: bytes, changes: list[Change], span: int) -> bytes:
    """Change bytes within ``span`` of either end: the metadata stands there."""
    wrong = bytearray(whole)
    for kind, where, what in changes:
        at = where % span if where % 2 else max(len(wrong) - 1 - where % span, 0)
        if kind == "flip":
            wrong[at] ^= 1 << what
        elif kind == "number":
            at -= at % 4
            wrong[at : at + 8] = NUMBERS[what].to_bytes(8, "little")[: len(wrong) - at]
        elif kind == "copy":
            source = what % (len(wrong) - 16)
            wrong[at : at + 16] = wrong[source : source + 16][: len(wrong) - at]
        elif kind == "insert":
            wrong[at:at] = bytes(what)
        else:
            del wrong[at : at + what]
    return bytes(wrong)


fuzzed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=250, deadline=None)


@pytest.mark.fault("S7")
@fuzzed
@given(changes_of_bytes, st.booleans())
def test_a_manifest_with_checksums_is_refused_or_says_the_same(
    tmp_path: Path, changes: list[Change], anywhere: bool
) -> None:
    whole = golden.CHECKED.read_bytes()
    (tmp_path / "m.quiver").write_bytes(mutated(whole, changes, len(whole) if anywhere else 3000))
    try:
        manifest = Manifest.open(tmp_path / "m.quiver")
    except (BadRequest, Misconfigured):
        return
    assert same(manifest, Manifest.open(golden.CHECKED))


@pytest.mark.fault("S7")
@fuzzed
@given(changes_of_bytes)
def test_no_metadata_makes_a_reader_take_memory(tmp_path: Path, changes: list[Change]) -> None:
    before = pa.default_memory_pool().max_memory()
    (tmp_path / "m.quiver").write_bytes(mutated(golden.MANIFEST.read_bytes(), changes, 3000))
    try:
        manifest = Manifest.open(tmp_path / "m.quiver")
    except (BadRequest, Misconfigured):
        pass
    else:
        assert len(manifest) == 40
        assert manifest.tables.lengths.shape == (38, 2)
    assert pa.default_memory_pool().max_memory() - before < 1 << 20


# -- what was opened --------------------------------------------------------------------------------------------------


def test_a_manifest_that_was_opened_outlives_what_becomes_of_its_file(tmp_path: Path) -> None:
    path = Path(shutil.copy(golden.CHECKED, tmp_path / "m.quiver"))
    manifest = Manifest.open(path)
    write_manifest(tmp_path / "other.quiver", parts_of(3))
    with path.open("r+b") as file:  # as `cp other.quiver m.quiver` does it
        file.write((tmp_path / "other.quiver").read_bytes())
    assert same(manifest, Manifest.open(golden.CHECKED))
    os.truncate(path, 0)
    assert same(manifest, Manifest.open(golden.CHECKED))
    assert str(manifest.digest) == str(Digest.of(golden.CHECKED.read_bytes()))
    path.unlink()
    assert bytes(manifest.content) == golden.CHECKED.read_bytes()


def test_a_manifest_is_shared_as_memory_that_nobody_can_change(tmp_path: Path) -> None:
    path = Path(shutil.copy(golden.CHECKED, tmp_path / "m.quiver"))
    manifest = Manifest.open(path)
    fd = manifest.share()
    assert fd is not None
    assert manifest.share() == fd, "it is made once"
    path.unlink()
    shared = Manifest.adopt(path, os.dup(fd), manifest.digest)
    assert same(shared, manifest)
    assert shared.digest == manifest.digest
    assert shared.has_checksums
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 100)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 100)
    del manifest
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    assert shared.key(0) == "sample-00"


def test_memory_that_is_not_sealed_is_not_adopted() -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, golden.CHECKED.read_bytes())
        with pytest.raises(OSError, match="change"):
            Manifest.adopt(Path("m.quiver"), fd, Digest(bytes(32)))
    finally:
        os.close(fd)


def test_where_no_memory_can_be_shared_a_manifest_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    assert Manifest.open(golden.CHECKED).share() is None


def test_a_fork_while_another_thread_computes_a_digest_leaves_nothing_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, other = Manifest.open(golden.CHECKED), Manifest.open(golden.CHECKED)
    hashing, go_on = threading.Event(), threading.Event()

    def slow(_: memoryview) -> Digest:
        hashing.set()
        go_on.wait(30)
        return Digest(bytes(32))

    with monkeypatch.context() as slowed:
        slowed.setattr(Digest, "of", slow)
        thread = threading.Thread(target=lambda: manifest.digest)
        thread.start()
        assert hashing.wait(30)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it was pytest's
        signal.alarm(10)  # ends it, if it waits for a lock that nobody is left to release
        os._exit(0 if manifest.digest == other.digest and other.total_bytes else 1)
    go_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_disk_that_fails_while_a_manifest_is_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", failing)
    assert "Input/output error" in refused(golden.CHECKED, DiskFailed)


def test_a_manifest_that_is_written_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copy(golden.MANIFEST, tmp_path / "m.quiver"))
    read = os.preadv

    def then_changed(fd: int, into: Any, at: int) -> int:
        count = read(fd, into, at)
        os.truncate(path, 2000)
        return count

    monkeypatch.setattr(os, "preadv", then_changed)
    assert "changed while it was read" in refused(path)


def test_a_file_of_another_kind_is_refused_before_memory_is_taken_for_it(tmp_path: Path) -> None:
    path = tmp_path / "m.quiver"
    with path.open("wb") as file:
        file.truncate(1 << 43)  # a sparse one, larger than any memory
    assert "not an Arrow file" in refused(path)
    with path.open("r+b") as file:
        file.write(MAGIC)
    with pytest.raises(BadRequest, match=f"of {1 << 43} bytes, and {1 << 30} are allowed"):
        Manifest.open(path, size_bytes_max=1 << 30)
