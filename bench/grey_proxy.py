"""A TCP proxy in front of one daemon, which makes it grey: alive, and slow, silent or unreliable.

Behaviours, as text, which apply to all connections at once, open ones included:

    pass             forwards everything
    drip RATE        answers at RATE bytes per second
    slow RATE DELAY  answers at RATE bytes per second, and begins each DELAY seconds late
    silent           accepts, and answers nothing
    mute             answers health checks and nothing else
    reset BYTES      resets each connection after so many bytes of answers

``python -m bench.grey_proxy PORT TARGET_PORT`` reads behaviours from its standard input, one per line.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
import time
from types import TracebackType
from typing import Final, Self

PIECE_BYTES: Final = 256 << 10
SLICE_SECONDS: Final = 0.01  # of forwarding at a limited rate
LOOPBACK: Final = "127.0.0.1"


class GreyProxy:
    """Forwards connections to a daemon. Its threads end with it; a connection that it holds back ends with it too."""

    def __init__(self, target_port: int, port: int = 0) -> None:
        self.fired = 0  # how often a behaviour other than ``pass`` touched an answer
        self._target_port = target_port
        self._listener = socket.create_server((LOOPBACK, port), backlog=256)
        self.url = f"http://{LOOPBACK}:{self._listener.getsockname()[1]}"
        self._changed = threading.Condition()
        self._behaviour: tuple[str, ...] = ("pass",)
        self._closed = False
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            sockets = [self._listener, *self._sockets]
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def behave(self, how: str) -> None:
        with self._changed:
            self._behaviour = tuple(how.split())
            self._changed.notify_all()

    # -- connections --------------------------------------------------------------------------------------------------

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._closed:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection((LOOPBACK, self._target_port), 2)
                except OSError:
                    near.close()
                    continue
                far.settimeout(None)
                for sock in (near, far):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._changed:
                    self._sockets |= {near, far}
                self._start(self._serve, near, far)

    def _serve(self, near: socket.socket, far: socket.socket) -> None:
        try:
            first = near.recv(PIECE_BYTES)
            exempt = b"GET /healthz" in first[:32]
            far.sendall(first)
            answers = threading.Thread(target=self._answers, args=(far, near, exempt), daemon=True)
            answers.start()
            with contextlib.suppress(OSError):
                while piece := near.recv(PIECE_BYTES):
                    far.sendall(piece)
            _shut(far)
            answers.join()
        except OSError:
            pass
        finally:
            with self._changed:
                self._sockets -= {near, far}
            near.close()
            far.close()

    def _answers(self, far: socket.socket, near: socket.socket, exempt: bool) -> None:
        """Forward what the daemon answers."""
        sent, quiet_since = 0, time.monotonic()
        try:
            while piece := far.recv(PIECE_BYTES):
                begins = time.monotonic() - quiet_since > SLICE_SECONDS
                sent = self._forward(near, piece, sent, begins=begins, exempt=exempt)
                quiet_since = time.monotonic()
        except OSError:
            pass
        _shut(near)
        _shut(far)

    def _forward(self, near: socket.socket, piece: bytes, sent: int, *, begins: bool, exempt: bool) -> int:
        """Forward a piece of an answer as the present behaviour says; return how many bytes were sent in all."""
        left = memoryview(piece)
        while left:
            with self._changed:
                how = self._behaviour
                while (how[0] == "silent" or (how[0] == "mute" and not exempt)) and not self._closed:
                    self.fired += 1
                    self._changed.wait()
                    how = self._behaviour
                if self._closed:
                    raise ConnectionAbortedError("the proxy ends")
                self.fired += how[0] not in ("pass", "mute")
            if how[0] == "reset" and sent + len(left) > int(how[1]):
                near.sendall(left[: max(int(how[1]) - sent, 0)])
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                near.shutdown(socket.SHUT_RD)
                near.close()
                raise ConnectionAbortedError("reset")
            if how[0] == "slow" and begins:
                self._pause(float(how[2]))
                begins = False
            count = len(left)
            if how[0] in ("drip", "slow"):
                rate = float(how[1])
                count = max(min(count, int(rate * SLICE_SECONDS)), 1)
                self._pause(count / rate)
            near.sendall(left[:count])
            left, sent = left[count:], sent + count
        return sent

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        with self._changed:
            how = self._behaviour
            while (left := until - time.monotonic()) > 0 and not self._closed and self._behaviour == how:
                self._changed.wait(left)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    with GreyProxy(int(sys.argv[2]), int(sys.argv[1])) as proxy:
        print(proxy.url, flush=True)
        for line in sys.stdin:
            proxy.behave(line)
            print(proxy.fired, flush=True)
