"""Sharing domains seen from inside a daemon: what a request makes it do, and what daemons do for one another."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

import jwt
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.digest import Digest
from quiver.domain import HEADER, SINGLE, Domain, domain_named
from quiver.errors import BadRequest
from quiver.peer import PeerClient
from quiver.residency.needs import named
from quiver.ring import Member
from quiver.store import Kind, Store
from quiver.token_source import TokenSource
from quiver_cacheserver.access.caller import Caller
from quiver_cacheserver.access.control import Access
from quiver_cacheserver.names import consumer_in, key_of, name_in
from quiver_cacheserver.node import Node
from quiver_cacheserver.rack.registry import StaticRegistry
from quiver_cacheserver.residency.filler import Admission
from tests.daemon.test_domains import ASKED
from tests.support.data import Files, make_shard
from tests.support.inside import in_process, url_of
from tests.support.tenants import Tenant, new_domain, request_of
from tests.support.waiting import until

SHARD, DATA = make_shard([b"sample" * 100])
UNKNOWN = Digest(b"\xfe" * 32)
HERE, ELSEWHERE = domain_named("here"), domain_named("elsewhere")
MEMBER = "member"


class ByName(Access):
    """Takes a token for the name of its bearer's domain, and believes that "member" is a member of the rack."""

    def admit(self, address: str, token: str, verb: str, **how: bool) -> Caller:
        name = jwt.decode(token, options={"verify_signature": False})["domain"] if "." in token else token
        return Caller(address, name, name, is_member=name == MEMBER)


@contextlib.contextmanager
def daemon(where: Path, put: tuple[Domain, ...] = (), **more: Any) -> Iterator[tuple[str, Node]]:
    """Run a daemon in which these domains hold a shard, unverified; yield its URL and its node."""
    nodes: list[Node] = []

    def made(node: Node) -> None:
        node.access = ByName()
        for domain in put:
            with node.store.reserve(Kind.SHARD, SHARD, len(DATA), (), domain) as writing:
                writing.write(DATA)
                writing.commit(shares=True)
        node.verification._unverified.update({SHARD} if put else ())
        nodes.append(node)

    with in_process(where, made=made, **more) as address:
        yield url_of(address), nodes[0]


@contextlib.contextmanager
def client(url: str, domain: str) -> Iterator[PeerClient]:
    with contextlib.closing(PeerClient(url, token=TokenSource(domain))) as peer:
        yield peer


# -- work --------------------------------------------------------------------------------------------------------------


def counted(node: Node) -> Counter[str]:
    """Count the calls of what costs a daemon something: the disk, a verification, a fill, room, a peer."""
    counts: Counter[str] = Counter()
    parts: dict[object, tuple[str, ...]] = {
        node.store: ("open_file", "check", "load", "reserve", "drop", "quarantine"),
        node.verification: ("begin", "verify"),
        node.inventory: ("touched", "missed"),
        node.rooms: ("reserve", "check"),
        node.filler: ("fill",),
        node.fills: ("start",),
        node.peers: ("holders", "manifest_holders"),
        node.holders: ("filled",),
    }

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def replacement(*args: Any, **more: Any) -> Any:
            counts[name] += 1
            return call(*args, **more)

        return replacement

    for part, names in parts.items():
        for name in names:
            setattr(part, name, counting(f"{type(part).__name__}.{name}", getattr(part, name)))
    return counts


OVER_TCP = [how for how in ASKED if how not in ("files", "files to be checked again", "held")]


@pytest.mark.fault("S8")
@pytest.mark.parametrize("is_verified", [True, False])
def test_a_request_makes_a_daemon_do_for_foreign_files_what_it_does_for_unknown_ones(
    tmp_path: Path, files: Files, is_verified: bool
) -> None:
    manifest = files.opened()
    with daemon(tmp_path, (HERE, ELSEWHERE)) as (url, node):
        host, _, port = url.removeprefix("http://").rpartition(":")
        with client(url, "here") as owner:
            owner.put_manifest(manifest.digest, files.manifest.read_bytes())
            if is_verified:
                assert owner.has_shard(SHARD)
            assert node.verification.is_pending(SHARD) is not is_verified
        counts = counted(node)

        def done(how: str, digest: Digest) -> Counter[str]:
            before = counts.copy()
            ASKED[how](Tenant((host, int(port)), None, new_domain()), digest)
            node.disk_threads.submit(int).result()
            return counts - before

        for how in OVER_TCP:
            unknown = done(how, UNKNOWN)
            assert done(how, SHARD) == unknown, how
            assert done(how, manifest.digest) == unknown, how
            kinds = {name.partition(".")[0] for name in unknown}
            assert not kinds & {"Filler", "Fills", "Verification"}, (how, unknown)
            assert not how.startswith("PUT") or "Rooms.reserve" in unknown, "the count counts"
        assert node.verification.is_pending(SHARD) is not is_verified, "nothing was verified or doubted for a stranger"
        with client(url, "elsewhere") as other:
            before = counts.copy()
            assert other.has_shard(SHARD)
            assert (counts - before)["Verification.begin"] == (not is_verified)


