"""What a rank does in its group, as the sampler uses it: decide, follow, or neither if the order is fixed anyway.

The sampler calls ``begin``, ``asked``, ``consumed``, ``leave`` and ``close`` as the training loop goes on; where a
batch is drawn, a leader passes on what it decided and a follower takes what was decided. Whatever the order is, the
decision of a batch is one message: the pass (``Epoch``) encodes and decodes it.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from quiver import forks
from quiver.errors import BadRequest, Misconfigured, Unavailable
from quiver_client import process_exit
from quiver_client.loader.epoch import Deal
from quiver_client.loader.replicas.agreement import Facts, GroupAgreement
from quiver_client.loader.replicas.follower import FollowerStream
from quiver_client.loader.replicas.group import ReplicaGroup
from quiver_client.loader.replicas.leader import LeaderStream
from quiver_client.loader.replicas.log import DecisionLog, PassLog
from quiver_client.loader.replicas.meeting import default_store, meet, publish, try_to_meet
from quiver_client.loader.replicas.messages import frame_bytes_max
from quiver_client.loader.replicas.patience import Patience

TURN_SECONDS: Final = 0.5  # between two checks of a wait
CLOSE_SECONDS: Final = 10.0  # that a leader that closes its loader gives followers to be sent the rest


class Pass(Protocol):
    """What of a pass a role uses. ``Any``: what the order itself uses for the entries of a batch."""

    @property
    def number(self) -> int: ...
    @property
    def pending(self) -> int: ...
    @property
    def identity(self) -> str:
        """A digest of what is pending, in the order of the permutation."""
        ...

    def encode_decision(self, entries: Any) -> bytes: ...
    def decode_decision(self, decision: bytes, count_max: int) -> Any: ...


class Role:
    """The role of a rank that is in no group: it does nothing."""

    leads = True  # this process reports what is needed, and writes the ledger
    follows = False  # another process decides
    is_in_group = False  # other ranks have to get the same samples

    def begin(self, epoch: Pass) -> None:
        """A pass begins. May wait for other ranks. Raises ``Misconfigured``, ``Unavailable``."""

    def has_room(self, epoch: Pass) -> bool:
        """Whether a leader may decide the next batch now."""
        return True

    def decision(self, epoch: Pass) -> Any:
        """Return the entries of a follower's next batch, ``None`` if they did not arrive yet."""
        return None

    def drawn(self, epoch: Pass, entries: Any) -> None:
        """The next batch is about to be drawn."""

    def wait(self, epoch: Pass) -> bool:
        """Wait for what other ranks do, for a moment; ``False`` if no batch waits for them. Raises ``Unavailable``."""
        return False

    def asked(self) -> None:
        """The loop waits for a batch. Raises ``Unavailable`` if a rank of the group is gone."""

    def consumed(self, epoch: Pass, number: int) -> None:
        """The loop is about to receive a batch. Raises ``Misconfigured`` if another rank left the pass before it."""

    def leave(self, epoch: Pass, *, at_end: bool) -> None:
        """The loop left a pass. Does not wait."""

    def finish(self, epoch: Pass) -> None:
        """The loop read a pass to its end. May wait until followers were sent all of it."""

    def close(self) -> None:
        """End the connections. The next pass opens them again."""

    def stop(self) -> None:
        """Like ``close``, without waiting."""


