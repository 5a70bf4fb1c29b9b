"""The leader's end: a thread that sends what was decided to the followers, each at its own pace.

The thread that draws batches adds them to the log and never waits for a socket. A process that connects and does not
show the secret is dropped after ``HELLO_SECONDS``, or earlier if too many of its kind are connected; nothing waits for
it meanwhile.
"""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
import time
from typing import Final

from quiver import forks
from quiver_client import process_exit
from quiver_client.loader.replicas.connection import Connection, Waker
from quiver_client.loader.replicas.log import DecisionLog
from quiver_client.loader.replicas.meeting import keep_alive, listen
from quiver_client.loader.replicas.messages import STRANGER_BYTES_MAX, Bye, Hello, Message, Welcome

log = logging.getLogger("quiver_client")

HELLO_SECONDS: Final = 10.0
STRANGERS_MAX: Final = 32  # beyond as many as there are followers
ACCEPT_AGAIN_SECONDS: Final = 0.5  # after the process had no descriptor left
LINGER_SECONDS: Final = 0.7  # that ``close`` gives followers to be sent the rest; less than the exit gives


class _Peer(Connection):
    """A connection; ``rank`` is that of a follower once it has shown the secret."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        super().__init__(sock, STRANGER_BYTES_MAX)
        self.rank: int | None = None
        self.deadline = deadline  # for the secret
        self.said_bye = False


class LeaderStream:
    """``log`` is shared: read and changed with ``changed`` held, which is notified of all that followers do."""

    def __init__(self, log: DecisionLog, frame_bytes_max: int) -> None:
        self.log = log
        self.changed = forks.condition()
        self.failed: BaseException | None = None
        self.is_flushed = True  # the kernel has all that was sent
        listening, self.invitation = listen()
        self._frame_bytes_max = frame_bytes_max
        self._closing_since = 0.0
        self._waker = Waker()
        process_exit.call_at_exit(self.stop, process_exit.Phase.LOOPS)
        serving = _Serving(self, listening, self._waker)
        self._thread = process_exit.start(serving.run, "quiver-replicas", leaves=True)

    def __repr__(self) -> str:
        return f"LeaderStream(port {self.invitation.port}, {self.log!r})"

    def wake(self) -> None:
        """Have the thread send what is new."""
        self._waker.wake()

    def stop(self) -> None:
        """Ask the thread to send the rest and end. Does not wait."""
        with self.changed:
            self._closing_since = self._closing_since or time.monotonic()
            self.changed.notify_all()
        self.wake()

    def close(self) -> None:
        """Send the rest, for a limited time, and end."""
        self.stop()
        process_exit.join([self._thread], 2 * LINGER_SECONDS)

    @property
    def is_closed(self) -> bool:
        return self._closing_since > 0 or self.failed is not None

    @property
    def linger_until(self) -> float:
        return self._closing_since + LINGER_SECONDS if self._closing_since else 0.0

    def welcome(self, message: Message) -> int | None:
        """Return the rank of a follower that introduces itself, ``None`` for anything else."""
        if self.is_closed or not isinstance(message, Hello) or message.rank not in self.log.followers:
            return None
        return message.rank if hmac.compare_digest(message.secret, self.invitation.followers_secret) else None

    @property
    def frame_bytes_max(self) -> int:
        return self._frame_bytes_max


class _Serving:
    """The thread of a stream: the only user of its sockets."""

    def __init__(self, stream: LeaderStream, listening: socket.socket, waker: Waker) -> None:
        self._stream, self._listening, self._waker = stream, listening, waker
        forks.close_in_child(listening)
        self._selector = selectors.DefaultSelector()
        forks.close_in_child(self._selector)
        self._peers: list[_Peer] = []  # the oldest first
        self._accepts_from = 0.0
        self._listens = False

    def run(self) -> None:
        try:
            self._selector.register(self._waker.reading, selectors.EVENT_READ)
            while not self._turn():
                pass
        except Exception as error:  # noqa: BLE001 - the supervisor of the stream: those who draw raise it
            with self._stream.changed:
                self._stream.failed = error
                self._stream.changed.notify_all()
        finally:
            for peer in self._peers:
                peer.close()
            self._listening.close()
            self._selector.close()
            self._waker.close()
            with self._stream.changed:
                self._stream.log.closed()
                self._stream.changed.notify_all()

    def _turn(self) -> bool:
        """Wait for something to do, and do it; return whether all is done."""
        now = time.monotonic()
        self._listen(now)
        for key, events in self._selector.select(self._seconds_to_wait(now)):
            if key.fileobj is self._waker.reading:
                self._waker.drain()
            elif key.fileobj is self._listening:
                self._accept()
            elif events & selectors.EVENT_READ and not key.data.ended:
                self._read(key.data)
        self._drop_strangers(time.monotonic())
        with self._stream.changed:
            for peer in self._peers:
                self._fill(peer)
            is_closing = self._stream.linger_until > 0
            self._stream.is_flushed = not any(peer.has_output for peer in self._peers)
            is_sent = not self._stream.log.unsent
        for peer in self._peers:
            if peer.has_output:
                peer.flush()
        for peer in [each for each in self._peers if each.ended]:
            self._drop(peer)
        with self._stream.changed:
            self._stream.is_flushed = not any(peer.has_output for peer in self._peers)
            self._stream.changed.notify_all()
        for peer in self._peers:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.has_output else 0)
            self._selector.modify(peer.sock, events, peer)
        if not is_closing:
            return False
        if time.monotonic() >= self._stream.linger_until:
            return True
        if is_sent:
            self._say_bye()
        return is_sent and not any(peer.rank is not None for peer in self._peers)

    def _seconds_to_wait(self, now: float) -> float | None:
        moments = [peer.deadline for peer in self._peers if peer.rank is None]
        moments += [self._accepts_from] if not self._listens else []
        moments += [self._stream.linger_until] if self._stream.linger_until else []
        return max(min(moments) - now, 0.0) if moments else None

    def _listen(self, now: float) -> None:
        if not self._listens and now >= self._accepts_from:
            self._selector.register(self._listening, selectors.EVENT_READ)
            self._listens = True

    def _accept(self) -> None:
        try:
            sock, _ = self._listening.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor is left, or the peer is gone already
            log.warning("replicas: no connection can be accepted now: %s", error)
            self._selector.unregister(self._listening)
            self._listens, self._accepts_from = False, time.monotonic() + ACCEPT_AGAIN_SECONDS
            return
        sock.setblocking(False)
        keep_alive(sock)
        peer = _Peer(sock, time.monotonic() + HELLO_SECONDS)
        self._peers.append(peer)
        self._selector.register(sock, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> None:
        for message in peer.receive():
            if peer.rank is None:
                self._introduce(peer, message)
            elif isinstance(message, Bye):
                peer.said_bye = True
            else:
                with self._stream.changed:
                    if not self._stream.log.hear(peer.rank, message):
                        peer.ended = peer.ended or f"it sent what makes no sense here ({type(message).__name__})"
                    self._stream.changed.notify_all()
            if peer.ended and peer.rank is None:
                return

    def _introduce(self, peer: _Peer, message: Message) -> None:
        rank = self._stream.welcome(message)
        if rank is None:
            peer.ended = "a stranger"
            return
        for other in self._peers:
            if other.rank == rank:  # it closed that connection, and that was not noticed yet
                other.said_bye, other.ended = True, "it connected again"
                self._drop(other)
                break
        peer.rank, peer.frames.bytes_max = rank, self._stream.frame_bytes_max
        peer.put(Welcome(self._stream.invitation.leaders_secret))
        with self._stream.changed:
            self._stream.log.connected(rank)
            self._stream.changed.notify_all()

    def _fill(self, peer: _Peer) -> None:
        """Put the messages for a follower into its buffer, while there is room."""
        if peer.rank is None or peer.ended:
            return
        while peer.has_room:
            message = self._stream.log.next_for(peer.rank)
            if message is None:
                break
            peer.put(message)

    def _drop_strangers(self, now: float) -> None:
        strangers = [peer for peer in self._peers if peer.rank is None]
        surplus = len(strangers) - STRANGERS_MAX - len(self._stream.log.followers)
        for place, peer in enumerate(strangers):
            if peer.ended or peer.deadline <= now or place < surplus:
                peer.ended = peer.ended or "a stranger"
                self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        self._peers.remove(peer)
        self._selector.unregister(peer.sock)
        peer.close()
        if peer.rank is None:
            return
        with self._stream.changed:
            self._stream.log.disconnected(peer.rank, "" if peer.said_bye else peer.ended)
            self._stream.changed.notify_all()

    def _say_bye(self) -> None:
        """End the connections, so that what was sent still arrives: each follower closes its end first."""
        for peer in self._peers:
            if peer.rank is not None and not peer.said_bye:
                peer.said_bye = True
                peer.put(Bye())
                peer.flush()
                peer.shut()
