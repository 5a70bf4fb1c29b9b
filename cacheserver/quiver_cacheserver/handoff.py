"""The socket of ``--socket``: open shard files for the readers on this host (``quiver.handoff``, docs/protocol.md).

Who may connect is said by the socket's permissions and its folder's. Whoever may can make the daemon open files and
look things up, and nothing else: a request is one message of bounded size, descriptors that are sent here are dropped
by the kernel, and a reader that does not take its answers is not answered again, so at most one answer's descriptors
are on the way to anybody.
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
from quiver.errors import BadRequest, Misconfigured, OverCapacity, QuiverError
from quiver.handoff import (
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
from quiver.store import Kind, OpenFile
from quiver_cacheserver.budget import Resource
from quiver_cacheserver.node import Node

log = logging.getLogger(__name__)

BACKLOG: Final = 128
SILENCE_SECONDS: Final = 30.0  # of a reader; while it has maps it asks every few seconds
THREADS: Final = 2  # not the disk's: to open a file takes microseconds, and must not queue behind reads of cold ones
PAUSE_SECONDS: Final = 0.5  # without descriptors nobody is let in; somebody may close one
PROBE_SECONDS: Final = 1.0
MODE: Final = 0o660


@contextlib.contextmanager
def bound(path: str) -> Iterator[socket.socket | None]:
    """Listen at ``path`` (``None`` for none) until the end of the block, and remove it then.

    What a dead daemon left there is replaced. Raises ``Misconfigured`` if a living one is there, or no socket may be.
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
            if (found.st_dev, found.st_ino) == made:  # and not the one of a daemon that took our place
                Path(path).unlink()


def _bind(path: str) -> tuple[socket.socket, tuple[int, int]]:
    """Return the listening socket and which file it is."""
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        _lock(folder, path)  # two that start at once must not take each other's new socket for a dead one's
        _make_way(path)
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
        log.warning("--socket %s: readers of other users want the folder to belong to this daemon's user", path)
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


def _make_way(path: str) -> None:
    """Remove a socket that nobody listens at."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise Misconfigured(f"--socket {path}: there is something else by that name; remove it, or choose another name")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EPROTOTYPE, errno.ETIMEDOUT):  # those say that somebody is there
                raise
    raise Misconfigured(f"--socket {path}: a living process listens there; give each daemon its own")


class Handoff:
    """Serves the socket between ``async with``'s two ends."""

    def __init__(self, node: Node, listener: socket.socket) -> None:
        self._node = node
        self._listener = listener
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="quiver-handoff")
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []
        # By user; who was silent for longest is first.
        self._connections: dict[str, OrderedDict[asyncio.Task[None], None]] = {}
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # given up to tell somebody that there are none

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
            await asyncio.sleep(0)  # accepting takes turns with all else

    def _has_room(self, user: str) -> bool:
        """Hold what one more connection takes; the user's own oldest is closed for it, if that is what it takes."""
        hold = self._node.budgets.hold
        if hold(user, Resource.SOCKET_CONNECTIONS, counted=False):
            return True
        its = self._connections.get(user)
        if its:
            next(iter(its)).cancel()  # who still wants something connects again
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
        """Let somebody go who waits to be let in while there are no descriptors: it reads over TCP meanwhile."""
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
        """Answer one reader until it leaves, is silent for too long, or says what is no request."""
        try:
            connection.setblocking(False)
            while await self._exchange(connection, user):
                task = asyncio.current_task()
                assert task is not None
                its = self._connections.get(user)
                if its is not None and task in its:
                    its.move_to_end(task)
        except (OSError, TimeoutError):
            return
        except Exception:  # a supervisor: a bug costs this connection, and not the daemon
            log.exception("a connection to --socket was closed")

    async def _exchange(self, connection: socket.socket, user: str) -> bool:
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
            with self._node.budgets.holding(user, Resource.SOCKET_REQUESTS):
                answer, files = await self._answer(request, user)
        except OverCapacity:
            connection.send(refusal(Status.BUSY))
            return True
        return self._send(connection, answer, files)

    def _send(self, connection: socket.socket, answer: bytes, files: list[OpenFile]) -> bool:
        """Send an answer: a whole message that nothing is queued before, so it never has to wait."""
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

    async def _answer(self, request: HandoffRequest, user: str) -> tuple[bytes, list[OpenFile]]:
        if request.verb is Verb.HELLO:
            return hello_answer(self._node.name), []
        node, loop = self._node, asyncio.get_running_loop()
        if request.flags & RECHECK:
            node.suspect((entry.digest for entry in request.entries), user)
        if request.verb is Verb.HELD:
            held = [self._is_held(entry) for entry in request.entries]
            if request.flags & USED:
                read = [entry.digest for entry, here in zip(request.entries, held, strict=True) if here]
                await loop.run_in_executor(self._threads, self._touch, read)  # it takes the inventory's lock
            return held_answer(held), []
        tried = [entry.digest if node.at_hand(entry.digest) else None for entry in request.entries]
        editions = [self._edition(digest) for digest in tried]  # before: a file that takes its place is a newer one
        opened = await loop.run_in_executor(self._threads, self._open, tried)
        statuses = [
            FileStatus.PRESENT if file is not None else FileStatus.NOT_NOW if node.held(digest) else FileStatus.ABSENT
            for (digest, _), file in zip(request.entries, opened, strict=True)
        ]
        files = [file for file in opened if file is not None]
        return files_answer(list(zip(statuses, editions, strict=True))), files

    def _is_held(self, entry: Held) -> bool:
        return (
            bool(entry.edition) and self._node.resident(entry.digest) and self._edition(entry.digest) == entry.edition
        )

    def _edition(self, digest: Digest | None) -> int:
        return self._node.inventory.edition(digest) if digest is not None else 0

    def _touch(self, digests: Sequence[Digest]) -> None:
        for digest in digests:
            self._node.store.inventory.touched(Kind.SHARD, digest)

    def _open(self, digests: Sequence[Digest | None]) -> list[OpenFile | None]:
        files: list[OpenFile | None] = []
        for digest in digests:
            try:
                files.append(self._node.store.open_file(Kind.SHARD, digest) if digest is not None else None)
            except QuiverError:  # gone meanwhile; the disk fails; no descriptor is to be had: read it over TCP
                files.append(None)
        return files


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
