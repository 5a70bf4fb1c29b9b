"""Sharing domains: within one the digest is the capability, across them nothing is readable and nothing shows.

Each test, and each example of a property, uses domains of its own at daemons that many share: what one of them does
must not be visible to the others.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from quiver.digest import Digest
from quiver.residency.messages import NeedsAnswer, NeedsStatus
from quiver.store.domains import ATTRIBUTE
from quiver.transport.handoff import RECHECK as FILE_RECHECK
from quiver.transport.handoff import USED, Held
from quiver.wire import FORGO, RECHECK, RangeStatus
from tests.support.daemon import Daemon
from tests.support.data import Files, make_files, make_shard, random_files, rebased, shard_bytes_of
from tests.support.tenants import SIGNER, Tenant, new_domain
from tests.support.waiting import until

UNKNOWN = Digest(b"\xfe" * 32)


class Shared:
    """A daemon with tokens and a socket, and two datasets of which it may read the first."""

    def __init__(self, where: Path, *flags: str, capacity: str = "1GiB") -> None:
        SIGNER.publish(where / "keys")
        self.path = where / "s"
        self.files = make_files(where, random_files(24, seed=3, low=2_000, high=9_000), shard_bytes="32KiB")
        self.others = make_files(where, random_files(12, seed=4, low=2_000, high=9_000), name="o", shard_bytes="32KiB")
        self.daemon = Daemon(
            where / "data",
            *("--token-keys", str(where / "keys"), "--socket", str(self.path), "--node-id", "me", *flags),
            origins=[self.files.folder],
            capacity=capacity,
        )
        self.manifest, self.other = self.files.opened(), self.others.opened()
        self.shards = [shard_bytes_of(self.manifest, number) for number in range(self.manifest.shard_count)]

    def tenant(self, domain: str | None = None, tenant: str | None = None) -> Tenant:
        return Tenant(self.daemon.address, self.path, domain or new_domain(), tenant)

    def with_manifest(self, files: Files | None = None) -> Tenant:
        """Return a tenant of a new domain that holds a manifest."""
        tenant, files = self.tenant(), files or self.files
        assert tenant.put("manifests", files.opened().digest, files.manifest.read_bytes()).status == 201
        return tenant

    def metric(self, name: str) -> float:
        body = self.tenant().ask("GET", "/metrics").body.decode()
        values = [line.rsplit(" ", 1)[1] for line in body.splitlines() if line.startswith(name)]
        assert values, f"no metric {name}"
        return sum(map(float, values))

    def inodes(self) -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in self.daemon.files()}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    made = Shared(tmp_path_factory.mktemp("shared"))
    assert made.manifest.shard_count >= 3
    with made.daemon:
        yield made


# -- what is readable --------------------------------------------------------------------------------------------------


@pytest.mark.fault("S8")
def test_what_a_domain_reads_is_what_it_has_shown_to_have_whatever_was_asked_by_whom(shared: Shared) -> None:
    names, numbers = st.sampled_from("abc"), st.integers(0, 2)

    class Model(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            self.tenants = {name: shared.tenant() for name in "abc"}
            self.shards: dict[str, set[Digest]] = {name: set() for name in "abc"}
            self.manifests: dict[str, bool] = dict.fromkeys("abc", False)

        @rule(name=names, number=numbers)
        def upload(self, name: str, number: int) -> None:
            digest, data = shared.shards[number]
            assert self.tenants[name].put("shards", digest, data).status == 201
            self.shards[name].add(digest)

        @rule(name=names, number=numbers)
        def upload_something_else(self, name: str, number: int) -> None:
            assert self.tenants[name].put("shards", shared.shards[number][0], b"x" * 5_000).status == 422

        @rule(name=names)
        def upload_the_manifest(self, name: str) -> None:
            content = shared.files.manifest.read_bytes()
            assert self.tenants[name].put("manifests", shared.manifest.digest, content).status == 201
            self.manifests[name] = True

        @rule(name=names, number=numbers, how=st.sampled_from(["fill", "read", "stream"]))
        def fill(self, name: str, number: int, how: str) -> None:
            tenant, digest = self.tenants[name], shared.shards[number][0]
            if how == "fill":
                told = tenant.fill(shared.manifest.digest, [digest])[0]
            else:
                answer = (tenant.read if how == "read" else tenant.stream)([digest], shared.manifest.digest, 20_000)
                told = RangeStatus(answer.body[0])
            if self.manifests[name]:
                self.shards[name].add(digest)
            here = digest in self.shards[name]
            assert told is (RangeStatus.PRESENT if here else RangeStatus.NO_MANIFEST)

        @rule(name=names, number=numbers)
        def doubt_and_decline(self, name: str, number: int) -> None:
            tenant, digest = self.tenants[name], shared.shards[number][0]
            assert tenant.recheck([digest]).status == 204
            assert tenant.forgo(shared.manifest.digest, [digest]).status == 204
            tenant.read([digest], shared.manifest.digest if self.manifests[name] else None, 20_000, RECHECK | FORGO)
            tenant.files([digest], FILE_RECHECK)
            if self.manifests[name]:
                self.shards[name].add(digest)
            tenant.read([digest], None, 20_000)  # and wait until it is verified again

        @rule(name=names)
        def report(self, name: str) -> None:
            tenant = self.tenants[name]
            if self.manifests[name]:  # then the daemon fetches what is missing, for this domain
                until(lambda: 0 not in tenant.seen(shared.manifest, ahead=0.0), 60)
                self.shards[name].update(digest for digest, _ in shared.shards)
            else:
                answer = tenant.needs(shared.manifest.digest, np.full(len(shared.shards), 255, np.uint8))
                assert NeedsAnswer.decode(answer.body).status is NeedsStatus.NO_MANIFEST

        @invariant()
        def each_reads_what_it_has(self) -> None:
            for name, tenant in getattr(self, "tenants", {}).items():
                assert set(tenant.reads_manifest(shared.manifest.digest).values()) == {self.manifests[name]}
                for digest, _ in shared.shards[:3]:
                    carriers = tenant.shard_carriers(digest)
                    assert set(carriers.values()) == {digest in self.shards[name]}, (name, carriers)

    few = settings(max_examples=4, stateful_step_count=8, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Model, settings=few)


# -- what shows --------------------------------------------------------------------------------------------------------

ASKED: dict[str, Callable[[Tenant, Digest], object]] = {
    "GET of a shard": lambda tenant, digest: tenant.ask("GET", f"/v1/shards/{digest}"),
    "HEAD of a shard": lambda tenant, digest: tenant.ask("HEAD", f"/v1/shards/{digest}"),
    "GET of a manifest": lambda tenant, digest: tenant.ask("GET", f"/v1/manifests/{digest}"),
    "HEAD of a manifest": lambda tenant, digest: tenant.ask("HEAD", f"/v1/manifests/{digest}"),
    "read": lambda tenant, digest: tenant.read([digest]),
    "read that waits": lambda tenant, digest: tenant.read([digest], digest, 500),
    "read with flags": lambda tenant, digest: tenant.read([digest], digest, 0, RECHECK | FORGO),
    "stream": lambda tenant, digest: tenant.stream([digest]),
    "stream that waits": lambda tenant, digest: tenant.stream([digest], digest, 500),
    "stream with flags": lambda tenant, digest: tenant.stream([digest], digest, 0, RECHECK | FORGO),
    "fill": lambda tenant, digest: tenant.fill(digest, [digest]),
    "forgo": lambda tenant, digest: tenant.forgo(digest, [digest]),
    "recheck": lambda tenant, digest: tenant.recheck([digest]),
    "needs": lambda tenant, digest: tenant.needs(digest, np.full(3, 255, np.uint8)),
    "files": lambda tenant, digest: tenant.files([digest]),
    "files to be checked again": lambda tenant, digest: tenant.files([digest], FILE_RECHECK),
    "held": lambda tenant, digest: tenant.held([Held(digest, 1)], USED),
    "PUT of other bytes": lambda tenant, digest: tenant.put("shards", digest, b"x" * 5_000),
    "PUT of another manifest": lambda tenant, digest: tenant.put("manifests", digest, b"x" * 5_000),
}


@pytest.mark.fault("S8")
@pytest.mark.parametrize("how", ASKED)
def test_what_is_foreign_is_answered_as_what_nobody_has(shared: Shared, how: str) -> None:
    owner = shared.with_manifest()
    digest = shared.shards[0][0]
    assert owner.fill(shared.manifest.digest, [digest]) == [RangeStatus.PRESENT]
    told = {
        name: ASKED[how](shared.tenant(), asked)
        for name, asked in (
            ("unknown", UNKNOWN),
            ("absent", shared.other.shard_digest(0)),  # a real one, which nobody has uploaded
            ("foreign shard", digest),
            ("foreign manifest", shared.manifest.digest),
        )
    }
    assert len(set(map(repr, told.values()))) == 1, told
    edition = owner.files([digest])[0].editions[0]
    assert shared.tenant().held([Held(digest, edition), Held(UNKNOWN, edition)], USED) == b"\0\0"
    assert all(owner.shard_carriers(digest).values()), "what strangers ask changes nothing for those who have it"
    assert all(owner.reads_manifest(shared.manifest.digest).values())


@pytest.mark.fault("S8")
@pytest.mark.parametrize("base", ["not allowed", "gone"])
def test_a_manifest_of_one_s_own_that_names_a_foreign_shard_gives_nothing(
    shared: Shared, tmp_path: Path, base: str
) -> None:
    """``other`` is held by nobody: what is answered about its shards is what is to be answered about foreign ones."""
    owner = shared.with_manifest()
    shards = [digest for digest, _ in shared.shards[:2]]
    assert set(owner.fill(shared.manifest.digest, shards)) == {RangeStatus.PRESENT}
    folder = "file:///nowhere/" if base == "not allowed" else f"file://{shared.files.folder}/gone/"
    told = []
    for number, files in enumerate((shared.files, shared.others)):
        lie = rebased(files, folder, tmp_path / f"{number}.quiver").opened()
        thief, content = shared.tenant(), (tmp_path / f"{number}.quiver").read_bytes()
        assert thief.put("manifests", lie.digest, content).status == 201
        named = [lie.shard_digest(at) for at in range(2)]
        answers: list[object] = [thief.fill(lie.digest, named, 2_000)]
        for ask in (thief.read, thief.stream):
            answers += [ask(named, lie.digest), ask(named, lie.digest, 500, RECHECK), ask(named)]
        answers += [thief.forgo(lie.digest, named), thief.read(named, lie.digest), thief.recheck(named)]
        answers += [thief.files(named), thief.seen(lie)[:2], thief.ask("GET", f"/v1/shards/{named[0]}")]
        told.append(answers)
        assert not any(thief.shard_carriers(named[0]).values())
    assert told[0] == told[1]


@pytest.mark.fault("S8")
def test_an_upload_is_answered_alike_whether_or_not_others_have_the_shard(shared: Shared) -> None:
    first, second = shared.tenant(), shared.tenant()
    digest, data = shard_bytes_of(shared.other, 1)
    content = shared.others.manifest.read_bytes()
    name = shared.other.digest
    told = [(it.put("shards", digest, data), it.put("manifests", name, content)) for it in (first, second)]
    assert told[0] == told[1]
    assert told[0][0].status == 201


@pytest.mark.fault("S8")
def test_nobody_learns_from_an_answer_to_a_report_who_else_needs_or_holds_a_shard(shared: Shared) -> None:
    owner, other = shared.with_manifest(), shared.with_manifest()
    shards = [digest for digest, _ in shared.shards]
    owner.fill(shared.manifest.digest, shards)
    assert owner.seen(shared.manifest, b"1" * 16) == [1] * len(shards)
    assert owner.seen(shared.manifest, b"2" * 16) == [2] * len(shards), "within a domain consumers are counted"
    assert other.seen(shared.manifest, b"1" * 16) == [0] * len(shards), "and it did not take the other's lease"
    other.fill(shared.manifest.digest, shards)
    assert other.seen(shared.manifest, b"1" * 16) == [1] * len(shards)
    assert owner.seen(shared.manifest, b"1" * 16) == [2] * len(shards)


# -- what is stored and read -------------------------------------------------------------------------------------------


@pytest.mark.fault("S8")
def test_each_domain_reads_the_origin_and_the_bytes_are_stored_once(shared: Shared) -> None:
    digest, data = shared.shards[1]
    sizes = shared.manifest.blob_sizes(slice(0, len(shared.manifest.tables.digests)))
    blobs = shared.manifest.shard_blobs(1)
    read_bytes = int(sizes[blobs.start : blobs.stop].sum())
    first, second, third = shared.with_manifest(), shared.with_manifest(), shared.tenant()
    assert first.fill(shared.manifest.digest, [digest]) == [RangeStatus.PRESENT]
    inode, before = shared.inodes()[str(digest)], shared.metric("quiver_origin_read_bytes_total")
    resident = shared.metric("quiver_resident_bytes")
    edition = first.files([digest])[0].editions[0]

    assert second.fill(shared.manifest.digest, [digest]) == [RangeStatus.PRESENT]
    assert shared.metric("quiver_origin_read_bytes_total") - before == read_bytes, "it shows that it has them"
    assert third.put("shards", digest, data).status == 201
    assert shared.metric("quiver_resident_bytes") == resident
    assert shared.inodes()[str(digest)] == inode
    assert first.files([digest])[0].editions[0] == edition, "those who map the file need not know"
    assert not list((shared.daemon.data_dir / "tmp").iterdir())

    again = shared.metric("quiver_origin_read_bytes_total")
    assert second.fill(shared.manifest.digest, [digest]) == [RangeStatus.PRESENT]
    assert shared.metric("quiver_origin_read_bytes_total") == again, "and once"


@pytest.mark.fault("S8", "O1")
def test_what_jobs_of_several_domains_need_is_fetched_for_each_and_stored_once(shared: Shared) -> None:
    tenants = [shared.with_manifest() for _ in range(2)]
    before, files = shared.metric("quiver_origin_read_bytes_total"), len(shared.daemon.files())
    until(lambda: not any(0 in tenant.seen(shared.manifest, ahead=0.0) for tenant in tenants), 60)
    read_bytes = shared.metric("quiver_origin_read_bytes_total") - before
    assert read_bytes == 2 * shared.files.total_bytes()
    assert len(shared.daemon.files()) <= max(files, len(shared.shards))


@pytest.mark.fault("S8")
def test_tenants_of_one_domain_share_what_one_of_them_has(shared: Shared) -> None:
    domain = new_domain()
    one, two = shared.tenant(domain, "one"), shared.tenant(domain, "two")
    digest, data = shared.shards[2]
    assert one.put("shards", digest, data).status == 201
    assert all(two.shard_carriers(digest).values())


@pytest.mark.fault("S8")
def test_domains_that_share_their_shards_fit_where_they_would_not_twice(tmp_path: Path) -> None:
    made = Shared(tmp_path, capacity="256KiB")
    total = sum(len(data) for _, data in made.shards)
    assert total < 256 << 10 < 2 * total
    with made.daemon:
        tenants = [made.with_manifest() for _ in range(3)]
        for tenant in tenants:
            for digest, data in made.shards:
                assert tenant.put("shards", digest, data).status == 201
        for tenant in tenants:
            assert set(tenant.fill(made.manifest.digest, [digest for digest, _ in made.shards], 0)) == {0}
        assert made.metric("quiver_resident_bytes") < 256 << 10
        assert made.metric("quiver_forced_drops_total") == 0


# -- restarts ----------------------------------------------------------------------------------------------------------


def restarted(made: Shared, number: signal.Signals = signal.SIGTERM) -> None:
    made.daemon.signal(number)
    made.daemon.wait()
    made.daemon.start()
    made.daemon.wait_until_serving()


@pytest.mark.fault("S8", "C1")
def test_domains_survive_a_kill_and_what_lost_its_record_is_nobody_s_until_it_is_shown(tmp_path: Path) -> None:
    made = Shared(tmp_path)
    with made.daemon:
        one, two = made.with_manifest(), made.with_manifest()
        shards = [digest for digest, _ in made.shards]
        one.fill(made.manifest.digest, shards)
        two.fill(made.manifest.digest, shards[:1])
        restarted(made, signal.SIGKILL)
        for tenant, has in ((one, [True] * 3), (two, [True, False, False])):
            tenant._address = made.daemon.address
            tenant.read(shards, None, 20_000)  # until they are verified
            assert [set(tenant.shard_carriers(it).values()) for it in shards[:3]] == [{it} for it in has]
            assert set(tenant.reads_manifest(made.manifest.digest).values()) == {True}
        assert not any(made.tenant().shard_carriers(shards[0]).values())

        made.daemon.stop()
        for path in made.daemon.files():
            os.removexattr(path, ATTRIBUTE)
        os.setxattr(made.daemon.files()[1], ATTRIBUTE, b"too short")
        before = made.inodes()
        made.daemon.start()
        made.daemon.wait_until_serving()
        one._address = made.daemon.address
        assert not any(any(one.shard_carriers(it).values()) for it in shards)
        assert set(one.fill(made.manifest.digest, shards)) == {RangeStatus.PRESENT}
        assert all(one.shard_carriers(shards[0]).values())
        assert len(made.inodes()) == len(before), "no second copy"


@pytest.mark.fault("S8")
def test_what_was_stored_before_there_were_tokens_is_nobody_s_until_it_is_shown(tmp_path: Path) -> None:
    made = Shared(tmp_path)
    digest, data = made.shards[0]
    with Daemon(made.daemon.data_dir) as plain:
        assert plain.ask("PUT", f"/v1/shards/{digest}", data)[0] == 201
        plain.stop()
        assert not any(ATTRIBUTE in os.listxattr(path) for path in plain.files()), "it writes nothing new"
    with made.daemon:
        tenant, foreign = made.tenant(), made.shards[1]
        assert not any(tenant.shard_carriers(digest).values())
        assert tenant.put("shards", digest, data).status == 201
        assert all(tenant.shard_carriers(digest).values())
        assert tenant.put("shards", *foreign).status == 201
        made.daemon.stop()
    with Daemon(made.daemon.data_dir) as plain:
        assert plain.ask("GET", f"/v1/shards/{digest}")[:2] == (200, data)
        assert plain.ask("GET", f"/v1/shards/{foreign[0]}")[0] == 404, "a domain's shards are its own, also then"


def test_only_the_daemon_s_user_can_read_what_tenants_store(tmp_path: Path) -> None:
    """A job on the same machine would otherwise read all domains' shards from the disk, with the digests as names."""
    SIGNER.publish(tmp_path / "keys")
    shard, data = make_shard([b"theirs" * 100])
    with Daemon(tmp_path / "data") as daemon:  # whose folders were made for everybody
        assert daemon.ask("PUT", f"/v1/shards/{shard}", data)[0] == 201
    assert (tmp_path / "data" / "shards").stat().st_mode & 0o007
    token = SIGNER.token()
    with Daemon(tmp_path / "data", "--token-keys", str(tmp_path / "keys"), token=token) as daemon:
        shard, data = make_shard([b"ours" * 100])
        assert daemon.ask("PUT", f"/v1/shards/{shard}", data)[0] == 201
        for folder in ("shards", "manifests", "partial", "quarantine", "tmp"):
            assert (daemon.data_dir / folder).stat().st_mode & 0o777 == 0o700
        # Whoever was passed the open file could otherwise read in its attribute who else holds it.
        assert [path.stat().st_mode & 0o777 for path in daemon.files() if path.name == str(shard)] == [0o600]