class _Open:
    """A pass that a loop reads."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.consumed = 0  # batches


class Member(Role):
    """The role of a rank whose group has a fixed order: it compares with the others, and communicates nothing else."""

    is_in_group = True

    def __init__(self, group: ReplicaGroup, agreement: GroupAgreement, batch_size: int, timeout_seconds: float) -> None:
        self.leads = group.is_leader
        self._group, self._agreement = group, agreement
        self._batch_size = batch_size
        self._patience = Patience(timeout_seconds)
        self._open: dict[Pass, _Open] = {}

    def begin(self, epoch: Pass) -> None:
        number = self._agreement.begin(default_store(), epoch.number, {"order": epoch.identity})
        self._joined(number)
        self._open[epoch] = _Open(number)

    def asked(self) -> None:
        self._patience.begin()

    def consumed(self, epoch: Pass, number: int) -> None:
        self._patience.end()
        if epoch in self._open:
            self._open[epoch].consumed = number + 1

    def leave(self, epoch: Pass, *, at_end: bool) -> None:
        opened = self._open.pop(epoch, None)
        if opened is not None:
            self._patience.end()
            self._left(opened, at_end=at_end)

    def finish(self, epoch: Pass) -> None:
        self._agreement.finish(default_store(), epoch.number)

    def _joined(self, number: int) -> None: ...
    def _left(self, opened: _Open, *, at_end: bool) -> None: ...


class Leader(Member):
    """Decides for the group. The log of a pass stays until all followers have left the pass."""

    def __init__(self, group: ReplicaGroup, agreement: GroupAgreement, batch_size: int, timeout_seconds: float) -> None:
        super().__init__(group, agreement, batch_size, timeout_seconds)
        self._log = DecisionLog(group.followers)
        self._stream: LeaderStream | None = None

    def _joined(self, number: int) -> None:
        stream = self._stream
        if stream is None or stream.is_closed:
            stream = self._stream = LeaderStream(self._log, frame_bytes_max(self._batch_size))
            publish(default_store(), self._agreement.key, stream.invitation)
        self._wait_until(lambda: not self._log.behind, stream, lambda: self._log.behind, "did not leave its last pass")
        with stream.changed:
            self._log.begin(number)
        stream.wake()

    def has_room(self, epoch: Pass) -> bool:
        return not self._slow(epoch)

    def drawn(self, epoch: Pass, entries: Any) -> None:
        stream, log = self._stream, self._log_of(epoch)
        if stream is None or log is None:
            return
        with stream.changed:
            log.decide(epoch.encode_decision(entries))
        stream.wake()

    def wait(self, epoch: Pass) -> bool:
        stream = self._stream
        if stream is None:
            return False
        with stream.changed:
            if not self._slow(epoch):
                return False
            self._check(stream)
            what = f"did not begin epoch {epoch.number}, or is far behind rank {self._group.own}, the leader"
            self._patience.check(lambda: _named(self._slow(epoch)), what)
            stream.changed.wait(TURN_SECONDS)
            self._agreement.check(default_store())
        return True

    def asked(self) -> None:
        super().asked()
        if self._stream is not None and self._open:
            with self._stream.changed:
                self._check(self._stream)

    def consumed(self, epoch: Pass, number: int) -> None:
        stream, opened = self._stream, self._open.get(epoch)
        if stream is not None and opened is not None:
            with stream.changed:
                rank = self._log.broken_off(opened.number, number + 1)
            if rank is not None:
                raise Misconfigured(_broke_off(f"rank {rank}", epoch.number, f"rank {self._group.own}, its leader,"))
        super().consumed(epoch, number)

    def finish(self, epoch: Pass) -> None:
        super().finish(epoch)
        stream = self._stream
        if stream is not None:
            what = f"did not begin epoch {epoch.number}, which rank {self._group.own}, the leader, has read to its end"
            self._wait_until(lambda: not self._log.unsent and stream.is_flushed, stream, lambda: self._log.unsent, what)

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is None:
            return
        until = time.monotonic() + CLOSE_SECONDS
        with stream.changed, contextlib.suppress(Misconfigured, ValueError):  # then nobody comes
            while self._awaits_followers and not stream.is_closed and time.monotonic() < until:
                stream.changed.wait(TURN_SECONDS)
                self._agreement.check(default_store())
        stream.close()

    @property
    def _awaits_followers(self) -> bool:
        """Whether followers are some batches behind, or about to begin, and nothing has failed."""
        return bool(self._log.unsent) and not self._log.missing and not self._patience.is_exhausted

    def stop(self) -> None:
        # The loader was dropped. Its followers may not have connected yet, or be some batches behind; and whoever drops
        # it, the garbage collector perhaps, must not wait for them.
        if self._stream is not None and not self._stream.is_closed:
            process_exit.start(self.close, "quiver-replicas-end")

    def _left(self, opened: _Open, *, at_end: bool) -> None:
        if self._stream is not None:
            with self._stream.changed:
                self._log.end(opened.number, opened.consumed, at_end=at_end)
                self._stream.changed.notify_all()
            self._stream.wake()

    def _slow(self, epoch: Pass) -> list[int]:
        """Return the followers that keep the next batch from being decided."""
        stream, log = self._stream, self._log_of(epoch)
        if stream is None or log is None:
            return []
        with stream.changed:
            return log.slow

    def _log_of(self, epoch: Pass) -> PassLog | None:
        opened = self._open.get(epoch)
        return self._log.passes.get(opened.number) if opened is not None else None

    def _wait_until(
        self, is_so: Callable[[], bool], stream: LeaderStream, who: Callable[[], Sequence[int]], what: str
    ) -> None:
        self._patience.begin()
        with stream.changed:
            while not is_so() and not stream.is_closed:
                self._check(stream)
                self._patience.check(lambda: _named(who()), what)
                stream.changed.wait(TURN_SECONDS)
                self._agreement.check(default_store())
        self._patience.end()

    def _check(self, stream: LeaderStream) -> None:
        """Raise ``Unavailable`` if the group cannot go on. Called with the stream's lock."""
        if stream.failed is not None:
            raise Unavailable(f"rank {self._group.own}, the leader", "its connections failed") from stream.failed
        for rank in self._log.missing:
            why = f"it is gone, and its group cannot go on: {self._log.lost[rank]}"
            raise Unavailable(_named([rank]), why, lasting=True)


