"""Open files over a Unix socket: how a daemon hands shards to the readers on its own host (docs/protocol.md).

The socket is of type SOCK_SEQPACKET. A request is one message and so is its answer; each arrives whole or not at all,
and descriptors belong to exactly one message. In a stream they would need framing, and would be attached to a single
byte. Messages are MessagePack.

    hello     may have a token, to which the connection is bound, and an introduction (``quiver.introduction``); the
              answer has the daemon's node id
    files     names shards; the answer has a status and an edition for each, and carries the descriptors of those that
              are present, in order
    held      names shards and editions; the answer says for each whether the daemon still holds that edition. It may
              say how many bytes of a manifest were read by mapped files since the last such request, of whatever shards

A connection carries one request at a time. The client blocks and has no threads of its own, like ``quiver.peer``:
connections belong to the process that opened them.
"""

from __future__ import annotations

import array
import enum
import errno
import os
import socket
import struct
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Final, NamedTuple, TypeVar

import msgspec

from quiver.claims import TOKEN_BYTES_MAX
from quiver.digest import DIGEST_BYTES, Bytes, Digest
from quiver.errors import BadRequest, Corrupt, Forbidden, OverCapacity, QuiverError, Unauthenticated, Unavailable
from quiver.introduction import TEXT_BYTES_MAX
from quiver.malformed import MALFORMED
from quiver.prepared import prepare
from quiver.store import OpenFile
from quiver.token_source import NO_TOKEN, TokenSource
from quiver.transport.connection import Connection, Dialogue, Ended

FILES_MAX: Final = 64  # descriptors of one message; the kernel takes 253
HELD_MAX: Final = 1024
NODE_ID_BYTES_MAX: Final = 64
RECHECK: Final = 1  # flag: the reader found wrong bytes; verify these shards on disk before handing them out
USED: Final = 2  # flag: the reader has read these since its last request: they are in use
FLAGS_MAX: Final = (1 << 32) - 1  # unknown flags are ignored
ANSWER_SECONDS: Final = 1.0
IDLE_CONNECTIONS_MAX: Final = 2
EDITION_BYTES_MAX: Final = 9  # of an integer as MessagePack
OVERHEAD_BYTES_MAX: Final = 128  # names of fields, and lengths
READ_BYTES_MAX: Final = 1 << 50
REQUEST_BYTES_MAX: Final = HELD_MAX * (DIGEST_BYTES + EDITION_BYTES_MAX) + OVERHEAD_BYTES_MAX
ANSWER_BYTES_MAX: Final = HELD_MAX + FILES_MAX * EDITION_BYTES_MAX + NODE_ID_BYTES_MAX + OVERHEAD_BYTES_MAX

_CREDENTIALS: Final = struct.Struct("iII")  # process, user, group: the kernel's struct ucred
T = TypeVar("T")
_Unsigned = Annotated[int, msgspec.Meta(ge=0)]


class Verb(enum.IntEnum):
    """The requests of a reader."""

    HELLO = 0
    FILES = 1
    HELD = 2


class Status(enum.IntEnum):
    """The outcome of a request. After ``REFUSED`` and ``DENIED`` the daemon closes the connection."""

    OK = 0
    BUSY = 1
    REFUSED = 2
    DENIED = 3  # no valid token, or one without the right


class FileStatus(enum.IntEnum):
    """Whether a shard's file comes with the answer."""

    PRESENT = 0
    ABSENT = 1
    NOT_NOW = 2  # resident, but not verified yet; or the daemon has no descriptor left


class Held(NamedTuple):
    """A file that a reader has: the shard's name, and the edition of the file under that name."""

    digest: Digest
    edition: int


_ENTRIES_MAX: Final = {Verb.HELLO: 0, Verb.FILES: FILES_MAX, Verb.HELD: HELD_MAX}


