"""A remote store in a process of its own, for processes that may fork.

The threads of an object store's client do not survive ``fork``, and a DataLoader forks at any time. So a training
process starts this module as a program, the reader, sends it requests, and gets the bytes through memory that both map:
no payload crosses a socket.

The owner and the reader share one Unix socket of type SOCK_SEQPACKET, which keeps message boundaries and, unlike a
datagram socket, tells either side when the other has closed. Each request has a pair of such sockets of its own: one
end is sent to the reader, with the memory to fill, and returns the answer; closing the other end cancels the request.
So requests run in parallel, their answers cannot be confused, and an interrupted thread leaves nothing behind. The
reader ends, even in the middle of a request, when its socket is closed or its owner's process has ended, in whatever
way and even if a child inherited a copy of the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from quiver import forks
from quiver.errors import Changed, DiskFailed, Forbidden, Misconfigured, NotFound, QuiverError, Unavailable
from quiver.origin.base import READ_SECONDS, Extent
from quiver.origin.remote import SLOWEST_BYTES_PER_SECOND, RemoteStore
from quiver.prepared import prepare

ANSWER_BYTES_MAX: Final = 1 << 16
SLACK_SECONDS: Final = 10.0  # beyond the deadline of a read, which the reader enforces unless it hangs or is stopped
END_SECONDS_MAX: Final = 1.0
_ERRORS: Final[dict[str, type[QuiverError]]] = {
    kind.code: kind for kind in (Forbidden, Misconfigured, NotFound, DiskFailed)
}


class _Request(msgspec.Struct):
    """A request: read extents into the memory, of ``size_bytes``, or download an object into a folder."""

    size_bytes: int
    within_seconds: float
    extents: list[Extent]
    folder: str = ""


class _Answer(msgspec.Struct):
    read_bytes: int = 0
    path: str = ""
    error: str = ""
    about: str = ""
    message: str = ""
    retry_after_seconds: float = 0.0
    lasting: bool = False


class _Running(NamedTuple):
    """The reader's process, the socket to it, and the finalizer that ends both."""

    process: subprocess.Popen[bytes]
    link: socket.socket
    finalizer: weakref.finalize[..., ProcessStore]


class ProcessStore:
    """``ObjectStore`` whose requests a reader answers: started on first use, and again if it dies."""

    def __init__(self, base: str) -> None:
        self._reader: _Running | None = None
        self.base = base if base.endswith("/") else base + "/"
        self._lock = forks.lock()  # held while the reader starts or ends, and never while an answer is awaited
        self._closed = False

    def __repr__(self) -> str:
        return f"ProcessStore({self.base!r})"

    def read(self, extents: Sequence[Extent], out: memoryview, within_seconds: float = READ_SECONDS) -> int:
        if not len(out):
            return 0
        memory = os.memfd_create("quiver-origin", os.MFD_CLOEXEC)
        try:
            answer = self._asked(_Request(len(out), within_seconds, list(extents)), memory)
            with mmap.mmap(memory, len(out)) as shared:
                out[:] = memoryview(shared)
        finally:
            os.close(memory)
        return answer.read_bytes

    def download(self, path: str, folder: Path, within_seconds: float = READ_SECONDS) -> Path:
        """Download an object into a folder, once per version; return its file there. See ``RemoteStore.download``."""
        memory = os.memfd_create("quiver-origin", os.MFD_CLOEXEC)
        try:
            return Path(self._asked(_Request(0, within_seconds, [Extent(path, 0, 0)], str(folder)), memory).path)
        finally:
            os.close(memory)

    def close(self) -> None:
        """End the reader. Reads that wait for it fail at once."""
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.finalizer()

    def _asked(self, request: _Request, memory: int) -> _Answer:
        """Return the answer to a request. Raises the reader's error."""
        raw = msgspec.msgpack.encode(request)
        os.ftruncate(memory, request.size_bytes)
        os.pwrite(memory, raw, request.size_bytes)
        for attempt in (1, 2):
            with self._lock:
                if self._closed:
                    raise Unavailable(self.base, "was closed", lasting=True)
                reader = self._started()
            try:
                return _raised(self._exchanged(reader.link, request, memory), self.base)
            except (OSError, EOFError) as error:
                with self._lock:
                    if self._reader is reader:
                        self._end()
                    if self._closed:
                        raise Unavailable(self.base, "was closed", lasting=True) from None
                if attempt == 2:
                    raise Unavailable(
                        self.base, f"the process that reads it died (exit {reader.process.poll()})"
                    ) from error
        raise AssertionError("unreachable")

    def _exchanged(self, link: socket.socket, request: _Request, memory: int) -> _Answer:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                socket.send_fds(link, [request.size_bytes.to_bytes(8, "little")], [memory, theirs.fileno()])
            seconds = request.within_seconds + request.size_bytes / SLOWEST_BYTES_PER_SECOND + SLACK_SECONDS
            _wait_for(ours, time.monotonic() + seconds, self.base)
            raw = ours.recv(ANSWER_BYTES_MAX)
        if not raw:
            raise EOFError
        return msgspec.msgpack.decode(raw, type=_Answer)

    def _started(self) -> _Running:
        if self._reader is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.settimeout(SLACK_SECONDS)  # for sending, which waits only if the reader hangs
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM, self.base, str(theirs.fileno()), str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C is for its owner to handle
                )
            # The reader ends when this process does, so there is nothing to do at the interpreter's exit.
            finalizer = weakref.finalize(self, _end, process, ours, os.getpid())
            finalizer.atexit = False
            self._reader = _Running(process, ours, finalizer)
        return self._reader


