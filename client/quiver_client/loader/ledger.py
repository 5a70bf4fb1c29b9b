"""The order that one rank took, in a file: what it took of each epoch, batch by batch, to be taken again from there.

Which samples a batch holds depends on what was resident when it was taken, and that never comes back. But of each shard
the entries taken are always the next ones (``quiver.substitution``), so a batch is some shards and a number for each,
and one that keeps to the permutation is a number alone: a few bytes a batch (``docs/format.md``).

The file only grows. A frame's CRC continues that of the frame before, so no frame counts unless all before it do: what
a killed process leaves is the same order, and at most shorter. A run that goes on from a checkpoint repeats batches
that the ledger has already; it says from where, and the reader leaves out what was taken in vain.
"""

from __future__ import annotations

import io
import os
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from quiver.digest import Digest
from quiver.errors import BadRequest
from quiver.substitution import Mask
from quiver_client.loader.batch_encoding import VARINT_BYTES_MAX, decode_batch, encode_batch, inflate, number_at, varint

__all__ = ["LedgerReader", "LedgerWriter", "Run", "decode_batch", "encode_batch"]

MAGIC: Final = b"qvledger"
VERSION: Final = 1
FLUSH_SECONDS: Final = 1.0  # what a killed process loses at most
FLUSH_BYTES: Final = 64 << 10

_BATCH, _AGAIN, _BEGIN, _END = range(4)  # what a frame holds
_END_BODY: Final = b"complete"
_AGAIN_MAX: Final = 4096  # repeats in a frame: bounds what a few bytes of a file can make of themselves
_HEADER_BYTES_MAX: Final = 64 << 10
_CRC_BYTES: Final = 4


