"""What a daemon tells operators: by name, never by digest, to each caller what its sharing domain may see."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from quiver.allocation import Allocation, DatasetDemand, Policy, Problem, Reader, Share
from quiver.claims import Right
from quiver.digest import Digest
from quiver.domain import SINGLE, Domain, domain_named
from quiver.errors import BadRequest, DiskFailed
from quiver.identity import Identity
from quiver.overview import DatasetRequest, RankView
from quiver.residency import ConsumerReport, Measured
from quiver.residency.messages import NEEDS_TYPE, NeedsReport
from quiver.store import Kind, Store
from quiver_cacheserver.access.caller import EVERY_RIGHT, Caller
from quiver_cacheserver.allocation import AllocationSettings
from quiver_cacheserver.overview import removal
from quiver_cacheserver.overview.facts import Facts
from quiver_cacheserver.overview.held import look
from quiver_cacheserver.overview.jobs import Reading, jobs_of
from quiver_cacheserver.overview.known import KnownDatasets
from quiver_cacheserver.overview.overview import Overview
from quiver_cacheserver.overview.shares import Shown, view
from quiver_cacheserver.pins import FILE, Pins, pin_of
from tests.daemon.test_costs import lone_node
from tests.support.daemon import Daemon
from tests.support.data import Files, make_files, random_files
from tests.support.tenants import SIGNER, Tenant, new_domain
from tests.support.tokens import bearer
from tests.support.waiting import until

ONE, OTHER = domain_named("one"), domain_named("other")


def digest(number: int) -> Digest:
    return Digest(number.to_bytes(32, "big"))


def rows(*numbers: int) -> np.ndarray:
    return np.frombuffer(b"".join(map(digest, numbers)), np.uint8).reshape(-1, 32)


def facts(*numbers: int, size: int = 10, repeated: int = 0) -> Facts:
    return Facts("", len(numbers), repeated, rows(*numbers), np.full(len(numbers), size, np.int64))


# -- who sees what ----------------------------------------------------------------------------------------------------


def test_a_token_that_reads_or_fills_sees_its_domain_and_one_that_only_operates_sees_all() -> None:
    assert Caller("x").sees is None
    assert Caller("x", "t", "one", EVERY_RIGHT).sees == ONE
    assert Caller("x", "t", "one", frozenset({Right.READ, Right.OPERATE})).sees == ONE
    assert Caller("x", "t", "one", frozenset({Right.OPERATE})).sees is None
    assert Caller("x", is_member=True, acting_for=SINGLE).sees is None


# -- what is held -----------------------------------------------------------------------------------------------------


def test_what_datasets_save_by_sharing_shards_adds_up_to_what_is_saved() -> None:
    found = look(rows(1, 2, 3, 5, 9), {"a": facts(1, 2, 3, 4), "b": facts(2, 3), "c": facts(3, 5)})
    assert {key: it.resident_bytes for key, it in found.items()} == {"a": 30, "b": 20, "c": 20}
    stored = 10 * len({1, 2, 3, 5})
    assert sum(it.saved_bytes for it in found.values()) == pytest.approx(30 + 20 + 20 - stored, abs=len(found))


def test_equal_samples_of_a_dataset_save_as_far_as_it_is_resident() -> None:
    assert look(rows(1, 2), {"a": facts(1, 2, 3, 4, repeated=400)})["a"].saved_bytes == 200
    assert look(rows(), {"a": facts(1)})["a"].resident_bytes == 0


def test_the_facts_of_a_manifest_tell_what_equal_samples_would_take(tmp_path: Path) -> None:
    content = {f"{number}.bin": b"same" * 100 for number in range(5)} | {"other.bin": b"x" * 100}
    found = Facts.of(make_files(tmp_path, content).opened())
    assert (found.samples, found.repeated_bytes) == (6, 4 * 400)
    assert found.size_bytes == int(found.sizes.sum()) > 500


# -- jobs -------------------------------------------------------------------------------------------------------------


def test_the_ranks_of_a_job_are_one_entry_per_dataset_and_the_number_of_entries_is_bounded() -> None:
    readings = [
        Reading(Identity("train", "", "t"), "id1", "imagenet", RankView("r2", rate=1.0)),
        Reading(Identity("train", "", "t"), "id1", "imagenet", RankView("r1", rate=2.0), ordered=True),
        Reading(Identity("train", "", "t"), "id2", "laion", RankView("r1", rate=9.0)),
        Reading(Identity("train", "", "u"), "id1", "imagenet", RankView("r3")),
    ]
    jobs, left_out = jobs_of(readings, 2)
    assert [(it.job, it.tenant, it.dataset) for it in jobs] == [("train", "t", "laion"), ("train", "t", "imagenet")]
    assert [rank.id for rank in jobs[1].ranks] == ["r1", "r2"]
    assert jobs[1].ordered
    assert left_out == 1


# -- the allocation ---------------------------------------------------------------------------------------------------


def solved() -> tuple[Problem, Allocation]:
    readers = (Reader(name="train", rate=np.inf, tenant="t"),)
    problem = Problem(
        capacity_bytes=100,
        datasets=(
            DatasetDemand(name="a", size_bytes=80, origin="s3", readers=readers),
            DatasetDemand(name="b", size_bytes=60, origin="s3", readers=(Reader(name="x", rate=1, tenant="u"),)),
        ),
        origin_rates={"s3": 50.0},
        weights={"t": 2.0, "u": 1.0},
        quotas={"u": 10.0},
    )
    shares = {
        "a": Share(cache_bytes=70, origin_rate=20.0, reason="because"),
        "b": Share(cache_bytes=30, origin_rate=np.inf, reason=""),
    }
    return problem, Allocation(policy=Policy.MAX_MIN, shares=shares, predicted={("a", "train"): 5.0})


def test_an_allocation_is_told_in_json_whatever_is_infinite() -> None:
    told = view("n", *solved(), lambda it: Shown(f"id-{it.name}", it.name), age_seconds=1.0, entries_max=10)
    assert json.loads(msgspec.json.encode(told))["datasets"][1]["origin_rate"] is None
    assert (told.capacity_bytes, told.policy) == (100, "max-min")
    assert told.datasets[0].readers[0].rate is None
    assert told.datasets[0].readers[0].predicted == 5.0


def test_a_domain_is_told_its_own_part_of_the_allocation_alone() -> None:
    told = view("n", *solved(), lambda it: Shown("1", "a") if it.name == "a" else None, age_seconds=1.0, entries_max=10)
    assert [share.name for share in told.datasets] == ["a"]
    assert (told.capacity_bytes, told.origin_rates, told.weights, told.quotas) == (70, {"s3": 20.0}, {"t": 2.0}, {})


# -- pins -------------------------------------------------------------------------------------------------------------


def test_pins_are_kept_over_a_restart_without_a_digest_and_hold_once_the_dataset_is_known(tmp_path: Path) -> None:
    store = Store.open(tmp_path, 1000, shared=False)
    pins = Pins(store)
    pins.add("0" * 16, pin_of("imagenet", 100))
    assert digest(1).hex() not in (tmp_path / FILE).read_text()
    again = Pins(store)
    assert "0" * 16 in again
    assert not again.among(rows(1, 2)).any()
    again.know("0" * 16, SINGLE, digest(9), rows(2, 3))
    assert again.among(rows(1, 2)).tolist() == [False, True]
    assert again.manifests == {digest(9)}
    assert again.remove("0" * 16)
    assert not again.among(rows(1, 2)).any()
    assert not Pins(store).ids
    store.close()


def test_pins_are_bounded_by_the_capacity_and_by_the_quota_of_their_tenant(tmp_path: Path) -> None:
    store = Store.open(tmp_path, 1000, shared=False)
    pins = Pins(store)
    pins.add("a" * 16, pin_of("a", 500, "t"))
    with pytest.raises(BadRequest, match=r"b would take 401 B and other pins take 500 B: pins may take here 900 B"):
        pins.add("b" * 16, pin_of("b", 401, "t"))
    with pytest.raises(BadRequest, match=r"the quota of tenant t is here 600 B"):
        pins.add("b" * 16, pin_of("b", 101, "t"), 600.0)
    pins.add("a" * 16, pin_of("a", 600, "t"), 600.0)  # the same again, not a second one
    assert pins.within_limit(rows(), np.zeros(0, np.int64)).tolist() == []
    pins.know("a" * 16, SINGLE, digest(9), rows(1, 2, 3))
    assert pins.within_limit(rows(1, 2, 3), np.full(3, 400)).tolist() == [True, True, False]
    store.close()


def test_a_pin_of_one_domain_holds_for_no_dataset_of_another(tmp_path: Path) -> None:
    store = Store.open(tmp_path, 1000, shared=False)
    pins = Pins(store)
    pins.add("a" * 16, pin_of("a", 100, domain=ONE))
    pins.know("a" * 16, OTHER, digest(9), rows(1))
    assert not pins.among(rows(1)).any()
    assert not pins.remove("a" * 16, OTHER)
    assert pins.remove("a" * 16, ONE)
    store.close()


def test_a_pin_is_not_replaced_by_one_who_does_not_see_it(tmp_path: Path) -> None:
    """Who knows a manifest and the name of a domain knows the id that the dataset has there."""
    store = Store.open(tmp_path, 1000, shared=False)
    pins = Pins(store)
    pins.add("a" * 16, pin_of("a", 100, domain=ONE))
    pins.add("b" * 16, pin_of("b", 100))  # by an operator of all domains
    for dataset in ("a" * 16, "b" * 16):
        pins.add(dataset, pin_of("mine", 1, domain=OTHER))
        assert not pins.remove(dataset, OTHER)
    assert {it.name for _, it in Pins(store).items()} == {"a", "b"}
    pins.add("a" * 16, pin_of("all's", 100))
    assert dict(pins.items())["a" * 16].domain is None
    store.close()


@pytest.mark.parametrize("policy", ["max-min", "none"])
async def test_the_quota_of_a_tenant_bounds_its_pins_from_the_first_request_on(policy: str, tmp_path: Path) -> None:
    files = make_files(tmp_path, random_files(3, seed=1))
    with contextlib.closing(lone_node(files, tmp_path)) as node:
        node.allocator.settings = AllocationSettings.parse(policy, {"t": {"quota": 300}}, (), 1000)
        asked, overview = DatasetRequest("a" * 16, "big", 301), Overview(node)
        with pytest.raises(BadRequest, match="the quota of tenant t is here 300 B"):
            await overview.pin(asked, Caller("", tenant="t", domain="one"))
        assert not (await overview.pin(asked, Caller("", tenant="u", domain="one"))).known


async def test_a_dataset_that_comes_to_another_domain_has_its_name_there_too(tmp_path: Path) -> None:
    manifest = make_files(tmp_path / "d", random_files(3, seed=1)).opened()
    heard, reported = list[Domain](), {(ONE, manifest.digest): manifest}
    with contextlib.closing(Store.open(tmp_path / "s", 1000, shared=False)) as store:
        known = KnownDatasets(store, lambda: reported, lambda of, domain, name: heard.append(domain))
        await known.look(anew=True)
        await known.look(anew=True)
        assert heard == [ONE]
        reported[OTHER, manifest.digest] = manifest
        await known.look(anew=True)
        assert heard == [ONE, OTHER]


def test_a_pin_that_cannot_be_written_is_not_made(tmp_path: Path) -> None:
    store = Store.open(tmp_path, 1000, shared=False)
    pins = Pins(store)
    (tmp_path / FILE).mkdir()  # so that the file cannot get its name
    (tmp_path / FILE / "x").touch()
    with pytest.raises(DiskFailed, match="nothing was changed"):
        pins.add("a" * 16, pin_of("a", 100))
    assert not pins.ids
    assert not list(tmp_path.glob(".pins*"))
    store.close()


@pytest.mark.parametrize("content", ["{", '{"a": 3}', "[]", "\udcff"])
def test_a_damaged_file_of_pins_pins_nothing_and_says_so(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store.open(tmp_path, 1000, shared=False)
    (tmp_path / FILE).write_bytes(content.encode("utf-8", "surrogateescape"))
    assert not Pins(store).ids
    assert "pin the datasets again" in caplog.text
    store.close()


# -- evictions --------------------------------------------------------------------------------------------------------


def test_an_eviction_keeps_what_others_share_and_what_other_domains_hold(tmp_path: Path) -> None:
    store = Store.open(tmp_path, 10_000, shared=False)
    for number, domain in ((1, ONE), (2, ONE), (3, ONE), (3, OTHER)):
        with store.reserve(Kind.SHARD, digest(number), 10, (), domain) as writing:
            writing.write(b"x" * 10)
            writing.commit(shares=True)
    its = facts(1, 2, 3)
    keep = removal.shared_with(its, [facts(2, 7)])
    assert removal.evict(store, its, keep, ONE) == (20, 10)
    has = store.inventory.has
    assert [has(Kind.SHARD, digest(number), ONE) for number in (1, 2, 3)] == [False, True, False]
    assert has(Kind.SHARD, digest(3), OTHER)
    assert removal.evict(store, its, keep, ONE) == (0, 10)
    store.close()
    again = Store.open(tmp_path, 10_000, shared=False)
    assert not again.inventory.has(Kind.SHARD, digest(3), ONE)
    again.close()


# -- routes -----------------------------------------------------------------------------------------------------------

PATHS = ("/v1/jobs", "/v1/datasets", "/v1/allocation", "/metrics")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    where = tmp_path_factory.mktemp("shared")
    SIGNER.publish(where / "keys")
    with Daemon(where / "node", "--token-keys", str(where / "keys"), origins=[where]) as daemon:
        yield daemon


def reports(tenant: Tenant, files: Files, job: str) -> None:
    """Report that a job of the tenant reads the files' dataset."""
    manifest = files.opened()
    assert tenant.put("manifests", manifest.digest, files.manifest.read_bytes()).status == 201
    needs = ConsumerReport(
        job.encode().ljust(16, b"."),
        np.zeros(manifest.shard_count, np.uint8),
        1e6,
        1e12,
        60.0,
        identity=Identity(job, tenant="forged"),
        dataset_name=f"dataset of {job}",
        measured=Measured(5e5, 0.5, 1e3),
    )
    body = NeedsReport(manifest.digest, needs).encode()
    assert tenant.ask("POST", "/v1/needs", body, {"Content-Type": NEEDS_TYPE}).status == 200


