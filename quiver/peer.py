"""A blocking client of one daemon, with few verbs; also a ``ShardSource``.

It has no threads of its own, so it works in a daemon's thread and in a training process that forks: connections belong
to the process that opened them. The request bounds the size of every answer. Reads use streams if the peer has them
(``transport.stream``); everything else uses HTTP (``transport.http``).
"""

from __future__ import annotations

import copy
from typing import Final, TypeVar

import msgspec
import numpy as np

from quiver.digest import Bytes, Digest
from quiver.domain import HEADER, Domain
from quiver.errors import BadRequest, Corrupt, NotFound, QuiverError
from quiver.handover import DrainRequest, DrainStatus, HandoverAnswer, HandoverRequest
from quiver.introduction import HEADER as INTRODUCTION
from quiver.overview import (
    AllocationView,
    DatasetRequest,
    DatasetsView,
    EvictAnswer,
    JobsView,
    PinAnswer,
    ProbeRequest,
    ProbeView,
)
from quiver.residency.messages import ANSWER_BYTES_MAX, NEEDS_TYPE, NeedsAnswer, NeedsReport, NeedsStatus
from quiver.ring import check_url
from quiver.token_source import NO_TOKEN, TokenSource
from quiver.transport.attempt import Attempt
from quiver.transport.connection import U8, Endpoint
from quiver.transport.http import HttpVerbs
from quiver.transport.liveness import PATIENT, Patience
from quiver.transport.stream import ReadStreams
from quiver.transport.tls import Credentials
from quiver.wire import (
    JSON_BYTES_MAX,
    MSGPACK_TYPE,
    RANGE,
    READ_TYPE,
    SHARD_TYPE,
    FillRequest,
    ForgoRequest,
    NodeStatus,
    RangeStatus,
    ReadRequest,
    RecheckRequest,
    RingView,
    ShardStatuses,
    decode_json,
)

T = TypeVar("T")

EVICTION_SECONDS: Final = 300.0  # of a dataset of a hundred thousand shards, from a slow disk
JSON_TYPE: Final = "application/json"
HANDOVER_BYTES_SLACK: Final = 1024  # the same, with fields of later versions
STATUSES_BYTES_SLACK: Final = 64  # of the message, beyond a byte per shard


