"""Access control on every carrier: who may use which verb, what a refusal tells, and what operators see of it."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from aiohttp import web

from quiver.claims import Right
from quiver.digest import Digest
from quiver.domain import domain_named
from quiver.errors import Forbidden, Unauthenticated
from quiver.peer import PeerClient
from quiver.token_source import TokenSource
from quiver.transport.handoff import FileStatus, HandoffAnswer, HandoffClient, HandoffRequest, Held, Status, Verb
from quiver.transport.stream import PROTOCOL
from quiver.wire import FORGO, RANGE, FillRequest, ForgoRequest, RangeStatus, ReadRequest, RecheckRequest
from quiver_cacheserver.access import audit as audit_module
from quiver_cacheserver.access import rights
from quiver_cacheserver.access.audit import LINES_MAX, Audit
from quiver_cacheserver.access.caller import Caller, account_of, quota_of
from quiver_cacheserver.access.control import Access
from quiver_cacheserver.access.keys import PublicKeys
from quiver_cacheserver.access.tokens import LEEWAY_SECONDS, Tokens
from quiver_cacheserver.budget import Resource
from quiver_cacheserver.node import Node
from quiver_cacheserver.serving import app
from tests.daemon.test_tokens import BAD, SIGNER
from tests.support.daemon import Daemon
from tests.support.data import Files, make_shard
from tests.support.inside import in_process, url_of
from tests.support.tokens import Signer, bearer, replace
from tests.support.waiting import until

SHARD, DATA = make_shard([b"sample" * 100])
ABSENT = Digest(b"a" * 32)
ALL = "read,fill,operate"
UPGRADE = {"Connection": "Upgrade", "Upgrade": PROTOCOL}
PUBLIC = ("/healthz", "/readyz")

# Every route with a request that it understands.
REQUESTS: dict[str, tuple[str, str, bytes | None, dict[str, str]]] = {
    "POST /v1/read": ("POST", "/v1/read", ReadRequest(None, (SHARD,), np.zeros(0, RANGE)).encode(), {}),
    "GET /v1/stream": ("GET", "/v1/stream", None, {}),  # no upgrade: answered 400 by the route itself
    "GET /v1/shards/{digest}": ("GET", f"/v1/shards/{SHARD}", None, {}),
    "PUT /v1/shards/{digest}": ("PUT", f"/v1/shards/{SHARD}", DATA, {}),
    "GET /v1/manifests/{digest}": ("GET", f"/v1/manifests/{ABSENT}", None, {}),
    "PUT /v1/manifests/{digest}": ("PUT", f"/v1/manifests/{ABSENT}", b"x", {}),
    "POST /v1/fill": ("POST", "/v1/fill", FillRequest(ABSENT, (ABSENT,), 0).encode(), {}),
    "POST /v1/forgo": ("POST", "/v1/forgo", ForgoRequest(ABSENT, (ABSENT,)).encode(), {}),
    "POST /v1/recheck": ("POST", "/v1/recheck", RecheckRequest((ABSENT,)).encode(), {}),
    "POST /v1/needs": ("POST", "/v1/needs", b"x", {}),
    "GET /v1/ring": ("GET", "/v1/ring", None, {}),
    "GET /v1/status": ("GET", "/v1/status", None, {}),
    "POST /v1/handover": ("POST", "/v1/handover", b"x", {}),
    "POST /v1/drain": ("POST", "/v1/drain", b"x", {}),
    "GET /v1/drain": ("GET", "/v1/drain", None, {}),
    "DELETE /v1/drain": ("DELETE", "/v1/drain", None, {}),
    "GET /v1/jobs": ("GET", "/v1/jobs", None, {}),
    "GET /v1/datasets": ("GET", "/v1/datasets", None, {}),
    "GET /v1/allocation": ("GET", "/v1/allocation", None, {}),
    "POST /v1/pin": ("POST", "/v1/pin", b"x", {}),
    "POST /v1/unpin": ("POST", "/v1/unpin", b"x", {}),
    "POST /v1/evict": ("POST", "/v1/evict", b"x", {}),
    "POST /v1/probe": ("POST", "/v1/probe", b"x", {}),
    "GET /metrics": ("GET", "/metrics", None, {}),
    "GET /healthz": ("GET", "/healthz", None, {}),
    "GET /readyz": ("GET", "/readyz", None, {}),
}
GUARDED = [verb for verb in REQUESTS if rights.RIGHTS[verb] is not None]


@pytest.fixture(scope="module")
def daemon(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that requires tokens, has a socket and a shard, and one origin that it cannot read."""
    where = tmp_path_factory.mktemp("access")
    SIGNER.publish(where / "keys")
    flags = ("--token-keys", str(where / "keys"), "--socket", str(where / "s"), "--node-id", "me")
    origins = [files.folder, where / "nothing"]
    with Daemon(where / "data", *flags, origins=origins, token=SIGNER.token(rights=ALL)) as running:
        assert running.ask("PUT", f"/v1/shards/{SHARD}", DATA)[0] == 201
        yield running


