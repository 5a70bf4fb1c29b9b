"""``Profile``: what ``DataLoader.profile()`` returns. Values only.

Sources of the ideas: f* and its use are those of SiloD (EuroSys 2023); probing is that of Quiver (FAST 2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from quiver.sizes import format_rate, format_size
from quiver_client.loader.loop_rate import LoopSpeed
from quiver_client.loader.making import Costs
from quiver_client.loader.probing import Probed
from quiver_client.read_clock import TIERS


@dataclass(frozen=True, slots=True)
class TierReads:
    """What a tier delivered to this rank's batches since its loader was made: ``bytes``, and the ``seconds`` that the
    threads or workers that make batches spent on it, added up."""

    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """How fast one rank's loop reads, and could. Zeros where nothing is known yet, in the first half second for one.

    possible_rate: f*, bytes per second that the loop would read if it never waited for data
    throughput: bytes per second that it does read, waiting included
    samples_per_second: of the same
    wait_share: the share of the loop's time in which it waits for a batch, 0 to 1
    step_seconds: from receiving a batch to asking for the next one
    gpu_seconds: of CUDA work per step; 0 where there is none
    making_seconds: that a thread or worker takes to make a batch of what was read: transform and collation
    makers: threads or workers that make batches at once
    making_rate: samples per second that all of them can make; 0: not known
    batch_bytes, batch_samples: of a batch, on average
    attained_bytes: all that the job has read in this rank, before it was resumed, too
    tiers: by name. ``host`` is a daemon on this machine that hands shards out, ``rack`` daemons over the network,
        ``embedded`` a folder, in which the time of filling it is included, ``origin`` what was read past all of these
    probed: what was measured by probing; ``None`` without (docs/profiling.md)

    Rates and shares are of the last seconds of the loop, tiers of all of its time.
    """

    rank: int = 0
    world_size: int = 1
    possible_rate: float = 0.0
    throughput: float = 0.0
    samples_per_second: float = 0.0
    wait_share: float = 0.0
    step_seconds: float = 0.0
    gpu_seconds: float = 0.0
    making_seconds: float = 0.0
    makers: int = 0
    making_rate: float = 0.0
    batch_bytes: float = 0.0
    batch_samples: float = 0.0
    attained_bytes: float = 0.0
    tiers: Mapping[str, TierReads] = field(default_factory=dict)
    probed: Probed | None = None

    @classmethod
    def of(cls, speeds: Sequence[LoopSpeed], costs: Costs, *, rank: tuple[int, int], makers: int) -> Profile:
        """Return the profile of a loop that reads one dataset, or several of a mixture. ``rank``: and of how many."""
        samples = sum(it.batch_samples for it in speeds)
        batch_bytes = sum(it.batch_bytes for it in speeds)
        throughput = sum(it.throughput for it in speeds)
        step = max((it.step_seconds for it in speeds), default=0.0)
        gpu = max((it.gpu_seconds for it in speeds), default=0.0)
        making = max((it.making_seconds for it in speeds), default=0.0)
        reads = zip(TIERS, costs.tier_bytes, costs.tier_seconds, strict=True)
        return cls(
            rank=rank[0],
            world_size=rank[1],
            possible_rate=sum(it.possible for it in speeds),
            throughput=throughput,
            samples_per_second=samples * throughput / batch_bytes if batch_bytes else 0.0,
            wait_share=max((it.waited for it in speeds), default=0.0),
            step_seconds=step,
            gpu_seconds=gpu,
            making_seconds=costs.making_seconds / costs.batches if costs.batches else 0.0,
            makers=makers,
            making_rate=samples / making if making else 0.0,
            batch_bytes=batch_bytes,
            batch_samples=samples,
            attained_bytes=sum(it.attained_bytes for it in speeds),
            tiers={name: TierReads(int(size), seconds) for name, size, seconds in reads},
            probed=Probed.of(costs, batch_bytes=batch_bytes, step_seconds=max(step, gpu), makers=makers),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain dictionaries and numbers, for JSON."""
        return {**asdict(self), "tiers": {name: asdict(reads) for name, reads in self.tiers.items()}}

    def __str__(self) -> str:
        if not self.throughput:
            return f"rank {self.rank} of {self.world_size}: nothing is known yet; the loop has hardly begun"
        per_byte = self.batch_samples / self.batch_bytes if self.batch_bytes else 0.0
        making = f"{self.making_rate:,.0f} samples/s by {self.makers} at once" if self.making_rate else "not known yet"
        lines = [
            f"rank {self.rank} of {self.world_size}",
            f"  could read   {format_rate(self.possible_rate)}   {self.possible_rate * per_byte:,.0f} samples/s   (f*)",
            f"  reads        {format_rate(self.throughput)}   {self.samples_per_second:,.0f} samples/s",
            f"  waits        {self.wait_share:.1%} of the time",
            f"  step         {_milliseconds(self.step_seconds)} per batch of {self.batch_samples:,.0f} samples,"
            f" {format_size(self.batch_bytes)}",
        ]
        lines += [f"  on the GPU   {_milliseconds(self.gpu_seconds)}"] if self.gpu_seconds else []
        lines += [f"  making       {_milliseconds(self.making_seconds)}   {making}"]
        for name, reads in self.tiers.items():
            if reads.bytes or reads.seconds:
                speed = format_rate(reads.bytes / reads.seconds) if reads.seconds else ""
                lines.append(f"  {name:<12} {format_size(reads.bytes)} in {reads.seconds:.2f} s   {speed}")
        if self.probed is not None:
            lines += [
                f"  probed       {format_rate(self.probed.hits)} if all is in the cache,"
                f" {format_rate(self.probed.misses)} if nothing is ({self.probed.batches} batches)"
            ]
        return "\n".join(lines)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"