@dataclass(frozen=True)
class Run:
    """What a ledger is about: with any of it different the same record would mean other samples."""

    dataset: Digest
    seed: int
    shuffle: bool
    rank: int
    world_size: int
    batch_size: int
    drop_last: bool


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``Run`` as it stands in the file."""

    dataset: str
    seed: int
    shuffle: bool
    rank: int
    world_size: int
    batch_size: int
    drop_last: bool


class _Begin(NamedTuple):
    """The frame that opens a segment: batches that were taken in one go."""

    epoch: int
    batches: int  # of the same deal that were behind already
    done: Mask | None

    def encode(self) -> bytes:
        head = varint(self.epoch) + varint(self.batches)
        if self.done is None:
            return head + varint(0)
        packed = np.packbits(self.done).tobytes()
        deflated = zlib.compress(packed)
        shorter = len(deflated) < len(packed)
        return head + varint(2 if shorter else 1) + varint(len(self.done)) + (deflated if shorter else packed)

    @classmethod
    def decode(cls, body: bytes) -> _Begin:
        epoch, at = number_at(body, 0)
        batches, at = number_at(body, at)
        how, at = number_at(body, at)
        if how == 0 and at == len(body):
            return cls(epoch, batches, None)
        count, at = number_at(body, at)
        packed = inflate(body[at:], -(-count // 8)) if how == 2 else body[at:]
        if how not in (1, 2) or len(packed) != -(-count // 8):
            raise ValueError("a segment whose beginning makes no sense")
        return cls(epoch, batches, np.unpackbits(np.frombuffer(packed, np.uint8), count=count).astype(bool))


class _Frame(NamedTuple):
    kind: int
    body: bytes
    end: int  # where the next one begins
    crc: int


class _Segment(NamedTuple):
    epoch: int
    deal: Digest  # tells deals of an epoch apart: which samples were done before
    batches: int
    records: int
    at: int  # where its first frame is, and the CRC before it
    crc: int
    end_crc: int  # behind its last frame


class _Contents(NamedTuple):
    """What a ledger holds, short of the records."""

    segments: list[_Segment]
    end: int  # behind the last whole frame but the one that closes the ledger, and the CRC there
    crc: int


class LedgerWriter:
    """Writes down what is taken, or goes on with a ledger of the same run (``resume``; a new one if there is none).

    What is not flushed is lost with the process; a checkpoint must not be ahead of its ledger: ``flush`` before it.
    ``ValueError`` that names ``ledger`` for one that cannot be gone on with, ``OSError`` where the disk refuses.
    """

    # A buffer of its own and a file without one: a forked worker inherits both, and would flush a file's by itself.

    def __init__(self, path: Path, run: Run, *, resume: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._flushed_at = clock()
        self._buffer = bytearray()
        self._last: bytes | None = None
        self._again = 0
        self._begun = False
        if resume and path.exists():
            self._file, self._crc = _go_on(path, run)
        else:
            self._file, self._crc = _create(path, run)

    def __repr__(self) -> str:
        return f"LedgerWriter({str(self._path)!r}, {'closed' if self._file.closed else f'{len(self._buffer)} bytes'})"

    def begin(self, epoch: int, done: npt.NDArray[np.bool_] | None, batches: int) -> None:
        """Begin a segment. ``done`` (samples,): those done before the deal; ``batches`` of that deal are behind."""
        self._settle()
        self._last = None
        self._append(_BEGIN, _Begin(epoch, batches, done).encode())
        self._begun = True
        self.flush()

    def batch(self, record: bytes) -> None:
        """Write down a batch, as ``encode_batch`` gave it, when it is consumed."""
        if not self._begun:
            raise ValueError("begin() comes before the first batch()")
        if record == self._last and self._again < _AGAIN_MAX:
            self._again += 1
        else:
            self._settle()
            self._append(_BATCH, record)
            self._last = record
        if len(self._buffer) >= FLUSH_BYTES or self._clock() - self._flushed_at >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Hand all to the operating system: before a checkpoint is given out, and at the end of an epoch."""
        self._settle()
        while self._buffer:
            written = self._file.write(self._buffer)
            del self._buffer[:written]
        self._flushed_at = self._clock()

    def close(self) -> None:
        """Write down that the ledger is complete, and bring it to the disk."""
        if self._file.closed:
            return
        with self._file:
            self._settle()
            self._append(_END, _END_BODY)
            self.flush()
            os.fsync(self._file.fileno())

    def give_up(self) -> None:
        """Let go of a file that cannot be written any more: what is in it stays, and is not said to be complete."""
        self._file.close()

    def _settle(self) -> None:
        """Write down how often the last record came again."""
        if self._again:
            self._append(_AGAIN, varint(self._again))
            self._again = 0

    def _append(self, kind: int, body: bytes) -> None:
        frame = varint(len(body) << 2 | kind) + body
        self._crc = zlib.crc32(frame, self._crc)
        self._buffer += frame + self._crc.to_bytes(_CRC_BYTES, "little")


class LedgerReader:
    """Gives back what was taken. Checks all of the file when it is made, then reads an epoch at a time.

    ``ValueError`` that names ``replay`` for a ledger of another run, for what is none, and for a damaged one. What a
    killed process left unfinished at the end is no damage.
    """

    def __init__(self, path: Path, run: Run) -> None:
        self._path = path
        with path.open("rb") as file:
            try:
                self._segments = _scan(file, run).segments
            except ValueError as error:
                raise self._refused(str(error)) from error

    def __repr__(self) -> str:
        return f"LedgerReader({str(self._path)!r}, {len(self.epochs)} epochs)"

    @property
    def epochs(self) -> tuple[int, ...]:
        """The epochs of which it has something."""
        return tuple(sorted({segment.epoch for segment in self._segments}))

    def records(self, epoch: int) -> list[tuple[Mask | None, list[bytes]]]:
        """Return the deals of an epoch: which samples were done before it (``None``: none), and its batches' records.

        What a checkpoint threw away is left out: a segment that begins behind ``k`` batches of a deal replaces what the
        ledger has of that deal after them, and all deals since. Empty for an epoch of which the ledger has nothing;
        ``ValueError`` where batches are missing in between.
        """
        out: list[tuple[Mask | None, list[bytes]]] = []
        with self._path.open("rb") as file:
            for pieces in self._deals(epoch):
                records: list[bytes] = []
                done = None
                for segment, start, stop in pieces:
                    if start != len(records):
                        missing = f"batches {len(records) + 1} to {start} of epoch {epoch} are missing"
                        raise self._refused(f"{missing}: it was not kept, or not flushed before a checkpoint")
                    try:
                        begin, found = _read(file, segment)
                    except ValueError as error:
                        raise self._refused(f"it changed while it was in use: {error}") from error
                    done = begin.done
                    records += found[: stop - start]
                out.append((done, records))
        return out

    def _deals(self, epoch: int) -> list[list[tuple[_Segment, int, int]]]:
        """Return what counts of each deal: segments, and from which batch to which they stand."""
        deals: dict[Digest, list[tuple[_Segment, int, int]]] = {}
        for segment in self._segments:
            if segment.epoch != epoch:
                continue
            if segment.deal in deals:
                while next(reversed(deals)) != segment.deal:
                    deals.popitem()
            kept = [
                (earlier, start, min(stop, segment.batches))
                for earlier, start, stop in deals.get(segment.deal, [])
                if start < segment.batches
            ]
            deals[segment.deal] = [*kept, (segment, segment.batches, segment.batches + segment.records)]
        return list(deals.values())

    def _refused(self, why: str) -> ValueError:
        return ValueError(f"replay={str(self._path)!r} cannot be replayed: {why}")


