"""Sends ranges of files to a reader without copying them through this process.

The kernel gets slices of mapped files by address, many in one call: this process copies nothing, takes no Python step
per range or per byte, and releases the GIL meanwhile. The call reads a cold page from disk; a page that cannot be read
is an error of the call (``EFAULT``), not a signal.

Under TLS this process would touch the pages itself, and a truncated file would raise SIGBUS. So there it reads the
bytes into a buffer (``preadv``), and encrypts them from it.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from quiver.digest import Digest
from quiver.errors import DiskFailed
from quiver.store import OpenFile
from quiver.transport.sockets import TLS_PIECE_BYTES, VECTOR_MAX, is_plain, send_some, send_vector

Ints = npt.NDArray[np.int64]

BUFFERS_KEPT: Final = 16
_buffers: deque[bytearray] = deque(maxlen=BUFFERS_KEPT)  # reused: fresh memory costs as much as copying


class Payload:
    """A head, and behind it ranges of files in order: ``(n,)`` which file, and offset and length in bytes.

    ``shards``: the shards that the files are, to be verified again if one of them cannot be read.
    """

    __slots__ = (
        "_addresses", "_buffer", "_copied", "_ends", "_files", "_head", "_lengths", "_next", "_numbers", "_offsets",
        "_part", "_sent", "_size", "_vector", "_views", "head_bytes", "shards", "size_bytes",
    )  # fmt: skip

    def __init__(
        self,
        files: Sequence[OpenFile],
        numbers: Ints,
        offsets: Ints,
        lengths: Ints,
        head: bytes = b"",
        shards: Sequence[Digest] = (),
    ) -> None:
        self.size_bytes = int(lengths.sum())  # without the head
        self.head_bytes = len(head)
        self.shards = shards
        self._files = files
        self._head = head
        # Adjacent ranges are merged.
        ends = offsets + lengths
        begins = np.ones(len(numbers), bool)
        begins[1:] = (numbers[1:] != numbers[:-1]) | (offsets[1:] != ends[:-1])
        firsts = np.flatnonzero(begins)
        self._numbers, self._offsets = numbers[firsts], offsets[firsts]
        self._lengths = np.add.reduceat(lengths, firsts) if len(firsts) else lengths
        self._next = 0  # the first range that is not in the vector yet
        self._addresses = np.zeros(len(files), np.uint64)  # of the files; 0: not mapped yet
        self._views: list[npt.NDArray[np.uint8]] = []  # what the vector points into
        self._vector = np.empty((0, 2), np.uint64)  # address and length: what is being sent
        self._ends = np.empty(0, np.int64)  # of its buffers, from the first one's start
        self._size = 0  # bytes of the vector
        self._sent = 0  # of those
        self._part = 0  # under TLS: bytes of the next range that were read already
        self._buffer: bytearray | None = None  # they were read into
        self._copied: memoryview | None = None  # under TLS: bytes that were read and are not sent yet

    @classmethod
    def of(cls, data: bytes) -> Payload:
        """Return a payload of these bytes alone."""
        none = np.zeros(0, np.int64)
        return cls((), none, none, none, data)

    @property
    def done(self) -> bool:
        return self._next >= len(self._numbers) and self._sent >= self._size and not self._head and not self._copied

    def send(self, sock: socket.socket) -> int:
        """Send what the socket accepts in one call; return how many bytes that was, the head's included.

        Raises ``NotReady`` if it accepts nothing now, ``OSError`` if the connection failed, and ``DiskFailed`` if the
        disk cannot be read.
        """
        return self._send_mapped(sock) if is_plain(sock) else self._send_copied(sock)

    # -- by address ---------------------------------------------------------------------------------------------------

    def _send_mapped(self, sock: socket.socket) -> int:
        while self._sent >= self._size:
            if not self._fill_vector():
                return 0
        first = 0
        if self._sent:
            first = int(self._ends.searchsorted(self._sent, "right"))
            left = int(self._ends[first]) - self._sent
            self._vector[first, 0] += self._vector[first, 1] - np.uint64(left)
            self._vector[first, 1] = left
        try:
            count = send_vector(sock, self._vector, first)
        except OSError as error:
            if error.errno == errno.EFAULT:  # the kernel reports a page that it cannot read as a bad address
                raise DiskFailed("a shard's file cannot be read, or became shorter") from error
            raise
        self._sent += count
        return count

    def _fill_vector(self) -> bool:
        """Make the next buffers to send; return whether there are any."""
        part = slice(self._next, self._next + VECTOR_MAX - 1)
        numbers, at = self._numbers[part], int(bool(self._head))
        if not len(numbers) and not at:
            return False
        vector = np.empty((at + len(numbers), 2), np.uint64)
        if len(numbers):
            vector[at:, 0] = self._mapped(numbers)[numbers]
            vector[at:, 0] += self._offsets[part].astype(np.uint64)
            vector[at:, 1] = self._lengths[part]
        if at:
            head = np.frombuffer(self._head, np.uint8)
            self._views.append(head)
            vector[0] = head.__array_interface__["data"][0], len(head)
            self._head = b""
        self._next += len(numbers)
        self._vector, self._sent = vector, 0
        self._ends = np.cumsum(vector[:, 1]).astype(np.int64)
        self._size = int(self._ends[-1])
        return True

    def _mapped(self, numbers: Ints) -> npt.NDArray[np.uint64]:
        """Return where the files are mapped, those of ``numbers`` at least. Raises ``DiskFailed``."""
        used = np.bincount(numbers, minlength=len(self._addresses))
        for number in np.flatnonzero((used > 0) & (self._addresses == 0)).tolist():
            # If several threads map a file at once, the file keeps the last mapping only. Keep a reference to this one:
            # once unmapped, its address could be reused for anything else in this process.
            view = np.frombuffer(self._files[number].mapped(), np.uint8)
            self._views.append(view)
            self._addresses[number] = view.__array_interface__["data"][0]
        return self._addresses

    # -- by copies ----------------------------------------------------------------------------------------------------

    def _send_copied(self, sock: socket.socket) -> int:
        if not self._copied and not self._copy():
            return 0
        assert self._copied is not None
        count = send_some(sock, [self._copied])
        self._copied = self._copied[count:]
        if not self._copied:
            self._release_buffer()
        return count

    def _copy(self) -> bool:
        """Read the next bytes to send into a buffer; return whether there are any."""
        try:
            buffer = _buffers.pop()
        except IndexError:
            buffer = bytearray(TLS_PIECE_BYTES)
        out, used = memoryview(buffer), 0
        piece = self._head[: len(out)]
        out[: len(piece)] = piece
        self._head, used = self._head[len(piece) :], len(piece)
        while used < len(out) and self._next < len(self._numbers):
            number, offset = int(self._numbers[self._next]), int(self._offsets[self._next]) + self._part
            length = int(self._lengths[self._next]) - self._part
            wanted = out[used : used + length]
            count = self._read(self._files[number], wanted, offset)
            used, self._part = used + count, self._part + count
            if count == length:
                self._next, self._part = self._next + 1, 0
        self._buffer, self._copied = buffer, out[:used]
        if not used:
            self._release_buffer()
        return used > 0

    def _read(self, file: OpenFile, out: memoryview, offset: int) -> int:
        done = 0
        while done < len(out):
            try:
                count = os.preadv(file.fd, [out[done:]], offset + done)
            except OSError as error:
                raise DiskFailed(f"a shard's file cannot be read: {error.strerror}") from error
            if not count:
                raise DiskFailed("a shard's file cannot be read, or became shorter")
            done += count
        return done

    def _release_buffer(self) -> None:
        buffer, self._buffer, self._copied = self._buffer, None, None
        if buffer is not None:
            _buffers.append(buffer)
