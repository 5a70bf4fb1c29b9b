"""Bytes forged so that XXH3 agrees, from a peer in the ring: which are caught, and which are trusted, and by whom."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.digest import Digest
from quiver.manifest import Manifest
from quiver.peer import PeerClient
from quiver.store import Kind
from quiver.store.inventory import file_of
from quiver.transport.tls import Credentials
from quiver.wire import FillRequest
from quiver_cacheserver.node import Node
from quiver_client import Dataset, index
from tests.support.daemon import Daemon, Patient
from tests.support.data import Files, make_files, shard_bytes_of
from tests.support.forgery import SHORT_BYTES, forged
from tests.support.inside import in_process
from tests.support.tls import Pki, variables
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("patient_reads")

TEXT = b"what a person wants you to train on " * 99
SIZES = [SHORT_BYTES, 1088, 5_000, 40_000]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    rng = np.random.default_rng(11)
    content = {f"{at:03}.bin": rng.bytes(SIZES[at % len(SIZES)]) for at in range(60)}
    return make_files(tmp_path_factory.mktemp("forged"), content, shard_bytes="64KiB", layout="mixed")


@dataclass
class Forger:
    """A peer that is in the ring, claims to have every shard, and has changed every sample."""

    url: str
    node: Node
    samples: set[bytes]  # as it serves them


@contextlib.contextmanager
def forging(where: Path, manifest: Manifest, tls: Credentials | None = None) -> Iterator[Forger]:
    shards = dict(shard_bytes_of(manifest, number) for number in range(manifest.shard_count))
    made: list[Node] = []

    def forge(node: Node) -> None:
        made.append(node)
        node.suspect = lambda digests, client="": None  # type: ignore[method-assign]  # it knows, and does not care
        for digest in shards:
            path = file_of(node.store.root, Kind.SHARD, digest)
            path.chmod(0o600)
            path.write_bytes(wrong[digest])

    wrong: dict[Digest, bytes] = {}
    samples: set[bytes] = set()
    tables = manifest.tables
    for number in range(manifest.shard_count):
        digest = manifest.shard_digest(number)
        data = bytearray(shards[digest])
        for blob in range(int(tables.firsts[number]), _end(manifest, number)):
            at = int(tables.offsets[blob])
            for length in tables.lengths[blob].tolist():
                data[at : at + length] = forged(bytes(data[at : at + length]), TEXT)
                samples.add(bytes(data[at : at + length]))
                at += length
        wrong[digest] = bytes(data)
    with in_process(where, shards, made=forge, tls=tls) as address:
        del address
        yield Forger(made[0].url, made[0], samples)


def _end(manifest: Manifest, number: int) -> int:
    following = manifest.tables.firsts[number + 1 :]
    return int(following[0]) if len(following) else len(manifest.tables.offsets)


Make = Callable[..., Dataset]


def everything(dataset: Dataset) -> dict[str, Any]:
    return {sample["__key__"]: sample["data"] for sample in dataset.__getitems__(list(range(len(dataset))))}


@pytest.mark.fault("S11")
def test_forged_bytes_of_a_peer_that_is_not_authenticated_are_caught(
    files: Files, dataset: Make, tmp_path: Path
) -> None:
    with forging(tmp_path, files.opened()) as forger:
        fast = dataset(files.manifest, forger.url, fields=["data", "__key__"], verify="fast")
        assert set(everything(fast).values()) == forger.samples, "the forgery is one: XXH3 agrees with all of it"
        assert fast.stats()["corruptions"] == 0
        for verify in ({}, {"verify": "full"}):
            made = dataset(files.manifest, forger.url, fields=["data", "__key__"], **verify)
            assert everything(made) == files.content
            stats = made.stats()
            assert stats["corruptions"] >= len(files.content)
            assert stats["bytes_rack"] == 0
            assert stats["bytes_origin"] >= files.total_bytes()


@pytest.mark.fault("S11")
def test_a_peer_with_a_nodes_certificate_is_trusted_where_xxh3_agrees_unless_verify_says_otherwise(
    files: Files, dataset: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/security.md says: who has a node's key can forge bytes for those who do not ask for BLAKE3."""
    pki = Pki(tmp_path / "pki")
    for name, path in variables(pki.client("alice")).items():
        monkeypatch.setenv(name, path)
    with forging(tmp_path, files.opened(), Credentials(pki.node("a"), serves=True)) as forger:
        assert forger.url.startswith("https://")
        auto = dataset(files.manifest, forger.url, fields=["data", "__key__"])
        assert set(everything(auto).values()) == forger.samples
        full = dataset(files.manifest, forger.url, fields=["data", "__key__"], verify="full")
        assert everything(full) == files.content
        assert full.stats()["corruptions"] >= len(files.content)


@pytest.mark.fault("S11")
def test_forged_bytes_are_caught_where_only_some_fields_are_read(dataset: Make, tmp_path: Path) -> None:
    """The BLAKE3 is over the whole sample, so the other field is read as well, from such a peer."""
    content = {}
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "000.tar", "w") as tar:
        for at in range(40):
            for kind, size in (("before", 3_000), ("wanted", 2_000), ("after", 5_000)):
                data = content[f"{at:03}.{kind}"] = os.urandom(size)
                info = tarfile.TarInfo(f"{at:03}.{kind}")
                info.size = size
                tar.addfile(info, io.BytesIO(data))
    manifest = tmp_path / "all.quiver"
    index(tmp_path / "data", manifest, shard_bytes="64KiB")
    opened = Manifest.open(manifest)
    expected = {key.removesuffix(".wanted"): data for key, data in content.items() if key.endswith(".wanted")}

    def read(**named: Any) -> tuple[dict[str, bytes], dict[str, int]]:
        made = dataset(manifest, forger.url, fields=["__key__", "wanted"], **named)
        samples = made.__getitems__(list(range(len(made))))
        columns = made.columns(range(len(made)))
        assert [sample["wanted"] for sample in samples] == columns["wanted"]
        return {sample["__key__"]: sample["wanted"] for sample in samples}, made.stats()

    with forging(tmp_path, opened) as forger:
        got, stats = read(verify="fast")
        assert set(got.values()) <= forger.samples
        assert stats["corruptions"] == 0
        got, stats = read()
        assert got == expected
        assert stats["corruptions"] >= 40
    with Daemon(tmp_path / "honest", origins=[tmp_path / "data"]) as forger:  # type: ignore[assignment]
        got, stats = read()
        assert got == expected
        assert stats["corruptions"] == stats["bytes_origin"] == 0, "and honest bytes pass the check"
        assert stats["bytes_rack"] == 2 * 40 * 2_000, "what was chosen is counted"


@pytest.mark.fault("S11")
def test_a_daemon_does_not_keep_what_a_peer_has_forged(files: Files, tmp_path: Path) -> None:
    """Shards are compared with their BLAKE3 before they are written, whoever sent them."""
    manifest = files.opened()
    names = tuple(manifest.shard_digest(number) for number in range(manifest.shard_count))
    with (
        forging(tmp_path, manifest) as forger,
        Patient(tmp_path / "honest", "--peers", forger.url, origins=[files.folder]) as daemon,
        contextlib.closing(PeerClient(daemon.url)) as peer,
    ):
        peer.put_manifest(manifest.digest, manifest.content)
        until(lambda: not peer.fill(FillRequest(manifest.digest, names, 20_000)).any())
        assert forger.node.counters.served_bytes > 0, "it was asked"
        assert daemon.metric("quiver_corruptions_total") >= 1
        for number, name in enumerate(names):
            assert bytes(peer.load(name, 1 << 20)) == shard_bytes_of(manifest, number)[1]
