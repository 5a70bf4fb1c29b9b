"""A fleet: racks, datasets and jobs. Parsed once, here; everything after it holds only values that make sense.

FLEET.toml is described in docs/planning.md. An error names the table, or the row of the trace, in one line.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from quiver.errors import Misconfigured
from quiver_client.planning import amounts
from quiver_client.planning.trace import JOB_FIELDS, read_trace

RACKS_MAX: Final = 100_000
JOBS_MAX: Final = 1_000_000
PLACEMENTS: Final = ("spread", "together")


@dataclass(frozen=True, slots=True)
class Rack:
    """A rack: what its nodes' SSDs hold together, and how fast it reads from each origin."""

    name: str
    capacity_bytes: float
    origin_rates: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class DatasetPlan:
    name: str
    size_bytes: float
    origin: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job: it reads ``work_bytes`` of its dataset, at ``rate`` (over all ranks) while it does not wait.

    ``rack`` is empty where the placement decides.
    """

    name: str
    dataset: str
    rate: float
    work_bytes: float
    start: float = 0.0
    tenant: str = ""
    group: str = ""
    ordered: bool = False
    rack: str = ""


@dataclass(frozen=True, slots=True)
class Fleet:
    racks: tuple[Rack, ...]
    datasets: Mapping[str, DatasetPlan]
    jobs: tuple[Job, ...]
    placement: str = "spread"
    weights: Mapping[str, float] = field(default_factory=dict)
    quotas: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


_TOP: Final = {"placement", "racks", "datasets", "jobs", "trace", "weights", "quotas"}
_RACK: Final = {"name", "count", "nodes", "ssd_per_node", "origins"}
_DATASET: Final = {"name", "size", "origin"}


def read_fleet(path: Path) -> Fleet:
    """Read FLEET.toml, and the trace that it names. Raises ``Misconfigured`` and ``OSError``."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # also of text that is no UTF-8, and of a number of 5,000 digits
        raise Misconfigured(f"{path} is no TOML: {error}") from error
    _check_integers(path, table)
    _known(str(path), table, _TOP)
    racks = _racks(path, _tables(path, table, "racks"))
    if not racks:
        raise Misconfigured(f"{path} has no [[racks]]; a plan needs one at least")
    jobs = Jobs()
    for place, entry in enumerate(_tables(path, table, "datasets"), 1):
        jobs.add_dataset(f"{path}: datasets, entry {place}", entry)
    for place, entry in enumerate(_tables(path, table, "jobs"), 1):
        jobs.add(f"{path}: jobs, entry {place}", entry)
    if "trace" in table:
        if not isinstance(table["trace"], str):
            raise Misconfigured(f"{path}: trace is {table['trace']!r}; write the path of a CSV file")
        for where, entry in read_trace(path.parent / table["trace"]):
            jobs.add(where, entry)
    if not jobs.jobs:
        raise Misconfigured(f'{path} has no jobs; add [[jobs]] or trace = "trace.csv"')
    placement = table.get("placement", "spread")
    if placement not in PLACEMENTS:
        raise Misconfigured(f"{path}: placement is {placement!r}; write one of {', '.join(PLACEMENTS)}")
    known = {rack.name for rack in racks}
    for where, job in zip(jobs.places, jobs.jobs, strict=True):
        if job.rack and job.rack not in known:
            raise Misconfigured(f"{where}: there is no rack {job.rack!r}; racks are {', '.join(sorted(known)[:5])}, …")
    fleet = Fleet(
        racks=tuple(racks),
        datasets=jobs.datasets,
        jobs=tuple(jobs.jobs),
        placement=placement,
        weights=_by_tenant(path, table, "weights", amounts.weight),
        quotas=_by_tenant(path, table, "quotas", amounts.size),
    )
    largest = max(racks, key=lambda rack: rack.capacity_bytes)
    for tenant, quota in fleet.quotas.items():
        if quota > largest.capacity_bytes:
            raise Misconfigured(
                f"{path}: quotas.{tenant} is {table['quotas'][tenant]!r}, more than the SSDs of any rack hold together;"
                " a quota is of one rack"
            )
    return replace(fleet, notes=_notes(fleet))


def _notes(fleet: Fleet) -> tuple[str, ...]:
    """Return what is no mistake, and probably was not meant: names that nothing else in the plan has."""
    limited = {origin for rack in fleet.racks for origin in rack.origin_rates}
    free = {dataset.origin for dataset in fleet.datasets.values()} - limited if limited else set()
    notes = [f"origin {name!r} is no limit: no rack's origins name it" for name in sorted(free - {""})]
    tenants = {job.tenant for job in fleet.jobs}
    for what, given in (("weight", fleet.weights), ("quota", fleet.quotas)):
        notes += [
            f"the {what} of tenant {name!r} has no effect: no job has it" for name in sorted(set(given) - tenants)
        ]
    return tuple(notes)


def _check_integers(path: Path, value: Any) -> None:
    """Refuse whole numbers that TOML does not have. Arithmetic fails with some, and so does showing them."""
    if isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            _check_integers(path, each)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise Misconfigured(f"{path} is no TOML: a whole number in it has more than 64 bits")


