"""Reads the objects of a source for indexing: whole, in pieces, or by ranges; never more than a piece is in memory.

``Objects`` is the noun, with a local and a remote implementation. Both raise ``SourceChanged`` if an object differs
from what the listing saw: a manifest that mixes two versions of a file would name samples that cannot be fetched.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import blake3
import xxhash

from quiver.errors import BadRequest, Changed, Forbidden, NotFound, Unavailable
from quiver.manifest import OriginObject
from quiver.origin.base import Extent, split_url
from quiver.origin.web_answers import NoRanges
from quiver_client.indexing.errors import SourceChanged
from quiver_client.indexing.npy import NpyField
from quiver_client.indexing.parallel import THREADS_REMOTE, Meter, local_threads

PIECE_BYTES: Final = 8 << 20


class Handle(Protocol):
    """One open object. Used by one thread."""

    url: str
    size: int

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` from the object; raises ``SourceChanged`` if it is too short."""
        ...

    def close(self, *, check: bool) -> None:
        """Close it; with ``check``, raise ``SourceChanged`` if it differs from what the listing saw."""
        ...


class Objects(Protocol):
    """The objects below one base URL."""

    threads: int  # the number of objects worth reading concurrently

    def whole(self, listed: OriginObject) -> memoryview:
        """Return an object of at most ``PIECE_BYTES``, valid until the thread's next call. Raises as ``pieces``."""
        ...

    def pieces(self, listed: OriginObject) -> Iterator[memoryview]:
        """Yield a whole object in pieces, each valid until the next. Raises ``SourceChanged`` if it was replaced."""
        ...

    def open(self, listed: OriginObject) -> Handle: ...

    def close(self) -> None: ...


def open_objects(base: str, meter: Meter) -> Objects:
    """Return the objects below a base URL."""
    scheme, rest = split_url(base)
    return LocalObjects(rest, meter) if scheme == "file" else RemoteObjects(base, meter)


def hash_object(objects: Objects, listed: OriginObject, npy: NpyField | None = None) -> tuple[bytes, int]:
    """Return BLAKE3 and XXH3-64 of a whole object; ``npy`` is given its beginning."""
    if listed.size <= PIECE_BYTES:
        data = objects.whole(listed)
        if npy is not None:
            npy.see(data, listed.size)
        return blake3.blake3(data).digest(), xxhash.xxh3_64_intdigest(data)
    strong, weak = blake3.blake3(), xxhash.xxh3_64()
    pieces = objects.pieces(listed)
    for piece in npy.watch(pieces, listed.size) if npy is not None else pieces:
        strong.update(piece)
        weak.update(piece)
    return strong.digest(), weak.intdigest()


class LocalObjects:
    """Files below a folder. One instance serves all threads; each thread has a buffer of its own while it iterates."""

    def __init__(self, root: str, meter: Meter) -> None:
        self.threads = local_threads()
        self._root = os.path.join(root, "")
        self._meter = meter
        self._kept = threading.local()

    def whole(self, listed: OriginObject) -> memoryview:
        data = self._buffer(listed.size)[: listed.size]
        handle = self.open(listed)
        done = False
        try:
            handle.read_into(0, data)
            done = True
        finally:
            handle.close(check=done)
        return data

    def pieces(self, listed: OriginObject) -> Iterator[memoryview]:
        handle = self.open(listed)
        done = False
        try:
            buffer = self._buffer(PIECE_BYTES)
            for offset in range(0, max(listed.size, 1), PIECE_BYTES):
                piece = buffer[: min(PIECE_BYTES, listed.size - offset)]
                handle.read_into(offset, piece)
                yield piece
            done = True
        finally:
            handle.close(check=done)

    def _buffer(self, size_bytes: int) -> memoryview:
        """Return this thread's buffer: allocating memory per file would cost as much as reading the file."""
        kept: memoryview | None = getattr(self._kept, "buffer", None)
        if kept is None or len(kept) < size_bytes:
            kept = self._kept.buffer = memoryview(bytearray(min(max(2 * size_bytes, 1 << 16), PIECE_BYTES)))
        return kept

    def open(self, listed: OriginObject) -> LocalHandle:
        return LocalHandle(self._root + listed.path, listed, self._meter)

    def close(self) -> None:
        pass


