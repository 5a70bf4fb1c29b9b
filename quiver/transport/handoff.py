"""Open files over a Unix socket: how a daemon hands shards to the readers on its own host (docs/protocol.md).

The socket is of type SOCK_SEQPACKET: a request is one message and so is its answer, each arrives whole or not at all,
and descriptors belong to exactly one message. In a stream they would need framing, and hang on a byte of it.

    request   "QHF1", verb u32, entries u32, flags u32, then the entries
    answer    "QHA1", status u32, entries u32, 0 u32, then the entries

    hello     no entries; the answer's entries are the characters of the daemon's node id
    files     digests (32 bytes each); the answer has for each an edition (u64), then for each a status (a byte), and
              with it come the descriptors of those that are present, in order
    held      digest and edition (40 bytes); the answer has for each a byte: 1 if this is still the file of that name

One request at a time on a connection. Integers are little-endian. Blocking and without threads of its own, like
``quiver.peer``: connections belong to the process that opened them.
"""

from __future__ import annotations

import array
import contextlib
import enum
import errno
import os
import socket
import struct
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from quiver.digest import DIGEST_BYTES, Bytes, Digest
from quiver.errors import BadRequest, Corrupt, Forbidden, OverCapacity, QuiverError, Unavailable
from quiver.store import OpenFile
from quiver.transport.idle import Idle

FILES_MAX: Final = 64  # descriptors of one message; the kernel takes 253
HELD_MAX: Final = 1024
NODE_ID_BYTES_MAX: Final = 64
RECHECK: Final = 1  # flag: the reader found wrong bytes; verify these shards on disk before they are handed out
USED: Final = 2  # flag: the reader read these since it last asked: they are in use
ANSWER_SECONDS: Final = 1.0
IDLE_CONNECTIONS_MAX: Final = 2

_CREDENTIALS: Final = struct.Struct("iII")  # process, user, group: the kernel's struct ucred
_HEAD: Final = struct.Struct("<4sIII")
_EDITION: Final = struct.Struct("<Q")
_HELD_ENTRY: Final = struct.Struct(f"<{DIGEST_BYTES}sQ")
_ASKED, _ANSWERED = b"QHF1", b"QHA1"
REQUEST_BYTES_MAX: Final = _HEAD.size + HELD_MAX * _HELD_ENTRY.size
ANSWER_BYTES_MAX: Final = _HEAD.size + max(HELD_MAX, FILES_MAX * (_EDITION.size + 1), NODE_ID_BYTES_MAX)


class Verb(enum.IntEnum):
    """What a reader can ask."""

    HELLO = 0
    FILES = 1
    HELD = 2


class Status(enum.IntEnum):
    """How a request was taken. After ``REFUSED`` the daemon closes the connection."""

    OK = 0
    BUSY = 1
    REFUSED = 2


class FileStatus(enum.IntEnum):
    """Whether a shard's file comes with the answer."""

    PRESENT = 0
    ABSENT = 1
    NOT_NOW = 2  # here, and to be verified first; or there is no descriptor to be had


class Held(NamedTuple):
    """A file that a reader has: the shard's name, and which of the files that have had it."""

    digest: Digest
    edition: int


_ENTRIES_MAX: Final = {Verb.HELLO: 0, Verb.FILES: FILES_MAX, Verb.HELD: HELD_MAX}
_ENTRY_BYTES: Final = {Verb.HELLO: 0, Verb.FILES: DIGEST_BYTES, Verb.HELD: _HELD_ENTRY.size}


@dataclass(frozen=True, slots=True)
class HandoffRequest:
    """One message of a reader. The editions of ``files`` are 0: any will do."""

    verb: Verb
    entries: tuple[Held, ...] = ()
    flags: int = 0

    def encode(self) -> bytes:
        head = _HEAD.pack(_ASKED, self.verb, len(self.entries), self.flags)
        if self.verb is Verb.FILES:
            return head + b"".join(entry.digest for entry in self.entries)
        return head + b"".join(_HELD_ENTRY.pack(*entry) for entry in self.entries)

    @classmethod
    def decode(cls, message: Bytes) -> HandoffRequest:
        """Parse a message. Raises ``BadRequest`` for one that breaks a limit or does not add up."""
        verb, count, flags, entries = _parted(message, _ASKED)
        if verb not in _ENTRIES_MAX:
            raise BadRequest(f"there is no verb {verb}")
        asked = Verb(verb)
        if count > _ENTRIES_MAX[asked] or len(entries) != count * _ENTRY_BYTES[asked]:
            raise BadRequest(f"a request for {count} {asked.name.lower()} with {len(entries)} bytes of entries")
        if asked is Verb.FILES:
            starts = range(0, len(entries), DIGEST_BYTES)
            return cls(asked, tuple(Held(Digest(entries[at : at + DIGEST_BYTES]), 0) for at in starts), flags)
        held = _HELD_ENTRY.iter_unpack(entries) if count else ()
        return cls(asked, tuple(Held(Digest(name), edition) for name, edition in held), flags)