@contextlib.contextmanager
def client(url: str, token: str | TokenSource) -> Iterator[PeerClient]:
    source = token if isinstance(token, TokenSource) else TokenSource(token)
    with contextlib.closing(PeerClient(url, token=source)) as peer:
        yield peer


def reading(*shards: Digest, manifest: Digest | None = None, flags: int = 0) -> ReadRequest:
    ranges = np.zeros(len(shards), RANGE)
    ranges["shard"], ranges["length"] = np.arange(len(shards)), 1
    return ReadRequest(manifest, shards, ranges, 20_000, flags)


# -- the table ---------------------------------------------------------------------------------------------------------


def test_every_route_and_every_verb_of_every_carrier_has_its_right_in_the_table(tmp_path: Path) -> None:
    verbs: list[str] = []

    def walk(node: Node) -> None:
        for route in app.make_app(node).router.routes():
            assert route.resource is not None
            method = "GET" if route.method == "HEAD" else route.method
            verbs.append(f"{method} {route.resource.canonical}")

    with in_process(tmp_path, made=walk):
        pass
    verbs += [f"{rights.SOCKET}{verb.name.lower()}" for verb in Verb]
    verbs += [rights.STREAM_READ, rights.READ_FILLS, rights.READ_FORGOES, rights.READ_RECHECKS, rights.READYZ_REASONS]
    assert set(verbs) == set(rights.RIGHTS)
    assert {verb for verb, right in rights.RIGHTS.items() if right is None} == {f"GET {path}" for path in PUBLIC}
    assert set(REQUESTS) == {verb for verb in verbs if verb.partition(" ")[0] in ("GET", "PUT", "POST", "DELETE")}


def test_a_route_that_is_missing_in_the_table_keeps_the_daemon_from_starting() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response()

    with pytest.raises(AssertionError, match="GET /v1/new is missing"):
        app._guarded(cast("Node", None), app.Route("GET", "/v1/new", handler))


# -- refusals ----------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: dict[str, str]


def answer_to(daemon: Daemon, verb: str, headers: dict[str, str]) -> Answer:
    method, path, body, more = REQUESTS[verb]
    status, told, got = daemon.ask(method, path, body, {"Authorization": "", **more, **headers})
    return Answer(status, told, {name: value for name, value in got.items() if name != "date"})


@pytest.mark.fault("S8")
@pytest.mark.parametrize("verb", GUARDED)
def test_without_a_valid_token_each_route_gives_one_and_the_same_answer(daemon: Daemon, verb: str) -> None:
    missing = answer_to(daemon, verb, {})
    assert missing.status == 401
    assert missing.headers["www-authenticate"] == "Bearer"
    assert json.loads(missing.body)["error"] == "unauthenticated"
    assert b"QUIVER_TOKEN" in missing.body
    for name, (_, make) in BAD.items():
        sent = make().encode(errors="surrogateescape").decode("latin-1")  # in which http.client encodes it
        assert answer_to(daemon, verb, bearer(sent)) == missing, name
    assert answer_to(daemon, verb, {"Authorization": f"Basic {SIGNER.token()}"}) == missing
    assert answer_to(daemon, GUARDED[0], {}) == missing  # of whatever route


