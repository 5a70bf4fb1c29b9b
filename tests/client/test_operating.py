"""Adding up what daemons answer, finding what a person named, and explaining it in words."""

from __future__ import annotations

import contextlib
import socket
from functools import partial

import msgspec
import pytest

from quiver.allocation import allocate
from quiver.errors import BadRequest, NotFound
from quiver.identity import told_apart
from quiver.overview import (
    AllocationView,
    DatasetsView,
    DatasetView,
    JobsView,
    JobView,
    RankView,
    ReaderView,
    ShareView,
    TierBytes,
)
from quiver.peer import PeerClient
from quiver.ring import Member
from quiver_client.operating.explaining import TB, change_for, explain_job, in_words, problem_of
from quiver_client.operating.finding import dataset_called, subject_called
from quiver_client.operating.merging import best_allocation, merged_datasets, merged_jobs
from quiver_client.operating.rack import ask_all
from tests.support.etcd import free_ports
from tests.support.servers import HostileServer, ok

MB = 1e6


def job(name: str, *ranks: RankView, tenant: str = "", dataset: str = "1" * 16, **more: object) -> JobView:
    return JobView(name, "", tenant, "imagenet", dataset, list(ranks), **more)  # type: ignore[arg-type]


def rank(number: int, attained: float = 0.0, rate: float = 10.0) -> RankView:
    return RankView(f"r{number}", rate=rate, throughput=rate / 2, waited=0.5, attained_bytes=attained)


# -- merging ----------------------------------------------------------------------------------------------------------


def test_a_rank_that_reports_to_every_daemon_counts_once_with_its_latest_report() -> None:
    [merged] = merged_jobs(
        [JobsView("a", [job("train", rank(1, 5.0), rank(2, 5.0, 20.0))]), JobsView("b", [job("train", rank(1, 9.0))])]
    )
    assert (merged.ranks, merged.rate, merged.throughput, merged.waited) == (2, 30.0, 15.0, 0.5)
    assert merged.attained_bytes == 14.0


def test_what_several_daemons_take_a_stock_loader_to_read_is_averaged() -> None:
    views = [
        JobsView(node, [job("stock", RankView("s", throughput=speed), stock=True, processes=count)])
        for node, speed, count in (("a", 4.0, 2), ("b", 6.0, 3))
    ]
    [merged] = merged_jobs(views)
    assert (merged.throughput, merged.ranks, merged.stock) == (5.0, 3, True)


def test_jobs_of_two_tenants_with_one_name_are_two_jobs() -> None:
    views = [JobsView("a", [job("train", rank(1), tenant="x"), job("train", rank(2), tenant="y")])]
    assert [it.tenant for it in merged_jobs(views)] == ["x", "y"]


def test_bytes_that_daemons_hold_are_summed_and_a_dataset_is_known_by_its_id() -> None:
    views = [
        DatasetsView(
            node,
            [
                DatasetView("1" * 16, "imagenet", 5, 100, 0, held, 3, pinned, ["j"], 1, ["t"], TierBytes(1, 2, 3)),
                DatasetView("2" * 16, "imagenet", 5, 50),
            ],
        )
        for node, held, pinned in (("a", 30, True), ("b", 40, False))
    ]
    first, second = merged_datasets([*views, DatasetsView("c", [DatasetView("1" * 16, "old name")])])
    assert (first.name, second.name) == ("imagenet", "imagenet (2)")
    assert (first.resident_bytes, first.saved_bytes, first.pinned_at, first.resident_share) == (70, 6, 1, 0.7)
    assert first.read == {"host": 2, "rack": 4, "origin": 6}
    assert (first.readers, first.reader_count, first.size_bytes) == (("j",), 1, 100)


def test_names_that_are_told_apart_never_take_a_name_that_another_dataset_has() -> None:
    assert told_apart({"1": "a", "2": "a", "3": "a (2)"}) == {"1": "a", "2": "a (3)", "3": "a (2)"}
    assert told_apart({"1": "a", "2": "b"}) == {"1": "a", "2": "b"}


