"""What is run: datasets, jobs, the size of the cache and the origin's bandwidth, as values.

Rates are samples per second and rank, as in the table of docs/allocation.md. ``pace`` makes a case faster without
changing any ratio: samples are larger by that factor, so that each job reads more bytes per second and passes through
its dataset sooner. CPU per sample hardly depends on its size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

MB: Final = 1_000_000


@dataclass(frozen=True)
class Source:
    """A dataset: random bytes, in samples of one size."""

    name: str
    size_bytes: int = 100 * MB
    sample_bytes: int = 12_000


@dataclass(frozen=True)
class Job:
    """``rate``: samples per second and rank. ``group``: of trials that count once. ``ordered``: a fixed order."""

    name: str
    source: str
    rate: float
    ranks: int = 1
    ordered: bool = False
    group: str = ""
    tenant: str = ""
    weight: float = 1.0


@dataclass(frozen=True)
class Case:
    """``cached``: of all datasets together. ``origin``: of the need under an equal split; 0: unlimited.

    ``asks``: the row of the table that it belongs to. ``warm`` and ``window``: seconds at pace 1.
    """

    name: str
    row: str
    sources: tuple[Source, ...]
    jobs: tuple[Job, ...]
    cached: float = 0.2
    origin: float = 0.6
    policies: tuple[str, ...] = ("none", "max-min")
    warm: float = 60.0
    window: float = 80.0

    def at_pace(self, pace: float) -> Case:
        sources = tuple(replace(it, sample_bytes=round(it.sample_bytes * pace)) for it in self.sources)
        return replace(self, sources=sources, warm=self.warm / pace, window=self.window / pace)

    def quick(self) -> Case:
        """Return a case of the same shape that takes seconds: its figures mean nothing."""
        sources = tuple(replace(it, size_bytes=MB, sample_bytes=6_000) for it in self.sources)
        jobs = tuple(replace(it, ranks=min(it.ranks, 2), rate=min(it.rate, 100.0)) for it in self.jobs)
        return replace(self, sources=sources, jobs=jobs, cached=0.6, warm=2.0, window=1.0)

    def source(self, name: str) -> Source:
        return next(it for it in self.sources if it.name == name)

    def need(self, job: Job) -> float:
        """Return f* of all its ranks, in bytes per second."""
        return job.rate * job.ranks * self.source(job.source).sample_bytes

    @property
    def capacity_bytes(self) -> float:
        return self.cached * sum(it.size_bytes for it in self.sources)

    @property
    def need_at_equal_split(self) -> float:
        """Return the origin bytes per second that all would need, with the cache split equally between datasets."""
        each = self.capacity_bytes / len(self.sources)
        return sum(self._stream(it) * max(1 - each / it.size_bytes, 0.0) for it in self.sources)

    @property
    def origin_rate(self) -> float:
        """Bytes of samples per second; 0: unlimited."""
        return self.origin * self.need_at_equal_split

    def _stream(self, source: Source) -> float:
        its = [job for job in self.jobs if job.source == source.name]
        shared = max((self.need(job) for job in its if not job.ordered), default=0.0)
        return shared + sum(self.need(job) for job in its if job.ordered)


def _pair(sample_bytes: int) -> tuple[Source, Source]:
    return Source("a", sample_bytes=sample_bytes), Source("b", sample_bytes=sample_bytes)


DISJOINT: Final = (
    ("8x50-1x50", 12_000, (Job("wide", "a", 50, ranks=8), Job("narrow", "b", 50))),
    ("1x300-1x30", 16_000, (Job("fast", "a", 300), Job("slow", "b", 30))),
    ("8x5-1x300", 16_000, (Job("wide", "a", 5, ranks=8), Job("fast", "b", 300))),
)
MIXTURES: Final = (
    Case("two-substituting", "predicted", _pair(12_000), (Job("fast", "a", 400), Job("slow", "b", 130)), origin=0.7),
    Case(
        "one-ordered", "predicted", _pair(12_000), (Job("fixed", "a", 300, ordered=True), Job("free", "b", 300)),
        origin=0.7,
    ),
    Case(
        "two-on-one", "predicted", _pair(12_000), (Job("x", "a", 350), Job("y", "a", 250), Job("z", "b", 200)),
        origin=0.7,
    ),
    Case(
        "a-group", "predicted", _pair(12_000),
        (*(Job(f"trial-{at}", "a", 200, group="sweep") for at in range(4)), Job("alone", "b", 300)), origin=0.7,
    ),
    Case(
        "three-datasets", "predicted",
        (Source("a", 60 * MB), Source("b", 100 * MB), Source("c", 40 * MB)),
        (Job("p", "a", 300), Job("q", "b", 200), Job("r", "c", 100)), origin=0.6,
    ),
)  # fmt: skip
CASES: Final = (
    *(Case(f"disjoint-{name}", "disjoint", _pair(size), jobs) for name, size, jobs in DISJOINT),
    *(Case(f"ample-{name}", "ample", _pair(size), jobs, origin=2.0) for name, size, jobs in DISJOINT),
    # The compute-bound job needs a tenth of the bytes per second.
    Case("io-hungry", "io-hungry", _pair(16_000), (Job("io", "a", 300), Job("compute", "b", 30)), origin=0.7,
         policies=("none", "max-min", "throughput")),
    *(replace(it, policies=("max-min",)) for it in MIXTURES),
    Case("nothing-one-dataset", "nothing-to-gain", (Source("a"),), (Job("x", "a", 300), Job("y", "a", 300)),
         origin=0.9),
    Case("nothing-all-cached", "nothing-to-gain", _pair(12_000), (Job("x", "a", 300), Job("y", "b", 100)),
         cached=1.3, origin=0.0),
)  # fmt: skip
