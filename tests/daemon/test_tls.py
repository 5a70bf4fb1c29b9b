"""Daemons that speak TLS: every carrier, who is let in, what a bad certificate is told, and half-open handshakes."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from quiver.errors import Forbidden, QuiverError, Unavailable
from quiver.peer import PeerClient
from quiver.ring import Member, Ring
from quiver.transport.liveness import is_alive
from quiver.transport.tls import Credentials, TlsFiles
from quiver.wire import RANGE, ReadRequest
from quiver_cacheserver.access.caller import Caller
from quiver_cacheserver.budget import Cost, RefillRate, Resource
from quiver_cacheserver.node import Node
from quiver_cacheserver.rack.peers import RackPeers
from quiver_cacheserver.rack.registry import StaticRegistry
from quiver_cacheserver.serving import listening, requests
from tests.support.daemon import Daemon
from tests.support.data import make_shard
from tests.support.inside import in_process
from tests.support.tls import Pki, flags, replace
from tests.support.waiting import until

NAME, SHARD = make_shard([os.urandom(300_000) for _ in range(40)])
SMALL, SMALL_SHARD = make_shard([os.urandom(500) for _ in range(2_000)])


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def alice(pki: Pki) -> Credentials:
    return Credentials(pki.client("alice"))


@pytest.fixture(scope="module")
def daemon(pki: Pki, alice: Credentials, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon") / "data", *flags(pki.node("n1"))) as running:
        with contextlib.closing(PeerClient(running.url, tls=alice, node="n1")) as peer:
            peer.put_shard(NAME, SHARD)
            peer.put_shard(SMALL, SMALL_SHARD)
        yield running


def asking(shard: object, *ranges: tuple[int, int]) -> ReadRequest:
    made = np.zeros(len(ranges), RANGE)
    for at, (offset, length) in enumerate(ranges):
        made[at] = (0, 0, offset, length)
    return ReadRequest(None, (shard,), made)  # type: ignore[arg-type]


def test_every_carrier_works_through_the_tls_of_the_daemon(daemon: Daemon, alice: Credentials) -> None:
    assert daemon.url.startswith("https://127.0.0.1:")
    rows = [(int(at) * 500, 500) for at in np.random.default_rng(3).permutation(2_000)]
    with contextlib.closing(PeerClient(daemon.url, tls=alice, node="n1")) as peer:
        assert [member.id for member in peer.ring().ring()[0].members] == ["n1"]
        assert bytes(peer.load(NAME, len(SHARD))) == SHARD
        whole = asking(NAME, (0, 12_000_000), (3, 5_000_000))
        for read in (peer.read, peer._read_by_http):
            for _ in range(3):
                statuses, data = read(whole)
                assert not statuses.any()
                assert data.tobytes() == SHARD[:12_000_000] + SHARD[3:5_000_003]
                statuses, data = read(asking(SMALL, *rows))
                assert data.tobytes() == b"".join(SMALL_SHARD[at : at + 500] for at, _ in rows)
        (stream,) = peer._streams.idle.kept
        assert isinstance(stream._socket, ssl.SSLSocket)
        assert stream._socket.version() == "TLSv1.3"


def test_many_readers_at_once_get_what_they_asked_for(daemon: Daemon, alice: Credentials) -> None:
    failures: list[BaseException] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            with contextlib.closing(PeerClient(daemon.url, tls=alice, node="n1")) as peer:
                for turn in range(10):
                    offsets = rng.integers(0, 11_000_000, 20).tolist()
                    read = peer.read if turn % 3 else peer._read_by_http
                    _, data = read(asking(NAME, *[(offset, 50_000) for offset in offsets]))
                    assert data.tobytes() == b"".join(SHARD[offset : offset + 50_000] for offset in offsets)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_both_versions_of_tls_are_spoken_and_older_ones_are_not(
    daemon: Daemon, alice: Credentials, version: ssl.TLSVersion
) -> None:
    host, port = daemon.url.removeprefix("https://").split(":")
    context = ssl.create_default_context(cafile=alice.files.ca)
    context.load_cert_chain(alice.files.cert, alice.files.key)
    context.maximum_version = version
    with socket.create_connection((host, int(port))) as plain, context.wrap_socket(plain, server_hostname=host) as sock:
        assert sock.version() == str(version.name).replace("_", ".")
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 200")


def test_a_caller_without_a_certificate_may_ask_whether_the_daemon_lives_and_nothing_else(
    daemon: Daemon, pki: Pki
) -> None:
    anonymous = Credentials(pki.anonymous())
    assert is_alive(daemon.url, 5.0, tls=anonymous)
    with contextlib.closing(PeerClient(daemon.url, tls=anonymous)) as peer:
        for ask in (
            peer.ring,
            peer.status,
            lambda: peer.has_shard(NAME) and pytest.fail("it says what it has"),
            lambda: peer.load(NAME, len(SHARD)),
            lambda: peer.read(asking(NAME, (0, 1))),
            lambda: peer.put_shard(NAME, SHARD),
        ):
            with pytest.raises((Forbidden, Unavailable), match=r"QUIVER_TLS_CERT|403"):
                ask()


@pytest.mark.fault("N4")
@pytest.mark.parametrize(
    ("files", "why"),
    [
        (lambda pki, other: pki.client("late", days=-0.5), "certificate has expired"),
        (lambda pki, other: mixed(pki, other.client("mallory")), "not signed by its authority"),
    ],
    ids=["expired", "foreign"],
)
def test_a_client_with_a_bad_certificate_is_refused_and_told_why(
    daemon: Daemon, pki: Pki, tmp_path: Path, files: object, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As seen by the daemon; a client with Quiver's own code does not get as far, since it checks its own first."""
    monkeypatch.setattr("quiver.transport.tls._checked", lambda files, as_server: {})
    bad = Credentials(files(pki, Pki(tmp_path)))  # type: ignore[operator]
    before = sum(b"was refused" in line.encode() for line in daemon.lines)
    monkeypatch.setattr(daemon, "tls", Credentials(pki.client("operator")))
    refused = daemon.metric("quiver_refusals_total")
    with contextlib.closing(PeerClient(daemon.url, tls=bad)) as peer, pytest.raises(Unavailable, match=why):
        peer.ring()
    until(lambda: sum(b"was refused" in line.encode() for line in daemon.lines) > before)
    until(lambda: daemon.metric("quiver_refusals_total") > refused)


