"""Uploads to a daemon that may not read the origin: each ends in a verified shard there, or is forgone."""

from __future__ import annotations

from typing import Any

import pytest

from quiver.digest import Bytes, Digest
from quiver.errors import OverCapacity, QuiverError, Unavailable
from quiver.manifest import Manifest
from quiver.origin import open_origin
from quiver.shard import verified
from quiver.wire import ForgoRequest
from quiver_client.rack.uploads import ShardUploads
from quiver_client.stats import Stats
from tests.support.data import Files


class Peer:
    """A daemon that takes uploads, or refuses them with ``error``; and hears which are forgone."""

    url = name = "peer"

    def __init__(self, error: QuiverError | None = None) -> None:
        self.error = error
        self.put: dict[Digest, bytes] = {}
        self.forgone: list[Digest] = []

    def put_shard(self, digest: Digest, data: Bytes) -> None:
        if self.error is not None:
            raise self.error
        self.put[digest] = bytes(data)

    def forgo(self, request: ForgoRequest) -> None:
        self.forgone += request.shards


@pytest.fixture
def manifest(files: Files) -> Manifest:
    return files.opened()


def uploads_of(manifest: Manifest, stats: Stats) -> ShardUploads:
    return ShardUploads(manifest, lambda: open_origin(manifest), stats)


def test_an_upload_is_verified_handed_to_the_caller_and_put(manifest: Manifest) -> None:
    stats, peer, received = Stats(), Peer(), list[bytes]()
    uploads_of(manifest, stats).upload(peer, 0, lambda data: received.append(bytes(data)))  # type: ignore[arg-type]
    digest = manifest.shard_digest(0)
    assert list(peer.put) == [digest]
    verified(digest, peer.put[digest], "peer")
    assert received == [peer.put[digest]]
    assert (stats.snapshot()["uploads"], peer.forgone) == (1, [])


def test_an_upload_that_the_daemon_refuses_is_forgone_and_the_caller_keeps_the_shard(manifest: Manifest) -> None:
    stats, peer, received = Stats(), Peer(OverCapacity("full", 1.0)), list[bytes]()
    uploads_of(manifest, stats).upload(peer, 0, lambda data: received.append(bytes(data)))  # type: ignore[arg-type]
    verified(manifest.shard_digest(0), received[0], "origin")
    assert (stats.snapshot()["uploads"], peer.forgone) == (0, [manifest.shard_digest(0)])


def test_an_upload_whose_origin_fails_is_forgone_and_raises(manifest: Manifest) -> None:
    def away() -> Any:
        raise Unavailable("origin", "does not answer")

    stats, peer = Stats(), Peer()
    with pytest.raises(Unavailable, match="does not answer"):
        ShardUploads(manifest, away, stats).upload(peer, 0)  # type: ignore[arg-type]
    assert (stats.snapshot()["uploads"], peer.put, peer.forgone) == (0, {}, [manifest.shard_digest(0)])
