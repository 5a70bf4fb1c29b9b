"""A follower's end: a thread that receives what the leader decided, ahead of when it is drawn."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from typing import Final

from quiver import forks
from quiver_client import process_exit
from quiver_client.loader.replicas.connection import Connection, Waker
from quiver_client.loader.replicas.log import AHEAD_MAX
from quiver_client.loader.replicas.messages import Batch, Began, Bye, Drawn, Join, Left, Message

LINGER_SECONDS: Final = 0.5
ACKNOWLEDGED_EACH: Final = 8  # batches
QUEUED_MAX: Final = AHEAD_MAX + ACKNOWLEDGED_EACH  # a leader that sends more does not count what was drawn


class Followed:
    """What this follower knows of the pass that it joined last. Values only."""

    def __init__(self) -> None:
        self.turn = 0
        self.has_begun = False
        self.decisions: deque[bytes] = deque()  # received, and not drawn yet
        self.drawn = 0
        self.left: Left | None = None  # how the leader left the pass
        self.lost = ""  # why the connection ended

    def join(self) -> Join:
        """Join the next pass; what still arrives of an earlier one is ignored."""
        self.turn += 1
        self.has_begun, self.left, self.drawn = False, None, 0
        self.decisions.clear()
        return Join(self.turn)

    def hear(self, message: Message) -> bool:
        """Take in what the leader says; return whether it makes sense."""
        match message:
            case Began(turn=turn):
                self.has_begun = turn == self.turn
            case Batch(decision=decision):
                if self.has_begun:
                    self.decisions.append(decision)
                return len(self.decisions) <= QUEUED_MAX
            case Left():
                if self.has_begun:
                    self.left = message
            case _:
                return False
        return True


class FollowerStream:
    """``followed`` is shared: used with ``changed`` held, which is notified of all that the leader does."""

    def __init__(self, sock: socket.socket, frame_bytes_max: int) -> None:
        self.followed = Followed()
        self.changed = forks.condition()
        self._connection = Connection(sock, frame_bytes_max)
        self._outgoing: deque[Message] = deque()
        self._closing_since = 0.0
        self._waker = Waker()
        process_exit.call_at_exit(self.stop, process_exit.Phase.LOOPS)
        self._thread = process_exit.start(self._run, "quiver-replicas", leaves=True)

    @property
    def is_closed(self) -> bool:
        return self._closing_since > 0 or bool(self.followed.lost)

    def join(self) -> None:
        """Join the leader's next pass."""
        with self.changed:
            self.send(self.followed.join())

    def leave(self, consumed: int, *, at_end: bool) -> None:
        with self.changed:
            self.send(Left(consumed, at_end))
            self.changed.notify_all()

    @property
    def decision(self) -> bytes | None:
        """The decision of the next batch, ``None`` if it did not arrive yet."""
        with self.changed:
            return self.followed.decisions[0] if self.followed.decisions else None

    def drawn(self) -> None:
        """The next batch is drawn."""
        with self.changed:
            followed = self.followed
            followed.decisions.popleft()
            followed.drawn += 1
            if followed.drawn % ACKNOWLEDGED_EACH == 0:
                self.send(Drawn(followed.drawn))

    def send(self, message: Message) -> None:
        self._outgoing.append(message)
        self._waker.wake()

    def stop(self) -> None:
        """Ask the thread to say goodbye and end. Does not wait."""
        with self.changed:
            if not self._closing_since:
                self._closing_since = time.monotonic()
                self._outgoing.append(Bye())
            self.changed.notify_all()
        self._waker.wake()

    def close(self) -> None:
        self.stop()
        process_exit.join([self._thread], 2 * LINGER_SECONDS)

    def _run(self) -> None:
        connection = self._connection
        selector = selectors.DefaultSelector()
        forks.close_in_child(selector)
        try:
            selector.register(self._waker.reading, selectors.EVENT_READ)
            selector.register(connection.sock, selectors.EVENT_READ)
            while not self._turn(selector):
                pass
        except Exception as error:  # noqa: BLE001 - the supervisor of the stream: whoever draws raises it
            connection.ended = f"{type(error).__name__}: {error}"
        finally:
            selector.close()
            connection.close()
            self._waker.close()
            with self.changed:
                self.followed.lost = connection.ended or "it was closed here"
                self.changed.notify_all()

    def _turn(self, selector: selectors.BaseSelector) -> bool:
        connection = self._connection
        until = self._closing_since + LINGER_SECONDS if self._closing_since else None
        for key, events in selector.select(max(until - time.monotonic(), 0.0) if until else None):
            if key.fileobj is self._waker.reading:
                self._waker.drain()
            elif events & selectors.EVENT_READ:
                self._hear(connection.receive())
        while self._outgoing and connection.has_room:
            connection.put(self._outgoing.popleft())
        connection.flush()
        more = selectors.EVENT_WRITE if connection.has_output else 0
        selector.modify(connection.sock, selectors.EVENT_READ | more)
        if connection.ended:
            return True
        if not self._closing_since:
            return False
        if not connection.has_output and not self._outgoing:
            connection.shut()  # the leader has read the rest when it closes its end
        return time.monotonic() >= self._closing_since + LINGER_SECONDS

    def _hear(self, messages: list[Message]) -> None:
        with self.changed:
            for message in messages:
                if isinstance(message, Bye):
                    self._connection.ended = "it closed its loader"
                elif not self.followed.hear(message):
                    self._connection.ended = f"it sent what makes no sense here ({type(message).__name__})"
            self.changed.notify_all()
