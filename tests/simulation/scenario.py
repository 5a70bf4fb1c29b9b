"""What happens in a seed: a rack, jobs, and faults, all drawn from one generator before anything runs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from tests.simulation.dataset import VARIANTS
from tests.simulation.job import JobPlan

HORIZON_SECONDS: Final = 15.0  # by which every fault has ended
KINDS: Final = {
    "crash": 3,
    "crash and lose the disk": 2,
    "suspend a daemon": 3,
    "suspend a rank": 3,
    "suspend a job": 2,
    "cut": 3,
    "isolate a daemon": 2,
    "slow": 2,
    "lose messages": 2,
    "deliver twice": 2,
    "flip bits": 4,
    "rot": 3,
    "kill": 2,
    "join": 2,
    "leave": 2,
    "etcd away": 2,
    "etcd loses its data": 1,
    "etcd lease revoked": 2,
    "etcd watches stuck": 2,
    "etcd watches replay": 2,
    "etcd junk": 2,
    "origin away": 2,
    "origin slow": 2,
    "any rings": 3,
}


@dataclass(frozen=True)
class Fault:
    kind: str
    at: float
    seconds: float
    number: int  # which process, and other choices


@dataclass(frozen=True)
class Scenario:
    """A seed's rack, jobs and faults."""

    daemons: int
    capacity_share: float  # of the dataset, per daemon
    ttl_seconds: float
    jobs: tuple[JobPlan, ...]
    faults: tuple[Fault, ...]

    @property
    def any_rings(self) -> bool:
        return any(fault.kind == "any rings" and fault.at == 0.0 for fault in self.faults)


def drawn(chance: random.Random) -> Scenario:
    """Draw a scenario. One in twelve is calm: nothing fails, and then every shard must be read once."""
    calm = chance.random() < 1 / 12
    daemons = chance.choice([1, 2, 2, 3, 3, 4])
    share = chance.choice([0.15, 0.3, 0.6, 1.2]) if not calm else 4.0
    variant = chance.randrange(VARIANTS)
    count = chance.choice([1, 1, 1, 2, 2, 3])
    jobs = tuple(_job(chance, variant, number) for number in range(count))
    faults: list[Fault] = []
    if not calm:
        for _ in range(min(int(chance.expovariate(1 / 4.0)) + 1, 12)):
            kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
            seconds = min(chance.choice([0.3, 1.0, 2.0, 4.0, 6.0]) * (0.5 + chance.random()), 8.0)
            at = 0.0 if kind == "any rings" and chance.random() < 0.5 else chance.uniform(0, HORIZON_SECONDS - seconds)
            if at == 0.0:
                seconds = HORIZON_SECONDS
            faults.append(Fault(kind, at, seconds, chance.randrange(1 << 30)))
        for number, job in enumerate(jobs):  # while it trains
            for _ in range(chance.choice([0, 1, 2])):
                at = job.start + chance.uniform(0.2, 12 * job.step_seconds + 0.5)
                faults.append(Fault("kill", at, 0.5, number + len(jobs) * chance.randrange(1 << 20)))
    faults.sort(key=lambda fault: fault.at)
    return Scenario(daemons, share, chance.choice([3.0, 6.0]), jobs, tuple(faults))


def _job(chance: random.Random, variant: int, number: int) -> JobPlan:
    substitute = chance.random() < 0.8
    return JobPlan(
        variant=variant if chance.random() < 0.8 else chance.randrange(VARIANTS),
        world_size=chance.choice([1, 1, 1, 2, 2, 3]),
        batch_size=chance.randint(4, 12),
        epochs=chance.choice([1, 1, 2]),
        step_seconds=chance.choice([0.1, 0.3, 0.6, 1.0]),
        start=1.0 if number == 0 else chance.uniform(1, 6),
        substitute=substitute,
        lookahead=chance.choice([None, None, None, 20]) if substitute else None,
        drop_last=chance.random() < 0.2,
        is_named=chance.random() < 0.7,
        checkpoint_steps=chance.choice([1, 2, 4, 1000]),
        other_worlds=chance.random() < 0.7,
        ledger=chance.random() < 0.25,
        seed=chance.randrange(1 << 16),
    )
