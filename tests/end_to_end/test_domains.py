"""Sharing domains over a rack of daemons that authenticate one another."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quiver.digest import Digest
from quiver.errors import Forbidden
from quiver.handover import DrainRequest
from quiver.peer import PeerClient
from quiver.token_source import TokenSource
from quiver.transport.tls import Credentials, TlsFiles
from quiver.wire import FillRequest, RangeStatus
from tests.support.daemon import Patient, rack_of
from tests.support.data import Files, shard_bytes_of
from tests.support.etcd import free_ports
from tests.support.tenants import SIGNER, Tenant
from tests.support.tls import Pki, flags


@pytest.fixture
def urls(tmp_path: Path, files: Files) -> Iterator[list[str]]:
    """A rack of three that requires tokens and whose daemons have certificates."""
    pki, ports = Pki(tmp_path / "pki"), free_ports(3)
    SIGNER.publish(tmp_path / "keys")
    peers = ",".join(f"https://127.0.0.1:{port}" for port in ports)
    with contextlib.ExitStack() as stack:
        daemons = []
        for at, port in enumerate(ports):
            own = ("--peers", peers, "--token-keys", str(tmp_path / "keys"), *flags(pki.node(f"n{at}")))
            tls = Credentials(pki.anonymous())
            daemons.append(Patient(tmp_path / f"n{at}", *own, port=port, origins=[files.folder], tls=tls))
            stack.callback(daemons[-1].kill)
            daemons[-1].start()
        for daemon in daemons:
            daemon.wait_until_serving()
        yield peers.split(",")


@contextlib.contextmanager
def clients(urls: list[str], where: Path, domain: str) -> Iterator[list[PeerClient]]:
    credentials = Credentials(TlsFiles(str(where / "ca.pem")))
    token = TokenSource(SIGNER.token(domain, rights="read,fill,operate"))
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(PeerClient(url, tls=credentials, token=token))) for url in urls]


@pytest.mark.fault("S8", "O1")
def test_a_rack_reads_the_origin_once_for_each_domain_and_peers_serve_within_it(
    urls: list[str], files: Files, tmp_path: Path
) -> None:
    manifest = files.opened()
    shards = tuple(manifest.shard_digest(number) for number in range(manifest.shard_count))
    total = files.total_bytes()
    for number, domain in enumerate(("vision", "audio")):
        with clients(urls, tmp_path / "pki", domain) as daemons:
            assert not any(daemon.has_shard(shard) for daemon in daemons for shard in shards)
            daemons[1].put_manifest(manifest.digest, files.manifest.read_bytes())
            for daemon in daemons:
                statuses = daemon.fill(FillRequest(manifest.digest, shards, 20_000))
                assert set(statuses.tolist()) == {RangeStatus.PRESENT}
            read_bytes = sum(daemon.status().origin_read_bytes for daemon in daemons)
            assert read_bytes == (number + 1) * total, "one read for the domain, and the others had it from their peers"
            assert [daemon.status().shards for daemon in daemons] == [len(shards)] * 3, "and it is stored once"


@pytest.mark.fault("S8")
def test_without_certificates_daemons_ask_one_another_for_nothing(files: Files, tmp_path: Path) -> None:
    SIGNER.publish(tmp_path / "keys")
    manifest = files.opened()
    with rack_of(2, tmp_path, "--token-keys", str(tmp_path / "keys"), origins=[files.folder]) as daemons:
        assert all("reads the origin itself" in daemon.log.replace("\n", " ") for daemon in daemons)
        for daemon in daemons:
            tenant = Tenant(daemon.address, None, "vision")
            assert tenant.put("manifests", manifest.digest, files.manifest.read_bytes()).status == 201
            statuses = tenant.fill(manifest.digest, [manifest.shard_digest(0)])
            assert statuses == [RangeStatus.PRESENT]
            metrics = tenant.ask("GET", "/metrics").body.decode()
            assert 'quiver_fills_total{source="origin"} 1.0' in metrics
            assert not [line for line in metrics.splitlines() if "refusals" in line and 'missing"} 1' in line]


@pytest.mark.fault("S8", "M9")
def test_a_drain_hands_a_shard_over_in_each_domain_that_holds_it_and_in_no_other(
    urls: list[str], files: Files, tmp_path: Path
) -> None:
    manifest = files.opened()
    digest, data = shard_bytes_of(manifest, 0)
    other, more = shard_bytes_of(manifest, 1)
    with (
        clients(urls, tmp_path / "pki", "vision") as vision,
        clients(urls, tmp_path / "pki", "audio") as audio,
        clients(urls, tmp_path / "pki", "text") as text,
    ):
        vision[0].put_manifest(manifest.digest, files.manifest.read_bytes())
        for who in (vision, audio):
            who[0].put_shard(digest, data)
        audio[0].put_shard(other, more)
        refused = PeerClient(
            urls[0],
            tls=Credentials(TlsFiles(str(tmp_path / "pki" / "ca.pem"))),
            token=TokenSource(SIGNER.token("vision", rights="read,fill")),
        )
        with contextlib.closing(refused), pytest.raises(Forbidden, match="operate"):
            refused.drain(DrainRequest(60.0))
        status = vision[0].drain(DrainRequest(60.0))
        deadline = time.monotonic() + 60
        while status.state == "draining" and time.monotonic() < deadline:
            status = vision[0].drain_status()
        assert (status.state, status.left_bytes, status.refused_bytes) == ("drained", 0, 0)
        assert status.handed_over_bytes == 2 * len(data) + len(more)

        def held(who: list[PeerClient], shard: Digest) -> bool:
            return any(daemon.has_shard(shard) for daemon in who[1:])

        assert [held(who, digest) for who in (vision, audio, text)] == [True, True, False]
        assert [held(who, other) for who in (vision, audio, text)] == [False, True, False]
        assert any(daemon.has_manifest(manifest.digest) for daemon in vision[1:])
        assert not any(daemon.has_manifest(manifest.digest) for daemon in audio[1:])
