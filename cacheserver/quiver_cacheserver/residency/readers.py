"""Readers that report no needs, such as a stock ``DataLoader``: what this daemon sees of them, for the allocation.

Each read names a manifest, and its connection may have introduced itself (``quiver.introduction``). From the bytes
read per manifest and reader follow rates; the workers of one job, and its ranks if they say their job's name, are one
reader. Such a reader takes samples in an order of its own, so its misses are its own: an *ordered* one. How fast it
could read, and how long it waits, cannot be seen from here.

Nothing is counted twice: reads for a consumer that reports needs are left out, since its report says more. The read
path adds to one counter per request. The table is bounded, per client and in all, and a reader that stops reading is
soon no longer returned.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from quiver.digest import Digest
from quiver.domain import SINGLE, Domain
from quiver.identity import NOBODY, Identity
from quiver.introduction import Introduction
from quiver.manifest import Manifest
from quiver.residency import Needs
from quiver.ring import Ring
from quiver_cacheserver.dataset_names import DatasetNames
from quiver_cacheserver.names import name_in
from quiver_cacheserver.opened import OpenManifests
from quiver_cacheserver.rack.registry import Registry

READERS_MAX: Final = 8192  # of a rack's 2,000 processes each reads a few datasets; workers count with their parent
READERS_PER_CLIENT_MAX: Final = 2048
LOOK_SECONDS: Final = 0.25  # for which what was seen is returned again: a look at 2,000 readers takes 12 ms
SAMPLE_SECONDS: Final = 1.0  # between two samples of a counter, and the least time that a rate is taken over
STEADY_SECONDS: Final = 5.0  # of a window from which on its rate is no burst of workers that fill their queues
WINDOW_SECONDS: Final = 15.0  # over which rates are taken: more than the pauses between batches of large samples
SHARDS_LOOKED_AT: Final = 8192  # of a manifest, which takes milliseconds, and is exact to a few percent
SHARES_MAX: Final = 1024  # remembered
FORGET_SECONDS: Final = 600.0  # after which what a silent reader has read is forgotten: loops validate for minutes


@dataclass(frozen=True, slots=True)
class ReadBy:
    """Who reads on a connection. ``client``: its account (``Caller.budget``). ``tenant``: of its token, if it has one.

    ``introduction``: what it said of itself, which an older client does not.
    """

    client: str
    domain: Domain = SINGLE
    tenant: str = ""
    introduction: Introduction | None = None

    @property
    def identity(self) -> Identity:
        """Whose reads they are. A token's tenant counts, whatever the introduction says."""
        said = self.introduction.identity if self.introduction is not None else NOBODY
        return replace(said, tenant=self.tenant) if self.tenant else said


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenReader:
    """A job that reads a dataset and reports nothing, as this daemon sees it: an ordered reader.

    ``manifest`` and ``domain``: of the dataset, which ``dataset`` names there (``Needs.datasets``). ``name`` tells it
    from other jobs of its tenant on this dataset: its job, else something opaque, not to be shown. ``throughput``:
    bytes per second that it reads of the whole rack, as far as follows from this daemon's share of the dataset.
    ``rate``: the fastest that it was seen to read lately, so no more than f*, what it could read if it never waited.
    ``attained_bytes``: what it has read, as long as it is remembered. ``processes``: how many opened the dataset.
    """

    dataset: Digest
    manifest: Digest
    domain: Domain
    name: str
    identity: Identity
    dataset_name: str
    throughput: float
    rate: float
    attained_bytes: float
    processes: int = 1


class _Key(NamedTuple):
    domain: Domain
    manifest: Digest
    who: str  # the reader in hexadecimal and its job, else its account


