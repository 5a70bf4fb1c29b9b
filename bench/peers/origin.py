"""A first epoch: directly from the origin, and through an empty rack."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from bench.measure import Batch
from bench.peers.ahead import ahead
from bench.peers.base import Peer
from bench.peers.quiver import ROOM, has_views
from bench.servers import SERVERS, quiver_rack

# As many concurrent requests as the daemons of the rack make together (quiver.origin.remote).
REQUESTS_AT_ONCE: Final = 32 * SERVERS


class Origin(Peer):
    """One request per sample, with the concurrency of the rack's daemons; batches are fetched ahead.

    Option ``origin``: the base URL of the data's files.
    """

    name = "origin"
    extra = "s3"
    packages = ("obstore",)
    settings = f"obstore, one GET per sample, {REQUESTS_AT_ONCE} at once, fetching ahead"

    def prepare(self) -> None:
        from obstore.store import HTTPStore

        self._store = HTTPStore.from_url(self.work.options["origin"], client_options={"allow_http": True})
        root = self.data.folder / "files"
        self._batches = [
            [str(self.data.file(number).relative_to(root)) for number in batch]
            for batch in self.data.batches(self.work.batch_size)
        ]

    def batches(self, way: str) -> Iterable[Batch]:
        return ahead(self._plain())

    def _plain(self) -> Iterator[Batch]:
        import obstore

        with asyncio.Runner() as runner:
            turns = asyncio.Semaphore(REQUESTS_AT_ONCE)

            async def get(path: str) -> Any:
                async with turns:
                    answer = await obstore.get_async(self._store, path)
                    return memoryview(await answer.bytes_async())

            async def together(paths: list[str]) -> list[Any]:
                return await asyncio.gather(*(get(path) for path in paths))

            for paths in self._batches:
                yield runner.run(together(paths))


class QuiverCold(Peer):
    """Every round reads through three daemons that have just started and are empty; the loader may substitute.

    Its own order is the point: it reads resident samples while the daemons fill the others.
    """

    name = "quiver-cold"
    extra = "client,server,s3"
    packages = ("quiver_client", "obstore")
    settings = "quiver_client.DataLoader, num_workers=0, shuffle, three empty daemons; their start is not measured"

    def prepare(self) -> None:
        self._rounds = 0
        self._running = contextlib.ExitStack()
        self.closing.callback(self._end_rack)
        self._loader: Any = None
        self.data.manifest()

    def before_round(self) -> None:
        from quiver_client import DataLoader, Dataset

        self._end_rack()
        self._rounds += 1
        origin, room = self.work.options["origin"], ROOM * self.data.total_bytes + (256 << 20)
        manifest = self.data.rebased(origin, self.work.folder / "data.quiver")
        running = quiver_rack(self.work.folder / f"rack{self._rounds}", origin, room)
        urls, _ = self._running.enter_context(running)
        more: dict[str, Any] = {"copy": False} if has_views() else {}
        dataset = Dataset(manifest, ",".join(urls), **more)
        self._running.callback(dataset.close)
        field = dataset.manifest.header.blobs[0].name
        self._loader = DataLoader(
            dataset,
            self.work.batch_size,
            shuffle=True,
            collate_fn=lambda samples: [np.frombuffer(sample[field], np.uint8) for sample in samples],
        )
        self._running.callback(self._loader.close)

    def _end_rack(self) -> None:
        self._running.close()
        self._running = contextlib.ExitStack()

    def batches(self, way: str) -> Iterable[Batch]:
        loader: Iterable[Batch] = self._loader
        return loader