def mixed(pki: Pki, foreign: TlsFiles) -> TlsFiles:
    return TlsFiles(str(pki.ca), foreign.cert, foreign.key)


@pytest.mark.fault("N4")
def test_a_client_checks_its_own_certificate_before_it_connects(daemon: Daemon, pki: Pki, tmp_path: Path) -> None:
    for files, why in (
        (pki.client("late", days=-0.5), "expired"),
        (mixed(pki, Pki(tmp_path).client("mallory")), "not signed by the authority"),
        (TlsFiles(str(pki.ca), pki.client("a").cert, pki.client("b").key), "key is not that of the certificate"),
        (TlsFiles(str(tmp_path / "absent")), "No such file"),
        (TlsFiles(pki.client("a").key), "PEM"),
    ):
        with (
            contextlib.closing(PeerClient(daemon.url, tls=Credentials(files))) as peer,
            pytest.raises(QuiverError, match=why),
        ):
            peer.ring()


@pytest.mark.fault("N4")
def test_plain_http_to_a_tls_port_is_told_so(daemon: Daemon) -> None:
    with (
        contextlib.closing(PeerClient(daemon.url.replace("https", "http"))) as peer,
        pytest.raises(QuiverError, match="this port speaks TLS, and the request is plain HTTP: write https://"),
    ):
        peer.ring()


@pytest.mark.fault("N4")
def test_tls_to_a_plain_port_is_told_so(tmp_path: Path, alice: Credentials) -> None:
    with (
        Daemon(tmp_path / "data") as plain,
        contextlib.closing(PeerClient(plain.url.replace("http", "https"), tls=alice)) as peer,
        pytest.raises(Unavailable, match=r"speaks no TLS.*http://"),
    ):
        peer.ring()


