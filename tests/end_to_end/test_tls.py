"""Datasets and racks through TLS: epochs are exact, daemons authenticate one another, and every refusal says why."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quiver.errors import Misconfigured, QuiverError, Unavailable
from quiver.peer import PeerClient
from quiver.ring import Member, Ring
from quiver.transport.tls import Credentials, TlsFiles
from quiver.wire import FillRequest, RingView
from quiver_client import DataLoader, Dataset
from quiver_client.config import RackCache, parse_cache
from tests.support.daemon import Daemon
from tests.support.data import Files
from tests.support.etcd import Etcd, free_ports
from tests.support.tls import Pki, flags, variables
from tests.support.waiting import until

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
    pytest.mark.usefixtures("patient_reads"),
]


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@contextlib.contextmanager
def tls_rack(where: Path, pki: Pki, files: Files, count: int = 3) -> Iterator[list[Daemon]]:
    """A rack with a static ring, whose daemons hold a third of the data each and ask one another."""
    alice = Credentials(pki.client("alice"))
    ports = free_ports(count)
    peers = ",".join(f"https://127.0.0.1:{port}" for port in ports)
    daemons = []
    for at, port in enumerate(ports):
        its = ("--peers", peers, *flags(pki.node(f"n{at}")))
        daemons.append(Daemon(where / f"n{at}", *its, port=port, origins=[files.folder], tls=alice))
    with contextlib.ExitStack() as stack:
        for daemon in daemons:
            stack.callback(daemon.kill)
            daemon.start()
        for daemon in daemons:
            daemon.wait_until_serving()
        yield daemons


@pytest.fixture(scope="module")
def rack(pki: Pki, files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Daemon]]:
    with tls_rack(tmp_path_factory.mktemp("rack"), pki, files) as running:
        yield running


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with Etcd() as running:
        yield running


@pytest.fixture
def as_client(monkeypatch: pytest.MonkeyPatch) -> Callable[[TlsFiles], None]:
    """Set a client's variables."""

    def set_all(given: TlsFiles) -> None:
        for name, path in variables(given).items():
            monkeypatch.setenv(name, path)

    return set_all


@pytest.fixture
def alice(pki: Pki, as_client: Callable[[TlsFiles], None]) -> None:
    as_client(pki.client("alice"))


@pytest.mark.usefixtures("alice")
@pytest.mark.parametrize("method", ["none", "fork"])
def test_an_epoch_through_tls_is_exact_in_this_process_and_in_workers(
    rack: list[Daemon], files: Files, method: str
) -> None:
    with contextlib.closing(Dataset(files.manifest, rack[0].url, fields=["image", "__key__"])) as dataset:
        if method == "fork":
            dataset[0]  # so that a connection is open when the workers are forked
        workers = 0 if method == "none" else 2
        context = multiprocessing.get_context(method) if workers else None
        loader = DataLoader(
            dataset, batch_size=16, shuffle=True, seed=4, num_workers=workers, multiprocessing_context=context
        )
        seen: Counter[str] = Counter()
        for batch in loader:
            for key, data in zip(batch["__key__"], batch["image"], strict=True):
                assert data == files.content[key]
                seen[key] += 1
        loader.close()
        assert seen == Counter(files.content.keys())
        if not workers:
            stats = dataset.stats()
            assert stats["bytes_rack"] == sum(map(len, files.content.values())), "all of it came from the rack"
            assert stats["fallbacks"] == stats["corruptions"] == 0


def test_plain_and_tls_give_the_same_batches(
    rack: list[Daemon], files: Files, pki: Pki, as_client: Callable[[TlsFiles], None], tmp_path: Path
) -> None:
    as_client(pki.client("bob"))
    orders = []
    with Daemon(tmp_path / "plain", origins=[files.folder]) as plain:
        for url in (rack[1].url, plain.url):
            with contextlib.closing(Dataset(files.manifest, url, fields=["image", "__key__"])) as dataset:
                loader = DataLoader(dataset, batch_size=16, shuffle=True, seed=4, substitute=False)
                orders.append([(batch["__key__"], batch["image"]) for batch in loader])
                loader.close()
    assert orders[0] == orders[1]


