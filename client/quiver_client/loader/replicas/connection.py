"""One end of a connection between leader and follower: messages in and out of a non-blocking socket."""

from __future__ import annotations

import contextlib
import socket
from typing import Final

from quiver import forks
from quiver.errors import BadRequest
from quiver_client.loader.replicas.messages import Frames, Message, encode

RECEIVE_BYTES: Final = 1 << 16
OUT_BYTES: Final = 1 << 16  # buffered before the socket takes it


class Connection:
    """Owned by one thread. ``ended`` says why it ended, once it has."""

    def __init__(self, sock: socket.socket, frame_bytes_max: int) -> None:
        self.sock = sock
        self.frames = Frames(frame_bytes_max)
        self.ended = ""
        self._out = bytearray()
        forks.close_in_child(sock)

    @property
    def has_room(self) -> bool:
        return len(self._out) < OUT_BYTES

    @property
    def has_output(self) -> bool:
        return bool(self._out)

    def put(self, message: Message) -> None:
        self._out += encode(message)

    def receive(self) -> list[Message]:
        """Return the messages that have arrived. Afterwards ``ended`` is set if nothing can arrive any more."""
        try:
            data = self.sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            self.ended = f"the connection failed ({error.strerror or error})"
            return []
        if not data:
            self.ended = "the process ended, or closed the connection"
            return []
        self.frames.add(data)
        messages = []
        try:
            while (message := self.frames.next()) is not None:
                messages.append(message)
        except BadRequest as error:
            self.ended = f"it sent what is no message ({error})"
        return messages

    def flush(self) -> None:
        """Send what the socket takes now."""
        try:
            while self._out:
                sent = self.sock.send(self._out)
                del self._out[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self._out.clear()
            self.ended = self.ended or f"the connection failed ({error.strerror or error})"

    def shut(self) -> None:
        """Send nothing more. What was sent still arrives."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.sock.close()


class Waker:
    """Wakes a thread that waits in ``select``, from any thread and from the garbage collector."""

    def __init__(self) -> None:
        self.reading, self._writing = socket.socketpair()
        for end in (self.reading, self._writing):
            end.setblocking(False)
            forks.close_in_child(end)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake; closed: the thread has ended
            self._writing.send(b"\0")

    def drain(self) -> None:
        with contextlib.suppress(OSError):
            while len(self.reading.recv(4096)) == 4096:
                pass

    def close(self) -> None:
        self.reading.close()
        self._writing.close()