@pytest.mark.fault("S8")
def test_a_refusal_does_not_tell_a_digest_that_is_here_from_one_that_is_not(daemon: Daemon) -> None:
    bad = bearer(Signer().token())
    for digest in (SHARD, ABSENT):
        for method in ("GET", "HEAD"):
            status, _, headers = daemon.ask(method, f"/v1/shards/{digest}", None, bad)
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
    told = [daemon.ask("GET", f"/v1/shards/{digest}", None, bad)[1] for digest in (SHARD, ABSENT)]
    assert told[0] == told[1]


@pytest.mark.parametrize("verb", GUARDED)
def test_a_token_may_do_what_its_rights_say_and_nothing_else(daemon: Daemon, verb: str) -> None:
    right = rights.RIGHTS[verb]
    assert right is not None
    others = ",".join(sorted(other.value for other in Right if other is not right))
    refused = answer_to(daemon, verb, bearer(SIGNER.token(rights=others)))
    assert refused.status == 403
    assert (
        f"lacks the right `{right.value}`; ask for one made with --rights {ALL}" in json.loads(refused.body)["message"]
    )
    assert answer_to(daemon, verb, bearer(SIGNER.token(rights=right.value))).status not in (401, 403)


def test_health_checks_need_no_token_and_tell_strangers_no_reasons(daemon: Daemon) -> None:
    for headers in ({}, bearer("x"), bearer(SIGNER.token(rights="read"))):
        assert answer_to(daemon, "GET /healthz", headers).status == 200
        ready = answer_to(daemon, "GET /readyz", headers)
        assert (ready.status, ready.body) == (503, b"not ready\n")
    assert b"origin" in answer_to(daemon, "GET /readyz", bearer(SIGNER.token(rights="operate"))).body


def test_unknown_routes_are_as_unknown_as_ever(daemon: Daemon) -> None:
    assert daemon.ask("GET", "/v1/nothing", None, {"Authorization": ""})[0] == 404


# -- reads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_http", [False, True], ids=["stream", "HTTP"])
def test_a_reader_without_the_right_to_fill_reads_what_is_here_and_causes_nothing(
    daemon: Daemon, files: Files, by_http: bool
) -> None:
    manifest = files.opened()
    assert daemon.ask("PUT", f"/v1/manifests/{manifest.digest}", files.manifest.read_bytes())[0] == 201
    missing = manifest.shard_digest(int(by_http))
    with client(daemon.url, SIGNER.token(rights="read")) as peer:
        if by_http:
            peer._streams.no_stream.pause(60)
        statuses, data = peer.read(reading(SHARD, missing, manifest=manifest.digest, flags=FORGO))
        assert bool(peer._streams.idle.kept) is not by_http
    assert statuses.tolist() == [RangeStatus.PRESENT, RangeStatus.NO_ROOM]
    assert bytes(data) == b"s"
    with client(daemon.url, SIGNER.token()) as peer:
        assert not peer.read(reading(missing, manifest=manifest.digest))[0].any()
    with client(daemon.url, SIGNER.token(rights="read")) as peer:
        assert not peer.read(reading(missing, manifest=manifest.digest))[0].any()


def test_a_stream_needs_the_right_to_read(daemon: Daemon) -> None:
    with client(daemon.url, SIGNER.token(rights="fill,operate")) as peer, pytest.raises(Forbidden, match="`read`"):
        peer.read(reading(SHARD))
    with client(daemon.url, "") as peer, pytest.raises(Unauthenticated, match="no token was sent"):
        peer.read(reading(SHARD))


class Inside(NamedTuple):
    """A daemon in this process whose time stands still until a test moves it."""

    url: str
    node: Node
    now: list[float]


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Inside]:
    SIGNER.publish(tmp_path / "keys")
    now, nodes = [time.time()], []

    def made(node: Node) -> None:
        node.access = Access(Tokens(PublicKeys(tmp_path / "keys"), "r", lambda: now[0]))
        nodes.append(node)

    with in_process(tmp_path, {SHARD: DATA}, made=made, domain=domain_named("vision")) as address:
        yield Inside(url_of(address), nodes[0], now)


def test_a_stream_is_bound_to_its_token_until_that_expires(inside: Inside) -> None:
    with client(inside.url, SIGNER.token(seconds=1000)) as peer:
        peer.read(reading(SHARD))
        assert peer._streams.idle.kept
        inside.now[0] += 1001 + LEEWAY_SECONDS
        with pytest.raises(Unauthenticated):
            peer.read(reading(SHARD))
        assert not peer._streams.idle.kept
    assert inside.node.access.audit.refusals["expired"] >= 1


