"""Which consumers need a fetch now: how long what is resident lasts each of them. Pure.

Fetching for consumers that read the same dataset is put off until the fastest of them would soon have read the next
shard, since waiting lets more of them share a read. Those of another dataset have no part in that: patience with them
would save nothing. So for the one consumer that reads a dataset alone, the next shard is fetched at once if there is
room for it. The ranks of one job are as one consumer: no sample is read by two of them, so there is no read to share,
and a job that waits for patience at the start of its epoch has an idle origin then and a late one at its end.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from quiver.digest import Digest
from quiver.residency.consumers import Consumer, DatasetNeeds, Mask
from quiver.residency.needs import Needs
from quiver.residency.origin_estimate import OriginEstimate

LOW_SHARDS: Final = 1.25  # runway of a dataset's fastest consumer below which the next shard is fetched
STARVING_SHARDS: Final = 0.25  # runway, at the end of a fill, below which a needed shard may be evicted
SILENT_REPORTS: Final = 3.0  # report intervals without a report, after which nothing is fetched for a consumer
RANKS_LEFT_MAX: Final = 1.1  # of a dataset that the ranks of one job have left together: what is reported is rounded up
MUCH_WAITED: Final = 0.1  # of its time, that a loop waited: then bandwidth is short
REPORT_SECONDS_MAX: Final = 1.0  # between two reports of a consumer with a long runway
ORIGIN_SHARE: Final = 0.8  # of the origin's measured bandwidth that decisions rely on


class Hungry(NamedTuple):
    """A consumer that needs a fetch now.

    ``starving``: its runway would not last until the fetch ends. ``dry``: it has next to nothing left now. ``low``: its
    runway is short; if not, it is fetched for only because its job reads alone, and patience saves nothing.
    ``seconds``: how long its runway lasts.
    """

    consumer: Consumer
    missing: Mask
    starving: bool
    dry: bool
    low: bool
    seconds: float


class Runway(NamedTuple):
    """Bytes that a consumer has ahead of it now: resident in all; of what is mine, resident and absent.

    ``to_fetch``: bytes of the whole shards that are absent, of which this consumer may read only a part.
    """

    ahead: float
    local: float
    absent: float
    to_fetch: float


class Hunger:
    """The runways of one round's consumers."""

    def __init__(self, needs: Needs, now: float, origin: OriginEstimate) -> None:
        self._needs, self._now, self._origin = needs, now, origin
        self._reading: dict[Digest, list[Consumer]] = {}
        self._are_ranks: dict[Digest, bool] = {}
        self._is_scarce: bool | None = None
        for it in needs.consumers.values():
            if it.is_reading:
                self._reading.setdefault(it.dataset, []).append(it)

    def reading(self, name: Digest) -> list[Consumer]:
        """Return the consumers of a dataset that have something left to read."""
        return self._reading.get(name, [])

    @property
    def datasets(self) -> list[Digest]:
        """The datasets of which somebody has something left to read."""
        return list(self._reading)

    @property
    def is_scarce(self) -> bool:
        """Whether somebody waits so much that a read more would be missed: bandwidth is short."""
        if self._is_scarce is None:
            waits = (it.report.measured.waited for each in self._reading.values() for it in each)
            self._is_scarce = any(waited >= MUCH_WAITED for waited in waits)
        return self._is_scarce

    def are_ranks(self, name: Digest) -> bool:
        """Whether those who read a dataset are ranks of one job: they have its name, and no part of it twice."""
        if name not in self._are_ranks:
            reading, sizes = self.reading(name), self._needs.sizes[self._needs.datasets[name].slots]
            jobs = {it.report.identity.job for it in reading}
            left = sum(float(it.left.sum()) for it in reading)
            self._are_ranks[name] = len(jobs) == 1 and "" not in jobs and left <= RANKS_LEFT_MAX * float(sizes.sum())
        return self._are_ranks[name]

    def of(self, it: Consumer, here: Mask, missing: Mask) -> Hungry | None:
        """Return what a consumer's hunger is, ``None`` for none. ``here``, ``missing``: of its dataset's shards."""
        dataset, reading = self._needs.datasets[it.dataset], self.reading(it.dataset)
        runway = self.runway(it, here, missing)
        fastest = max((each.report.rate for each in reading if self.is_heard(each)), default=0.0)
        low = self._is_low(it, dataset, runway, fastest)
        if not low and len(reading) > 1 and not self.are_ranks(it.dataset):
            return None
        seconds = runway.ahead / it.report.rate if it.report.rate > 0 else 0.0
        dry = runway.ahead <= STARVING_SHARDS * dataset.shard_bytes
        return Hungry(it, missing, runway.ahead <= self.little(it), dry, low, seconds)

    def runway(self, it: Consumer, here: Mask, missing: Mask) -> Runway:
        local = float(it.left_mine @ here)
        read_since = it.report.rate * (self._now - it.reported_at)
        ahead = it.report.ahead_bytes + (local - it.local_bytes) - read_since
        mine_since = read_since * self._needs.datasets[it.dataset].mine_share
        sizes = self._needs.sizes[self._needs.datasets[it.dataset].slots]
        return Runway(ahead, local - mine_since, float(it.left_mine @ missing), float(sizes @ missing))

    def little(self, it: Consumer) -> float:
        """Return the runway below which a consumer starves: a shard fetched now arrives one fill later."""
        shard_bytes = self._needs.datasets[it.dataset].shard_bytes
        return STARVING_SHARDS * shard_bytes + it.report.rate * self._origin.fill_seconds

    def is_heard(self, it: Consumer) -> bool:
        """Whether a consumer reported recently. The progress of a silent one is unknown."""
        pause = max(self._origin.report_seconds, REPORT_SECONDS_MAX)
        return self._now - it.reported_at <= SILENT_REPORTS * pause

    def spared(self, name: Digest, here: Mask, *, alone: bool) -> list[Consumer]:
        """Return the consumers of a dataset whose shards are not evicted for a starving one.

        A shard just fetched for one consumer has most left in it, and few need it. If the next starving consumer had it
        evicted, and so on, shards would replace one another before they are read, and no consumer would progress.
        ``alone``: it is the starving one itself, and reads alone. Then it replaces its own shards only if it waits, and
        what it has is too little for a batch; it may not know yet of what came a moment ago.
        """
        spared = []
        for it in self.reading(name):
            if not self.is_heard(it):
                continue
            runway = self.runway(it, here, it.pending)
            if alone:
                some_bytes = STARVING_SHARDS * self._needs.datasets[name].shard_bytes
                keeps = runway.ahead > 0 or runway.local > some_bytes
            else:
                # A rank that reads goes on to read what others of its job have read: to fetch it again would cost a
                # read of the whole shard, which only an origin with bandwidth to spare gives for nothing.
                reads_on = it.report.ahead_bytes > 0 and self.is_scarce and self.are_ranks(name)
                keeps = reads_on or max(runway.ahead, runway.local) <= self.little(it)
            if keeps:
                spared.append(it)
        return spared

    def _is_low(self, it: Consumer, dataset: DatasetNeeds, runway: Runway, fastest: float) -> bool:
        """Return whether a consumer's runway is short, in all and of what is mine."""
        rate, origin = it.report.rate, self._origin
        if rate <= 0:
            return runway.ahead < LOW_SHARDS * dataset.shard_bytes
        low_seconds = max(LOW_SHARDS * dataset.shard_bytes / fastest, origin.fill_seconds) + origin.report_seconds
        # Of a consumer that waits, however much is here does not make a batch: at the end of an epoch all that is left
        # may be of one daemon, and each would take the others to be late.
        waits = it.report.ahead_bytes <= 0 and runway.ahead <= STARVING_SHARDS * dataset.shard_bytes
        if runway.ahead < rate * low_seconds and (waits or runway.local < rate * low_seconds * dataset.mine_share):
            return True
        if origin.rate <= 0 or dataset.mine_share <= 0:
            return False
        # The latest time to begin: with a slow origin, fetches must start early enough to finish within the epoch.
        mine_rate = rate * dataset.mine_share
        seconds = (runway.local + runway.absent) / mine_rate if mine_rate > 0 else np.inf
        return bool(seconds - runway.to_fetch / (origin.rate * ORIGIN_SHARE) < low_seconds)