# -- finding ----------------------------------------------------------------------------------------------------------


def test_what_is_unknown_or_ambiguous_is_one_line_that_says_what_there_is() -> None:
    datasets = merged_datasets([DatasetsView("a", [DatasetView("1" * 16, "imagenet", size_bytes=1)])])
    jobs = merged_jobs([JobsView("a", [job("train", rank(1), tenant="x"), job("train", rank(2), tenant="y")])])
    with pytest.raises(NotFound, match=r"^no dataset is called 'laion'; there is dataset imagenet$"):
        dataset_called("laion", datasets)
    with pytest.raises(NotFound, match=r"^no dataset is called 'laion'; there is no named dataset$"):
        dataset_called("laion", [])
    with pytest.raises(BadRequest, match=r"several tenants have a job called 'train': x, y; name one with --tenant"):
        subject_called("train", jobs, datasets)
    [found] = subject_called("train", jobs, datasets, "y")  # type: ignore[misc]
    assert found.tenant == "y"
    assert subject_called("1" * 16, jobs, datasets) == datasets[0]
    also = merged_jobs([JobsView("a", [job("imagenet", rank(1))])])
    with pytest.raises(BadRequest, match="is a job and a dataset"):
        subject_called("imagenet", also, datasets)


# -- explaining -------------------------------------------------------------------------------------------------------


def allocation(capacity: float, *, policy: str = "max-min") -> AllocationView:
    """Return an allocation of one dataset of 100 TB, read at 10 GB/s from an origin of 5."""
    reader = ReaderView("train", 10_000 * MB, "t")
    asked = ShareView("1" * 16, "imagenet", 100 * TB, "s3", [reader], 0.0)
    told = AllocationView("n", policy, capacity_bytes=capacity, datasets=[asked], origin_rates={"s3": 5000 * MB})
    if policy != "max-min":
        return told
    solved = allocate(problem_of(told))
    share, predicted = solved.shares["1" * 16], solved.predicted["1" * 16, "train"]
    shown = ReaderView("train", 10_000 * MB, "t", predicted=predicted)
    given = ShareView("1" * 16, "imagenet", 100 * TB, "s3", [shown], share.cache_bytes, share.origin_rate, share.reason)
    return AllocationView("n", policy, 1.0, capacity, [given], {"s3": 5000 * MB})


def explained(view: AllocationView | None, rate: float = 10_000 * MB) -> list[str]:
    datasets = merged_datasets(
        [DatasetsView("a", [DatasetView("1" * 16, "imagenet", 1, int(100 * TB), 0, int(20 * TB))])]
    )
    ranks = RankView("r", rate=rate, throughput=6000 * MB, waited=0.4)
    [it] = explain_job(merged_jobs([JobsView("a", [job("train", ranks, tenant="t")])]), datasets, view)
    return in_words(it, allocates=view is not None)


def test_what_more_or_less_cache_would_change_is_solved_again_with_the_same_function() -> None:
    words = explained(allocation(20 * TB))
    assert words[0] == "train of tenant t reads imagenet."
    assert "Without waiting it would read 10 GB/s (f*)." in words
    assert "20% of the dataset is in the cache (c)." in words
    assert any(line.startswith("It is given 20% of the dataset as cache; its origin gives it 5 GB/s") for line in words)
    # SiloD: b / (1 - c/d) = 5 / 0.8, 5 / 0.79 and 5 / 0.81 GB/s
    assert "With that it is predicted to read 6.25 GB/s, as it does." in words
    assert words[-2:] == [
        "1 TB more cache in the rack would make it 1% faster: 6.33 GB/s.",
        "1 TB less cache in the rack would make it 1% slower: 6.17 GB/s.",
    ]


