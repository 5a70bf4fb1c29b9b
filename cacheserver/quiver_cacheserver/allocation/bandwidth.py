"""The bandwidth of origins: how much there is, and whose turn it is to read. Pure; the caller passes the time.

*How much* is measured only while an origin is the limit: while consumers of its datasets are short of data and this
daemon reads it without a pause. What is delivered then is the bandwidth. It stays known when the hunger ends, as the
origin did not become faster by that. A measured limit is exceeded by a quarter on purpose, or it could never be seen
to have risen.

*Whose turn* it is, token buckets say, one per dataset, as fast as the allocation gives it bandwidth. A bucket may go
below zero by one shard, and then waits. What a dataset does not use overflows into its origin's common bucket, which
anyone may empty: bandwidth is never idle for the sake of a share. For the same reason nobody waits while this daemon
reads nothing from the origin: if its bandwidth was measured far too low, buckets divide it wrongly for a while, and the
next measurement is better. A cap (``--origin-rate``) is a bucket for all, and holds in any case.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from quiver.digest import Digest
from quiver.rate import Rate

WINDOW_SECONDS: Final = 2.0  # of reading while consumers are short of data, over which the bandwidth is measured
WEIGHT: Final = 0.3  # of a new window against all before it
BEYOND: Final = 1.25  # of a measured bandwidth, what is asked for
BURST_SECONDS: Final = 1.0  # of its rate, what a bucket holds
DEBT_SECONDS: Final = 4.0  # of its rate, or one shard, what a bucket owes at most
WAIT_SECONDS: Final = (0.01, 1.0)  # bounds of how long a fill waits before it asks again
FRESH_SECONDS: Final = WAIT_SECONDS[0] / 2  # for which filled buckets count as full: many ask, and each asks about all


class Bandwidth:
    """What one origin delivers while it is the limit. ``value``: bytes per second, 0 while it never was.

    Only the time in which fills read it counts, once where several did. What peers give, and what fails, says nothing
    of it: were that time counted, an origin would be taken for slow after a member joined, and be read slowly for it.
    """

    def __init__(self) -> None:
        self._rate = Rate(WINDOW_SECONDS, WEIGHT)
        self._counted_until = 0.0
        self._hungry = False

    @property
    def value(self) -> float:
        return self._rate.value

    def hungry(self, now: float, *, hungry: bool) -> None:
        """Say whether consumers are short of data. Measuring needs to know before it changes."""
        if not self._hungry:
            self._counted_until = now
        self._hungry = hungry

    def was_read(self, began: float, now: float, size_bytes: float) -> None:
        """A fill that began then has read so many bytes of it."""
        if self._hungry:
            self._rate.add(size_bytes, max(now - max(began, self._counted_until), 0.0))
            self._counted_until = now


@dataclass(slots=True)
class _Bucket:
    """Bytes that may be read. ``rate``: how fast it fills; infinite: it limits nothing."""

    rate: float
    at: float
    tokens: float = 0.0

    def fill(self, now: float, added: float = 0.0) -> float:
        """Fill it until now; return what does not fit."""
        if math.isinf(self.rate):
            return 0.0
        most = self.rate * BURST_SECONDS
        filled = self.tokens + self.rate * max(now - self.at, 0.0) + added
        self.at, self.tokens = now, min(filled, most)
        return max(filled - most, 0.0)

    @property
    def wait_seconds(self) -> float:
        """How long until something may be read."""
        if math.isinf(self.rate) or self.tokens > 0:
            return 0.0
        return -self.tokens / self.rate if self.rate > 0 else math.inf


@dataclass(slots=True)
class _Origin:
    spare: float = 0.0
    buckets: dict[Digest, _Bucket] = field(default_factory=dict)
    at: float = -math.inf

    def fill(self, now: float) -> None:
        """Fill the buckets until now. A round of decisions, or thousands of fills that wait, ask at about one time."""
        if 0 <= now - self.at < FRESH_SECONDS:
            return
        self.at = now
        rate = sum(it.rate for it in self.buckets.values())
        over = sum(it.fill(now) for it in self.buckets.values())
        self.spare = min(self.spare + over, rate * BURST_SECONDS)


class Turns:
    """The buckets of all datasets and origins."""

    def __init__(self) -> None:
        self._origins: dict[str, _Origin] = {}
        self._origin_of: dict[Digest, str] = {}
        self._caps: dict[str, _Bucket] = {}
        self._cap_of: dict[Digest, str] = {}

    def set_rates(self, rates: Mapping[Digest, float], origin_of: Mapping[Digest, str], now: float) -> None:
        """Say how fast each dataset may read its origin. A dataset that is not named reads as it likes."""
        before = {name: it for origin in self._origins.values() for name, it in origin.buckets.items()}
        limited = {name: rate for name, rate in rates.items() if math.isfinite(rate)}
        origins: dict[str, _Origin] = {}
        for name, rate in limited.items():
            key = origin_of.get(name, "")
            known = self._origins.get(key)
            origin = origins.setdefault(key, _Origin(known.spare if known is not None else 0.0))
            bucket = before.get(name)
            if bucket is None:
                bucket = _Bucket(rate * BEYOND, now, rate * BURST_SECONDS)
            bucket.fill(now)
            bucket.rate = rate * BEYOND
            origin.buckets[name] = bucket
        self._origins, self._origin_of = origins, {name: origin_of.get(name, "") for name in limited}

    def set_cap(self, dataset: Digest, prefix: str, rate: float, now: float) -> None:
        """Say that a dataset lies below a prefix of which so many bytes per second may be read in all."""
        bucket = self._caps.setdefault(prefix, _Bucket(rate, now, 0.0))
        bucket.fill(now)
        bucket.rate = rate
        self._cap_of[dataset] = prefix

    def is_capped(self, dataset: Digest) -> bool:
        return dataset in self._cap_of

    def keep(self, datasets: set[Digest], now: float) -> None:
        """Forget the caps of other datasets, and prefixes below which nobody reads, if they owe nothing."""
        self._cap_of = {name: prefix for name, prefix in self._cap_of.items() if name in datasets}
        used = set(self._cap_of.values())
        for prefix, bucket in list(self._caps.items()):
            bucket.fill(now)
            if prefix not in used and bucket.tokens >= 0:
                del self._caps[prefix]

    def wait_seconds(self, dataset: Digest, now: float, *, idle: bool = False) -> float:
        """Return how long a fill of this dataset should wait before it asks again; 0 if it may begin now.

        ``idle``: nothing is read from its origin here.
        """
        waits = [0.0]
        cap = self._caps.get(self._cap_of.get(dataset, "\0"))
        if cap is not None:
            cap.fill(now)
            waits.append(cap.wait_seconds)
        origin = self._origins.get(self._origin_of.get(dataset, "\0"))
        if origin is not None:
            origin.fill(now)
            if origin.spare <= 0 and not idle:
                waits.append(origin.buckets[dataset].wait_seconds)
        seconds = max(waits)
        return min(max(seconds, WAIT_SECONDS[0]), WAIT_SECONDS[1]) if seconds > 0 else 0.0

    def credit(self, now: float) -> dict[Digest, float]:
        """Return the seconds of its rate that each limited dataset has in its bucket; negative for a debt."""
        found: dict[Digest, float] = {}
        for origin in self._origins.values():
            origin.fill(now)
            found |= {name: it.tokens / it.rate for name, it in origin.buckets.items() if it.rate > 0}
        return found

    def take(self, dataset: Digest, size_bytes: float) -> None:
        """Record that so many bytes are about to be read; negative: that they were not, after all."""
        cap = self._caps.get(self._cap_of.get(dataset, "\0"))
        if cap is not None:
            cap.tokens -= size_bytes
        origin = self._origins.get(self._origin_of.get(dataset, "\0"))
        if origin is None:
            return
        bucket = origin.buckets[dataset]
        if bucket.tokens <= 0 < origin.spare:
            origin.spare -= size_bytes
        else:
            bucket.tokens = max(bucket.tokens - size_bytes, -max(size_bytes, bucket.rate * DEBT_SECONDS))