class Jobs:
    """Jobs and datasets while they are read: a dataset's size may be told by any of its jobs."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.places: list[str] = []  # where each job was told, for messages
        self.datasets: dict[str, DatasetPlan] = {}
        self._names: dict[str, str] = {}

    def add_dataset(self, where: str, entry: Mapping[str, Any]) -> None:
        _known(where, entry, _DATASET)
        name = amounts.name(f"{where}: name", entry.get("name"))
        if name in self.datasets:
            raise Misconfigured(f"{where}: dataset {name!r} is there already; give each its own name")
        size = amounts.size(f"{where}: size", entry.get("size"))
        origin = amounts.name(f"{where}: origin", entry.get("origin", ""), empty=True)
        self.datasets[name] = DatasetPlan(name, size, origin)

    def add(self, where: str, entry: Mapping[str, Any]) -> None:
        """Add a job. An empty value counts as absent."""
        _known(where, entry, set(JOB_FIELDS))
        entry = {key: value for key, value in entry.items() if value != ""}
        if len(self.jobs) >= JOBS_MAX:
            raise Misconfigured(f"{where}: more than {JOBS_MAX:,} jobs; plan a part of them")
        name = amounts.name(f"{where}: name", entry.get("name"))
        if name in self._names:
            raise Misconfigured(
                f"{where}: job {name!r} is there already, at {self._names[name]}; give each its own name"
            )
        for needed in ("dataset", "rate"):
            if needed not in entry:
                raise Misconfigured(f"{where}: {needed} is missing")
        dataset = self._dataset(where, entry)
        rate = amounts.rate(f"{where}: rate", entry["rate"])
        rate *= amounts.count(f"{where}: ranks", entry.get("ranks", 1))
        job = Job(
            name=name,
            dataset=dataset.name,
            rate=rate,
            work_bytes=_work(where, entry, rate, dataset.size_bytes),
            start=amounts.duration(f"{where}: start", entry.get("start", 0), zero=True),
            tenant=amounts.name(f"{where}: tenant", entry.get("tenant", ""), empty=True),
            group=amounts.name(f"{where}: group", entry.get("group", ""), empty=True),
            ordered=amounts.flag(f"{where}: ordered", entry.get("ordered", False)),
            rack=amounts.name(f"{where}: rack", entry.get("rack", ""), empty=True),
        )
        self._names[name] = where
        self.jobs.append(job)
        self.places.append(where)

    def _dataset(self, where: str, entry: Mapping[str, Any]) -> DatasetPlan:
        name = amounts.name(f"{where}: dataset", entry["dataset"])
        known = self.datasets.get(name)
        if known is None and "size" not in entry:
            raise Misconfigured(f"{where}: size is missing, and no [[datasets]] says how large {name!r} is")
        size = amounts.size(f"{where}: size", entry["size"]) if "size" in entry else None
        origin = amounts.name(f"{where}: origin", entry["origin"]) if "origin" in entry else None
        if known is None:
            assert size is not None
            known = self.datasets[name] = DatasetPlan(name, size, origin or "")
        if size not in (None, known.size_bytes) or origin not in (None, known.origin):
            raise Misconfigured(f"{where}: dataset {name!r} has another size or origin elsewhere; it has one of each")
        return known


def _work(where: str, entry: Mapping[str, Any], rate: float, size: float) -> float:
    if ("epochs" in entry) == ("duration" in entry):
        both = "both epochs and duration are" if "epochs" in entry else "neither epochs nor duration is"
        raise Misconfigured(f"{where}: {both} given; write one of them")
    if "duration" in entry:
        return rate * amounts.duration(f"{where}: duration", entry["duration"])
    return amounts.number(f"{where}: epochs", entry["epochs"], amounts.EPOCHS_MIN, amounts.EPOCHS_MAX) * size


def _racks(path: Path, entries: list[Mapping[str, Any]]) -> list[Rack]:
    racks: list[Rack] = []
    for place, entry in enumerate(entries, 1):
        where = f"{path}: racks, entry {place}"
        _known(where, entry, _RACK)
        name = amounts.name(f"{where}: name", entry.get("name"))
        number = amounts.count(f"{where}: count", entry.get("count", 1), RACKS_MAX)
        nodes = amounts.count(f"{where}: nodes", entry.get("nodes", 1))
        capacity = nodes * amounts.size(f"{where}: ssd_per_node", entry.get("ssd_per_node"))
        origins = entry.get("origins", {})
        if not isinstance(origins, dict):
            raise Misconfigured(f'{where}: origins is {origins!r}; write origins = {{ s3 = "2GB/s" }}')
        rates = {origin: amounts.rate(f"{where}: origins.{origin}", value) for origin, value in origins.items()}
        names = [name] if number == 1 else [f"{name}-{n}" for n in range(1, number + 1)]
        racks += [Rack(each, capacity, rates) for each in names]
    if len(racks) > RACKS_MAX:
        raise Misconfigured(f"{path}: more than {RACKS_MAX:,} racks; plan a part of them")
    if len({rack.name for rack in racks}) < len(racks):
        raise Misconfigured(f"{path}: two racks have the same name; give each its own")
    return racks


def _tables(path: Path, table: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    entries = table.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise Misconfigured(f"{path}: {key} is no list of tables; write [[{key}]]")
    return entries


def _by_tenant(path: Path, table: Mapping[str, Any], key: str, parse: Any) -> dict[str, float]:
    entries = table.get(key, {})
    if not isinstance(entries, dict):
        raise Misconfigured(f"{path}: {key} is {entries!r}; write [{key}] and a line for each tenant")
    names = [amounts.name(f"{path}: a tenant in {key}", tenant) for tenant in entries]
    return {name: parse(f"{path}: {key}.{name}", entries[name]) for name in names}


def _known(where: str, entry: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(entry) - known)
    if unknown:
        raise Misconfigured(f"{where}: {unknown[0]!r} is not known; known are {', '.join(sorted(known))}")