@pytest.mark.fault("N4")
@pytest.mark.parametrize(
    ("flagged", "why"),
    [
        (lambda pki, other: pki.node("n9", days=-0.5), "expired"),
        (lambda pki, other: mixed(pki, other.node("n9")), "not signed by the authority"),
        (lambda pki, other: pki.node("n9", "elsewhere.example"), "wrong name"),
        (lambda pki, other: pki.client("n9"), "wrong kind"),
        (lambda pki, other: TlsFiles(str(pki.ca), pki.node("n9").cert, pki.node("n8").key), "key is not that"),
    ],
    ids=["expired", "foreign", "another host", "a client's", "another key"],
)
def test_a_daemon_does_not_start_with_a_certificate_that_others_would_refuse(
    pki: Pki, tmp_path: Path, flagged: object, why: str
) -> None:
    files = flagged(pki, Pki(tmp_path / "other"))  # type: ignore[operator]
    refused = Daemon(tmp_path / "data", *flags(files))
    refused.start()
    assert refused.wait() in (1, 2)
    assert why in refused.log, refused.log
    assert "Traceback" not in refused.log


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        (("--node-id", "n2"), "the certificate of node n1, and --node-id is n2"),
        (("--peers", "http://127.0.0.1:7717"), "write https://"),
        (("--advertise", "http://127.0.0.1:7717"), "write https://"),
    ],
)
def test_flags_that_contradict_the_certificate_are_refused(
    pki: Pki, tmp_path: Path, extra: tuple[str, ...], why: str
) -> None:
    refused = Daemon(tmp_path / "data", *flags(pki.node("n1")), *extra)
    refused.start()
    assert refused.wait() in (1, 2)
    assert why in refused.log, refused.log


def test_one_flag_of_the_three_is_not_enough(pki: Pki, tmp_path: Path) -> None:
    refused = Daemon(tmp_path / "data", "--tls-ca", str(pki.ca))
    refused.start()
    assert refused.wait() == 2
    assert "(or QUIVER_TLS_… in the environment) belong together" in refused.log  # clients use the same variables


@pytest.mark.fault("N4")
def test_a_daemon_is_only_taken_for_the_node_that_its_certificate_names(daemon: Daemon, alice: Credentials) -> None:
    with (
        contextlib.closing(PeerClient(daemon.url, tls=alice, node="n2")) as peer,
        pytest.raises(Unavailable, match="that of node n1, and the ring has node n2 there"),
    ):
        peer.ring()


# -- replaced while it runs --------------------------------------------------------------------------------------------


def serial(url: str, credentials: Credentials) -> str:
    host, port = url.removeprefix("https://").split(":")
    with (
        socket.create_connection((host, int(port)), 20) as plain,
        credentials.client().wrap_socket(plain, server_hostname=host) as sock,
    ):
        return str((sock.getpeercert() or {})["serialNumber"])


def test_a_new_certificate_is_used_without_a_restart_and_old_connections_go_on(tmp_path: Path) -> None:
    pki = Pki(tmp_path / "pki")
    alice = Credentials(pki.client("alice"))
    files = pki.node("n1")
    with (
        Daemon(tmp_path / "data", *flags(files)) as daemon,
        contextlib.closing(PeerClient(daemon.url, tls=alice, node="n1")) as peer,
    ):
        peer.put_shard(NAME, SHARD)
        peer.read(asking(NAME, (0, 100)))
        (stream,) = peer._streams.idle.kept
        before = serial(daemon.url, alice)

        good = Path(files.cert).read_bytes(), Path(files.key).read_bytes()
        replace(Path(files.cert), b"no certificate")
        until(lambda: "stay in use" in daemon.log)
        assert serial(daemon.url, alice) == before

        replace(Path(files.cert), good[0])
        pki.node("n1")
        until(lambda: serial(daemon.url, alice) != before)
        assert daemon.log.count("stay in use") <= 2, "once for each state of the files"
        _, data = peer.read(asking(NAME, (7, 100)))
        assert data.tobytes() == SHARD[7:107]
        assert peer._streams.idle.kept == [stream], "on the connection that was open"


