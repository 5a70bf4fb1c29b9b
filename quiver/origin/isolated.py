"""A remote store in a process of its own, for processes that may fork.

The threads of an object store's client do not survive ``fork``, and a DataLoader forks at times that nobody chooses. So
a training process starts this module as a program, sends it what to read, and gets the bytes through memory that both
map: no payload crosses the socket. The helper ends when the socket does, so it cannot outlive its owner.

Each request is a datagram: msgpack, and the file descriptor of the memory to fill. Each answer is one as well.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Final

import msgspec

from quiver.errors import Changed, Forbidden, Misconfigured, QuiverError, Unavailable
from quiver.origin.base import Extent

REQUEST_BYTES_MAX: Final = 1 << 26
ANSWER_SECONDS_MAX: Final = 300.0
END_SECONDS_MAX: Final = 2.0
_ERRORS: Final[dict[str, type[QuiverError]]] = {"forbidden": Forbidden, "misconfigured": Misconfigured}


class _Answer(msgspec.Struct):
    read_bytes: int = 0
    error: str = ""
    about: str = ""
    message: str = ""


class IsolatedStore:
    """``ObjectStore`` whose requests a helper process answers, started on first use and once again if it dies."""

    def __init__(self, base: str) -> None:
        self._helper: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self.base = base if base.endswith("/") else base + "/"
        self._lock = threading.Lock()  # one request at a time: the helper itself reads with many threads
        self._owner = os.getpid()

    def __repr__(self) -> str:
        return f"IsolatedStore({self.base!r})"

    def read(self, extents: Sequence[Extent], out: memoryview) -> int:
        if not len(out):
            return 0
        memory = os.memfd_create("quiver-origin", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, len(out))
            with mmap.mmap(memory, len(out)) as shared:
                answer = self._ask(msgspec.msgpack.encode(list(extents)), memory)
                if answer.error == Changed.code:
                    raise Changed(answer.about, answer.message)
                if answer.error:
                    kind = _ERRORS.get(answer.error)
                    raise kind(answer.message) if kind else Unavailable(self.base, answer.message)
                out[:] = memoryview(shared)
        finally:
            os.close(memory)
        return answer.read_bytes

    def close(self) -> None:
        helper, self._helper = self._helper, None
        if helper is None:
            return
        process, link = helper
        if self._owner == os.getpid():
            # Shut down and not only closed: a child that was forked meanwhile holds the socket by its copy.
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            try:
                process.wait(END_SECONDS_MAX)
            except subprocess.TimeoutExpired:  # in the midst of a request that nobody waits for any more
                process.kill()
                process.wait()
        else:
            process.returncode = 0  # the parent's child: not this process's to wait for
        link.close()

    def __del__(self) -> None:
        self.close()

    def _ask(self, request: bytes, memory: int) -> _Answer:
        with self._lock:
            for attempt in (1, 2):
                process, link = self._connected()
                try:
                    _send(link, request, memory)
                    return msgspec.msgpack.decode(_receive(link)[0], type=_Answer)
                except (OSError, EOFError) as error:
                    self.close()
                    if attempt == 2:
                        raise Unavailable(
                            self.base, f"the process that reads it died (exit {process.poll()})"
                        ) from error
        raise AssertionError("unreachable")

    def _connected(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        if self._helper is None:
            ours, theirs = socket.socketpair()
            ours.settimeout(ANSWER_SECONDS_MAX)
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "quiver.origin.isolated", self.base, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            self._helper = process, ours
        return self._helper


def _send(link: socket.socket, message: bytes, memory: int | None = None) -> None:
    header = len(message).to_bytes(8, "little")
    if memory is None:
        link.sendall(header + message)
    else:
        socket.send_fds(link, [header], [memory])
        link.sendall(message)


def _receive(link: socket.socket) -> tuple[bytes, int | None]:
    header, fds, _, _ = socket.recv_fds(link, 8, 1)
    while 0 < len(header) < 8:
        header += link.recv(8 - len(header)) or b"\0" * 8
    size = int.from_bytes(header[:8], "little")
    if not header or size > REQUEST_BYTES_MAX:
        raise EOFError
    message = bytearray(size)
    view = memoryview(message)
    while view:
        count = link.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return bytes(message), (fds[0] if fds else None)


def _serve(base: str, link: socket.socket) -> None:
    from quiver.origin.remote import RemoteStore

    store: RemoteStore | None = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            request, memory = _receive(link)
            if memory is None:
                return
            try:
                store = store or RemoteStore(base)
                answer = _fill(store, msgspec.msgpack.decode(request, type=list[Extent]), memory)
            except Changed as error:
                answer = _Answer(error=error.code, about=error.url, message=error.why)
            except QuiverError as error:
                answer = _Answer(error=error.code, message=str(error))
            finally:
                os.close(memory)
            _send(link, msgspec.msgpack.encode(answer))


def _fill(store: object, extents: list[Extent], memory: int) -> _Answer:
    from quiver.origin.remote import RemoteStore

    assert isinstance(store, RemoteStore)
    with mmap.mmap(memory, 0) as shared, memoryview(shared) as out:
        return _Answer(read_bytes=store.read(extents, out))


def main() -> None:
    """Serve one owner until it goes. Ctrl-C is the owner's business: this process ends with its socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, base, number = sys.argv
    with socket.socket(fileno=int(number)) as link:
        _serve(base, link)
    os._exit(0)  # threads of a request that nobody waits for any more must not hold the process up


if __name__ == "__main__":
    main()