def check_run(path: Path, run: Run) -> None:
    """Raise ``ValueError`` naming ``ledger`` if there is a file that is no ledger of this run: it is not replaced."""
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            _check_header(file, run)
    except ValueError as error:
        raise ValueError(f"ledger={str(path)!r}: {error}. Name another file, or remove this one.") from error
    except OSError as error:
        raise ValueError(f"ledger={str(path)!r} cannot be read: {error.strerror}") from error


def _create(path: Path, run: Run) -> tuple[io.FileIO, int]:
    """Put a new ledger in the place of an old one, if there is one, and return it and its CRC."""
    header = msgspec.json.encode(_header(run))
    start = MAGIC + VERSION.to_bytes(4, "little") + len(header).to_bytes(4, "little") + header
    crc = zlib.crc32(start)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    file = temporary.open("wb", buffering=0)
    try:
        file.write(start + crc.to_bytes(_CRC_BYTES, "little"))
        os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        file.close()
        temporary.unlink(missing_ok=True)
        raise
    return file, crc


def _go_on(path: Path, run: Run) -> tuple[io.FileIO, int]:
    """Open a ledger behind its last whole frame, cutting off what follows, and return it and its CRC."""
    try:
        with path.open("rb") as file:
            contents = _scan(file, run)
    except ValueError as error:
        raise ValueError(
            f"ledger={str(path)!r} cannot be gone on with: {error}. Name another file, or remove this one."
        ) from error
    out = path.open("r+b", buffering=0)
    out.truncate(contents.end)
    out.seek(contents.end)
    return out, contents.crc


def _header(run: Run) -> _Header:
    return _Header(
        **{field.name: getattr(run, field.name) for field in fields(run)} | {"dataset": str(run.dataset)},
    )


def _check_header(file: BinaryIO, run: Run) -> tuple[int, int]:
    """Return where the first frame is, and the CRC there. ``ValueError``, with the reason, if it is another run's."""
    if file.read(len(MAGIC)) != MAGIC:
        raise ValueError("it is not a ledger")
    version = int.from_bytes(file.read(4), "little")
    if version != VERSION:
        raise ValueError(f"it is of version {version} of the format, and this Quiver reads {VERSION}")
    size = int.from_bytes(file.read(4), "little")
    header = file.read(min(size, _HEADER_BYTES_MAX))
    crc = zlib.crc32(MAGIC + version.to_bytes(4, "little") + size.to_bytes(4, "little") + header)
    if len(header) != size or file.read(_CRC_BYTES) != crc.to_bytes(_CRC_BYTES, "little"):
        raise ValueError("its header is damaged")
    try:
        theirs = msgspec.json.decode(header, type=_Header)
        Digest.parse(theirs.dataset)
    except (msgspec.DecodeError, BadRequest) as error:
        raise ValueError(f"its header is damaged: {error}") from error
    ours = _header(run)
    for name in (field.name for field in fields(run)):
        if getattr(theirs, name) != getattr(ours, name):
            raise ValueError(
                f"it is of another {name}: {getattr(theirs, name)!r} there, {getattr(ours, name)!r} in this run"
            )
    return file.tell(), crc