class _Counted:
    """What one process and its workers read of one manifest."""

    __slots__ = ("account", "attained_bytes", "by", "bytes", "fastest", "read_at", "samples", "settled_bytes")

    def __init__(self, by: ReadBy, now: float) -> None:
        self.account = by.client  # whose limit it counts against; a process may come by several connections
        self.by = by
        self.bytes = 0
        self.settled_bytes = 0  # of them, those that are attained, or were read for a consumer that reports
        self.attained_bytes = 0.0  # of the whole rack, by this daemon's share when it was looked at
        self.fastest = 0.0
        self.read_at = now
        self.samples: deque[tuple[float, int]] = deque([(now, 0)])

    def sample(self, now: float, *, reports: bool) -> None:
        """Record the counter now. ``reports``: what was read since the last sample was for a consumer that reports."""
        if reports:
            self.settled_bytes, self.attained_bytes = self.bytes, 0.0
            self.samples.clear()
            self.fastest = 0.0
        if not self.samples or now - self.samples[-1][0] >= SAMPLE_SECONDS:
            fades = 1 - (now - self.samples[-1][0]) / FORGET_SECONDS if self.samples else 0.0
            self.samples.append((now, self.bytes))
            steady = self.rate(now) if now - self.samples[0][0] >= STEADY_SECONDS else 0.0
            self.fastest = max(self.fastest * max(fades, 0.0), steady)
        while len(self.samples) > 2 and now - self.samples[1][0] >= WINDOW_SECONDS:
            self.samples.popleft()

    def attain(self, whole: float) -> float:
        """Return what it has read of the whole rack: what it read here since the last look, ``whole`` times.

        Shares change with the ring, and what was read before did not become less, nor more.
        """
        if whole > 0:
            read = self.bytes  # another thread may add to it
            self.attained_bytes += (read - self.settled_bytes) * whole
            self.settled_bytes = read
        return self.attained_bytes

    def rate(self, now: float) -> float:
        """Return bytes per second over the window; 0 while it is shorter than ``SAMPLE_SECONDS``."""
        began, before = self.samples[0]
        return (self.bytes - before) / (now - began) if now - began >= SAMPLE_SECONDS else 0.0