def test_an_allocation_that_was_kept_is_told_apart_from_one_that_is_solved_now() -> None:
    view = allocation(20 * TB)
    kept = ReaderView("train", 10_000 * MB, "t", predicted=5000 * MB)
    held = msgspec.structs.replace(view.datasets[0], readers=[kept], cache_bytes=0.0)
    words = explained(msgspec.structs.replace(view, datasets=[held]))
    assert "With that it is predicted to read 5 GB/s, 0.83 times what it reads now." in words
    assert any(line.startswith("If the cache was divided anew now, that would be 6.25 GB/s") for line in words)
    assert words[-2] == "1 TB more cache in the rack would make that 1% faster: 6.33 GB/s.", "that: not the 5 GB/s"


def test_a_job_that_reads_as_fast_as_it_can_gains_nothing_from_more_cache() -> None:
    words = explained(allocation(90 * TB))
    assert "1 TB more cache in the rack would not change that: it reads as fast as its loop can." in words


def test_a_small_rack_is_asked_about_a_quarter_of_what_it_has() -> None:
    assert change_for(100 * TB) == TB
    assert change_for(1 * TB) == TB / 4
    assert change_for(0.0) == 0.0


def test_what_is_not_known_is_said_and_nothing_is_made_up() -> None:
    assert "How fast it would read without waiting (f*) is not known yet." in explained(None, rate=0.0)
    assert explained(None)[-1].startswith("No allocation holds for it")
    assert not any("more cache" in line for line in explained(allocation(20 * TB, policy="newer")))


def test_nothing_is_said_of_the_waits_of_a_stock_loader() -> None:
    ranks = RankView("r", throughput=6000 * MB)
    [it] = explain_job(
        merged_jobs([JobsView("a", [job("train", ranks, tenant="t", stock=True)])]), [], allocation(20 * TB)
    )
    words = in_words(it)
    assert "It is a stock loader: how long it waits is not seen." in words
    assert "Without waiting it is taken to read 10 GB/s (f*), by what it was seen to read." in words
    assert "It reads 6 GB/s." in words
    assert it.as_json()["stock"] is True


def test_of_several_daemons_the_one_that_knows_most_readers_explains() -> None:
    views = [AllocationView("old"), allocation(20 * TB)]
    best = best_allocation(views)
    assert best is not None
    assert best.node == "n"
    assert best_allocation([AllocationView("old")]) is None


# -- asking a rack ----------------------------------------------------------------------------------------------------

OLDER = ok(b'{"error":"http","message":"Not Found"}', status="404 Not Found")


def test_a_member_that_is_away_older_or_malformed_is_named_and_the_others_count() -> None:
    told = msgspec.json.encode(JobsView("new", [job("train", rank(1))]))
    answers = {"new": ok(told), "old": OLDER, "wrong": ok(b'{"node": 3}'), "deep": ok(b"[" * 100_000)}
    with contextlib.ExitStack() as stack:
        urls = {name: stack.enter_context(HostileServer(partial(send, answer))).url for name, answer in answers.items()}
        urls["away"] = f"http://127.0.0.1:{free_ports(1)[0]}"
        asked = ask_all(("rack", [Member(name, url) for name, url in urls.items()]), PeerClient.jobs)
    assert list(asked.answers) == ["new"]
    assert set(asked.problems) == {"old", "wrong", "deep", "away"}
    assert asked.problems["old"].endswith("runs an older version, which does not answer this")
    assert "cannot be reached" in asked.problems["away"]
    assert all("\n" not in line and len(line) <= 401 for line in asked.problems.values())


def test_if_every_member_is_older_that_is_the_error() -> None:
    with HostileServer(partial(send, OLDER)) as server, pytest.raises(NotFound, match="runs an older version"):
        ask_all(("rack", [Member("old", server.url)]), PeerClient.datasets)


def send(answer: bytes, connection: socket.socket, request: bytes) -> None:
    connection.sendall(ok(b"ok\n") if b"/healthz" in request else answer)
