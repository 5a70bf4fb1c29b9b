"""The socket of ``--socket``: open shard files for the readers on this host (docs/protocol.md).

The permissions of the socket and of its folder decide who may connect. A reader can only make the daemon open files and
look up shards. A request is one message of bounded size, and the kernel drops descriptors that are sent here. A reader
that has not received an answer gets no further one, so at most one answer's descriptors are queued per reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
import struct
import termios
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from quiver.digest import Digest
from quiver.domain import Domain
from quiver.errors import BadRequest, Forbidden, Misconfigured, OverCapacity, QuiverError, Unauthenticated
from quiver.introduction import Introduction, introduced
from quiver.store import Kind, OpenFile
from quiver.transport.handoff import (
    RECHECK,
    REQUEST_BYTES_MAX,
    USED,
    FileStatus,
    HandoffRequest,
    Held,
    Status,
    Verb,
    files_answer,
    held_answer,
    hello_answer,
    refusal,
)
from quiver_cacheserver.access.caller import Caller
from quiver_cacheserver.access.control import Access
from quiver_cacheserver.access.rights import SOCKET
from quiver_cacheserver.budget import Resource
from quiver_cacheserver.node import Node
from quiver_cacheserver.residency.readers import ReadBy

log = logging.getLogger(__name__)

BACKLOG: Final = 128
SILENCE_SECONDS: Final = 30.0  # of a reader; while it has maps it asks every few seconds
THREADS: Final = 2  # not the disk's: opening a file takes microseconds, and must not queue behind reads of cold files
PAUSE_SECONDS: Final = 0.5  # between attempts to accept while no descriptor is left
PROBE_SECONDS: Final = 1.0
MODE: Final = 0o660


@contextlib.contextmanager
def bound(path: str) -> Iterator[socket.socket | None]:
    """Listen at ``path`` (``None`` for none) until the end of the block, and remove it then.

    A dead daemon's socket is replaced. Raises ``Misconfigured`` if a live daemon listens there, or binding fails.
    """
    if not path:
        yield None
        return
    try:
        listener, made = _bind(path)
    except OSError as error:
        raise Misconfigured(
            f"--socket {path}: {error.strerror or error}; choose a folder that this daemon may write to"
        ) from error
    try:
        yield listener
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            found = os.lstat(path)
            if (found.st_dev, found.st_ino) == made:  # and not another daemon's, bound since
                Path(path).unlink()


def _bind(path: str) -> tuple[socket.socket, tuple[int, int]]:
    """Return the listening socket and which file it is."""
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        _lock(folder, path)  # of two that start at once, neither must take the other's new socket for a dead daemon's
        _remove_dead(path)
        before = os.umask(0o777 & ~MODE)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        found, parent = os.lstat(path), os.fstat(folder)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(folder)
    if found.st_uid not in (0, parent.st_uid):
        log.warning("--socket %s: for readers of other users the folder must belong to this daemon's user", path)
    return listener, (found.st_dev, found.st_ino)


def _lock(folder: int, path: str) -> None:
    deadline = time.monotonic() + PROBE_SECONDS
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise Misconfigured(f"--socket {path}: its folder is locked by another process") from None
            time.sleep(0.01)
        else:
            return


def _remove_dead(path: str) -> None:
    """Remove a socket that nobody listens at."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise Misconfigured(f"--socket {path}: another kind of file has that name; remove it, or choose another name")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EPROTOTYPE, errno.ETIMEDOUT):  # with those a process listens
                raise
    raise Misconfigured(f"--socket {path}: another process listens there; give each daemon its own socket")


