"""What daemons tell operators: who reads, which datasets there are, and how the cache is shared. JSON messages.

Each daemon answers for itself; whoever asks adds the answers of a rack up (``quiver_client.operating``). A dataset has
a shown name, which people gave it, and an *id*, by which the daemons of a rack mean the same one: 16 hexadecimal digits
that are derived from its digest one way, so that an id is no capability. Nothing here contains a digest.

A later version may add fields. All rates are bytes per second; a rate of 0 is not known.
"""

from __future__ import annotations

from typing import Annotated, Final

import blake3
import msgspec

from quiver.digest import Digest
from quiver.domain import SINGLE, Domain
from quiver.prepared import prepare

ENTRIES_MAX: Final = 1000  # jobs, and datasets, in one answer: the largest; how many more there are is told
READERS_SHOWN_MAX: Final = 16  # jobs named with a dataset
ID_HEX: Final = 16
_DATASET: Final = b"quiver-dataset-id-v1\0"
REQUEST_BYTES_MAX: Final = 4096

Bytes = Annotated[int, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(max_length=400)]


def dataset_id(manifest: Digest, domain: Domain = SINGLE) -> str:
    """Return the id of the dataset of a manifest in a sharing domain."""
    return blake3.blake3(_DATASET + domain + b"\0" + manifest).hexdigest()[:ID_HEX]


class RankView(msgspec.Struct, frozen=True):
    """One rank of a job, as it last reported. ``id`` is the same at every daemon that it reports to."""

    id: Text
    rate: float = 0.0  # f*: what it would read if it never waited
    throughput: float = 0.0  # what it read lately
    waited: float = 0.0  # the share of its time that it waited for data, 0 to 1
    attained_bytes: float = 0.0
    left_bytes: float = 0.0  # still to be read in this epoch


class JobView(msgspec.Struct, frozen=True):
    """A job that reads one dataset. A job that reads several has an entry for each."""

    job: Text
    group: Text
    tenant: Text
    dataset: Text
    dataset_id: Text
    ranks: list[RankView]
    ordered: bool = False  # its order is fixed, or it is a stock loader: its misses are its own
    stock: bool = False  # it sends no reports: what the daemon saw of its reads, as one rank
    processes: int = 0  # of a stock loader's: how many opened the dataset


class JobsView(msgspec.Struct, frozen=True):
    """``GET /v1/jobs``."""

    node: Text
    jobs: list[JobView]
    left_out: int = 0


class TierBytes(msgspec.Struct, frozen=True):
    """Bytes of a dataset since the daemon started: in files passed to readers on its host, sent, read from origins."""

    host: Bytes = 0
    rack: Bytes = 0
    origin: Bytes = 0


class DatasetView(msgspec.Struct, frozen=True):
    """A dataset, and what this daemon holds of it.

    ``size_bytes``: all its shards. ``repeated_bytes``: what equal samples would take besides, if each was stored.
    ``saved_bytes``: what the resident part would take besides if it shared nothing: with itself or other datasets.
    """

    id: Text
    name: Text
    samples: int = 0
    size_bytes: Bytes = 0
    repeated_bytes: Bytes = 0
    resident_bytes: Bytes = 0
    saved_bytes: Bytes = 0
    pinned: bool = False
    readers: list[Text] = []  # names of jobs, some of them
    reader_count: int = 0
    tenants: list[Text] = []
    read: TierBytes = TierBytes()


class DatasetsView(msgspec.Struct, frozen=True):
    """``GET /v1/datasets``. ``pinned_limit_bytes``: what pins may keep here."""

    node: Text
    datasets: list[DatasetView]
    capacity_bytes: Bytes = 0
    pinned_limit_bytes: Bytes = 0
    left_out: int = 0


class ReaderView(msgspec.Struct, frozen=True):
    """What an allocation was told of a reader: a group of jobs that counts once. ``rate``: ``None`` if unlimited."""

    name: Text
    rate: float | None = 0.0
    tenant: Text = ""
    ordered: bool = False
    attained_bytes: float = 0.0
    predicted: float = 0.0


class ShareView(msgspec.Struct, frozen=True):
    """What an allocation was told of a dataset, and what it gives it. ``origin_rate``: ``None`` if it has no limit."""

    id: Text
    name: Text
    size_bytes: float
    origin: Text
    readers: list[ReaderView]
    cache_bytes: float
    origin_rate: float | None = None
    reason: Text = ""
    pinned: bool = False
    resident_bytes: float | None = None


class AllocationView(msgspec.Struct, frozen=True):
    """``GET /v1/allocation``: the last problem that this daemon solved, of the whole rack, and the answer.

    ``policy``: empty if it allocates nothing, or nothing yet. ``capacity_bytes``: what the datasets here share.
    ``origin_rates`` by origin, ``weights`` and ``quotas`` by tenant, as ``quiver.allocation.Problem`` has them.
    """

    node: Text
    policy: Text = ""
    age_seconds: float = 0.0
    capacity_bytes: float = 0.0
    datasets: list[ShareView] = []
    origin_rates: dict[Text, float] = {}
    weights: dict[Text, float] = {}
    quotas: dict[Text, float] = {}
    left_out: int = 0


class DatasetRequest(msgspec.Struct, frozen=True):
    """The body of ``POST /v1/pin``, ``/v1/unpin`` and ``/v1/evict``.

    ``id``: of the dataset. A daemon that does not know it yet keeps a pin until it does; for that a pin has the name
    and the size.
    """

    id: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
    name: Annotated[str, msgspec.Meta(max_length=160)] = ""
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0


class ProbeRequest(msgspec.Struct, frozen=True):
    """The body of ``POST /v1/probe``. ``begin``: ask the job for a series of probes; else only for what is known."""

    job: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    begin: bool = False


class ProbeView(msgspec.Struct, frozen=True):
    """What a daemon knows of the probes of a job, by its reports. ``ranks``: reports of its ranks, one for each
    dataset; 0: it knows no such job.

    ``series``: how many series of probes the rank that probes has ended. Of that rank: ``hits`` and ``misses``, the
    throughput that the last series measured with everything in the cache and with nothing, 0 if it could not; and
    ``rate`` and ``throughput``, as in ``RankView``.
    """

    node: Text
    job: Text
    ranks: int = 0
    series: int = 0
    hits: float = 0.0
    misses: float = 0.0
    rate: float = 0.0
    throughput: float = 0.0


class PinAnswer(msgspec.Struct, frozen=True):
    """``known``: whether this daemon knows the dataset already. ``resident_bytes``: of it, here."""

    node: Text
    known: bool
    resident_bytes: Bytes = 0


class EvictAnswer(msgspec.Struct, frozen=True):
    """``evicted_bytes``: what was removed here. ``kept_bytes``: what other datasets that are in use share."""

    node: Text
    evicted_bytes: Bytes
    kept_bytes: Bytes = 0


prepare(
    RankView,
    JobView,
    JobsView,
    TierBytes,
    DatasetView,
    DatasetsView,
    ReaderView,
    ShareView,
    AllocationView,
    DatasetRequest,
    ProbeRequest,
    ProbeView,
    PinAnswer,
    EvictAnswer,
)