@pytest.mark.fault("S8")
def test_a_reader_whose_token_is_renewed_goes_on_without_an_error(inside: Inside, tmp_path: Path) -> None:
    path = tmp_path / "token"
    replace(path, SIGNER.token(seconds=1000).encode())
    with client(inside.url, TokenSource(path=str(path))) as peer:
        peer.read(reading(SHARD))
        inside.now[0] += 1001 + LEEWAY_SECONDS
        replace(path, SIGNER.token(seconds=5000).encode())
        for _ in range(3):
            assert not peer.read(reading(SHARD))[0].any()
        assert peer._streams.idle.kept
        assert peer.ring().rack


def test_a_key_that_is_withdrawn_ends_the_streams_of_its_tokens(inside: Inside, tmp_path: Path) -> None:
    with client(inside.url, SIGNER.token()) as peer:
        peer.read(reading(SHARD))
        Signer().publish(tmp_path / "keys")
        (tmp_path / "keys" / f"{SIGNER.key_id}.pub").unlink()
        assert inside.node.access._tokens is not None
        inside.node.access._tokens.refresh()
        with pytest.raises(Unauthenticated):
            peer.read(reading(SHARD))
        assert not peer._streams.idle.kept


def test_what_a_tenant_holds_is_counted_for_the_tenant_and_not_for_its_host(inside: Inside) -> None:
    budgets = inside.node.budgets
    with (
        client(inside.url, SIGNER.token("a")) as one,
        client(inside.url, SIGNER.token("b", quota="batch")) as two,
        client(inside.url, SIGNER.token("b")) as three,
    ):
        for peer in (one, two, three):
            peer.read(reading(SHARD))
        for account in (account_of("a", ""), account_of("b", "batch"), account_of("b", "")):
            assert budgets.held(account, Resource.STREAMS) == 1
        assert budgets.held("127.0.0.1", Resource.STREAMS) == 0
    until(lambda: not budgets.used[Resource.STREAMS])


def test_no_account_is_an_addresss_and_a_tenants() -> None:
    assert Caller("127.0.0.1").budget == "127.0.0.1"
    assert " " in Caller("127.0.0.1", "127.0.0.1").budget
    assert quota_of(account_of("a", "batch")) == "batch"
    assert quota_of(account_of("a", "")) == quota_of("127.0.0.1") == quota_of("user 0") == ""


# -- the Unix socket ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def handoff(daemon: Daemon, token: str | TokenSource) -> Iterator[HandoffClient]:
    source = token if isinstance(token, TokenSource) else TokenSource(token)
    path = str(daemon.data_dir.parent / "s")
    with contextlib.closing(HandoffClient(path, answer_seconds=10, token=source)) as made:
        yield made


def test_the_socket_passes_files_to_who_may_read(daemon: Daemon) -> None:
    with handoff(daemon, SIGNER.token(rights="read")) as reader:
        assert reader.hello() == "me"
        (handed,) = reader.files([SHARD])
        assert handed.status is FileStatus.PRESENT
        assert handed.file is not None
        assert reader.held([Held(SHARD, handed.edition)]) == [True]


@pytest.mark.fault("S8")
@pytest.mark.parametrize(
    "token",
    ["", "abc", SIGNER.token(rights="fill,operate"), Signer().token()],
    ids=["none", "no token", "no right", "unknown"],
)
def test_the_socket_passes_nothing_to_anybody_else(daemon: Daemon, token: str) -> None:
    with handoff(daemon, token) as reader:
        with pytest.raises(Unauthenticated):
            reader.hello()
        with pytest.raises(Unauthenticated):
            reader.files([SHARD])