class Readers:
    """What readers read here. ``read`` is safe from threads; ``seen`` belongs to the event loop."""

    def __init__(self, needs: Needs, names: DatasetNames, share_of: Callable[[Digest, Domain], float]) -> None:
        """``share_of`` a manifest: the part of its bytes that readers read from this daemon, 0 for unknown."""
        self._needs = needs
        self._names = names
        self._share_of = share_of
        self._lock = threading.Lock()
        self._counted: OrderedDict[_Key, _Counted] = OrderedDict()  # the one that read longest ago first
        self._of_client: Counter[str] = Counter()
        self._looked_at, self._found = -LOOK_SECONDS, list[SeenReader]()

    def __len__(self) -> int:
        return len(self._counted)

    def read(self, by: ReadBy, manifest: Digest, count: int, now: float) -> None:
        """Count bytes that were read of a manifest, or looked for here in vain and read elsewhere."""
        said = by.introduction
        who = f"{said.reader.hex()} {said.identity.job}" if said is not None else by.client
        key = _Key(by.domain, manifest, who)
        with self._lock:
            counted = self._counted.get(key)
            if counted is None:
                if self._of_client[by.client] >= READERS_PER_CLIENT_MAX:
                    return
                counted = self._counted[key] = _Counted(by, now)
                self._of_client[by.client] += 1
                while len(self._counted) > READERS_MAX:
                    self._drop(next(iter(self._counted)))
            else:
                self._counted.move_to_end(key)
            counted.by = by
            counted.bytes += count
            counted.read_at = now

    def seen(self, now: float) -> list[SeenReader]:
        """Return the jobs that read and report nothing, each once per dataset. To be called every second or so."""
        if 0 <= now - self._looked_at < LOOK_SECONDS:
            return self._found
        self._looked_at, self._found = now, self._look(now)
        return self._found

    def _look(self, now: float) -> list[SeenReader]:
        reporting = self._reporting()
        with self._lock:
            for key in [key for key, it in self._counted.items() if now - it.read_at > FORGET_SECONDS]:
                self._drop(key)
            items = list(self._counted.items())
        jobs: dict[tuple[Digest, str, str, str], list[tuple[_Key, _Counted]]] = {}
        for key, counted in items:
            dataset, who, said = name_in(key.domain, key.manifest), counted.by.identity, counted.by.introduction
            follows = said is not None and said.follows and self._needs.has_dataset(dataset)
            reader = said.reader if said is not None else counted.by.client
            counted.sample(now, reports=follows or (dataset, reader) in reporting)
            if counted.bytes > counted.settled_bytes or counted.attained_bytes:
                jobs.setdefault((dataset, who.tenant, who.group, who.job or f"reader {key.who}"), []).append(
                    (key, counted)
                )
        found = (self._of_job(dataset, name, its, now) for (dataset, _, _, name), its in jobs.items())
        return [each for each in found if each.throughput > 0]

    def _of_job(self, dataset: Digest, name: str, its: list[tuple[_Key, _Counted]], now: float) -> SeenReader:
        key, latest = max(its, key=lambda each: each[1].read_at)
        share = self._share_of(key.manifest, key.domain)
        whole = 1 / share if share > 0 else 0.0
        said, rates = latest.by.introduction, [counted.rate(now) for _, counted in its]
        self._names.heard(key.manifest, key.domain, told=said.dataset_name if said is not None else "")
        return SeenReader(
            dataset=dataset,
            manifest=key.manifest,
            domain=key.domain,
            name=name,
            identity=latest.by.identity,
            dataset_name=said.dataset_name if said is not None else "",
            throughput=sum(rates) * whole,
            rate=sum(max(counted.fastest, rate) for (_, counted), rate in zip(its, rates, strict=True) if rate) * whole,
            attained_bytes=sum(counted.attain(whole) for _, counted in its),
            processes=len(its),
        )

    def _reporting(self) -> set[tuple[Digest, bytes | str]]:
        """Return by dataset which readers report needs; for those that do not say which they are, their clients."""
        found: set[tuple[Digest, bytes | str]] = set()
        for name, consumer in self._needs.consumers.items():
            found.add((consumer.dataset, consumer.report.reader))
            lease = self._needs.leases.get(name)
            if lease is not None:
                found.add((consumer.dataset, lease.client))
        return found

    def _drop(self, key: _Key) -> None:
        gone = self._counted.pop(key)
        self._of_client[gone.account] -= 1
        if not self._of_client[gone.account]:
            del self._of_client[gone.account]


class OwnShare:
    """``share_of`` of a daemon: the part of a manifest's bytes whose first owner in the ring it is, as readers read it.

    Of a large manifest it looks at ``SHARDS_LOOKED_AT`` shards; of one that is not open, at the weights in the ring.
    """

    def __init__(self, registry: Registry, opened: OpenManifests, node: str) -> None:
        self._registry = registry
        self._opened = opened
        self._node = node
        self._known: dict[Digest, tuple[Ring, bool, float]] = {}  # by name, with the ring and whether it was open

    def __call__(self, manifest: Digest, domain: Domain) -> float:
        name, ring = name_in(domain, manifest), self._registry.ring
        opened = self._opened.peek(name)
        known = self._known.get(name)
        if known is None or known[0] is not ring or (opened is not None and not known[1]):
            if len(self._known) >= SHARES_MAX:
                self._known.clear()
            known = self._known[name] = ring, opened is not None, own_share(ring, self._node, opened)
        return known[2]


def own_share(ring: Ring, node: str, manifest: Manifest | None) -> float:
    """Return the part of a manifest's bytes whose first owner is this node."""
    own = next((at for at, member in enumerate(ring.members) if member.id == node), -1)
    if manifest is None:
        weights = {at: ring.members[at].weight for at in ring.owning}
        return weights.get(own, 0.0) / max(sum(weights.values()), 1e-9)
    step = -(-manifest.shard_count // SHARDS_LOOKED_AT)
    sizes = manifest.tables.shard_sizes[::step].astype(np.float64)
    is_own = ring.rank(manifest.tables.shard_digests[::step], 1)[:, 0] == own
    return float(sizes[is_own].sum() / max(sizes.sum(), 1.0))