class Follower(Member):
    """Takes what the leader decided. Reports no needs: those of the group are the leader's."""

    follows = True

    def __init__(self, group: ReplicaGroup, agreement: GroupAgreement, batch_size: int, timeout_seconds: float) -> None:
        super().__init__(group, agreement, batch_size, timeout_seconds)
        self._stream: FollowerStream | None = None
        self._meeting = forks.lock()

    def _joined(self, number: int) -> None:
        self._patience.begin()
        stream = self._stream
        if stream is None or stream.is_closed:
            stream = self._connected(meet(default_store(), self._agreement.key, self._group.own, self._check_meeting))
        self._patience.end()
        stream.join(number)

    def decision(self, epoch: Pass) -> Any:
        stream, opened = self._stream, self._open.get(epoch)
        decision = stream.decision(opened.number) if stream is not None and opened is not None else None
        if decision is None:
            return None
        try:
            return epoch.decode_decision(decision, self._batch_size)
        except BadRequest as error:
            raise Unavailable(self._leader, f"it decided what rank {self._group.own} cannot draw: {error}") from error

    def drawn(self, epoch: Pass, entries: Any) -> None:
        if self._stream is not None and epoch in self._open:
            self._stream.drawn(self._open[epoch].number)

    def wait(self, epoch: Pass) -> bool:
        self._meet_again()
        stream = self._stream
        if stream is None:
            return True
        with stream.changed:
            opened = self._open.get(epoch)
            followed = stream.followed.passes.get(opened.number) if opened is not None else None
            if followed is None or followed.decisions:
                return True
            self._check(stream)
            if followed.left is not None:
                raise Misconfigured(_broke_off(self._leader, epoch.number, f"rank {self._group.own}"))
            self._patience.check(lambda: self._leader, f"did not decide a batch of epoch {epoch.number}")
            stream.changed.wait(TURN_SECONDS)
            if not followed.decisions:
                self._agreement.check(default_store())
        return True

    def asked(self) -> None:
        super().asked()
        if self._stream is not None:
            with self._stream.changed:
                self._check(self._stream)

    def consumed(self, epoch: Pass, number: int) -> None:
        stream, opened = self._stream, self._open.get(epoch)
        if stream is not None and opened is not None:
            with stream.changed:
                followed = stream.followed.passes.get(opened.number)
                left = followed.left if followed is not None else None
            if left is not None and number >= left.consumed:
                raise Misconfigured(_broke_off(self._leader, epoch.number, f"rank {self._group.own}"))
        super().consumed(epoch, number)

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def stop(self) -> None:
        if self._stream is not None:
            self._stream.stop()

    def _left(self, opened: _Open, *, at_end: bool) -> None:
        if self._stream is not None:
            self._stream.leave(opened.number, opened.consumed, at_end=at_end)

    @property
    def _leader(self) -> str:
        return f"rank {self._group.leader}, the leader of rank {self._group.own}"

    def _check(self, stream: FollowerStream) -> None:
        """Raise ``Unavailable`` if the leader is gone and had not sent all. Called with the stream's lock."""
        followed = stream.followed
        if not followed.lost:
            return
        for epoch, opened in self._open.items():
            read = followed.passes.get(opened.number)
            is_over = read is not None and read.left is not None
            may_meet_again = followed.said_bye and (read is None or read.is_untouched)
            if epoch.pending and not is_over and not may_meet_again:
                why = f"it is gone, and its group cannot go on: {followed.lost}"
                raise Unavailable(self._leader, why, lasting=True)

    def _connected(self, sock: socket.socket) -> FollowerStream:
        stream = self._stream = FollowerStream(sock, frame_bytes_max(self._batch_size))
        return stream

    def _meet_again(self) -> None:
        """Connect again if the leader closed its loader before it began the pass that this rank has begun."""
        stream = self._stream
        if stream is None or not stream.followed.said_bye or not self._open:
            return
        if not self._meeting.acquire(blocking=False):
            return
        try:
            with stream.changed:
                self._check(stream)
            sock = try_to_meet(default_store(), self._agreement.key, self._group.own)
            if sock is not None:
                stream.close()
                again = self._connected(sock)
                for opened in list(self._open.values()):
                    again.join(opened.number)
        finally:
            self._meeting.release()

    def _check_meeting(self) -> None:
        self._agreement.check(default_store())
        what = "it cannot be connected to, or did not make this loader and begin its pass"
        self._patience.check(lambda: self._leader, what)


def role_of(group: ReplicaGroup | None, identity: str, deal: Deal, *, substitute: bool, timeout: float) -> Role:
    """Return the role of this process. ``substitute``: the order depends on what is resident."""
    if group is None or len(group.members) == 1:
        return Role()
    settings: Facts = {
        "dataset": identity,
        "samples": deal.samples,
        "seed": deal.seed if deal.shuffle else 0,
        "shuffle": deal.shuffle,
        "block_shards": deal.block_shards,
        "drop_last": deal.drop_last,
        "batch_size": deal.batch_size,
        "substitute": substitute,
    }
    agreement = GroupAgreement(group, settings)
    if not substitute:
        return Member(group, agreement, deal.batch_size, timeout)
    return (Leader if group.is_leader else Follower)(group, agreement, deal.batch_size, timeout)


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks) or "a rank"


def _broke_off(who: str, epoch: int, other: str) -> str:
    return (
        f"{who} broke off epoch {epoch} while {other} reads on, and they have to get the same samples. Break a pass off"
        " in all ranks of the group after the same batch, or in none"
    )