class _Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request as encoded: digests back to back; as many editions, for ``HELD`` only."""

    verb: Verb
    shards: bytes = b""
    editions: tuple[_Unsigned, ...] = ()
    flags: Annotated[int, msgspec.Meta(ge=0, le=FLAGS_MAX)] = 0
    token: Annotated[str, msgspec.Meta(max_length=TOKEN_BYTES_MAX)] = ""
    introduction: Annotated[str, msgspec.Meta(max_length=TEXT_BYTES_MAX)] = ""
    manifest: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)] = b""
    read_bytes: Annotated[int, msgspec.Meta(ge=0, le=READ_BYTES_MAX)] = 0


class HandoffAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """An answer: to hello the node id, to files a ``FileStatus`` and an edition each, to held a 0 or 1 each."""

    status: Status
    node: Annotated[str, msgspec.Meta(max_length=NODE_ID_BYTES_MAX)] = ""
    statuses: bytes = b""
    editions: tuple[_Unsigned, ...] = ()

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, message: Bytes) -> HandoffAnswer:
        """Parse a message. Raises ``BadRequest``."""
        return _decode(message, cls)


@dataclass(frozen=True, slots=True)
class HandoffRequest:
    """One message of a reader. For ``files`` the editions are 0, which means any.

    ``token`` and ``introduction``: of hello, or ``""``. ``read_bytes``: read of ``manifest``, of held.
    """

    verb: Verb
    entries: tuple[Held, ...] = ()
    flags: int = 0
    token: str = field(default="", repr=False)
    introduction: str = ""
    manifest: Digest | None = None
    read_bytes: int = 0

    def encode(self) -> bytes:
        shards = b"".join(entry.digest for entry in self.entries)
        editions = tuple(entry.edition for entry in self.entries) if self.verb is Verb.HELD else ()
        manifest = bytes(self.manifest or b"")
        return msgspec.msgpack.encode(
            _Request(self.verb, shards, editions, self.flags, self.token, self.introduction, manifest, self.read_bytes)
        )

    @classmethod
    def decode(cls, message: Bytes) -> HandoffRequest:
        """Parse a message. Raises ``BadRequest`` for one that breaks a limit or is inconsistent."""
        if len(message) > REQUEST_BYTES_MAX:
            raise BadRequest(f"a request has at most {REQUEST_BYTES_MAX} bytes, not {len(message)}")
        told = _decode(message, _Request)
        shards = Digest.many(told.shards)
        editions = told.editions if told.verb is Verb.HELD else (0,) * len(shards)
        if len(shards) > _ENTRIES_MAX[told.verb] or len(editions) != len(shards) or len(told.editions) > len(shards):
            what = f"{len(shards)} shards and {len(told.editions)} editions"
            raise BadRequest(f"{what} in a request for {told.verb.name.lower()}")
        if told.token and told.verb is not Verb.HELLO:
            raise BadRequest(f"a token in a request for {told.verb.name.lower()}; it belongs to hello")
        manifest = Digest(told.manifest) if len(told.manifest) == DIGEST_BYTES else None
        entries = tuple(map(Held, shards, editions))
        return cls(told.verb, entries, told.flags, told.token, told.introduction, manifest, told.read_bytes)


def hello_answer(node: str) -> bytes:
    return HandoffAnswer(Status.OK, node=node).encode()


def files_answer(files: Sequence[tuple[FileStatus, int]]) -> bytes:
    """Return the answer to ``files``, given each shard's status and edition. The caller sends the descriptors."""
    statuses, editions = bytes(status for status, _ in files), tuple(edition for _, edition in files)
    return HandoffAnswer(Status.OK, statuses=statuses, editions=editions).encode()


def held_answer(held: Sequence[bool]) -> bytes:
    return HandoffAnswer(Status.OK, statuses=bytes(held)).encode()


def refusal(status: Status) -> bytes:
    return HandoffAnswer(status).encode()


