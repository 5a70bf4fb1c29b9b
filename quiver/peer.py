"""One daemon as seen by another machine: a blocking client of few verbs, and a ``ShardSource``.

Blocking and without threads of its own, so that it can be used from a thread of a daemon and in a training process that
forks: connections belong to the process that opened them. Whatever a peer answers is bounded by what was asked. Reads
go by streams where the peer has them (``quiver.stream``), all else by HTTP (``quiver.exchange``).
"""

from __future__ import annotations

from quiver.digest import Bytes, Digest
from quiver.errors import BadRequest, Corrupt, NotFound, QuiverError
from quiver.exchange import Exchange
from quiver.liveness import PATIENT, Patience
from quiver.residency.messages import ANSWER_BYTES_MAX, NEEDS_TYPE, NeedsAnswer, NeedsReport, NeedsStatus
from quiver.ring import check_url
from quiver.stream import U8, ReadStreams
from quiver.wire import (
    JSON_BYTES_MAX,
    READ_TYPE,
    SHARD_TYPE,
    NodeStatus,
    RangeStatus,
    ReadRequest,
    RingView,
    decode_json,
)


class PeerClient:
    """The verbs of one daemon. Raises ``Unavailable`` when it does not answer, ``Corrupt`` when it answers nonsense."""

    def __init__(self, url: str, patience: Patience = PATIENT) -> None:
        self.url = check_url(url)
        self.name = f"peer {self.url}"
        self._exchange = Exchange(self.url, self.name, patience)
        self._streams = ReadStreams(self.url, self.name, patience)

    def __repr__(self) -> str:
        return f"PeerClient({self.url!r})"

    def close(self) -> None:
        self._exchange.close()
        self._streams.close()

    # -- verbs --------------------------------------------------------------------------------------------------------

    def ring(self) -> RingView:
        view: RingView = decode_json(self._json("GET", "/v1/ring"), RingView, f"the ring that {self.url} answered")
        return view

    def status(self) -> NodeStatus:
        status: NodeStatus = decode_json(self._json("GET", "/v1/status"), NodeStatus, f"the status of {self.url}")
        return status

    def read(self, request: ReadRequest) -> tuple[U8, U8]:
        """Ask for ranges. Return a ``RangeStatus`` per range ``(n,)`` and the bytes of those present, back to back."""
        return self._streams.read(request) or self._read_by_http(request)

    def _read_by_http(self, request: ReadRequest) -> tuple[U8, U8]:
        wait = request.wait_ms / 1000
        with self._exchange.asked("POST", "/v1/read", request.encode(), READ_TYPE, wait) as answer:
            count = len(request.ranges)
            if answer.size_bytes < count:
                raise Corrupt(f"an answer of {answer.size_bytes} bytes to {count} ranges", self.name)
            statuses = answer.receive(count)
            present = int(request.ranges["length"][statuses == RangeStatus.PRESENT].sum())
            if answer.size_bytes != count + present:
                raise Corrupt(f"an answer of {answer.size_bytes} bytes where {count + present} belong", self.name)
            return statuses, answer.receive(present, by_rate=True)

    def needs(self, report: NeedsReport) -> NeedsAnswer:
        """Tell what a consumer needs; return what the peer holds of it. Raises ``NotFound`` where nobody listens."""
        with self._exchange.asked("POST", "/v1/needs", report.encode(), NEEDS_TYPE) as told:
            if told.size_bytes > ANSWER_BYTES_MAX:
                raise Corrupt(f"an answer of {told.size_bytes} bytes to a report of needs", self.name)
            data = told.receive(told.size_bytes).data
        try:
            answer = NeedsAnswer.decode(data)
        except BadRequest as error:
            raise Corrupt(str(error), self.name) from error
        wanted = len(report.report.left) if answer.status is NeedsStatus.TAKEN and not report.leaving else 0
        if len(answer.seen) != wanted:
            raise Corrupt(f"an answer about {len(answer.seen)} shards where {wanted} belong", self.name)
        return answer

    def load(self, digest: Digest, size_bytes: int) -> Bytes:
        """Return a shard that the peer has at hand; it is not made to fill it. ``ShardSource``."""
        return self._file(f"/v1/shards/{digest}", size_bytes)

    def fault(self, digest: Digest, error: Corrupt) -> QuiverError:
        return error

    def has_shard(self, digest: Digest) -> bool:
        return self._has(f"/v1/shards/{digest}")

    def has_manifest(self, digest: Digest) -> bool:
        return self._has(f"/v1/manifests/{digest}")

    def manifest(self, digest: Digest, size_bytes_max: int) -> Bytes:
        """Return a manifest's file, compared with its name."""
        data = self._file(f"/v1/manifests/{digest}", size_bytes_max)
        if Digest.of(data) != digest:
            raise Corrupt("manifest does not hash to its name", self.name)
        return data

    def put_shard(self, digest: Digest, data: Bytes) -> None:
        with self._exchange.asked("PUT", f"/v1/shards/{digest}", data, SHARD_TYPE):
            pass

    def put_manifest(self, digest: Digest, content: Bytes) -> None:
        with self._exchange.asked("PUT", f"/v1/manifests/{digest}", content, SHARD_TYPE):
            pass

    # -- answers ------------------------------------------------------------------------------------------------------

    def _file(self, path: str, size_bytes_max: int) -> Bytes:
        with self._exchange.asked("GET", path) as answer:
            if answer.size_bytes > size_bytes_max:
                what = f"a file of {answer.size_bytes} bytes where at most {size_bytes_max} were expected"
                raise Corrupt(what, self.name)
            return answer.receive(answer.size_bytes, by_rate=True).data

    def _has(self, path: str) -> bool:
        try:
            with self._exchange.asked("HEAD", path):
                return True
        except NotFound:
            return False

    def _json(self, method: str, path: str) -> Bytes:
        with self._exchange.asked(method, path) as answer:
            if answer.size_bytes > JSON_BYTES_MAX:
                raise Corrupt(f"{path}: {answer.size_bytes} bytes of JSON", self.name)
            return answer.receive(answer.size_bytes).data
