"""The ledger: which batches one rank consumed, epoch by epoch, written by ``ledger=`` and read by ``replay=``.

Which samples a batch holds depends on what was resident when it was drawn, and that cannot be reproduced; so the ledger
records it, in a few bytes per batch (``quiver_client.loader.ledger.batch_encoding``).

Invariant: the file only grows. A killed process leaves a prefix of the same order. A run that resumes from a checkpoint
repeats batches that the ledger already has; the segment that the run begins says from where, and the reader drops the
earlier ones. A power cut may lose batches, but no segment's beginning: without it the reader would take batches that a
resume had discarded for those that replaced them. So segments are synced as they begin, and lost batches are missed.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from quiver.digest import Digest
from quiver.store.files import sync_folder
from quiver.substitution import Mask
from quiver_client.loader.ledger.format import (
    CHUNK_BYTES,
    END_BODY,
    FrameKind,
    Run,
    check_header,
    encode_batches,
    encode_frame,
    encode_header,
    encode_segment,
    parse,
)

FLUSH_SECONDS: Final = 1.0  # what a killed process loses at most


class LedgerWriter:
    """Writes consumed batches to a new ledger or, with ``resume``, appends to one of the same run if there is one.

    Batches that were not flushed are lost with the process. A checkpoint must not be ahead of its ledger: ``flush``
    first. Raises ``ValueError`` naming ``ledger`` for a file that cannot be appended to, ``OSError`` if writing fails;
    what could not be written is kept, and written by the next ``flush``.
    """

    # Unbuffered, and a buffer of its own: Python would flush a buffered file in a forked child as well.

    def __init__(self, path: Path, run: Run, *, resume: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._flushed_at = clock()
        self._batches: list[bytes] = []  # not in a frame yet
        self._batches_bytes = 0
        self._buffer = bytearray()  # frames not written yet
        self._begun = False
        self._file, self._crc = _reopen(path, run) if resume and path.exists() else _create(path, run)

    def __repr__(self) -> str:
        unwritten = self._batches_bytes + len(self._buffer)
        return f"LedgerWriter({str(self._path)!r}, {'closed' if self._file.closed else f'{unwritten} bytes unwritten'})"

    def begin(self, epoch: int, done: npt.NDArray[np.bool_] | None, batches: int) -> None:
        """Begin a segment, after ``batches`` of the same deal. ``done`` (samples,): consumed before that deal."""
        self._frame_batches()
        self._append(FrameKind.SEGMENT, encode_segment(epoch, batches, done))
        self._begun = True
        self.flush()
        os.fsync(self._file.fileno())

    def batch(self, batch: bytes) -> None:
        """Record a consumed batch, as ``encode_batch`` returned it."""
        if not self._begun:
            raise ValueError("begin() comes before the first batch()")
        if self._batches_bytes + len(batch) > CHUNK_BYTES:
            self._frame_batches()
        self._batches.append(batch)
        self._batches_bytes += len(batch) + 1
        if self._batches_bytes >= CHUNK_BYTES or self._clock() - self._flushed_at >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system: before a checkpoint is handed out, and at the end of an epoch."""
        self._frame_batches()
        while self._buffer:
            written = self._file.write(self._buffer)
            del self._buffer[:written]
        self._flushed_at = self._clock()

    def close(self) -> None:
        """Mark the ledger as complete and sync it to the disk."""
        if self._file.closed:
            return
        with self._file:
            self._frame_batches()
            self._append(FrameKind.END, END_BODY)
            self.flush()
            os.fsync(self._file.fileno())

    def abandon(self) -> None:
        """Close the file without flushing or marking it as complete. Its content stays."""
        self._file.close()

    def _frame_batches(self) -> None:
        batches, self._batches, self._batches_bytes = self._batches, [], 0
        if batches:
            self._append(*encode_batches(batches))

    def _append(self, kind: FrameKind, body: bytes) -> None:
        frame, self._crc = encode_frame(kind, body, self._crc)
        self._buffer += frame


