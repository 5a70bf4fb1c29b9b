"""Reports, as an allocation is told them: by dataset the groups that read it, and what is resident of it. Pure.

Ranks of one job add up, as each reads its own samples. Of a group's jobs, such as the trials of a sweep, the fastest
counts: those that substitute read one stream. A consumer that says no job's name is a job of its own.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from quiver.allocation import Reader
from quiver.digest import Digest
from quiver.residency import Needs

UNNAMED: Final = "unnamed job"


class Heard(NamedTuple):
    """What is known of one rank. ``rate``: f* in bytes per second, 0 for unknown."""

    dataset: Digest
    consumer: str
    rate: float
    job: str = ""
    group: str = ""
    tenant: str = ""
    ordered: bool = False
    attained_bytes: float = 0.0


def readers_of(heard: Iterable[Heard]) -> dict[Digest, tuple[Reader, ...]]:
    """Return the readers of each dataset, sorted by name. No two of one have the same name.

    Where jobs of several tenants are called the same, or one job reads in a fixed order and substitutes, more follows a
    name than ``shown_name`` returns: what is predicted is told by name.
    """
    jobs: dict[Digest, dict[tuple[str, str, bool], dict[str, list[Heard]]]] = {}
    for it in heard:
        job = it.job or f"\0{it.consumer}"  # which no name contains
        groups = jobs.setdefault(it.dataset, {})
        groups.setdefault((it.group or job, it.tenant, it.ordered), {}).setdefault(job, []).append(it)
    return {dataset: tuple(_named(groups)) for dataset, groups in sorted(jobs.items())}


def shown_name(reader: Reader) -> str:
    """Return what a reader's job, or group, is called."""
    return reader.name.partition("\0")[0]


def resident_bytes(needs: Needs, sizes: Mapping[Digest, float]) -> dict[Digest, float]:
    """Return how much of each dataset the rack holds, going by the part of it that hashes to this daemon.

    ``sizes``: bytes of whole datasets. One of which nothing hashes here is absent.
    """
    present = needs.present()
    found = {}
    for name, size in sizes.items():
        if name in needs.datasets:
            slots = needs.datasets[name].slots[needs.datasets[name].mine]
            mine = needs.sizes[slots]
            if mine.sum() > 0:
                found[name] = size * float(mine[present[slots]].sum() / mine.sum())
    return found


def _named(groups: dict[tuple[str, str, bool], dict[str, list[Heard]]]) -> Iterable[Reader]:
    taken = Counter(name for name, _, _ in groups)
    numbered = (UNNAMED if number == 1 else f"{UNNAMED} ({number})" for number in itertools.count(1))
    free = (name for name in numbered if name not in taken)
    for (name, tenant, ordered), jobs in sorted(groups.items()):
        if name.startswith("\0"):
            name = next(free)
        elif taken[name] > 1:
            name = f"{name}\0{tenant}\0{ordered}"
        ranks = [list(each) for each in jobs.values()]
        # A rank that does not know its rate yet reads as fast as the others of its job do on average.
        yield Reader(
            name=name,
            rate=max(_rate(each) for each in ranks),
            tenant=tenant,
            ordered=ordered,
            attained_bytes=sum(it.attained_bytes for each in ranks for it in each),
        )


def _rate(ranks: list[Heard]) -> float:
    known = [it.rate for it in ranks if it.rate > 0]
    return sum(known) * len(ranks) / len(known) if known else 0.0