def hello_answer(node: str) -> bytes:
    return _HEAD.pack(_ANSWERED, Status.OK, len(node), 0) + node.encode()


def files_answer(files: Sequence[tuple[FileStatus, int]]) -> bytes:
    """Return the answer about shards, given the status and edition of each. Their descriptors go with it."""
    editions = b"".join(_EDITION.pack(edition) for _, edition in files)
    return _HEAD.pack(_ANSWERED, Status.OK, len(files), 0) + editions + bytes(status for status, _ in files)


def held_answer(held: Sequence[bool]) -> bytes:
    return _HEAD.pack(_ANSWERED, Status.OK, len(held), 0) + bytes(held)


def refusal(status: Status) -> bytes:
    return _HEAD.pack(_ANSWERED, status, 0, 0)


def _parted(message: Bytes, magic: bytes) -> tuple[int, int, int, bytes]:
    """Return the three numbers of a message's head, and what is behind it."""
    if len(message) < _HEAD.size or message[:4] != magic:
        raise BadRequest(f"a message begins with {magic.decode()} and three numbers")
    _, first, second, third = _HEAD.unpack_from(message)
    return first, second, third, bytes(message[_HEAD.size :])


class Handed(NamedTuple):
    """What became of a shard that was asked for: its file, if it was present."""

    status: FileStatus
    edition: int
    file: OpenFile | None


class HandoffClient:
    """The verbs of the daemon behind one socket. Safe from threads.

    Who listens is asked of the kernel on each connection, and is root, this user or one of ``trusted``: whoever may
    write to a folder can put a socket of his own under a path that was looked at before.

    Raises ``Unavailable`` when it does not answer or is another daemon than before, ``Forbidden`` when the socket's
    permissions keep this user out or a stranger listens, ``OverCapacity`` when it is busy, ``Corrupt`` when it answers
    nonsense. Whatever it sends, no descriptor is left open.
    """

    def __init__(self, path: str, trusted: Collection[int] = (), *, answer_seconds: float = ANSWER_SECONDS) -> None:
        """``trusted``: ids of users."""
        self.path = path
        self.trusted = frozenset(trusted)
        self.node = ""  # as the daemon named itself
        self._answer_seconds = answer_seconds
        self._idle: Idle[socket.socket] = Idle(IDLE_CONNECTIONS_MAX)

    def __repr__(self) -> str:
        return f"HandoffClient({self.path!r}, {self.node!r})"

    def close(self) -> None:
        self._idle.close()

    def hello(self) -> str:
        """Return the daemon's node id: that this is a member of the ring is for the caller to see."""
        with self._connected(time.monotonic() + self._answer_seconds):
            return self.node

    def files(self, digests: Sequence[Digest], flags: int = 0) -> list[Handed]:
        """Return for each of at most ``FILES_MAX`` shards what became of it. Nothing is brought in."""
        if not digests:
            return []
        request = HandoffRequest(Verb.FILES, tuple(Held(digest, 0) for digest in digests), flags)
        entries, files = self._asked(request, len(digests) * (_EDITION.size + 1))
        editions, statuses = entries[: -len(digests)], entries[-len(digests) :]
        if max(statuses) > FileStatus.NOT_NOW or statuses.count(FileStatus.PRESENT) != len(files):
            raise Corrupt(f"{len(files)} descriptors for {statuses.count(FileStatus.PRESENT)} files", self.path)
        passed = iter(files)
        return [
            Handed(FileStatus(status), edition, next(passed) if status == FileStatus.PRESENT else None)
            for status, (edition,) in zip(statuses, _EDITION.iter_unpack(editions), strict=True)
        ]

    def held(self, held: Sequence[Held], flags: int = 0) -> list[bool]:
        """Return for each of at most ``HELD_MAX`` files whether the daemon still holds it, as that shard's."""
        entries, _ = self._asked(HandoffRequest(Verb.HELD, tuple(held), flags), len(held))
        return [bool(entry) for entry in entries]

    # -- one request --------------------------------------------------------------------------------------------------

    def _asked(self, request: HandoffRequest, entries_bytes: int) -> tuple[bytes, list[OpenFile]]:
        """Return the entries of the answer and the files that came with it."""
        message, deadline = request.encode(), time.monotonic() + self._answer_seconds
        for anew in (False, True):
            with self._connected(deadline, anew=anew) as (connection, fresh):
                answer: bytes = b""
                files: list[OpenFile] = []
                try:
                    answer, files = _exchange(connection, message, deadline)
                except ConnectionError:
                    if fresh:
                        raise
                if answer or fresh:
                    return self._checked(answer, len(request.entries), entries_bytes), files
                connection.close()  # the daemon closed it for idleness: not its fault, ask once more
        raise AssertionError("unreachable")

    def _checked(self, answer: bytes, count: int, entries_bytes: int) -> bytes:
        if not answer:
            raise ConnectionResetError("closes the connection")
        try:
            status, answered, _, entries = _parted(answer, _ANSWERED)
        except BadRequest as error:
            raise Corrupt(str(error), self.path) from error
        if status == Status.BUSY:
            raise OverCapacity(f"{self.path}: the daemon is busy", 1.0)
        if status != Status.OK or answered != count or len(entries) != entries_bytes:
            raise Corrupt(f"status {status} and {len(entries)} bytes of entries about {answered}", self.path)
        return entries

    @contextlib.contextmanager
    def _connected(self, deadline: float, *, anew: bool = False) -> Iterator[tuple[socket.socket, bool]]:
        """Yield a connection, and whether it is new; it is kept for the next request unless this one fails."""
        connection, fresh = self._connection(deadline, anew)
        try:
            yield connection, fresh
        except OSError as error:
            connection.close()
            raise _meaning(self.path, error) from error
        except BaseException:
            connection.close()
            raise
        if connection.fileno() >= 0:  # not closed meanwhile
            self._idle.keep(connection)

    def _connection(self, deadline: float, anew: bool) -> tuple[socket.socket, bool]:
        if anew:
            self._idle.clear()  # as old as the one that was closed
        kept = self._idle.take()
        return (kept, False) if kept is not None else (self._connect(deadline), True)

    def _connect(self, deadline: float) -> socket.socket:
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except (OSError, AttributeError) as error:
            raise Unavailable(self.path, f"cannot be tried here ({error})") from error
        try:
            connection.settimeout(_left(deadline))
            connection.connect(self.path)
            self._see_who_listens(connection)
            answer, _ = _exchange(connection, HandoffRequest(Verb.HELLO).encode(), deadline)
            self._greet(answer)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                raise _meaning(self.path, error) from error
            raise
        return connection

    def _see_who_listens(self, connection: socket.socket) -> None:
        """Raise ``Forbidden`` if it was not somebody trusted who made this a socket to connect to."""
        told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(told)
        if uid not in (0, os.geteuid()) and uid not in self.trusted:
            raise Forbidden(
                f"{self.path}: user {uid} listens there, who is neither root, nor you, nor a system account whose "
                "socket it is; did somebody put it in the daemon's place?"
            )

    def _greet(self, answer: bytes) -> None:
        """Take the daemon's name, which stays the same from the first connection on."""
        told = self._checked(answer, len(answer) - _HEAD.size, len(answer) - _HEAD.size)
        node = told.decode("ascii", "replace")
        if not node or len(told) > NODE_ID_BYTES_MAX:
            raise Corrupt("a node id that is none", self.path)
        if self.node and self.node != node:
            raise Unavailable(self.path, f"is another daemon's by now: node {node[:64]!r}")
        self.node = node


