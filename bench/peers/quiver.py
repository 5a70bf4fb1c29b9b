"""Quiver itself, by its fastest public API: ``quiver_client.DataLoader`` with ``num_workers=0``."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, cast

import torch
import torch.utils.data

from bench.decode import decoded, stacked_batch
from bench.measure import Batch
from bench.peers.base import Peer
from bench.servers import CannotRun, Server, quiver_rack

ROOM = 2  # capacity ÷ data


class Quiver(Peer):
    """A subclass chooses the tier. Options: ``verify`` and ``views`` (``copy=False``, if this Quiver has it)."""

    packages = ("quiver_client", "blake3")
    extra = "client,server"
    settings = "quiver_client.DataLoader, num_workers=0, order by sampler="
    views: ClassVar[bool] = True

    def check(self) -> None:
        super().check()
        if self.views and not has_views():
            raise CannotRun("this Quiver's Dataset has no copy=False")

    def cache(self) -> str:
        """Start the tier's daemons and return its ``cache=``."""
        raise NotImplementedError

    def prepare(self) -> None:
        from quiver_client import DataLoader

        self._servers: list[Server] = []
        dataset = self.dataset(None)
        self.closing.callback(dataset.close)
        field = dataset.manifest.header.blobs[0]
        self._field = field.name
        # The loader's own collate stacks arrays of a fixed shape; bytes are passed through.
        more: dict[str, Any] = {} if getattr(field, "is_array", False) else {"collate_fn": _contents(field.name)}
        self._loader = DataLoader(
            dataset, self.work.batch_size, sampler=self.data.order.tolist(), substitute=False, **more
        )
        self.closing.callback(self._loader.close)

    def dataset(self, transform: Callable[[Any], Any] | None) -> Any:
        from quiver_client import Dataset

        more: dict[str, Any] = {"copy": False} if self.views else {}
        verify = self.work.options.get("verify", "fast")
        return Dataset(self.data.manifest(), self.cache(), transform=transform, verify=verify, **more)

    def batches(self, way: str) -> Iterable[Batch]:
        return map(self._as_buffers, self._loader)

    def _as_buffers(self, batch: Any) -> Batch:
        if isinstance(batch, list):
            return batch
        samples = batch[self._field]
        return stacked_batch(samples) if isinstance(samples, torch.Tensor) else cast(Batch, samples)

    def server_pids(self) -> list[int]:
        return [server.pid for server in self._servers]

    def rack(self, *flags: str, count: int) -> str:
        """Start daemons; return ``cache=`` for them."""
        room = ROOM * self.data.total_bytes + (256 << 20)
        running = quiver_rack(self.work.folder / "rack", self.data.folder, room, *flags, count=count)
        urls, self._servers = self.closing.enter_context(running)
        return ",".join(urls)


class QuiverHost(Quiver):
    name = "quiver"
    settings = f"{Quiver.settings}, embedded cache, samples as views of the mapped shards (copy=False)"

    def cache(self) -> str:
        room = ROOM * self.data.total_bytes + (256 << 20)
        return f"file://{self.work.folder}/cache?capacity={room}"


class QuiverHostBytes(QuiverHost):
    name = "quiver-bytes"
    settings = f"{Quiver.settings}, embedded cache, samples as bytes (the default)"
    views = False


class QuiverSocket(Quiver):
    name = "quiver-socket"
    settings = f"{Quiver.settings}, one daemon on this host that passes open files over a Unix socket, views"

    def check(self) -> None:
        super().check()
        command = [sys.executable, "-m", "quiver_cacheserver.cli", "--help"]
        if "--socket" not in subprocess.run(command, capture_output=True, text=True, check=False).stdout:
            raise CannotRun("this quiver-cacheserver has no --socket")

    def cache(self) -> str:
        return self.rack("--socket", "{node}/socket", count=1)


class QuiverRack(Quiver):
    name = "quiver-rack"
    settings = f"{Quiver.settings}, three daemons over TCP, views (copy=False)"

    def cache(self) -> str:
        return self.rack(count=3)


class QuiverRackBytes(QuiverRack):
    name = "quiver-rack-bytes"
    settings = f"{Quiver.settings}, three daemons over TCP, samples as bytes (the default)"
    views = False


class QuiverDecoded(QuiverHostBytes):
    name = "quiver-decoded"
    settings = "stock torch DataLoader, two persistent workers, embedded cache, JPEG decoded by Pillow in transform="

    def prepare(self) -> None:
        dataset = self.dataset(_decode_field)
        self.closing.callback(dataset.close)
        for begin in range(0, len(dataset), 256):  # fill everything: the question is about a warm cache
            dataset.__getitems__(range(begin, min(begin + 256, len(dataset))))
        self._loader_decoded = torch.utils.data.DataLoader(
            dataset,
            self.work.batch_size,
            sampler=self.data.order.tolist(),
            num_workers=2,
            persistent_workers=True,
        )

    def batches(self, way: str) -> Iterable[Batch]:
        return map(stacked_batch, self._loader_decoded)

    def server_pids(self) -> list[int]:
        return []


def _contents(field: str) -> Callable[[list[dict[str, Any]]], Batch]:
    """Return a collate function that passes the samples' bytes through."""
    return lambda samples: [sample[field] for sample in samples]


def has_views() -> bool:
    """Whether this Quiver can hand out views of mapped or received bytes."""
    from quiver_client import Dataset

    return "copy" in inspect.signature(Dataset).parameters


def _decode_field(sample: dict[str, Any]) -> Any:
    content = next(value for value in sample.values() if isinstance(value, bytes))
    return decoded(content)