def test_a_tenant_is_shown_names_of_its_own_domain_alone_and_the_tenant_of_its_token(
    shared: Daemon, tmp_path: Path
) -> None:
    # With a dash: "d1" alone may be part of an id.
    first, second = (Tenant(shared.address, None, f"{new_domain()}-domain") for _ in range(2))
    files = make_files(tmp_path, random_files(3, seed=1))
    reports(first, files, "alpha")
    reports(second, files, "beta")
    for path in PATHS:
        told = first.ask("GET", path)
        assert told.status == 200, told
        assert b"beta" not in told.body
        assert second.domain.encode() not in told.body
        assert str(files.opened().digest).encode() not in told.body
    [job] = json.loads(first.ask("GET", "/v1/jobs").body)["jobs"]
    assert (job["job"], job["tenant"], job["dataset"]) == ("alpha", first.domain, "dataset of alpha")
    wanted = b'{dataset="dataset of alpha",tenant="%s"} 0.5' % first.domain.encode()
    until(lambda: wanted in first.ask("GET", "/metrics").body)
    operator = bearer(SIGNER.token("ops", domain="ops", rights="operate"))
    told = shared.ask("GET", "/v1/jobs", headers=operator)[1]
    assert {"alpha", "beta"} <= {it["job"] for it in json.loads(told)["jobs"]}
    reader = bearer(SIGNER.token("x", domain="x", rights="read,fill"))
    assert {shared.ask("GET", path, headers=reader)[0] for path in PATHS} == {403}