class LedgerReader:
    """Reads a ledger. Reads and checks the whole file when it is made.

    Raises ``ValueError`` naming ``replay`` for a ledger of another run, a file that is no ledger, and a damaged one. A
    last frame that a killed process left incomplete is no damage.
    """

    def __init__(self, path: Path, run: Run) -> None:
        self._path = path
        try:
            self._segments = parse(path.read_bytes(), run).segments
        except ValueError as error:
            raise self._refused(str(error)) from error

    def __repr__(self) -> str:
        return f"LedgerReader({str(self._path)!r}, {len(self.epochs)} epochs)"

    @property
    def epochs(self) -> tuple[int, ...]:
        """The epochs of which the ledger has batches."""
        return tuple(sorted({segment.epoch for segment in self._segments}))

    def batches(self, epoch: int) -> list[tuple[Mask | None, list[bytes]]]:
        """Return the deals of an epoch: the samples done before each (``None``: none), and its encoded batches.

        Batches that a resume discarded are left out: a segment that begins after ``k`` batches of a deal replaces the
        later batches of that deal, and every later deal. Empty for an epoch that the ledger lacks; ``ValueError`` if
        batches are missing in between.
        """
        deals: dict[Digest, tuple[Mask | None, list[tuple[int, list[bytes]]]]] = {}
        for segment in self._segments:
            if segment.epoch != epoch:
                continue
            while segment.deal in deals and next(reversed(deals)) != segment.deal:
                deals.popitem()
            _, pieces = deals.get(segment.deal, (None, []))
            kept = [(start, batches[: segment.start - start]) for start, batches in pieces if start < segment.start]
            deals[segment.deal] = segment.done, [*kept, (segment.start, segment.batches())]
        return [(done, self._joined(epoch, pieces)) for done, pieces in deals.values()]

    def _joined(self, epoch: int, pieces: list[tuple[int, list[bytes]]]) -> list[bytes]:
        out: list[bytes] = []
        for start, batches in pieces:
            if start != len(out):
                missing = f"batches {len(out) + 1} to {start} of epoch {epoch} are missing"
                raise self._refused(f"{missing}: they were not recorded, or not flushed before a checkpoint")
            out += batches
        return out

    def _refused(self, why: str) -> ValueError:
        return ValueError(f"replay={str(self._path)!r} cannot be replayed: {why}")


def check_run(path: Path, run: Run) -> None:
    """Raise ``ValueError`` naming ``ledger`` if the file is no ledger of this run: nothing else is ever replaced."""
    if path.exists():
        try:
            check_header(path.read_bytes(), run)
        except ValueError as error:
            raise ValueError(f"ledger={str(path)!r}: {error}. Name another file, or remove this one.") from error
        except OSError as error:
            raise ValueError(f"ledger={str(path)!r} cannot be read: {error.strerror}") from error


def _create(path: Path, run: Run) -> tuple[io.FileIO, int]:
    """Create a ledger, in place of an old one if there is one; return it and its CRC."""
    header, crc = encode_header(run)
    temporary = path.with_name(f".{path.name}.tmp")  # one name: what a killed process left is written over
    file = temporary.open("wb", buffering=0)
    try:
        file.write(header)
        os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)  # else a power cut could bring an old ledger of the same run back
    except OSError:
        file.close()
        temporary.unlink(missing_ok=True)
        raise
    return file, crc


def _reopen(path: Path, run: Run) -> tuple[io.FileIO, int]:
    """Open a ledger behind its last whole frame, cutting off what follows; return it and its CRC."""
    try:
        _, end, crc = parse(path.read_bytes(), run)
    except ValueError as error:
        raise ValueError(
            f"ledger={str(path)!r} cannot be appended to: {error}. Name another file, or remove this one."
        ) from error
    file = path.open("r+b", buffering=0)
    file.truncate(end)
    file.seek(end)
    return file, crc