@pytest.mark.fault("S8")
def test_who_names_a_foreign_file_takes_no_protection_from_it(tmp_path: Path, files: Files) -> None:
    manifest = files.opened()
    with daemon(tmp_path) as (url, node), client(url, "here") as owner, client(url, "elsewhere") as other:
        owner.put_shard(SHARD, DATA)
        owner.put_manifest(manifest.digest, files.manifest.read_bytes())
        held_by = node.holders.of([SHARD, manifest.digest]).tolist()
        other.read(request_of([SHARD], manifest.digest))
        assert node.holders.of([SHARD, manifest.digest]).tolist() == held_by
        assert held_by[0] == held_by[1] == node.holders.number("tenant here") != 0
        other.put_shard(SHARD, DATA)
        other.put_manifest(manifest.digest, files.manifest.read_bytes())
        assert node.holders.of([SHARD, manifest.digest]).tolist() == [0, 0], "from now on they are everybody's"


@pytest.mark.fault("S8", "C2")
def test_a_shard_under_suspicion_is_replaced_and_not_shared_by_who_brings_it(tmp_path: Path) -> None:
    with daemon(tmp_path, (HERE,)) as (url, node):
        damaged = tmp_path / "store" / "shards" / SHARD.hex()[:2] / SHARD.hex()
        edition = node.inventory.edition(SHARD)
        damaged.write_bytes(bytes(len(DATA)))
        with client(url, "elsewhere") as other, client(url, "here") as owner:
            other.put_shard(SHARD, DATA)
            assert bytes(other.load(SHARD, len(DATA))) == DATA
            assert bytes(owner.load(SHARD, len(DATA))) == DATA
        assert node.inventory.edition(SHARD) != edition
        assert set(node.inventory.domains_of(Kind.SHARD, SHARD)) == {HERE, ELSEWHERE}


# -- daemons among one another -----------------------------------------------------------------------------------------


@pytest.mark.fault("S8")
def test_a_member_reads_and_writes_for_the_domain_that_it_names_and_nobody_else_can(tmp_path: Path) -> None:
    with daemon(tmp_path, (HERE,)) as (url, node), client(url, MEMBER) as member, client(url, "elsewhere") as other:
        assert member.acting_for(HERE).has_shard(SHARD)
        assert not member.acting_for(ELSEWHERE).has_shard(SHARD)
        assert not member.has_shard(SHARD), "without a domain it acts for the one of daemons without tokens"
        assert not other.acting_for(HERE).has_shard(SHARD), "the header of a client is ignored"
        member.acting_for(ELSEWHERE).put_shard(SHARD, DATA)
        assert set(node.inventory.domains_of(Kind.SHARD, SHARD)) == {HERE, ELSEWHERE}
        assert other.has_shard(SHARD)
        member._http = member._http.with_header(HEADER, "g" * 32)
        with pytest.raises(BadRequest, match="not a sharing domain"):
            member.load(SHARD, len(DATA))


@pytest.mark.fault("S8", "O1")
def test_a_daemon_asks_its_peers_and_gives_them_copies_on_behalf_of_the_domain(
    tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = files.opened()
    as_member = partial(PeerClient, token=TokenSource(MEMBER))  # what a certificate does
    monkeypatch.setattr("quiver_cacheserver.rack.peers.PeerClient", as_member)
    with daemon(tmp_path / "there") as (there, other), client(there, "here") as owner:
        owner.put_shard(SHARD, DATA)
        owner.put_manifest(manifest.digest, files.manifest.read_bytes())
        me = Member("me", "http://127.0.0.1:9")
        registry = StaticRegistry("r", me, (there, me.url), replicas=2)
        store = Store.open(tmp_path / "here", 64 << 20, shared=False)
        node = Node("0", store, registry, [])
        with contextlib.closing(node):
            for domain, has in ((HERE, True), (ELSEWHERE, False), (SINGLE, False)):
                assert [peer.has_shard(SHARD) for peer in node.peers.holders(SHARD, domain)] == [has]
            assert asyncio.run(node.manifests.get(manifest.digest, "x", HERE)) is not None
            assert asyncio.run(node.manifests.get(manifest.digest, "x", ELSEWHERE)) is None
            assert node.inventory.domains_of(Kind.MANIFEST, manifest.digest) == (HERE,)
            digest, data = make_shard([b"another" * 50])
            with store.reserve(Kind.SHARD, digest, len(data), (), ELSEWHERE) as writing:
                writing.write(data)
                writing.commit()
            node.admitted(digest, Admission("origin", "x", ELSEWHERE))
            until(lambda: other.inventory.domains_of(Kind.SHARD, digest) == (ELSEWHERE,))


# -- names -------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.binary(min_size=32, max_size=32).map(Digest), st.text(max_size=8), st.text(max_size=8))
def test_a_name_is_the_digest_s_in_one_domain_and_nobody_else_s(digest: Digest, one: str, two: str) -> None:
    domains = domain_named(one), domain_named(two)
    names = [name_in(domain, digest) for domain in domains]
    assert [name_in(domain, name) for domain, name in zip(domains, names, strict=True)] == [digest, digest]
    assert (names[0] == names[1]) is (one == two)
    assert (names[0] == digest) is (not one)
    assert (consumer_in(domains[0], bytes(16)) == bytes(16)) is (not one)
    rows = np.frombuffer(digest, np.uint8)[None]
    assert named(rows, key_of(domains[0])).tobytes() == names[0]


def test_a_domain_is_told_by_a_fixed_number_of_digits() -> None:
    assert Domain.parse(str(HERE)) == HERE == domain_named("here")
    assert len(HERE) == 16
    assert not SINGLE
    assert domain_named("") == SINGLE
    for wrong in ("", "0" * 31, "0" * 33, "A" * 32, "g" * 32, "0" * 31 + "\n", "0" * 31 + chr(0x660)):
        with pytest.raises(BadRequest):
            Domain.parse(wrong)