def _decode(message: Bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(message, type=kind)
    except MALFORMED as error:
        raise BadRequest(f"malformed message: {error}") from error


class Handed(NamedTuple):
    """The outcome for one requested shard: its file, if it was present."""

    status: FileStatus
    edition: int
    file: OpenFile | None


class Deadline:
    """A ``connection.Watch`` that ends an exchange at a fixed time, whatever progress it makes."""

    def __init__(self, seconds: float) -> None:
        self._ends_at = time.monotonic() + seconds

    @property
    def first_wait_seconds(self) -> float:
        return self.wait_seconds()

    def wait_seconds(self) -> float:
        return max(self._ends_at - time.monotonic(), 0.001)

    def asked(self) -> None:
        pass

    def sent(self, count: int) -> None:
        pass

    def heard(self, count: int) -> None:
        pass

    def check_rate(self) -> None:
        if time.monotonic() >= self._ends_at:
            raise TimeoutError("does not answer in time")

    def check(self, sock: socket.socket) -> None:
        self.check_rate()


class HandoffClient:
    """The verbs of the daemon behind one socket. Safe from threads.

    On each connection the kernel reports which user listens: it must be root, this user or one of ``trusted``. A check
    of the path would not suffice: a user who may write to its folder can replace the socket after the check.

    Raises ``Unavailable`` if the daemon does not answer or is another one than before, ``Forbidden`` if the socket's
    permissions exclude this user or an untrusted user listens, ``Unauthenticated`` if the daemon requires another
    token, ``OverCapacity`` if it is busy, and ``Corrupt`` for a malformed answer. Whatever the daemon sends, no
    descriptor is leaked.
    """

    def __init__(
        self,
        path: str,
        trusted: Collection[int] = (),
        *,
        answer_seconds: float = ANSWER_SECONDS,
        token: TokenSource = NO_TOKEN,
        introduction: str = "",
    ) -> None:
        """``trusted``: user ids. ``answer_seconds``: for a request, connecting included. ``token`` and
        ``introduction``: sent in hello.
        """
        self.path = path
        self.trusted = frozenset(trusted)
        self.node = ""  # as the daemon named itself
        self._answer_seconds = answer_seconds
        self._token = token
        self._introduction = introduction
        self._dialogue = Dialogue(self._failure, IDLE_CONNECTIONS_MAX)

    def __repr__(self) -> str:
        return f"HandoffClient({self.path!r}, {self.node!r})"

    def close(self) -> None:
        self._dialogue.close()

    def hello(self) -> str:
        """Return the daemon's node id. The caller checks that the ring has this member at this address."""
        self._dialogue.run(partial(self._opened, Deadline(self._answer_seconds)), lambda connection: None)
        return self.node

    def files(self, digests: Sequence[Digest], flags: int = 0) -> list[Handed]:
        """Return the outcome for each of at most ``FILES_MAX`` shards. The daemon fills nothing."""
        if not digests:
            return []
        answer, files = self._asked(HandoffRequest(Verb.FILES, tuple(Held(digest, 0) for digest in digests), flags))
        present = answer.statuses.count(FileStatus.PRESENT)
        if len(answer.editions) != len(digests) or max(answer.statuses) > FileStatus.NOT_NOW or present != len(files):
            raise Corrupt(
                f"{len(files)} descriptors and {len(answer.editions)} editions for {present} files", self.path
            )
        passed = iter(files)
        return [
            Handed(FileStatus(status), edition, next(passed) if status == FileStatus.PRESENT else None)
            for status, edition in zip(answer.statuses, answer.editions, strict=True)
        ]

    def held(self, held: Sequence[Held], flags: int = 0) -> list[bool]:
        """Return for each of at most ``HELD_MAX`` files whether the daemon still holds that edition of the shard."""
        answer, _ = self._asked(HandoffRequest(Verb.HELD, tuple(held), flags))
        return [bool(entry) for entry in answer.statuses]

    def read(self, manifest: Digest, count: int) -> None:
        """Tell how many bytes of a manifest were read by mapped files since this was last told."""
        self._asked(HandoffRequest(Verb.HELD, manifest=manifest, read_bytes=min(count, READ_BYTES_MAX)))

    # -- one request --------------------------------------------------------------------------------------------------

    def _asked(self, request: HandoffRequest) -> tuple[HandoffAnswer, list[OpenFile]]:
        """Return the answer, with a status per entry of the request, and the files that came with it."""
        message, deadline = request.encode(), Deadline(self._answer_seconds)

        def exchange(connection: Connection) -> tuple[HandoffAnswer, list[OpenFile]]:
            data, files = _exchange(connection, message, deadline)
            answer = self._parsed(data)
            if len(answer.statuses) != len(request.entries):
                raise Corrupt(f"an answer about {len(answer.statuses)} shards to {len(request.entries)}", self.path)
            connection.finish()
            return answer, files

        try:
            return self._dialogue.run(partial(self._opened, deadline), exchange)
        except Unauthenticated:  # the token of this connection has expired: say hello with the current one
            self._dialogue.idle.clear()
            return self._dialogue.run(partial(self._opened, deadline), exchange)

    def _parsed(self, data: bytes) -> HandoffAnswer:
        try:
            answer = HandoffAnswer.decode(data)
        except BadRequest as error:
            raise Corrupt(str(error), self.path) from error
        if answer.status is Status.BUSY:
            raise OverCapacity(f"{self.path}: the daemon is busy", 1.0)
        if answer.status is Status.DENIED:
            raise Unauthenticated(f"{self.path}: {self._token.fault()}")
        if answer.status is not Status.OK:
            raise Corrupt("the daemon refuses the request as malformed", self.path)
        return answer

    def _opened(self, deadline: Deadline) -> Connection:
        """Return a new connection, after the daemon has sent its node id on it."""
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except (OSError, AttributeError) as error:
            raise Unavailable(self.path, f"cannot be tried here ({error})") from error
        try:
            sock.settimeout(deadline.wait_seconds())
            sock.connect(self.path)
            self._check_listener(sock)
            connection = Connection(sock)
            hello = HandoffRequest(Verb.HELLO, token=self._token.token(), introduction=self._introduction)
            data, _ = _exchange(connection, hello.encode(), deadline)
            self._greet(self._parsed(data).node)
        except OSError as error:
            sock.close()
            raise self._failure(error, is_answering=False) from error
        except BaseException:
            sock.close()
            raise
        connection.finish()
        return connection

    def _check_listener(self, sock: socket.socket) -> None:
        """Raise ``Forbidden`` if an untrusted user listens on the socket."""
        told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(told)
        if uid not in (0, os.geteuid()) and uid not in self.trusted:
            raise Forbidden(
                f"{self.path}: user {uid} listens there, which is neither root, nor this user, nor the system "
                "account that owns the socket; did another user replace the daemon's socket?"
            )

    def _greet(self, node: str) -> None:
        """Record the daemon's node id, which must stay the same from the first connection on."""
        if not node:
            raise Corrupt("malformed answer: no node id", self.path)
        if self.node and self.node != node:
            raise Unavailable(self.path, f"belongs to another daemon now: node {node!r}")
        self.node = node

    def _failure(self, error: OSError, *, is_answering: bool) -> QuiverError:
        """Return the error for a socket that cannot be used."""
        if isinstance(error, (BlockingIOError, TimeoutError)):  # the former if the listener's queue is full
            return Unavailable(self.path, "does not answer in time")
        if error.errno in (errno.EACCES, errno.EPERM):
            return Forbidden(f"{self.path}: {error.strerror}; let this user, or one of its groups, use the socket")
        return Unavailable(self.path, f"cannot be used ({error.strerror or error}); is the daemon running?")


def is_this_host(host: str) -> bool:
    """Whether a host name or address is this machine's: whether a socket can bind to it."""
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


def _exchange(connection: Connection, message: bytes, deadline: Deadline) -> tuple[bytes, list[OpenFile]]:
    """Send a message; return the answer and the files that came with it. Raises ``OSError``."""
    connection.begin(deadline)
    connection.send_message(message)
    room = socket.CMSG_SPACE(FILES_MAX * array.array("i").itemsize)
    answer, passed, flags = connection.receive_message(ANSWER_BYTES_MAX, room)
    files = _taken(passed)
    if flags & socket.MSG_CTRUNC:  # more than allowed, or more than this process may have open
        raise OverCapacity("some descriptors were lost; allow this process more open files (ulimit -n)", 1.0)
    if flags & socket.MSG_TRUNC:
        raise Corrupt(f"an answer of more than {ANSWER_BYTES_MAX} bytes", "the socket's daemon")
    if not answer:
        raise Ended("the daemon closed the connection")
    return answer, files


def _taken(passed: Sequence[tuple[int, int, bytes]]) -> list[OpenFile]:
    """Return the passed files. Raises ``Corrupt``, having closed all, if one of them is no regular file."""
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
        raise Corrupt(f"a passed descriptor is not a shard's file: {wrong}", "the socket's daemon")
    return files


prepare(_Request, HandoffAnswer)