def test_a_tenant_can_neither_pin_nor_evict_what_another_domain_has(shared: Daemon, tmp_path: Path) -> None:
    first, second = (Tenant(shared.address, None, new_domain()) for _ in range(2))
    files = make_files(tmp_path, random_files(3, seed=2))
    reports(first, files, "gamma")
    until(lambda: json.loads(first.ask("GET", "/v1/datasets").body)["datasets"] != [])
    [dataset] = json.loads(first.ask("GET", "/v1/datasets").body)["datasets"]
    body = json.dumps({"id": dataset["id"]}).encode()
    unknown = json.dumps({"id": "0" * 16}).encode()
    for verb in ("pin", "unpin", "evict"):
        theirs, nobodys = (second.ask("POST", f"/v1/{verb}", it) for it in (body, unknown))
        assert theirs.status == nobodys.status == 404
        assert theirs.body.replace(dataset["id"].encode(), b"0" * 16) == nobodys.body
    assert first.ask("POST", "/v1/pin", body).status == 200
    assert json.loads(first.ask("GET", "/v1/datasets").body)["datasets"][0]["pinned"]
    assert second.ask("POST", "/v1/unpin", body).status == 404
    assert first.ask("POST", "/v1/unpin", body).status == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"id": 1}', b'{"id": "../../../x"}', b'{"id": "0000000000000000", "name": "a\\n"}', b"\xff" * 40],
)
def test_a_malformed_request_about_a_dataset_is_refused_in_one_line(body: bytes, shared: Daemon) -> None:
    tenant = Tenant(shared.address, None, new_domain())
    for verb in ("pin", "unpin", "evict"):
        told = tenant.ask("POST", f"/v1/{verb}", body)
        assert told.status == 400, told
        assert json.loads(told.body)["error"] == "bad_request"