@pytest.mark.usefixtures("alice")
def test_daemons_read_from_one_another_through_tls(files: Files, pki: Pki, tmp_path: Path, etcd: Etcd) -> None:
    """The second daemon may not read the origin: what it serves came from the first, and the ring is that of etcd.

    On a busy machine it may pass its peer over, and then does not ask again soon: then another one is started.
    """
    alice = Credentials(pki.client("alice"))
    ring = ("--etcd", etcd.url, "--rack", "tls", "--replicas", "2")
    manifest = files.opened()
    names = tuple(manifest.shard_digest(shard) for shard in range(manifest.shard_count))
    with Daemon(tmp_path / "a", *ring, *flags(pki.node("na")), origins=[files.folder], tls=alice) as first:
        with contextlib.closing(PeerClient(first.url, tls=alice, node="na")) as peer:
            peer.put_manifest(manifest.digest, manifest.content)
            until(lambda: not peer.fill(FillRequest(manifest.digest, names, 20_000)).any())
        for attempt in range(8):
            its = (*ring, *flags(pki.node(f"nb{attempt}")))
            with (
                Daemon(tmp_path / f"b{attempt}", *its, tls=alice) as second,
                contextlib.closing(PeerClient(second.url, tls=alice, node=f"nb{attempt}")) as peer,
            ):
                assert {"na", f"nb{attempt}"} <= {member["id"] for member in second.json("/v1/ring")["members"]}
                peer.put_manifest(manifest.digest, manifest.content)
                if not peer.fill(FillRequest(manifest.digest, names, 20_000)).any():
                    assert second.status()["origin_read_bytes"] == 0
                    assert second.metric("quiver_fills_total") == len(names)
                    return
        pytest.fail(f"no daemon got its shards from its peer: {second.log}")


@pytest.mark.fault("N4")
@pytest.mark.parametrize("what", ["foreign", "expired own", "anonymous", "plain to TLS", "TLS to plain", "no CA"])
def test_a_dataset_says_why_it_does_not_open(
    rack: list[Daemon],
    files: Files,
    pki: Pki,
    tmp_path: Path,
    as_client: Callable[[TlsFiles], None],
    what: str,
) -> None:
    other = Pki(tmp_path / "other")
    with Daemon(tmp_path / "plain") as plain:
        url, given, why = {
            "foreign": (rack[0].url, other.client("alice"), "not signed by the authority"),
            "expired own": (rack[0].url, pki.client("late", days=-0.5), "certificate has expired"),
            "anonymous": (rack[0].url, pki.anonymous(), "requires a client certificate"),
            "plain to TLS": (rack[0].url.replace("https", "http"), None, "this port speaks TLS"),
            "TLS to plain": (plain.url.replace("http", "https"), pki.client("alice"), "speaks no TLS"),
            "no CA": (rack[0].url, None, "QUIVER_TLS_CA is not set"),
        }[what]
        if given is not None:
            as_client(given)
        with pytest.raises(QuiverError, match=why):
            Dataset(files.manifest, url)


@pytest.mark.fault("N4")
def test_a_daemon_whose_certificate_has_expired_meanwhile_is_refused_by_name(
    files: Files, pki: Pki, tmp_path: Path, as_client: Callable[[TlsFiles], None]
) -> None:
    """Its own check was at the start; readers check each connection."""
    as_client(pki.client("alice"))
    valid_seconds = 4.0
    refusals: list[str] = []

    def is_refused() -> bool:
        try:
            Dataset(files.manifest, daemon.url).close()
        except Unavailable as error:
            refusals.append(str(error))
        return bool(refusals)

    with Daemon(
        tmp_path / "data", *flags(pki.node("n7", days=valid_seconds / 86400)), origins=[files.folder]
    ) as daemon:
        until(is_refused)
    assert "certificate has expired" in refusals[0]


@pytest.mark.usefixtures("alice")
@pytest.mark.fault("N4")
def test_a_ring_that_names_another_node_or_one_without_tls_costs_speed_only(
    rack: list[Daemon], files: Files, pki: Pki, tmp_path: Path
) -> None:
    """The ring of this daemon says that n2 is where n1 is, and has a member without TLS."""
    with Daemon(tmp_path / "plain", origins=[files.folder]) as plain:
        lying = RingView.of(
            Ring.of(
                "r", [Member("n2", rack[1].url, 1e9), Member("plain", plain.url, 1e9), Member("x", rack[0].url, 1e9)]
            )
        )
        with contextlib.closing(Dataset(files.manifest, rack[0].url, fields=["image", "__key__"])) as dataset:
            members = dataset._open().tiers[0]._members  # type: ignore[attr-defined]
            peer = members.peer(rack[0].url)
            peer.ring = lambda: lying
            members._asked_at = -1e9
            members.refresh()
            assert {member.id for member in members._ring.members} == {"n2", "x"}
            samples = dataset.__getitems__(list(range(len(dataset))))
            assert {sample["__key__"]: sample["image"] for sample in samples} == files.content
            assert dataset.stats()["fallbacks"] > 0
            assert dataset.stats()["bytes_rack"] == 0, "neither is the node that the ring names"
        assert plain.status()["served_bytes"] == 0


def test_https_urls_of_one_rack_may_leave_the_scheme_and_port_out(
    monkeypatch: pytest.MonkeyPatch, pki: Pki, as_client: Callable[[TlsFiles], None]
) -> None:
    as_client(pki.anonymous())
    assert parse_cache("https://n1,n2:80") == RackCache(("https://n1:7717", "https://n2:80"))
    with pytest.raises(Misconfigured, match="so must all of them"):
        parse_cache("https://n1,http://n2")
