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
from quiver_client.loader.replicas.messages import Batch, Bye, Drawn, Join, Left, Message

LINGER_SECONDS: Final = 0.5
ACKNOWLEDGED_EACH: Final = 8  # batches
QUEUED_MAX: Final = AHEAD_MAX + ACKNOWLEDGED_EACH  # a leader that sends more does not count what was drawn


class FollowedPass:
    """What a follower knows of one pass that it joined. Values only."""

    def __init__(self) -> None:
        self.decisions: deque[bytes] = deque()  # received, and not drawn yet
        self.drawn = 0
        self.left: Left | None = None  # how the leader left the pass

    @property
    def is_untouched(self) -> bool:
        """Whether nothing of it was received."""
        return not self.decisions and not self.drawn and self.left is None


class Followed:
    """What a follower knows of the passes that it reads. Values only."""

    def __init__(self) -> None:
        self.passes: dict[int, FollowedPass] = {}
        self.lost = ""  # why the connection ended
        self.said_bye = False  # the leader ended it on purpose

    def hear(self, message: Message) -> bool:
        """Take in what the leader says; return whether it makes sense. Passes that were left here are ignored."""
        if not isinstance(message, Batch | Left):
            return False
        followed = self.passes.get(message.number)
        if followed is None:
            return True
        if isinstance(message, Left):
            followed.left = message
        else:
            followed.decisions.append(message.decision)
        return len(followed.decisions) <= QUEUED_MAX


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

    def join(self, number: int) -> None:
        """Join a pass of the leader's."""
        with self.changed:
            self.followed.passes[number] = FollowedPass()
            self.send(Join(number))

    def leave(self, number: int, consumed: int, *, at_end: bool) -> None:
        with self.changed:
            if self.followed.passes.pop(number, None) is not None:
                self.send(Left(number, consumed, at_end))
            self.changed.notify_all()

    def decision(self, number: int) -> bytes | None:
        """Return the decision of the next batch of a pass, ``None`` if it did not arrive yet."""
        with self.changed:
            followed = self.followed.passes.get(number)
            return followed.decisions[0] if followed is not None and followed.decisions else None

    def drawn(self, number: int) -> None:
        """The next batch of a pass is drawn."""
        with self.changed:
            followed = self.followed.passes[number]
            followed.decisions.popleft()
            followed.drawn += 1
            if followed.drawn % ACKNOWLEDGED_EACH == 0:
                self.send(Drawn(number, followed.drawn))

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
                    self._connection.ended, self.followed.said_bye = "it closed its loader", True
                elif not self.followed.hear(message):
                    self._connection.ended = f"it sent what makes no sense here ({type(message).__name__})"
            self.changed.notify_all()