class Handoff:
    """Serves the socket between ``async with``'s two ends."""

    def __init__(self, node: Node, listener: socket.socket) -> None:
        self._node = node
        self._listener = listener
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="quiver-handoff")
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []
        # By user, the longest silent reader first.
        self._connections: dict[str, OrderedDict[asyncio.Task[None], None]] = {}
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # closed when none is left, to refuse a reader

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._tasks.append(self._group.create_task(self._accept(), name="handoff"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for task in [*self._tasks, *(task for its in self._connections.values() for task in its)]:
            task.cancel()
        try:
            await self._group.__aexit__(None, None, None)
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)
            if self._spare >= 0:
                os.close(self._spare)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._node.counters.overloads += 1
                    self._turn_away()
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            user = _user_of(connection)
            if self._has_room(user):
                task = self._group.create_task(self._serve(connection, user), name="handoff connection")
                self._connections.setdefault(user, OrderedDict())[task] = None
                task.add_done_callback(partial(self._end, connection, user))
            else:
                connection.close()
            await asyncio.sleep(0)  # accepting takes turns with everything else on the loop

    def _has_room(self, user: str) -> bool:
        """Reserve budget for one more connection; if necessary, close the user's own oldest one for it."""
        hold = self._node.budgets.hold
        if hold(user, Resource.SOCKET_CONNECTIONS, counted=False):
            return True
        its = self._connections.get(user)
        if its:
            next(iter(its)).cancel()  # a reader that still needs the socket connects again
            self._forget(next(iter(its)), user)
        return hold(user, Resource.SOCKET_CONNECTIONS)

    def _forget(self, task: asyncio.Task[None], user: str) -> None:
        its = self._connections.get(user, OrderedDict())
        if task in its:
            del its[task]
            self._node.budgets.release(user, Resource.SOCKET_CONNECTIONS)
        if not its:
            self._connections.pop(user, None)

    def _end(self, connection: socket.socket, user: str, task: asyncio.Task[None]) -> None:
        self._forget(task, user)
        connection.close()  # also of a task that was cancelled before it began

    def _turn_away(self) -> None:
        """Refuse one waiting reader while no descriptor is left: it reads over TCP meanwhile."""
        if self._spare >= 0:
            os.close(self._spare)
        try:
            connection, _ = self._listener.accept()
            with connection:
                connection.setblocking(False)
                connection.send(refusal(Status.BUSY))
        except OSError:
            pass
        try:
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._spare = -1

    async def _serve(self, connection: socket.socket, user: str) -> None:
        """Answer one reader until it leaves, is silent for too long, or sends a malformed request."""
        try:
            connection.setblocking(False)
            reader = _Reader(user)
            while await self._exchange(connection, reader):
                task = asyncio.current_task()
                assert task is not None
                its = self._connections.get(user)
                if its is not None and task in its:
                    its.move_to_end(task)
        except (OSError, TimeoutError):
            return
        except Exception:  # a supervisor: a bug costs this connection, and not the daemon
            log.exception("a connection to --socket was closed")

    async def _exchange(self, connection: socket.socket, reader: _Reader) -> bool:
        """Answer one request; return whether there may be another."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(SILENCE_SECONDS):
            message = await loop.sock_recv(connection, REQUEST_BYTES_MAX + 1)
        if not message or _unread_bytes(connection):
            return False
        try:
            request = HandoffRequest.decode(message)
        except BadRequest:
            connection.send(refusal(Status.REFUSED))
            return False
        try:
            reader.admit(request, self._node.access)
        except (Unauthenticated, Forbidden):
            connection.send(refusal(Status.DENIED))
            return False
        try:
            with self._node.budgets.holding(reader.caller.budget, Resource.SOCKET_REQUESTS):
                answer, files = await self._answer(request, reader)
        except OverCapacity:
            connection.send(refusal(Status.BUSY))
            return True
        return self._send(connection, answer, files)

    def _send(self, connection: socket.socket, answer: bytes, files: list[OpenFile]) -> bool:
        """Send an answer: a whole message with nothing queued before it, so it never has to wait."""
        passed = struct.pack(f"{len(files)}i", *(file.fd for file in files))
        try:
            connection.sendmsg([answer], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)] if files else ())
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # too many descriptors of this user are on the way
                raise
            self._node.counters.overloads += 1
            connection.send(refusal(Status.BUSY))
            return True
        self._node.counters.handed_files += len(files)
        return True

    async def _answer(self, request: HandoffRequest, reader: _Reader) -> tuple[bytes, list[OpenFile]]:
        caller = reader.caller
        if request.verb is Verb.HELLO:
            return hello_answer(self._node.name), []
        node, domain, loop = self._node, caller.scope, asyncio.get_running_loop()
        if request.flags & RECHECK:
            node.suspect((entry.digest for entry in request.entries), caller.budget, domain)
        if request.verb is Verb.HELD:
            if request.read_bytes and request.manifest is not None:
                node.readers.read(reader.by, request.manifest, request.read_bytes, time.monotonic())
            held = [self._is_held(entry, domain) for entry in request.entries]
            if request.flags & USED:
                read = [entry.digest for entry, here in zip(request.entries, held, strict=True) if here]
                await loop.run_in_executor(self._threads, self._touch, read, domain)  # it takes the inventory's lock
            return held_answer(held), []
        tried = [entry.digest if node.at_hand(entry.digest, domain) else None for entry in request.entries]
        editions = [self._edition(digest) for digest in tried]  # before: a file that takes its place is a newer one
        opened = await loop.run_in_executor(self._threads, self._open, tried)
        statuses = [
            FileStatus.PRESENT
            if file is not None
            else FileStatus.NOT_NOW
            if node.held(digest, domain)
            else FileStatus.ABSENT
            for (digest, _), file in zip(request.entries, opened, strict=True)
        ]
        files = [file for file in opened if file is not None]
        of = node.manifests.opened.manifest_of(request.entries[0].digest, domain) if files else None
        node.count_read(of, domain, reader.by.identity.tenant, sum(file.size_bytes for file in files), "host")
        return files_answer(list(zip(statuses, editions, strict=True))), files

    def _is_held(self, entry: Held, domain: Domain) -> bool:
        is_resident = self._node.resident(entry.digest, domain)
        return bool(entry.edition) and is_resident and self._edition(entry.digest) == entry.edition

    def _edition(self, digest: Digest | None) -> int:
        return self._node.inventory.edition(digest) if digest is not None else 0

    def _touch(self, digests: Sequence[Digest], domain: Domain) -> None:
        for digest in digests:
            self._node.inventory.touched(Kind.SHARD, digest)
        self._node.manifests.opened.use_of(digests, domain)

    def _open(self, digests: Sequence[Digest | None]) -> list[OpenFile | None]:
        files: list[OpenFile | None] = []
        for digest in digests:
            try:
                files.append(self._node.store.open_file(Kind.SHARD, digest) if digest is not None else None)
            except QuiverError:  # evicted meanwhile, a failing disk, no descriptor left: read it over TCP
                files.append(None)
        return files


class _Reader:
    """The reader on one connection: a user of this host, and, from its hello on, the bearer of a token."""

    def __init__(self, user: str) -> None:
        self._user = user
        self._said_hello = False
        self._introduction: Introduction | None = None
        self.caller = Caller(user)

    @property
    def by(self) -> ReadBy:
        """Who reads, as it introduced itself."""
        return ReadBy(self.caller.budget, self.caller.scope, self.caller.tenant, self._introduction)

    def admit(self, request: HandoffRequest, access: Access) -> None:
        """Let a request through. Raises ``Unauthenticated`` and ``Forbidden``."""
        verb = f"{SOCKET}{request.verb.name.lower()}"
        if request.verb is Verb.HELLO or not self._said_hello:  # without tokens a reader may come without a hello
            self.caller = access.admit(self._user, request.token, verb)
            self._said_hello = request.verb is Verb.HELLO
            if self._said_hello:
                self._introduction = introduced(request.introduction)
        else:
            access.check(self.caller, verb)


def _user_of(connection: socket.socket) -> str:
    """Return whose budget a reader on this host falls under: its user's."""
    try:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return "local"
    return f"user {struct.unpack('3i', credentials)[1]}"


def _unread_bytes(connection: socket.socket) -> int:
    """Return what the reader has not taken of the answers to it."""
    return int(struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0])
