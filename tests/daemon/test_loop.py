"""The event loop is never blocked: blockbuster raises where a coroutine calls what may wait."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from blockbuster import BlockBuster, blockbuster_ctx

from quiver.digest import Digest
from quiver.ring import Member
from quiver.store import Store
from quiver.wire import RANGE, RECHECK, RangeStatus, ReadRequest
from quiver_cacheserver.node import Node
from quiver_cacheserver.rack.registry import StaticRegistry
from quiver_cacheserver.serving.app import make_app
from tests.support.data import Files, make_shard


@pytest.fixture
def blocked_calls() -> Iterator[BlockBuster]:
    with blockbuster_ctx() as found:
        yield found


@pytest.fixture
async def client(files: Files, tmp_path: Path, blocked_calls: BlockBuster) -> AsyncIterator[TestClient[Any, Any]]:
    loop = asyncio.get_running_loop()

    def build() -> Node:
        store = Store.open(tmp_path / "store", 64 << 20, shared=False)
        registry = StaticRegistry("r", Member("a", "http://127.0.0.1:9"))
        return Node("0", store, registry, [str(files.folder)])

    node = await loop.run_in_executor(None, build)
    async with TestClient(TestServer(make_app(node))) as running:
        yield running
    await loop.run_in_executor(None, node.close)


async def read(client: TestClient[Any, Any], shards: list[Digest], manifest: Digest, flags: int = 0) -> set[int]:
    ranges = np.zeros(len(shards), RANGE)
    ranges["shard"], ranges["length"] = np.arange(len(shards)), 500
    body = ReadRequest(manifest, tuple(shards), ranges, 20_000, flags).encode()
    async with client.post("/v1/read", data=body) as answer:
        assert answer.status == 200
        return set((await answer.read())[: len(shards)])


async def test_no_route_blocks_the_loop(client: TestClient[Any, Any], files: Files) -> None:
    manifest = files.opened()
    digest = manifest.digest
    shards = [manifest.shard_digest(number) for number in range(manifest.shard_count)]
    content = await asyncio.to_thread(files.manifest.read_bytes)
    assert await read(client, shards, digest) == {RangeStatus.NO_MANIFEST}
    async with client.put(f"/v1/manifests/{digest}", data=content) as answer:
        assert answer.status == 201
    for flags in (0, 0, RECHECK):
        assert await read(client, shards, digest, flags) == {RangeStatus.PRESENT}
    mine, data = make_shard([b"x" * 3_000_000])
    for body, status in ((data, 201), (data[:-1], 422)):
        async with client.put(f"/v1/shards/{mine}", data=io.BytesIO(body)) as answer:
            assert answer.status == status
    for path in (f"/v1/shards/{mine}", f"/v1/manifests/{digest}", "/v1/status", "/v1/ring", "/metrics", "/readyz"):
        async with client.get(path) as answer:
            assert answer.status == 200
            await answer.read()
    async with client.head(f"/v1/shards/{mine}") as answer:
        assert answer.status == 200


async def test_the_check_would_find_a_blocked_loop(blocked_calls: BlockBuster, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"[Bb]locking"):
        time.sleep(0.001)  # noqa: ASYNC251