def test_the_socket_passes_nothing_before_a_hello(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.settimeout(10)
        raw.connect(str(daemon.data_dir.parent / "s"))
        raw.send(HandoffRequest(Verb.FILES, (Held(SHARD, 0),)).encode())
        answer, passed, _, _ = raw.recvmsg(4096, 4096)
        assert HandoffAnswer.decode(answer).status is Status.DENIED
        assert not passed
        assert raw.recv(1) == b""


def test_a_renewed_token_says_hello_again_on_the_socket(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "token"
    replace(path, SIGNER.token("renewed", seconds=2 - LEEWAY_SECONDS).encode())  # valid for 2 s more, by the leeway
    with handoff(daemon, TokenSource(path=str(path))) as reader:
        reader.hello()
        replace(path, SIGNER.token().encode())
        mine = ("renewed", "socket held", "expired")
        until(lambda: reader.held([Held(SHARD, 1)]) and mine in map(told, refusals(daemon)))


def test_a_running_daemon_takes_a_new_key(daemon: Daemon) -> None:
    new = Signer()
    assert daemon.ask("GET", "/v1/ring", None, bearer(new.token("rolling")))[0] == 401
    new.publish(daemon.data_dir.parent / "keys")
    until(lambda: daemon.ask("GET", "/v1/ring", None, bearer(new.token("rolling")))[0] == 200)
    assert daemon.ask("GET", "/v1/ring")[0] == 200  # and the old one's tokens stay valid


# -- what operators see ------------------------------------------------------------------------------------------------


def told(line: dict[str, Any]) -> tuple[str, str, str]:
    return line["tenant"], line["route"], line["reason"]


def refusals(daemon: Daemon) -> list[dict[str, Any]]:
    return [json.loads(line) for line in daemon.lines if line.startswith('{"event"')]


def test_a_refusal_is_a_line_of_json_that_says_who_and_what_and_why_without_secrets(daemon: Daemon) -> None:
    token = SIGNER.token("auditor", rights="read", domain="shared")
    assert daemon.ask("PUT", f"/v1/shards/{ABSENT}", b"x", bearer(token))[0] == 403
    until(lambda: any(line["tenant"] == "auditor" for line in refusals(daemon)))
    line = next(line for line in refusals(daemon) if line["tenant"] == "auditor")
    assert line.pop("time").startswith("20")
    assert line.pop("left_out") >= 0
    assert line == {
        "event": "refused",
        "address": "127.0.0.1",
        "tenant": "auditor",
        "domain": "shared",
        "route": "PUT /v1/shards/{digest}",
        "reason": "right",
    }
    expired = SIGNER.token("late", seconds=-1000)
    assert daemon.ask("GET", "/v1/ring", None, bearer(expired))[0] == 401
    until(lambda: any(line["tenant"] == "late" and line["reason"] == "expired" for line in refusals(daemon)))
    for secret in (token, expired, str(ABSENT)):
        assert not any(part in daemon.log for part in secret.split("."))


def test_refusals_are_counted_by_reason(daemon: Daemon) -> None:
    def count(reason: str) -> float:
        _, body, _ = daemon.ask("GET", "/metrics")
        name = f'quiver_refusals_total{{reason="{reason}"}} '
        return next(float(line.removeprefix(name)) for line in body.decode().splitlines() if line.startswith(name))

    before = count("missing"), count("unknown_key")
    daemon.ask("GET", "/v1/ring", None, {"Authorization": ""})
    daemon.ask("GET", "/v1/ring", None, bearer(Signer().token()))
    assert (count("missing"), count("unknown_key")) == (before[0] + 1, before[1] + 1)


def test_audit_lines_are_bounded_and_say_how_many_were_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    audit = Audit(lambda: now[0])
    with caplog.at_level(logging.INFO, audit_module.LOGGER):
        for _ in range(1000):
            audit.refused(Caller("192.0.2.1"), "GET /v1/ring", "missing")
        audit.refused(Caller("192.0.2.2"), "GET /v1/ring", "missing")  # another one is seen all the same
        assert len(caplog.messages) == LINES_MAX + 1
        assert json.loads(caplog.messages[-1])["left_out"] == 1000 - LINES_MAX
        for number in range(1000):  # an attacker of many addresses
            audit.refused(Caller(f"198.51.100.{number}"), "GET /v1/ring", "missing")
        assert len(caplog.messages) == audit_module.LINES_MAX_IN_ALL
        now[0] = 61
        audit.refused(Caller("192.0.2.1"), "GET /v1/ring", "missing")
    assert json.loads(caplog.messages[-1])["left_out"] > 800
    assert audit.refusals["missing"] == 2002