class LocalHandle:
    """An open local file."""

    def __init__(self, path: str, listed: OriginObject, meter: Meter) -> None:
        self.url = path
        self.size = listed.size
        self._listed = listed
        self._meter = meter
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a FIFO must not hang
        except (FileNotFoundError, NotADirectoryError):
            raise SourceChanged(path, "vanished") from None
        except PermissionError:
            raise Forbidden(f"cannot read {path}: permission denied; let the user that runs this read it") from None
        except OSError as error:
            raise Unavailable(path, f"cannot be opened: {error.strerror}") from error

    def read_into(self, offset: int, out: memoryview) -> None:
        done = 0
        while done < len(out):
            try:
                count = os.preadv(self._fd, [out[done:]], offset + done)
            except OSError as error:
                raise Unavailable(self.url, f"cannot be read at byte {offset + done}: {error.strerror}") from error
            if not count:
                raise SourceChanged(self.url, "became shorter")
            done += count
        self._meter.advance(done)

    def close(self, *, check: bool) -> None:
        try:
            if check:
                now = os.fstat(self._fd)
                if (now.st_size, now.st_mtime_ns) != (self._listed.size, self._listed.mtime_ns):
                    raise SourceChanged(self.url, "changed")
        finally:
            os.close(self._fd)


class RemoteObjects:
    """Objects of S3, GCS, Azure or an HTTP server."""

    def __init__(self, base: str, meter: Meter) -> None:
        from quiver.origin.remote import RemoteStore, connect

        self.threads = THREADS_REMOTE
        self.base = base
        self.store = RemoteStore(base)
        self.client = connect(base)
        self.meter = meter

    def whole(self, listed: OriginObject) -> memoryview:
        [data] = self.pieces(listed)
        return data

    def pieces(self, listed: OriginObject) -> Iterator[memoryview]:
        url = self.base + listed.path
        with mapped(url):
            answer = self.client.get(listed.path)
            self.compare(listed, answer.meta)
            if listed.size <= PIECE_BYTES:
                chunks: Iterator[Any] = iter([answer.bytes()])
            else:
                chunks = answer.stream(min_chunk_size=PIECE_BYTES)
        left = listed.size
        while True:
            with mapped(url):
                chunk = next(chunks, None)
            if chunk is None:
                break
            piece = memoryview(chunk)
            left -= len(piece)
            self.meter.advance(len(piece))
            yield piece
        if left:
            raise SourceChanged(url, "became shorter" if left > 0 else "became longer")

    def open(self, listed: OriginObject) -> RemoteHandle:
        return RemoteHandle(self, listed)

    def close(self) -> None:
        self.store.close()

    def require_ranges(self, listed: OriginObject) -> None:
        """Raise ``BadRequest`` if the server does not answer byte ranges: its manifest would be useless."""
        if listed.size < 2:
            return
        url = self.base + listed.path
        with mapped(url):
            try:
                self.client.get_range(listed.path, start=1, end=2)
            except NoRanges as error:
                raise BadRequest(
                    f"{url}: the server does not answer byte ranges, which samples inside large objects need;"
                    " serve the data with one that does (nginx, S3), or copy it here"
                ) from error

    def compare(self, listed: OriginObject, now: Any) -> None:
        """Raise ``SourceChanged`` if the store describes the object differently than the listing did."""
        etag = now.get("e_tag") or ""
        if now["size"] != listed.size or (etag and listed.etag and etag != listed.etag):
            raise SourceChanged(self.base + listed.path, "changed")


class RemoteHandle:
    """A remote object, read by ranges."""

    def __init__(self, objects: RemoteObjects, listed: OriginObject) -> None:
        self.url = objects.base + listed.path
        self.size = listed.size
        self._objects = objects
        self._listed = listed

    def read_into(self, offset: int, out: memoryview) -> None:
        try:
            self._objects.store.read([Extent(self._listed.path, offset, len(out))], out)
        except Changed as error:
            raise SourceChanged(self.url, error.why) from error
        self._objects.meter.advance(len(out))

    def close(self, *, check: bool) -> None:
        if check:
            with mapped(self.url):
                self._objects.compare(self._listed, self._objects.client.head(self._listed.path))


@contextmanager
def mapped(url: str, *, listing: bool = False) -> Iterator[None]:
    """Map obstore's exceptions about ``url`` to ours. ``listing``: a missing object is ``NotFound``, not changed."""
    from quiver.origin.store_errors import path_errors, store_errors

    try:
        with store_errors(url), path_errors(url):
            yield
    except NotFound as error:
        if listing:
            raise
        raise SourceChanged(url, "vanished") from error


class ObjectFile(io.RawIOBase):
    """A handle as a seekable file, for the Parquet reader."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._handle.size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:  # pyarrow wants bytes
        left = max(self._handle.size - self._at, 0)
        data = bytearray(left if size is None or size < 0 else min(size, left))
        if data:
            self._handle.read_into(self._at, memoryview(data))
        self._at += len(data)
        return bytes(data)