def test_a_client_loads_its_files_again_when_they_change(
    daemon: Daemon, pki: Pki, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quiver.transport.tls.CHECK_SECONDS", 0.0)
    mine = pki.client("bob")
    bob = Credentials(mine)
    first = bob.client()
    assert bob.client() is first
    replace(Path(mine.cert), b"broken")
    assert bob.client() is first
    assert bob.client() is first
    assert caplog.text.count("stay in use") == 1
    pki.client("bob")
    assert bob.client() is not first
    with contextlib.closing(PeerClient(daemon.url, tls=bob)) as peer:
        assert peer.status().id == "n1"


# -- hostile clients ---------------------------------------------------------------------------------------------------


class Inside:
    """A daemon with TLS in this process."""

    def __init__(self, where: Path, pki: Pki) -> None:
        self.credentials = Credentials(pki.node("a"), serves=True)
        self.alice = Credentials(pki.client("alice"))
        self.node: Node
        self._where = where

    @contextlib.contextmanager
    def running(self, **more: object) -> Iterator[tuple[str, int]]:
        def made(node: Node) -> None:
            self.node = node

        shards = {NAME: SHARD, SMALL: SMALL_SHARD}
        with in_process(self._where, shards, made=made, tls=self.credentials, **more) as address:  # type: ignore[arg-type]
            yield address


@pytest.fixture
def inside(tmp_path: Path, pki: Pki) -> Inside:
    return Inside(tmp_path, pki)


@pytest.mark.fault("S3")
def test_half_open_handshakes_end_at_their_deadline_and_honest_readers_are_served_meanwhile(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "HEAD_SECONDS", 2.5)
    with inside.running() as address, contextlib.ExitStack() as stack:
        url = f"https://127.0.0.1:{address[1]}"
        hello = client_hello(inside.alice)
        for at in range(300):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", address[1]), 20))
            sock.sendall(hello[: (0, 3, 100, len(hello))[at % 4]])  # nothing, a part, or all and then silence
        until(lambda: inside.node.budgets.used[Resource.ARRIVING] >= 250)  # they are half open
        with contextlib.closing(PeerClient(url, tls=inside.alice)) as peer:
            for at in range(20):
                _, data = peer.read(asking(NAME, (at, 1_000_000)))
                assert data.tobytes() == SHARD[at : at + 1_000_000]
        until(lambda: inside.node.counters.connections_closed["late"] >= 300)
        until(lambda: not inside.node.budgets.used[Resource.ARRIVING])


def client_hello(credentials: Credentials) -> bytes:
    back = ssl.MemoryBIO()
    side = credentials.client().wrap_bio(ssl.MemoryBIO(), back, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        side.do_handshake()
    return back.read()


def test_one_address_has_as_many_handshakes_under_way_as_the_budget_says(inside: Inside) -> None:
    with inside.running(held_max={Resource.ARRIVING: 16}) as address, contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection(("127.0.0.1", address[1]), 20)) for _ in range(24)]
        until(lambda: inside.node.budgets.used[Resource.ARRIVING] == 12)
        for sock in socks:
            sock.setblocking(False)

        def closed(sock: socket.socket) -> bool:
            with contextlib.suppress(BlockingIOError):
                return sock.recv(1) == b""
            return False

        until(lambda: sum(map(closed, socks)) == 12)
    assert not inside.node.budgets.used[Resource.CONNECTIONS]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\xff\xff" + bytes(70_000),
        b"\x16\x03\x01\0\x05\x01\0\0\x01\0",
        b"\x80\x2e\x01\0\x02",
        os.urandom(500),
        b"SSH-2.0-x\r\n",
    ],
    ids=["a huge record", "a short hello", "SSL 2", "random", "another protocol"],
)
def test_what_is_not_tls_is_closed_and_leaves_nothing(inside: Inside, garbage: bytes) -> None:
    with inside.running() as address:
        with socket.create_connection(("127.0.0.1", address[1]), 20) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while sock.recv(4096):
                    pass
        until(lambda: not any(inside.node.budgets.used.values()))
        with contextlib.closing(PeerClient(f"https://127.0.0.1:{address[1]}", tls=inside.alice)) as peer:
            assert peer.has_shard(NAME)