def is_this_host(host: str) -> bool:
    """Whether a host name or address is this machine's: whether one can bind to it."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, _, _, address in addresses:
        try:
            with socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
        except OSError:
            continue
    return False


def _exchange(connection: socket.socket, message: bytes, deadline: float) -> tuple[bytes, list[OpenFile]]:
    """Send a message; return the answer, empty if the connection ended, and the files that came with it."""
    connection.settimeout(_left(deadline))
    connection.sendmsg([message])
    connection.settimeout(_left(deadline))
    room = socket.CMSG_SPACE(FILES_MAX * array.array("i").itemsize)
    answer, passed, flags, _ = connection.recvmsg(ANSWER_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC)
    files = _taken(passed)
    if flags & socket.MSG_CTRUNC:  # more than there can be, or more than this process may have open
        raise OverCapacity("not all descriptors could be taken; may this process have more open (ulimit -n)?", 1.0)
    if flags & socket.MSG_TRUNC:
        raise Corrupt(f"an answer of more than {ANSWER_BYTES_MAX} bytes", "the socket's daemon")
    return answer, files


def _taken(passed: Sequence[tuple[int, int, bytes]]) -> list[OpenFile]:
    """Return the files that were passed. Raises ``Corrupt``, all closed, if one of them is no regular file."""
    numbers = array.array("i")
    for level, kind, data in passed:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    files, wrong = [], ""
    for fd in numbers:
        try:
            files.append(OpenFile.adopt(fd))  # which closes it if it cannot be used
        except OSError as error:
            wrong = error.strerror or str(error)
    if wrong:
        raise Corrupt(f"what was passed is no file of a shard: {wrong}", "the socket's daemon")
    return files


def _left(deadline: float) -> float:
    """Return the seconds until then, and a moment if it is past: 0 would mean something else to a socket."""
    return max(deadline - time.monotonic(), 0.001)


def _meaning(path: str, error: OSError) -> QuiverError:
    if isinstance(error, (BlockingIOError, TimeoutError)):  # the former where as many wait as may
        return Unavailable(path, "does not answer in time")
    if error.errno in (errno.EACCES, errno.EPERM):
        return Forbidden(f"{path}: {error.strerror}; let this user, or a group of its, use the socket")
    return Unavailable(path, f"cannot be used ({error.strerror or error}); is the daemon running?")
