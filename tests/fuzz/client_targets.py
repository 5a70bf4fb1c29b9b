"""Fuzz targets of the client, and of what operators write: ledgers, checkpoints, leases, datasets, TOML."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Callable
from functools import cache, partial
from http.client import HTTPException, HTTPMessage, parse_headers
from typing import Any, Final

import click
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quiver.digest import Digest
from quiver.errors import BadRequest, Misconfigured, QuiverError, Unavailable
from quiver.location import Location
from quiver.manifest import Manifest
from quiver.origin.opening import open_origin
from quiver.origin.row_group_cache import row_groups
from quiver.origin.web import WebStore
from quiver.residency.messages import NeedsReport
from quiver.residency.report import ConsumerReport
from quiver.substitution import Order
from quiver_cacheserver import command as daemon_command
from quiver_client import index, merge_states
from quiver_client.embedded import lease_files
from quiver_client.indexing import npy, tar
from quiver_client.loader.epoch import Deal
from quiver_client.loader.ledger.batch_encoding import decode_batch, encode_batch, number_at
from quiver_client.loader.ledger.files import LedgerReader
from quiver_client.loader.ledger.format import (
    END_BODY,
    FrameKind,
    Run,
    encode_batches,
    encode_frame,
    encode_header,
    encode_segment,
    parse,
)
from quiver_client.loader.state import belonging, fitted, make_state
from tests.fuzz.target import MIB, Refused, Target, accepts, lazily, refused, scratch

# -- the loader -------------------------------------------------------------------------------------------------------

RUN: Final = Run(dataset="d", seed=1, shuffle=True, rank=0, world_size=1, batch_size=8, drop_last=False)
_HEADER_END: Final = len(encode_header(RUN)[0])


def _ledger_seeds() -> list[bytes]:
    data, crc = encode_header(RUN)
    bodies: list[tuple[FrameKind, bytes]] = [
        (FrameKind.SEGMENT, encode_segment(0, 0, None)),
        encode_batches([b"\0", b"\x04", b"\x01\x02\x03"]),
        (FrameKind.SEGMENT, encode_segment(1, 2, np.arange(60) % 3 == 0)),
        (FrameKind.BATCH, b"\0" * 30),
        (FrameKind.END, END_BODY),
    ]
    for kind, body in bodies:
        frame, crc = encode_frame(kind, body, crc)
        data += frame
    return [data, encode_header(RUN)[0]]


def _ledger_repair(data: bytes) -> bytes:
    """Return the frames with the CRCs that they should have."""
    out, crc = encode_header(RUN)
    at = _HEADER_END
    while at < len(data):
        try:
            number, start = number_at(data, at)
        except ValueError:
            break
        end = start + (number >> 2)
        if end + 4 > len(data):
            break
        frame, crc = encode_frame(FrameKind(number & 3), data[start:end], crc)
        out += frame
        at = end + 4
    return out + data[at:]


def _ledger() -> Callable[[bytes], bool]:
    path = scratch() / "ledger"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        reader = LedgerReader(path, RUN)
        assert parse(data, RUN).end <= len(data)
        for epoch in reader.epochs:
            reader.batches(epoch)

    return accepts(read, ValueError)


def _batch(data: bytes) -> None:
    """A batch in a ledger: whatever decodes is a batch that this order could have drawn."""
    order = Order(np.arange(120) % 7, 7)
    order.take(order.plain(13))
    entries, _ = decode_batch(order, data, 16)
    assert len(np.unique(entries)) == len(entries) <= 16
    assert (decode_batch(order, encode_batch(order, entries, 16), 16)[0] == entries).all()
    order.take(entries)


DEAL: Final = Deal(100, 1, True, 0, 2, 8, False)


def _state(data: bytes) -> None:
    try:
        told = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError("not what a serialiser returns") from error
    if isinstance(told, dict) and isinstance(told.get("samples"), int) and told["samples"] > 1 << 20:
        told["samples"] = 1 << 20  # a state may be of any dataset: it takes a bit for each sample
    fitting = None
    for use in (lambda: belonging(told, "d", DEAL), lambda: fitted(told, "d", DEAL), lambda: merge_states([told])):
        try:
            fitting = use()
        except ValueError as error:
            if type(error) is not ValueError:
                raise
    if fitting is None:
        raise ValueError("fits nothing")


def _state_seeds() -> list[bytes]:
    done, own = np.zeros(100, bool), np.zeros(50, bool)
    done[:9], own[3:9] = True, True
    states = [make_state("d", DEAL, 3, 2, done[:100], own[:46]), make_state("d", DEAL, 0, 0, done & False, own & False)]
    lone = make_state("d", Deal(100, 1, True, 0, 1, 8, False), 1, 1, done, np.ones(91, bool))
    return [msgspec.msgpack.encode(state) for state in (*states, lone, {**lone, "sampler": True, "rest": bytes(16)})]


def _lease() -> Callable[[bytes], bool]:
    path = scratch() / ("ab" * 16)

    def look(data: bytes) -> bool:
        path.write_bytes(data)
        with path.open("rb") as file:
            return lease_files._read(file.fileno(), path.stat(), time.monotonic(), path.name) is not None

    return look


def _lease_seeds() -> list[bytes]:
    report = ConsumerReport(b"\xab" * 16, np.arange(40, dtype=np.uint8), 1e6, 0.0, 5.0)
    content = lease_files._Content(b"/data/m.quiver", NeedsReport(Digest.of(b"m"), report).encode())
    return [msgspec.msgpack.encode(content)]


# -- datasets ---------------------------------------------------------------------------------------------------------


def _tar_seeds() -> list[bytes]:
    seeds = []
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=form) as archive:
            for name, size in (("a/x.jpg", 700), ("a/x.cls", 1), ("long/" * 15 + "y.npy", 10)):
                info = tarfile.TarInfo(name)
                info.size = size
                archive.addfile(info, io.BytesIO(b"7" * size))
            link = tarfile.TarInfo("a/link")
            link.type, link.linkname = tarfile.SYMTYPE, "x.jpg"
            archive.addfile(link)
        seeds.append(out.getvalue()[:8192])
    return seeds


def _tar_repair(data: bytes) -> bytes:
    """Return the blocks with the checksums that headers have, wherever they may be taken for one."""
    out = bytearray(data)
    for at in range(0, len(out) - 511, 512):
        block = out[at : at + 512]
        if any(block):
            total = sum(block) - sum(block[148:156]) + 8 * 32
            out[at + 148 : at + 156] = b"%06o\0 " % total
    return bytes(out)


def _tar(data: bytes) -> None:

    def read(offset: int, length: int) -> memoryview:
        assert 0 <= offset <= offset + length <= len(data), "only what is there is read"
        return memoryview(data)[offset : offset + length]

    for steps, member in enumerate(tar.members("t.tar", len(data), read), 1):
        assert 0 <= member.start < member.offset <= len(data)
        assert steps <= len(data) // 512, "each member has a header of its own"
        assert member.odd or member.offset + member.size <= len(data)


def _npy_seeds() -> list[bytes]:
    seeds = []
    for array in (np.arange(6, dtype="<i4").reshape(2, 3), np.zeros((2, 0), "<f8"), np.float32(1.5)):
        out = io.BytesIO()
        np.save(out, array)
        seeds.append(out.getvalue())
    return seeds


def _npy(data: bytes) -> None:
    found = npy.parse(data, len(data))
    if found is None:
        raise BadRequest("no array")
    assert np.load(io.BytesIO(data), allow_pickle=False).shape == found.shape, "numpy reads it alike"


def _indexed(name: str, form: str) -> Callable[[bytes], bool]:
    """Return the target that indexes a source, and reads a shard of what was accepted."""
    folder = scratch()
    source, output = folder / name, folder / "out.quiver"

    def run(data: bytes) -> None:
        source.write_bytes(data)
        output.unlink(missing_ok=True)
        index(source, output, format=form, shard_bytes="64KiB")

    return accepts(run, QuiverError)


def _table() -> pa.Table:
    rows = range(12)
    columns: dict[str, Any] = {
        "image": pa.array([b"%d" % row * row for row in rows]),
        "tokens": pa.array([[row, 2] for row in rows], pa.list_(pa.int32(), 2)),
        "ragged": pa.array([list(range(row % 4)) for row in rows], pa.list_(pa.float32())),
        "label": pa.array([row % 3 for row in rows]),
        "text": pa.array([f"t{row}" for row in rows]),
    }
    return pa.table(columns)


@cache
def _parquet_seeds() -> list[bytes]:
    seeds = []
    for options in ({"compression": "none"}, {"row_group_size": 5}, {"use_dictionary": False, "compression": "zstd"}):
        out = io.BytesIO()
        pq.write_table(_table(), out, **options)
        seeds.append(out.getvalue())
    return seeds


def _parquet_origin() -> Callable[[bytes], bool]:
    """Return the target in which a daemon reads samples from a file that is not the one that was indexed."""
    folder = scratch()
    source, made = folder / "t.parquet", folder / "t.quiver"
    source.write_bytes(_parquet_seeds()[1])
    index(source, made, format="parquet")
    manifest = Manifest.open(made)
    sizes = manifest.blob_sizes(slice(None))

    def read(data: bytes) -> None:
        source.write_bytes(data)
        before, row_groups.group_bytes_max = row_groups.group_bytes_max, 16 * MIB
        origin = open_origin(manifest)
        try:
            origin.read(range(len(sizes)), memoryview(bytearray(int(sizes.sum()))))
        finally:
            origin.close()
            row_groups.group_bytes_max = before

    return accepts(read, QuiverError)


# -- an origin's web server, and the operator's file -------------------------------------------------------------------


STORE: Final = WebStore(Location.parse("http://127.0.0.1:9/"), request_seconds=1.0, attempts=1, attempts_seconds=1.0)


class _Answer:
    def __init__(self, headers: HTTPMessage) -> None:
        self.headers, self.status = headers, 200


def _web_meta(data: bytes) -> None:
    store = STORE
    try:
        answer: Any = _Answer(parse_headers(io.BytesIO(data.replace(b"\n", b"\r\n") + b"\r\n\r\n")))
    except HTTPException as error:  # which the store maps
        raise Unavailable("u", "no answer") from error
    headers = answer.headers
    for status in (200, 206, 503):
        answer.status = status
        try:
            with refused(QuiverError):
                store._part("p", status, headers.get("Content-Range", ""), 0, 5)
        except Refused:
            pass
    error = store._refused("p", 503, headers.get("Location", ""), headers.get("Retry-After", ""))
    assert 0.0 <= error.retry_after_seconds < 1e9
    assert store._meta("p", answer)["size"] >= 0


def _toml() -> Callable[[bytes], bool]:
    path = scratch() / "c.toml"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        replaced: dict[str, Any] = {"log_to_stderr": print_nothing, "return_freed_memory": lambda: None}
        before = {name: getattr(daemon_command, name) for name in (*replaced, "serve", "uvloop")}
        try:
            for name, instead in {**replaced, "serve": lambda config: config, "uvloop": _NoLoop}.items():
                setattr(daemon_command, name, instead)
            daemon_command.command.main(["--config", str(path)], standalone_mode=False)
        finally:
            for name, was in before.items():
                setattr(daemon_command, name, was)

    return accepts(run, click.ClickException, Misconfigured)


class _NoLoop:
    @staticmethod
    def run(config: object) -> None:
        assert config is not None


def print_nothing(*_: object) -> None:
    """Stand in for the set-up of logging."""


TARGETS: Final = (
    Target("ledger", lazily(_ledger), _ledger_seeds, _ledger_repair, share=20, memory_bytes_max=128 * MIB),
    Target("batch", accepts(_batch, ValueError), lambda: [b"\0", b"\x02\0\x01\x01\0", b"\x1d\x03\x02"], share=20),
    Target("state", accepts(_state, ValueError), _state_seeds, share=10),
    Target("lease", lazily(_lease), _lease_seeds, share=30),
    Target("tar", accepts(_tar, BadRequest), _tar_seeds, _tar_repair, share=10),
    Target("npy", accepts(_npy, BadRequest), _npy_seeds, share=20),
    Target("webdataset", lazily(partial(_indexed, "t.tar", "webdataset")), _tar_seeds, _tar_repair, share=1),
    Target(
        "parquet",
        lazily(partial(_indexed, "t.parquet", "parquet")),
        _parquet_seeds,
        share=1,
        memory_bytes_max=256 * MIB,
    ),
    Target("parquet-origin", lazily(_parquet_origin), _parquet_seeds, share=3, memory_bytes_max=256 * MIB),
    Target(
        "web-answer",
        accepts(_web_meta, QuiverError),
        lambda: [
            b"Content-Length: 5\nETag: x\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT\nContent-Range: bytes 0-4/9\n",
            b"Content-Length: 7\nRetry-After: Mon, 01 Jan 2024 00:00:00 GMT\n",
            b"Content-Length: 0\nRetry-After: 3\nLocation: http://h/x\n",
        ],
        share=20,
    ),
    Target(
        "toml",
        lazily(_toml),
        lambda: [
            b'data-dir = "/d"\ncapacity = "1GiB"\norigin = ["/data", "s3://b/"]\npeers = "http://h:1,http://i:2"\n',
            b'data-dir = "/d"\ncapacity = "2TB"\nlisten = "0.0.0.0:7717"\ninsecure = true\nreplicas = 2\n',
        ],
        share=5,
    ),
)