def test_a_reader_that_leaves_in_the_middle_of_an_answer_leaves_nothing(inside: Inside) -> None:
    """By HTTP, where the transport has lent its socket to a worker that cannot go on."""
    with inside.running(send_bytes=4096) as address:
        for _ in range(3):
            host = "127.0.0.1"
            with (
                socket.create_connection((host, address[1]), 20) as plain,
                inside.alice.client().wrap_socket(plain, server_hostname=host) as sock,
            ):
                sock.sendall(f"GET /v1/shards/{NAME} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                assert sock.recv(100).startswith(b"HTTP/1.1 200")
                until(lambda: inside.node.budgets.used[Resource.FILES] == 1)
        until(lambda: not any(inside.node.budgets.used.values()))


def test_a_slow_reader_by_http_holds_no_thread_and_gets_everything(inside: Inside) -> None:
    with inside.running(send_bytes=4096) as address:
        host = "127.0.0.1"
        with (
            socket.create_connection((host, address[1]), 20) as plain,
            inside.alice.client().wrap_socket(plain, server_hostname=host) as sock,
        ):
            ask = f"GET /v1/shards/{NAME} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            sock.sendall(ask + ask)  # the second is in OpenSSL's memory while the first is answered
            until(lambda: inside.node.budgets.used[Resource.FILES] == 1)
            until(lambda: not inside.node.budgets.used[Resource.SENDS])
            for _ in range(2):
                head, _, body = received(sock, b"\r\n\r\n").partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200"), head
                while len(body) < len(SHARD):
                    body += sock.recv(len(SHARD) - len(body))
                assert body == SHARD
        until(lambda: not any(inside.node.budgets.used.values()))


def received(sock: ssl.SSLSocket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        more = sock.recv(1)
        assert more
        data += more
    return data


def test_many_uploads_and_requests_at_once_through_tls(inside: Inside) -> None:
    shards = [make_shard([os.urandom(200_000) for _ in range(20)]) for _ in range(6)]
    with (
        inside.running() as address,
        contextlib.closing(PeerClient(f"https://127.0.0.1:{address[1]}", tls=inside.alice)) as peer,
    ):
        threads = [threading.Thread(target=peer.put_shard, args=shard) for shard in shards]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name, data in shards:
            assert bytes(peer.load(name, len(data))) == data


def test_a_member_is_who_has_the_certificate_of_a_node(
    inside: Inside, pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quiver_cacheserver.serving import app

    callers = []
    admitted = app.admitted

    def record(request: web.Request, node: Node, verb: str) -> Caller:
        refused = Caller(requests.client_of(request))
        callers.append(refused)
        callers[-1] = admitted(request, node, verb)
        return callers[-1]

    monkeypatch.setattr(app, "admitted", record)
    with inside.running() as address, contextlib.ExitStack() as stack:
        for files in (pki.client("alice"), pki.node("b"), pki.anonymous()):
            peer = PeerClient(f"https://127.0.0.1:{address[1]}", tls=Credentials(files))
            stack.callback(peer.close)
            with contextlib.suppress(QuiverError):
                peer.status()
    assert [caller.is_member for caller in callers] == [False, True, False]


def test_a_request_in_one_byte_pieces_is_answered(inside: Inside) -> None:
    with inside.running() as address:
        host = "127.0.0.1"
        with (
            socket.create_connection((host, address[1]), 20) as plain,
            inside.alice.client().wrap_socket(plain, server_hostname=host) as sock,
        ):
            for byte in b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n":
                sock.sendall(bytes([byte]))
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
            began = time.monotonic()
            while sock.recv(100):
                pass
            assert time.monotonic() - began < 10


def test_a_daemon_asks_only_peers_that_speak_tls_as_it_does(pki: Pki) -> None:
    members = [
        Member("a", "https://a:1"),
        Member("b", "https://b:1"),
        Member("c", "http://c:1"),
        Member("d-1", "https://d:1"),
    ]
    registry = StaticRegistry("r", members[0])
    registry._ring = Ring.of("r", members)
    plain = RackPeers(registry, "a", "https://a:1")
    assert {peer.url for peer in plain.manifest_holders(NAME)} == {"http://c:1"}
    tls = Credentials(pki.node("a"), serves=True)
    peers = RackPeers(registry, "a", "https://a:1", tls)
    found = {peer.url: peer._http._endpoint for peer in peers.manifest_holders(NAME)}
    assert {url: endpoint.node for url, endpoint in found.items()} == {"https://b:1": "b", "https://d:1": ""}
    assert {endpoint.tls for endpoint in found.values()} == {tls}


def test_one_address_may_not_begin_handshakes_faster_than_the_budget_says(inside: Inside) -> None:
    with inside.running() as address:
        inside.node.budgets.rates[Cost.HANDSHAKES] = RefillRate(0.0, 5)
        url = f"https://127.0.0.1:{address[1]}"
        alive = [is_alive(url, 20.0, tls=inside.alice) for _ in range(8)]
        assert alive == [True] * 5 + [False] * 3
        assert inside.node.budgets.refused[Cost.HANDSHAKES] == 3