def _end(process: subprocess.Popen[bytes], link: socket.socket, owner: int) -> None:
    if owner == os.getpid():
        # Shut it down, since closing is not enough: a child that was forked meanwhile has a copy of the socket.
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
        try:
            process.wait(END_SECONDS_MAX)
        except subprocess.TimeoutExpired:  # stopped, perhaps
            process.kill()
            process.wait()
    else:
        process.returncode = 0  # a child of the parent, which alone can wait for it
    link.close()


_PROGRAM: Final = "import sys; from quiver.origin.origin_process import main; main()"


def _wait_for(answer: socket.socket, until: float, base: str) -> None:
    """Wait until there is something to receive. Raises ``Unavailable``.

    A DataLoader worker whose parent has ended exits instead of waiting, since the origin may hang for long.
    """
    poll = select.poll()
    poll.register(answer, select.POLLIN)
    with parent_of_worker() as parent:
        if parent is not None:
            poll.register(parent, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(max(until - time.monotonic(), 0.0) * 1000)]
    if answer.fileno() in ready:
        return
    if ready:
        raise SystemExit(1)
    raise Unavailable(base, "the process that reads it does not answer")


@contextlib.contextmanager
def parent_of_worker() -> Iterator[int | None]:
    """Open the parent of a process that should end with it, as workers should; ``None`` in any other process.

    The descriptor becomes readable when the parent ends. (The sentinel of multiprocessing is a pipe, which workers that
    were forked later hold open as well.) Raises ``SystemExit`` if the parent has already ended.
    """
    parent = multiprocessing.parent_process() if multiprocessing.current_process().daemon else None
    if parent is None or parent.pid is None:
        yield None
        return
    try:
        fd = os.pidfd_open(parent.pid)
    except ProcessLookupError:
        raise SystemExit(1) from None
    try:
        yield fd
    finally:
        os.close(fd)


def _raised(answer: _Answer, base: str) -> _Answer:
    if not answer.error:
        return answer
    if answer.error == Changed.code:
        raise Changed(answer.about, answer.message)
    kind = _ERRORS.get(answer.error)
    if kind is not None:
        raise kind(answer.message)
    retry_after = answer.retry_after_seconds
    raise Unavailable(answer.about or base, answer.message, retry_after_seconds=retry_after, lasting=answer.lasting)


# -- in the reader ----------------------------------------------------------------------------------------------------


class _Reader:
    """Answers the requests of one owner until the owner is gone."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._store: RemoteStore | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, link: socket.socket, owner: int) -> None:
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        link.setblocking(False)
        loop.add_reader(link, self._take, link, gone)
        loop.add_reader(owner, gone.set)
        await gone.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=END_SECONDS_MAX / 2) if self._tasks else None

    def _take(self, link: socket.socket, gone: asyncio.Event) -> None:
        try:
            head, fds, _, _ = socket.recv_fds(link, 8, 2)
        except BlockingIOError:
            return
        except OSError:
            head, fds = b"", []
        if not head:
            gone.set()
            return
        memory, reply = fds
        task = asyncio.get_running_loop().create_task(self._serve(memory, socket.socket(fileno=reply), head))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, memory: int, reply: socket.socket, head: bytes) -> None:
        """Answer one request; stop if its other end is closed."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        with reply:
            reply.setblocking(False)

            def gone() -> None:  # the owner sends nothing here: readable means closed
                loop.remove_reader(reply)
                task.cancel()

            loop.add_reader(reply, gone)
            try:
                answer = await self._answer(memory, int.from_bytes(head, "little"))
            finally:
                loop.remove_reader(reply)
                os.close(memory)
            with contextlib.suppress(OSError):
                reply.send(msgspec.msgpack.encode(answer))

    async def _answer(self, memory: int, size_bytes: int) -> _Answer:
        shared = memoryview(mmap.mmap(memory, 0))  # unmapped with its last view; a cancelled read may still hold one
        request = msgspec.msgpack.decode(shared[size_bytes:], type=_Request)
        try:
            self._store = self._store or RemoteStore(self._base)
            if request.folder:
                folder = Path(request.folder)
                path = await self._store.download(request.extents[0].path, folder, request.within_seconds)
                return _Answer(path=str(path))
            done = await self._store.fetch(request.extents, shared[:size_bytes], request.within_seconds)
            return _Answer(read_bytes=done)
        except Changed as error:
            return _Answer(error=error.code, about=error.url, message=error.why)
        except Unavailable as error:
            after, lasting = error.retry_after_seconds, error.lasting
            return _Answer(
                error=error.code, about=error.who, message=error.why, retry_after_seconds=after, lasting=lasting
            )
        except QuiverError as error:
            return _Answer(error=error.code, message=str(error))
        except OSError as error:
            why = f"cannot write to {request.folder}: {error.strerror or error}"
            return _Answer(error=DiskFailed.code, message=why)


def main() -> None:
    """Serve one owner until it is gone. Ctrl-C is for the owner to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, base, number, owner = sys.argv
    with socket.socket(fileno=int(number)) as link:
        with contextlib.suppress(ProcessLookupError):
            alive = os.pidfd_open(int(owner))
            if os.getppid() == int(owner):  # else the owner has ended, and another process may have its id
                asyncio.run(_Reader(base).run(link, alive))
        os._exit(0)  # obstore's threads must not delay the exit


prepare(_Request, _Answer)
