"""Clients of different sharing domains at one daemon: each verb on each carrier, with the answer as it came."""

from __future__ import annotations

import http.client
import itertools
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from quiver.digest import Digest
from quiver.manifest import Manifest
from quiver.residency import ConsumerReport
from quiver.residency.messages import NEEDS_TYPE, NeedsAnswer, NeedsReport
from quiver.transport.handoff import FileStatus, HandoffAnswer, HandoffRequest, Held, Verb
from quiver.transport.stream import FRAME, PROTOCOL, SIZE
from quiver.wire import RANGE, FillRequest, ForgoRequest, RangeStatus, ReadRequest, RecheckRequest, ShardStatuses
from tests.support.tokens import Signer, bearer

SIGNER: Final = Signer()
_count: Final = itertools.count()


class Answer(NamedTuple):
    """An answer, without what differs between two answers to the same request."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


def new_domain(prefix: str = "d") -> str:
    """Return a domain that no daemon has heard of: what one test or example does, no other one sees."""
    return f"{prefix}{next(_count)}"


class Tenant:
    """A client with a token of its own domain, and of its own tenant unless one is given."""

    def __init__(self, address: tuple[str, int], path: Path | None, domain: str, tenant: str | None = None) -> None:
        self.domain = domain
        self.token = SIGNER.token(tenant or domain, domain=domain, rights="read,fill,operate")
        self.headers = bearer(self.token)
        self._address, self._path = address, path

    def __repr__(self) -> str:
        return f"Tenant({self.domain!r})"

    def ask(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection(*self._address, timeout=60)
        try:
            connection.request(method, path, body=body, headers={**self.headers, **(headers or {})})
            answer = connection.getresponse()
            told = tuple((name.lower(), value) for name, value in answer.getheaders() if name.lower() != "date")
            return Answer(answer.status, told, answer.read())
        finally:
            connection.close()

    def put(self, kind: str, digest: Digest, data: bytes) -> Answer:
        return self.ask("PUT", f"/v1/{kind}/{digest}", data)

    # -- reads --------------------------------------------------------------------------------------------------------

    def read(
        self, shards: Sequence[Digest], manifest: Digest | None = None, wait_ms: int = 0, flags: int = 0
    ) -> Answer:
        """Read the first byte of each shard by HTTP."""
        return self.ask("POST", "/v1/read", request_of(shards, manifest, wait_ms, flags).encode())

    def stream(
        self, shards: Sequence[Digest], manifest: Digest | None = None, wait_ms: int = 0, flags: int = 0
    ) -> Answer:
        """Read the same on a stream; ``status`` is the kind of the frame."""
        body = request_of(shards, manifest, wait_ms, flags).encode()
        with socket.create_connection(self._address, timeout=60) as connection:
            lines = ["GET /v1/stream HTTP/1.1", "Host: x", "Connection: Upgrade", f"Upgrade: {PROTOCOL}"]
            lines += [f"{name}: {value}" for name, value in self.headers.items()]
            connection.sendall("\r\n".join([*lines, "", ""]).encode())
            with connection.makefile("rb") as answers:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += answers.readline() or _ended()
                assert head.startswith(b"HTTP/1.1 101"), head
                connection.sendall(SIZE.pack(len(body)) + body)
                _, kind, size = FRAME.unpack(answers.read(FRAME.size))
                return Answer(kind, (), answers.read(size))

    def files(self, shards: Sequence[Digest], flags: int = 0) -> tuple[HandoffAnswer, list[bytes]]:
        """Ask for open files at the Unix socket; return the answer, and the first byte of each file that came."""
        answers, fds = self._at_socket(HandoffRequest(Verb.FILES, tuple(Held(it, 0) for it in shards), flags))
        first = []
        for fd in fds:
            with os.fdopen(fd, "rb") as file:
                first.append(file.read(1))
        return answers, first

    def held(self, entries: Sequence[Held], flags: int = 0) -> bytes:
        return self._at_socket(HandoffRequest(Verb.HELD, tuple(entries), flags))[0].statuses

    def _at_socket(self, request: HandoffRequest) -> tuple[HandoffAnswer, list[int]]:
        assert self._path is not None
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(60)
            connection.connect(str(self._path))
            connection.send(HandoffRequest(Verb.HELLO, token=self.token).encode())
            connection.recv(1 << 16)
            connection.send(request.encode())
            message, ancillary, _, _ = connection.recvmsg(1 << 16, socket.CMSG_SPACE(4 * 64))
            fds = [fd for _, _, data in ancillary for fd in struct.unpack(f"{len(data) // 4}i", data)]
            return HandoffAnswer.decode(message), fds

    # -- whole shards -------------------------------------------------------------------------------------------------

    def fill(self, manifest: Digest, shards: Sequence[Digest], wait_ms: int = 20_000) -> list[RangeStatus]:
        answer = self.ask("POST", "/v1/fill", FillRequest(manifest, tuple(shards), wait_ms).encode())
        assert answer.status == 200, answer
        return [RangeStatus(it) for it in ShardStatuses.decode(answer.body, len(shards)).statuses]

    def recheck(self, shards: Sequence[Digest]) -> Answer:
        return self.ask("POST", "/v1/recheck", RecheckRequest(tuple(shards)).encode())

    def forgo(self, manifest: Digest, shards: Sequence[Digest]) -> Answer:
        return self.ask("POST", "/v1/forgo", ForgoRequest(manifest, tuple(shards)).encode())

    def needs(self, manifest: Digest, left: np.ndarray, consumer: bytes = bytes(16), **more: float) -> Answer:
        """Report what a consumer needs; ``rate`` and ``ahead`` in bytes."""
        report = ConsumerReport(consumer, left, more.get("rate", 0.0), more.get("ahead", 1e12), 30.0)
        body = NeedsReport(manifest, report).encode()
        return self.ask("POST", "/v1/needs", body, {"Content-Type": NEEDS_TYPE})

    def seen(self, manifest: Manifest, consumer: bytes = bytes(16), *, ahead: float = 1e12) -> list[int]:
        """Report that all of a dataset is needed; return what the daemon says is held.

        ``ahead``: how many bytes the consumer has, by default so many that nothing is fetched for it.
        """
        answer = self.needs(manifest.digest, np.full(manifest.shard_count, 255, np.uint8), consumer, ahead=ahead)
        assert answer.status == 200, answer
        seen: list[int] = NeedsAnswer.decode(answer.body).seen.tolist()
        return seen

    # -- in short -----------------------------------------------------------------------------------------------------

    def shard_carriers(self, shard: Digest) -> dict[str, bool]:
        """Return by which carriers the shard is readable now; none of them fills it."""
        carriers = {
            "GET": self.ask("GET", f"/v1/shards/{shard}").status == 200,
            "HEAD": self.ask("HEAD", f"/v1/shards/{shard}").status == 200,
            "read": self.read([shard]).body[:1] == bytes([RangeStatus.PRESENT]),
            "stream": self.stream([shard]).body[:1] == bytes([RangeStatus.PRESENT]),
        }
        if self._path is not None:
            told, files = self.files([shard])
            carriers["file"] = told.statuses == bytes([FileStatus.PRESENT]) and bool(files)
            carriers["held"] = bool(told.editions[0]) and self.held([Held(shard, told.editions[0])]) == b"\1"
        return carriers

    def reads_manifest(self, manifest: Digest) -> dict[str, bool]:
        return {method: self.ask(method, f"/v1/manifests/{manifest}").status == 200 for method in ("GET", "HEAD")}


def request_of(shards: Sequence[Digest], manifest: Digest | None, wait_ms: int = 0, flags: int = 0) -> ReadRequest:
    ranges = np.zeros(len(shards), RANGE)
    ranges["shard"], ranges["length"] = np.arange(len(shards)), 1
    return ReadRequest(manifest, tuple(shards), ranges, wait_ms, flags)


def _ended() -> bytes:
    raise ConnectionResetError("the daemon closed the connection")