class PeerClient:
    """The verbs of one daemon. Raises ``Unavailable`` if it does not answer, ``Corrupt`` for a malformed answer."""

    def __init__(
        self,
        url: str,
        patience: Patience = PATIENT,
        *,
        tls: Credentials | None = None,
        node: str = "",
        token: TokenSource = NO_TOKEN,
        introduction: str = "",
    ) -> None:
        """``tls``, ``node``, ``token`` and ``introduction``: see ``Endpoint``."""
        endpoint = Endpoint(check_url(url), patience, tls, node, token, introduction)
        self.url = endpoint.url
        self.is_authenticated = endpoint.is_authenticated
        self.name = endpoint.name
        self._http = HttpVerbs(endpoint)
        self._reads = self._http.with_header(INTRODUCTION, introduction) if introduction else self._http
        self._streams = ReadStreams(endpoint)

    def __repr__(self) -> str:
        return f"PeerClient({self.url!r})"

    def acting_for(self, domain: Domain) -> PeerClient:
        """Return a client over the same connections whose HTTP verbs name a sharing domain.

        A daemon heeds that only from a member of its rack that has authenticated itself. For ``SINGLE`` it is this one.
        """
        if not domain:
            return self
        other = copy.copy(self)
        other._http = other._reads = self._http.with_header(HEADER, str(domain))
        return other

    def close(self) -> None:
        self._http.close()
        self._streams.close()

    # -- verbs --------------------------------------------------------------------------------------------------------

    def ring(self) -> RingView:
        view: RingView = decode_json(self._json("/v1/ring"), RingView, f"the ring that {self.url} answered")
        return view

    def status(self) -> NodeStatus:
        status: NodeStatus = decode_json(self._json("/v1/status"), NodeStatus, f"the status of {self.url}")
        return status

    def jobs(self) -> JobsView:
        """Return who reads from the daemon. Raises ``NotFound`` if it is an older one, as the next two do."""
        return self._told("/v1/jobs", JobsView)

    def datasets(self) -> DatasetsView:
        return self._told("/v1/datasets", DatasetsView)

    def allocation(self) -> AllocationView:
        return self._told("/v1/allocation", AllocationView)

    def pin(self, request: DatasetRequest) -> PinAnswer:
        """Pin a dataset at the daemon. Raises ``BadRequest`` if it is larger than pins may be there."""
        return self._done("/v1/pin", request, PinAnswer)

    def unpin(self, request: DatasetRequest) -> PinAnswer:
        """Unpin a dataset. Raises ``NotFound`` if it is not pinned."""
        return self._done("/v1/unpin", request, PinAnswer)

    def evict(self, request: DatasetRequest) -> EvictAnswer:
        """Evict a dataset. Raises ``NotFound`` if the daemon does not know it, ``BadRequest`` if it is pinned."""
        return self._done("/v1/evict", request, EvictAnswer, wait_seconds=EVICTION_SECONDS)

    def read(self, request: ReadRequest, attempt: Attempt | None = None) -> tuple[U8, U8]:
        """Read ranges. Return a ``RangeStatus`` per range ``(n,)`` and the bytes of those present, back to back.

        ``attempt``: which another one may overtake; then the error says nothing about the daemon.
        """
        if attempt is None:
            return self._streams.read(request) or self._read_by_http(request)
        return self._streams.read(request, attempt) or self._read_by_http(request, self._reads.within(attempt))

    def resident(self, shards: tuple[Digest, ...], attempt: Attempt) -> U8:
        """Return a ``RangeStatus`` per shard ``(n,)``, without the shards and without having them filled.

        By HTTP, so that it is answered while reads on streams are not.
        """
        ranges = np.zeros(len(shards), RANGE)
        ranges["shard"] = np.arange(len(shards))
        return self._read_by_http(ReadRequest(None, shards, ranges), self._http.within(attempt))[0]

    def _read_by_http(self, request: ReadRequest, http: HttpVerbs | None = None) -> tuple[U8, U8]:
        lengths = request.ranges["length"]
        count, wanted = len(lengths), int(lengths.sum())
        answer = (http or self._reads).request(
            "POST",
            "/v1/read",
            request.encode(),
            READ_TYPE,
            answer_bytes_max=count + wanted,
            wait_seconds=request.wait_ms / 1000,
        )
        if len(answer) < count:
            raise Corrupt(f"an answer of {len(answer)} bytes to {count} ranges", self.name)
        statuses = answer[:count]
        present = int(lengths[statuses == RangeStatus.PRESENT].sum())
        if len(answer) != count + present:
            raise Corrupt(f"an answer of {len(answer)} bytes where {count + present} belong", self.name)
        return statuses, answer[count:]

    def fill(self, request: FillRequest) -> U8:
        """Have shards filled, waiting as long as the request says. Return a ``RangeStatus`` per shard ``(n,)``."""
        answer = self._http.request(
            "POST",
            "/v1/fill",
            request.encode(),
            MSGPACK_TYPE,
            answer_bytes_max=len(request.shards) + STATUSES_BYTES_SLACK,
            wait_seconds=request.wait_ms / 1000,
        )
        try:
            told = ShardStatuses.decode(answer.data, len(request.shards))
        except BadRequest as error:
            raise Corrupt(str(error), self.name) from error
        return np.frombuffer(told.statuses, np.uint8)

    def forgo(self, request: ForgoRequest) -> None:
        """Decline uploads that this reader was chosen for, so that others need not wait until they time out."""
        self._http.request("POST", "/v1/forgo", request.encode(), MSGPACK_TYPE)

    def recheck(self, request: RecheckRequest) -> None:
        """Have the peer verify shards on its disk before it serves them again: it sent wrong bytes of them."""
        self._http.request("POST", "/v1/recheck", request.encode(), MSGPACK_TYPE)

    def needs(self, report: NeedsReport) -> NeedsAnswer:
        """Report what a consumer needs; return what the peer holds. Raises ``NotFound`` if it accepts no reports."""
        body = report.encode()
        told = self._http.request("POST", "/v1/needs", body, NEEDS_TYPE, answer_bytes_max=ANSWER_BYTES_MAX)
        try:
            answer = NeedsAnswer.decode(told.data)
        except BadRequest as error:
            raise Corrupt(str(error), self.name) from error
        wanted = len(report.report.left) if answer.status is NeedsStatus.TAKEN and not report.leaving else 0
        if len(answer.seen) != wanted:
            raise Corrupt(f"an answer about {len(answer.seen)} shards where {wanted} belong", self.name)
        return answer

    def handover(self, request: HandoverRequest, attempt: Attempt) -> HandoverAnswer:
        """Ask which of these files the peer holds, or have it fetch those that it does not from the giver."""
        count = len(request.shards) + len(request.manifests)
        told = self._http.within(attempt).request(
            *("POST", "/v1/handover", request.encode(), MSGPACK_TYPE),
            answer_bytes_max=count + HANDOVER_BYTES_SLACK,
            wait_seconds=request.wait_ms / 1000,
        )
        try:
            return HandoverAnswer.decode(told.data, request)
        except BadRequest as error:
            raise Corrupt(str(error), self.name) from error

    def drain(self, request: DrainRequest) -> DrainStatus:
        """Have the daemon leave placement and hand over what it holds; it goes on serving. Raises ``NotFound`` if old.

        A drain that is under way gets the new deadline.
        """
        return self._drain_status("POST", request.encode())

    def drain_status(self) -> DrainStatus:
        return self._drain_status("GET")

    def undrain(self) -> DrainStatus:
        """Have the daemon own shards again. A handover that is under way ends."""
        return self._drain_status("DELETE")

    def _drain_status(self, method: str, body: bytes = b"") -> DrainStatus:
        answer = self._http.request(method, "/v1/drain", body, JSON_TYPE, answer_bytes_max=JSON_BYTES_MAX)
        status: DrainStatus = decode_json(answer.data, DrainStatus, f"the state of the drain that {self.url} answered")
        return status

    def probe(self, job: str, *, begin: bool = False) -> ProbeView:
        """Return what the daemon knows of a job's probes; ``begin``: ask for some first. Raises ``NotFound`` if old."""
        body = msgspec.json.encode(ProbeRequest(job, begin))
        answer = self._http.request("POST", "/v1/probe", body, JSON_TYPE, answer_bytes_max=JSON_BYTES_MAX)
        view: ProbeView = decode_json(answer.data, ProbeView, f"what {self.url} answered about probes")
        return view

    def load(self, digest: Digest, size_bytes: int) -> Bytes:
        """Return a shard that is resident at the peer, which does not fill it. ``ShardSource``."""
        return self._file(f"/v1/shards/{digest}", size_bytes)

    def fault(self, digest: Digest, error: Corrupt) -> QuiverError:
        return error

    def has_shard(self, digest: Digest) -> bool:
        return self._has(f"/v1/shards/{digest}")

    def has_manifest(self, digest: Digest) -> bool:
        return self._has(f"/v1/manifests/{digest}")

    def manifest(self, digest: Digest, size_bytes_max: int) -> Bytes:
        """Return a manifest's file, verified against its digest."""
        data = self._file(f"/v1/manifests/{digest}", size_bytes_max)
        if Digest.of(data) != digest:
            raise Corrupt("manifest does not hash to its name", self.name)
        return data

    def put_shard(self, digest: Digest, data: Bytes) -> None:
        self._http.request("PUT", f"/v1/shards/{digest}", data, SHARD_TYPE)

    def put_manifest(self, digest: Digest, content: Bytes) -> None:
        self._http.request("PUT", f"/v1/manifests/{digest}", content, SHARD_TYPE)

    # -- answers ------------------------------------------------------------------------------------------------------

    def _file(self, path: str, size_bytes_max: int) -> Bytes:
        return self._http.request("GET", path, answer_bytes_max=size_bytes_max).data

    def _has(self, path: str) -> bool:
        try:
            self._http.request("HEAD", path)
        except NotFound:
            return False
        return True

    def _told(self, path: str, kind: type[T]) -> T:
        told: T = decode_json(self._json(path), kind, f"the answer of {self.url} to {path}")
        return told

    def _done(self, path: str, request: DatasetRequest, kind: type[T], wait_seconds: float = 0.0) -> T:
        body = msgspec.json.encode(request)
        answer = self._http.request(
            "POST", path, body, JSON_TYPE, answer_bytes_max=JSON_BYTES_MAX, wait_seconds=wait_seconds
        )
        told: T = decode_json(answer.data, kind, f"the answer of {self.url} to {path}")
        return told

    def _json(self, path: str) -> Bytes:
        return self._http.request("GET", path, answer_bytes_max=JSON_BYTES_MAX).data
