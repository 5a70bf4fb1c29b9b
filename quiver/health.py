"""The health of peers, judged by the outcomes of its requests: whom to avoid, when and how much to hedge. Pure.

A peer may be alive and useless: stopped, stuck, or ten times slower than the others (a grey failure). So a peer is
judged by outcomes, and compared with the others, never with a constant alone: where all are slow, nobody is avoided and
nothing is hedged.

- ``Health`` has a circuit breaker per peer. It opens when a peer does not answer, when hedges overtake it repeatedly,
  or when it is several times slower than the others. It half-opens after a pause (doubled each time, with jitter) for
  one probe, which decides. No request is sent to a peer whose breaker is not closed: a probe costs no batch.
- ``Health`` also says after how long a request is late: at the 95th percentile of what the rack usually takes (Dean and
  Barroso, The Tail at Scale, CACM 2013). Percentiles are exact, over a window of the last answers of each peer: it is
  small enough to be sorted, and forgets, which P² (Jain and Chlamtac, 1985) does not.
- ``HedgeBudget`` caps what hedges transfer twice: a share of all bytes read, and a burst for the first batches.

Invariant: of n peers that are compared, at most a third (at least one) are avoided because they are slower than the
others. The caller passes the time, in seconds; not safe from threads.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Final

from quiver.backoff import Backoff

WINDOW: Final = 64  # answers of a peer that its percentiles are computed from
FEW: Final = 8  # fewer answers say nothing; percentiles are computed anew after so many
RECENT: Final = 16  # answers that show whether a peer is slow now
SLOW_RATIO: Final = 4.0  # a peer is slow if it takes this many times as long as the others,
SLOW_SECONDS: Final = 0.02  # and this much longer: below it nobody waits noticeably
LATE_WINDOW: Final = 8  # requests of which
LATE_MAX: Final = 3  # so many may be late before the breaker opens
HEDGE_SECONDS_MIN: Final = 0.1  # a request is not late before; a loaded machine needs as long now and then
HEDGE_SECONDS_UNKNOWN: Final = 0.15  # if it is not known how long the rack usually takes
GIVE_UP_SECONDS_MIN: Final = 0.6  # a request that could not be hedged ends after this long,
GIVE_UP_RATIO: Final = 8.0  # and after this many times the 95th percentile
PAUSE_SECONDS: Final = 1.0  # before a breaker half-opens for the first time
PAUSE_SECONDS_MAX: Final = 10.0  # probes are cheap and in the background: a peer that is back is used within seconds
PAUSE_JITTER: Final = 0.5
PROBE_SECONDS_MAX: Final = 30.0  # a probe without a result is forgotten
FORGET_SECONDS: Final = 30.0  # after so long in use, a peer's failures are forgotten
PEERS_MAX: Final = 4096  # as many as a ring has
HEDGED_SHARE: Final = 0.05
HEDGED_BURST_BYTES: Final = 32 << 20
# The time of a request, for comparing requests of different sizes: so long, and a byte at a gigabyte per second. It
# need not be right, since it is only ever compared with itself.
REQUEST_SECONDS: Final = 1e-3
BYTES_PER_SECOND: Final = 1e9


class State(enum.Enum):
    """Of a breaker."""

    CLOSED = enum.auto()  # the peer is used
    OPEN = enum.auto()  # it is avoided
    HALF_OPEN = enum.auto()  # it is avoided, and a probe is under way


class Cause(enum.Enum):
    """Why a breaker opened."""

    SILENT = enum.auto()  # it did not answer
    SLOW = enum.auto()  # it answers, too slowly


@dataclass(slots=True)
class _Peer:
    backoff: Backoff
    state: State = State.CLOSED
    cause: Cause = Cause.SILENT
    changed_at: float = -inf
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    late: deque[bool] = field(default_factory=lambda: deque(maxlen=LATE_WINDOW))
    answers: int = 0
    typical: float = 0.0  # the median pace; 0: not known
    high: float = 0.0  # the 95th percentile

    def recent_pace(self, share: float) -> float:
        """Return the pace that this share of the recent answers was below."""
        recent = sorted(list(self.paces)[-RECENT:])
        return recent[int(len(recent) * share)]


def nominal_seconds(size_bytes: int) -> float:
    return REQUEST_SECONDS + size_bytes / BYTES_PER_SECOND


class Health:
    """The health of all peers of one reader."""

    def __init__(self, pause_seconds: float = PAUSE_SECONDS, pause_seconds_max: float = PAUSE_SECONDS_MAX) -> None:
        self._pauses = pause_seconds, pause_seconds_max
        self._peers: dict[str, _Peer] = {}
        self._now = 0.0
        self._typical = self._high = 0.0  # of the rack: medians over its peers; 0: not known

    def __repr__(self) -> str:
        avoided = [f"{url} {it.cause.name.lower()}" for url, it in self._peers.items() if it.state is not State.CLOSED]
        return f"Health({len(self._peers)} peers, avoided: {', '.join(avoided) or 'none'})"

    # -- decisions ----------------------------------------------------------------------------------------------------

    def is_avoided(self, url: str) -> bool:
        """Whether to send no request to a peer."""
        peer = self._peers.get(url)
        return peer is not None and peer.state is not State.CLOSED

    def is_silent(self, url: str) -> bool:
        """Whether a peer is avoided because it did not answer."""
        peer = self._peers.get(url)
        return peer is not None and peer.state is not State.CLOSED and peer.cause is Cause.SILENT

    def failures(self, url: str) -> int:
        """Return how often a peer's breaker opened in a row."""
        peer = self._peers.get(url)
        return peer.backoff.failures if peer is not None else 0

    def late_after_seconds(self, size_bytes: int) -> float:
        """Return after how long a request for so many bytes is late, and worth a hedge."""
        usual = self._high * nominal_seconds(size_bytes) if self._high else HEDGE_SECONDS_UNKNOWN
        return max(usual, HEDGE_SECONDS_MIN)

    def give_up_after_seconds(self, size_bytes: int) -> float:
        """Return after how long to ask another peer instead; infinity if it is not known what is usual."""
        usual = self._high * nominal_seconds(size_bytes)
        return max(GIVE_UP_SECONDS_MIN, GIVE_UP_RATIO * usual) if usual else inf

    def is_slow(self, seconds: float, size_bytes: int) -> bool:
        """Whether an answer took several times as long as it usually takes."""
        return self._exceeds(seconds / nominal_seconds(size_bytes), self._typical, size_bytes)

    # -- events -------------------------------------------------------------------------------------------------------

    def answered(self, url: str, seconds: float, size_bytes: int, now: float) -> None:
        """A peer answered completely, with bytes that it had: no time was spent on fills."""
        peer = self._peer(url, now)
        if peer.state is not State.CLOSED:  # asked all the same, for want of others: a probe decides whether it is back
            return
        peer.paces.append(seconds / nominal_seconds(size_bytes))
        peer.late.append(False)
        peer.answers += 1
        if len(peer.paces) < FEW or peer.answers % FEW:
            return
        ordered = sorted(peer.paces)
        peer.typical, peer.high = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.95)]
        known = [it for it in self._peers.values() if it.typical and it.state is State.CLOSED]
        self._typical, self._high = median(it.typical for it in known), median(it.high for it in known)
        suspicious = self._exceeds(peer.recent_pace(0.25), self._typical, size_bytes)
        if suspicious and self._is_outlier(peer, known, size_bytes):
            self._open(peer, Cause.SLOW, now)

    def overtaken(self, url: str, now: float) -> None:
        """A hedge was faster than a peer."""
        peer = self._peer(url, now)
        if peer.state is not State.CLOSED:  # requests from before it was avoided end late: a probe decides
            return
        peer.late.append(True)
        if sum(peer.late) >= LATE_MAX:
            self._open(peer, Cause.SLOW, now)

    def failed(self, url: str, now: float) -> None:
        """A peer did not answer, or not to the end."""
        peer = self._peer(url, now)
        if peer.state is State.CLOSED:
            self._open(peer, Cause.SILENT, now)
        peer.cause = Cause.SILENT

    def recovered(self, url: str, now: float) -> None:
        """A peer that was silent answered a request. One that was slow has to pass a probe."""
        if self.is_silent(url):
            self._close(self._peer(url, now), now)

    def begin_probes(self, now: float) -> list[str]:
        """Return the avoided peers whose pause has ended: the caller probes each once, and calls ``probed``."""
        self._now = max(self._now, now)
        due = []
        for url, peer in self._peers.items():
            lost = peer.state is State.HALF_OPEN and now - peer.changed_at > PROBE_SECONDS_MAX
            if lost or (peer.state is State.OPEN and not peer.backoff.is_waiting):
                peer.state, peer.changed_at = State.HALF_OPEN, now
                due.append(url)
        return due

    def probed(self, url: str, *, good: bool, now: float) -> None:
        """A probe ended: the breaker closes, or opens for longer."""
        peer = self._peer(url, now)
        if peer.state is not State.HALF_OPEN:
            return
        if good:
            self._close(peer, now)
        else:
            peer.state, peer.changed_at = State.OPEN, now
            peer.backoff.fail()

    def retain(self, urls: Iterable[str]) -> None:
        """Forget all other peers: they left the ring."""
        kept = set(urls)
        self._peers = {url: peer for url, peer in self._peers.items() if url in kept}

    # -- inside -------------------------------------------------------------------------------------------------------

    def _peer(self, url: str, now: float) -> _Peer:
        self._now = max(self._now, now)
        peer = self._peers.get(url)
        if peer is None:
            if len(self._peers) >= PEERS_MAX:
                del self._peers[next(iter(self._peers))]
            peer = self._peers[url] = _Peer(Backoff(*self._pauses, jitter=PAUSE_JITTER, clock=lambda: self._now))
        return peer

    def _is_outlier(self, peer: _Peer, known: list[_Peer], size_bytes: int) -> bool:
        """Whether a peer is slow, now and compared with the others, and may be avoided for it."""
        others = [it.recent_pace(0.75) for it in known if it is not peer]  # now too: perhaps all are becoming slow
        avoided = sum(it.state is not State.CLOSED and it.cause is Cause.SLOW for it in self._peers.values())
        if len(peer.paces) < RECENT or not others or avoided >= max((len(known) + avoided) // 3, 1):
            return False
        return self._exceeds(peer.recent_pace(0.25), median(others), size_bytes)

    def _exceeds(self, pace: float, usual: float, size_bytes: int) -> bool:
        excess_seconds = (pace - usual) * nominal_seconds(size_bytes)
        return usual > 0 and pace > SLOW_RATIO * usual and excess_seconds > SLOW_SECONDS

    def _open(self, peer: _Peer, cause: Cause, now: float) -> None:
        if peer.state is not State.CLOSED:
            return
        if now - peer.changed_at > FORGET_SECONDS:
            peer.backoff.succeed()
        peer.state, peer.cause, peer.changed_at = State.OPEN, cause, now
        peer.backoff.fail()
        peer.paces.clear()
        peer.late.clear()
        peer.typical = peer.high = 0.0

    def _close(self, peer: _Peer, now: float) -> None:
        peer.state, peer.changed_at = State.CLOSED, now


class HedgeBudget:
    """How many bytes hedges may transfer twice: never more than ``burst_bytes`` and ``share`` of the bytes read."""

    def __init__(self, share: float = HEDGED_SHARE, burst_bytes: int = HEDGED_BURST_BYTES) -> None:
        self._share = share
        self._burst_bytes = burst_bytes
        self._left_bytes = float(burst_bytes)

    def __repr__(self) -> str:
        return f"HedgeBudget({self._left_bytes:.0f} of {self._burst_bytes} bytes left)"

    def earn(self, size_bytes: int) -> None:
        """Count bytes that were read."""
        self._left_bytes = min(self._left_bytes + self._share * size_bytes, self._burst_bytes)

    def take(self, size_bytes: int) -> bool:
        """Take what a hedge may transfer in vain; return whether there was so much."""
        if size_bytes > self._left_bytes:
            return False
        self._left_bytes -= size_bytes
        return True

    def refund(self, size_bytes: int) -> None:
        """Give back what was taken and not transferred."""
        self._left_bytes = min(self._left_bytes + size_bytes, self._burst_bytes)
