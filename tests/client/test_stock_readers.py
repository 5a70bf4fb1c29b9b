"""What a daemon sees of loaders that report nothing, and that it counts nothing twice: over real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch.utils.data

from quiver.digest import Digest
from quiver.identity import Identity
from quiver.introduction import READER_BYTES
from quiver.manifest import Manifest
from quiver.peer import PeerClient
from quiver.residency import ConsumerReport
from quiver.residency.messages import NeedsReport
from quiver.transport.handoff import HandoffClient
from quiver.wire import RANGE, ReadRequest
from quiver_cacheserver.access.control import Access
from quiver_cacheserver.access.keys import PublicKeys
from quiver_cacheserver.access.tokens import Tokens
from quiver_cacheserver.node import Node
from quiver_client import BatchSampler, DataLoader, Dataset
from tests.support.daemon import Daemon
from tests.support.data import Files
from tests.support.inside import in_process, url_of
from tests.support.tokens import Signer
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("patient_reads")


class Running(NamedTuple):
    node: Node
    url: str


@pytest.fixture
def running(files: Files, tmp_path: Path) -> Iterator[Running]:
    nodes: list[Node] = []
    with in_process(tmp_path, made=nodes.append, origins=[str(files.folder)]) as address:
        yield Running(nodes[0], url_of(address))


def counted(node: Node) -> list[tuple[Identity, int]]:
    return [
        (it.by.identity, round(it.attained_bytes) + it.bytes - it.settled_bytes)
        for it in list(node.readers._counted.values())
    ]


def bytes_of(manifest: Manifest) -> int:
    return int(manifest.blob_sizes(slice(None))[manifest.tables.blob_of].sum())


def until_nothing_counts(node: Node) -> None:
    """Look, as a daemon does, until a look leaves out all that was read: a loader reads ahead between two of them."""

    def looked() -> bool:
        node.readers.seen(time.monotonic())
        return all(size_bytes == 0 for _, size_bytes in counted(node))

    until(looked)


def _as_it_is(samples: Any) -> Any:
    return samples


def test_a_stock_loaders_workers_are_seen_as_one_job_with_every_byte_they_read(
    running: Running, files: Files, dataset: Callable[..., Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIVER_JOB", "résnet")
    monkeypatch.setenv("QUIVER_TENANT", "lab")
    ds = dataset(files.manifest, running.url, verify="full")
    loader = torch.utils.data.DataLoader(
        ds, 16, shuffle=True, num_workers=2, multiprocessing_context="fork", collate_fn=_as_it_is
    )
    assert sum(map(len, loader)) == len(ds)
    [(who, size_bytes)] = counted(running.node)
    assert who == Identity("résnet", "", "lab")
    assert size_bytes == bytes_of(files.opened()), "each byte once, also those that were filled first"
    assert running.node.readers.seen(1e9) == [], "silent since"


def test_a_loader_that_reports_is_no_stock_reader(
    running: Running, files: Files, dataset: Callable[..., Dataset]
) -> None:
    ds = dataset(files.manifest, running.url, verify="full")
    ds.__getitems__(range(len(ds)))  # makes all of it resident
    loader = DataLoader(ds, 16, shuffle=True, num_workers=2, job="resnet", group="sweep", tenant="lab")
    reading = iter(loader)
    next(reading)
    node = running.node
    until(lambda: len(node._needs.consumers) == 1)
    [consumer] = node._needs.consumers.values()
    assert consumer.report.identity == Identity("resnet", "sweep", "lab")
    assert consumer.report.reader == ds._opened.introduction.reader
    assert node.dataset_names.shown(files.opened().digest) == files.manifest.stem
    until_nothing_counts(node)
    reading.close()
    loader.close()


def test_a_stock_loader_with_our_sampler_reports_too(
    running: Running, files: Files, dataset: Callable[..., Dataset]
) -> None:
    ds = dataset(files.manifest, running.url, verify="full")
    ds.__getitems__(range(len(ds)))
    sampler = BatchSampler(ds, 16, job="resnet")
    reading = iter(torch.utils.data.DataLoader(ds, batch_sampler=sampler, collate_fn=_as_it_is))
    next(reading)
    until(lambda: len(running.node._needs.consumers) == 1)
    until_nothing_counts(running.node)
    sampler.close()


def test_the_tenant_is_the_tokens_in_reports_and_reads(
    files: Files, tmp_path: Path, dataset: Callable[..., Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    signer, nodes = Signer(), list[Node]()
    signer.publish(tmp_path / "keys")
    monkeypatch.setenv("QUIVER_TOKEN", signer.token("alice", rights="read,fill"))

    def made(node: Node) -> None:
        nodes.append(node)
        node.access = Access(Tokens(PublicKeys(tmp_path / "keys"), "r"))

    with in_process(tmp_path, made=made, origins=[str(files.folder)]) as address:
        ds = dataset(files.manifest, url_of(address), verify="full")
        ds[0]
        assert [who for who, _ in counted(nodes[0])] == [Identity("", "", "alice")]
        loader = DataLoader(ds, 16, job="resnet", tenant="mallory")
        reading = iter(loader)
        next(reading)
        until(lambda: len(nodes[0]._needs.consumers) == 1)
        [consumer] = nodes[0]._needs.consumers.values()
        assert consumer.report.identity == Identity("resnet", "", "alice")
        reading.close()
        loader.close()
        ds.close()


def test_a_rank_that_follows_another_says_so_from_then_on(
    running: Running, files: Files, dataset: Callable[..., Dataset]
) -> None:
    ds = dataset(files.manifest, running.url, verify="full")
    said = []
    for follow in (lambda: None, ds.follow):
        follow()
        ds[0]
        [counted] = running.node.readers._counted.values()
        assert counted.by.introduction is not None
        said.append(counted.by.introduction.follows)
    assert said == [False, True]


def test_what_a_process_reads_by_mapped_files_it_tells_the_daemon_once(
    files: Files, tmp_path: Path, dataset: Callable[..., Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(HandoffClient, "read", lambda _, manifest, count: told.append(count))
    with Daemon(tmp_path / "node", "--socket", str(tmp_path / "s"), origins=[files.folder]) as daemon:
        ds = dataset(files.manifest, daemon.url, verify="full")

        def read_whole() -> bool:
            ds.__getitems__(range(len(ds)))
            return bool(ds.stats()["bytes_host"] > bytes_of(files.opened()))

        until(read_whole, 60)  # the first time there may be no file to map
        until(lambda: sum(told) == ds.stats()["bytes_host"])


def test_a_malformed_introduction_keeps_nobody_from_reading(running: Running, files: Files) -> None:
    manifest = files.opened()
    ranges = np.zeros(1, RANGE)
    ranges["length"] = 1
    asked = ReadRequest(manifest.digest, (manifest.shard_digest(0),), ranges, 20_000)
    for said in ("", "nonsense", "id=ab&job=%0a"):
        peer = PeerClient(running.url, introduction=said)
        peer.put_manifest(manifest.digest, manifest.content)
        statuses, _ = peer.read(asked)
        assert statuses.tolist() == [0]
        statuses, _ = peer._read_by_http(asked)
        assert statuses.tolist() == [0]
        peer.close()
    assert [who for who, _ in counted(running.node)] == [Identity()], "one client that says nothing of use"


def test_an_older_clients_report_names_no_reader() -> None:
    told = ConsumerReport(bytes(16), np.zeros(3, np.uint8), 1e6, 0.0, 5.0, reader=b"r" * READER_BYTES)
    fields = msgspec.msgpack.decode(NeedsReport(Digest(bytes(32)), told).encode())
    assert fields.pop("reader") == b"r" * READER_BYTES
    old = NeedsReport.decode(msgspec.msgpack.encode(fields)).report
    assert (old.reader, old.identity) == (b"", Identity())