def _scan(file: BinaryIO, run: Run) -> _Contents:
    """Check all of a ledger, and return what it holds. ``ValueError`` for damage, but not for a torn tail."""
    at, crc = _check_header(file, run)
    size = file.seek(0, os.SEEK_END)
    file.seek(max(at, size - _CRC_BYTES - len(_END_BODY)))
    closed = file.read(len(_END_BODY)) == _END_BODY
    segments: list[_Segment] = []
    last: int | None = None
    while (frame := _frame(file, at, size, crc)) is not None:
        if frame.kind == _END:
            if frame.end != size or frame.body != _END_BODY:
                raise ValueError(f"it goes on at byte {frame.end}, where it was closed")
            return _Contents(segments, at, crc)
        if frame.kind == _BEGIN:
            begin = _Begin.decode(frame.body)
            deal = Digest.of(b"" if begin.done is None else begin.done.tobytes())
            segments.append(_Segment(begin.epoch, deal, begin.batches, 0, at, crc, frame.crc))
        elif not segments or (frame.kind == _AGAIN and last not in (_BATCH, _AGAIN)):
            raise ValueError(f"it is damaged at byte {at}: a batch out of place")
        else:
            records = segments[-1].records + _times(frame)
            segments[-1] = segments[-1]._replace(records=records, end_crc=frame.crc)
        at, crc, last = frame.end, frame.crc, frame.kind
    if closed:
        raise ValueError(f"it is damaged at byte {at}")
    return _Contents(segments, at, crc)


def _frame(file: BinaryIO, at: int, size: int, crc: int) -> _Frame | None:
    """Return the frame at ``at``; ``None`` if what is there up to ``size`` is not all of one.

    ``ValueError`` if it is all there and damaged. Where a machine died, a file may end in zeros instead: that is torn.
    """
    file.seek(at)
    head = file.read(min(VARINT_BYTES_MAX, size - at))
    if len(head) < VARINT_BYTES_MAX and all(byte >= 0x80 for byte in head):
        return None
    number, used = number_at(head, 0)
    end = at + used + (number >> 2) + _CRC_BYTES
    if end > size:
        return None
    file.seek(at + used)
    body = file.read(number >> 2)
    crc = zlib.crc32(body, zlib.crc32(head[:used], crc))
    if file.read(_CRC_BYTES) == crc.to_bytes(_CRC_BYTES, "little"):
        return _Frame(number & 3, body, end, crc)
    if any(any(chunk) for chunk in iter(lambda: file.read(FLUSH_BYTES), b"")):
        raise ValueError(f"it is damaged at byte {at}")
    return None


def _times(frame: _Frame) -> int:
    """Return how many batches a frame stands for."""
    if frame.kind == _BATCH:
        return 1
    times, at = number_at(frame.body, 0)
    if at != len(frame.body) or not 0 < times <= _AGAIN_MAX:
        raise ValueError(f"it is damaged before byte {frame.end}: {times} repeats")
    return times


def _read(file: BinaryIO, segment: _Segment) -> tuple[_Begin, list[bytes]]:
    """Return how a segment begins, and its records."""
    size = file.seek(0, os.SEEK_END)
    begin: _Begin | None = None
    records: list[bytes] = []
    crc = segment.crc
    for frame in _frames(file, segment.at, size, segment.crc):
        if begin is None:
            begin = _Begin.decode(frame.body)
        elif frame.kind == _BATCH:
            records.append(frame.body)
        elif frame.kind == _AGAIN:
            records += records[-1:] * _times(frame)
        crc = frame.crc
        if len(records) >= segment.records:
            break
    if begin is None or crc != segment.end_crc:
        raise ValueError(f"what stands from byte {segment.at} on is not what stood there")
    return begin, records


def _frames(file: BinaryIO, at: int, size: int, crc: int) -> Iterator[_Frame]:
    while (frame := _frame(file, at, size, crc)) is not None:
        yield frame
        at, crc = frame.end, frame.crc
