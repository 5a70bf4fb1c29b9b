"""Bytes by dataset and tenant: a bounded number of series, none of which ever decreases, and nothing is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from quiver.digest import Digest
from quiver.domain import SINGLE, domain_named
from quiver_cacheserver.overview.series import Level, Named, bounded
from quiver_cacheserver.usage import OTHER, Label, Usage

ELSEWHERE = domain_named("elsewhere")


def digest(number: int) -> Digest:
    return Digest(number.to_bytes(32, "big"))


def name_of(label: Label) -> tuple[str, str | None]:
    return f"d{int.from_bytes(label.manifest)}", label.tenant or None


def total(series: dict[tuple[str, str], dict[str, int]]) -> int:
    return sum(sum(its.values()) for its in series.values())


def test_the_first_bytes_of_a_dataset_are_in_its_own_series() -> None:
    usage = Usage()
    usage.add(Label(SINGLE, digest(1), "t"), "origin", 7)
    usage.add(Label(SINGLE, digest(1), "t"), "rack", 5)
    usage.add(None, "rack", 3)
    assert usage.series(name_of) == {
        ("d1", "t"): {"host": 0, "rack": 5, "origin": 7},
        (OTHER, ""): {"host": 0, "rack": 3, "origin": 0},
    }
    assert usage.by_dataset() == {(SINGLE, digest(1)): {"host": 0, "rack": 5, "origin": 7}}


def test_a_small_dataset_loses_its_series_to_one_that_counts_twice_as_much() -> None:
    usage = Usage(series_max=1)
    usage.add(Label(SINGLE, digest(1)), "rack", 10)
    usage.add(Label(SINGLE, digest(2)), "rack", 19)
    assert usage.series(name_of)["d1", ""]["rack"] == 10
    usage.add(Label(SINGLE, digest(2)), "rack", 2)
    assert usage.series(name_of) == {
        ("d2", ""): {"host": 0, "rack": 0, "origin": 0},  # what it had before stays where it was counted
        (OTHER, ""): {"host": 0, "rack": 31, "origin": 0},
    }
    usage.add(Label(SINGLE, digest(2)), "rack", 4)
    assert usage.series(name_of)["d2", ""]["rack"] == 4


def test_a_dataset_that_gets_another_name_begins_a_new_series() -> None:
    usage = Usage()
    usage.add(Label(SINGLE, digest(1)), "rack", 10)
    usage.series(name_of)
    usage.add(Label(SINGLE, digest(1)), "rack", 1)
    found = usage.series(lambda label: ("new", None))
    assert found["new", ""]["rack"] == 0
    assert found[OTHER, ""]["rack"] == 11


def test_reads_that_name_no_tenant_stay_with_the_tenant_whose_jobs_read_the_dataset() -> None:
    usage = Usage()
    usage.add(Label(SINGLE, digest(1)), "rack", 10)
    assert usage.series(lambda label: ("d1", "t"))["d1", "t"]["rack"] == 10
    usage.add(Label(SINGLE, digest(1)), "rack", 1)
    assert usage.series(lambda label: ("d1", None))["d1", "t"]["rack"] == 11  # its jobs have ended


def test_a_series_keeps_what_readers_without_a_tenant_added_to_it() -> None:
    """They count for the one tenant whose jobs read the dataset, until jobs of another one do."""
    usage = Usage()
    usage.add(Label(SINGLE, digest(1)), "rack", 10)
    usage.add(Label(SINGLE, digest(1), "t"), "rack", 5)
    assert usage.series(lambda label: ("d1", "t"))["d1", "t"]["rack"] == 15
    usage.add(Label(SINGLE, digest(1), "u"), "rack", 1)
    for more in (0, 3):
        usage.add(Label(SINGLE, digest(1)), "rack", more)
        found = usage.series(lambda label: ("d1", label.tenant))
        assert {key: its["rack"] for key, its in found.items()} == {
            ("d1", "t"): 15,
            ("d1", "u"): 1,
            ("d1", ""): more,
            (OTHER, ""): 0,
        }


def test_names_of_other_domains_are_counted_under_other() -> None:
    usage = Usage()
    usage.add(Label(SINGLE, digest(1)), "rack", 10)
    usage.add(Label(ELSEWHERE, digest(2), "them"), "rack", 20)
    assert set(usage.series(name_of)) == {("d1", ""), ("d2", "them"), (OTHER, "")}
    found = usage.series(name_of, ELSEWHERE)
    assert set(found) == {("d2", "them"), (OTHER, "")}
    assert total(found) == 30


adds = st.tuples(st.integers(1, 12), st.sampled_from(["", "a"]), st.sampled_from(["host", "rack", "origin"]))


@given(st.lists(st.one_of(st.tuples(adds, st.integers(0, 100)), st.sampled_from(["", "a", "b", None])), max_size=80))
def test_no_series_decreases_while_it_is_shown_and_nothing_is_lost(steps: list[tuple[tuple, int] | str | None]) -> None:  # type: ignore[type-arg]
    """``None`` and texts: the series are asked for; the tenant whose jobs read what names no tenant, then."""
    usage, counted = Usage(series_max=3, names_max=6), 0
    before: dict[tuple[str, str], dict[str, int]] = {}
    for step in steps:
        if isinstance(step, tuple):
            (number, tenant, tier), size = step
            usage.add(Label(SINGLE, digest(number), tenant), tier, size)
            counted += size
            continue
        found = usage.series(lambda label: (name_of(label)[0], label.tenant or step))  # noqa: B023 - called at once
        assert total(found) == counted
        assert len(found) <= 3 + 1
        for key in found.keys() & before.keys():
            assert all(found[key][tier] >= before[key][tier] for tier in found[key]), key
        before = found
    assert total(usage.series(name_of)) == counted


def test_the_largest_datasets_have_levels_of_their_own_and_the_rest_is_summed() -> None:
    levels = [Level(f"d{number}", "", 10, number, ranks=1, waited=0.5) for number in range(10)]
    shown = bounded(levels, 3)
    assert [(it.dataset, it.resident_bytes) for it in shown] == [("d9", 9), ("d8", 8), ("d7", 7), (OTHER, 21)]
    assert (shown[-1].ranks, shown[-1].waited) == (7, 3.5)


def test_a_dataset_that_is_called_other_is_counted_with_the_rest() -> None:
    shown = bounded([Level(OTHER, "", 10, 9), Level("a", "", 10, 1), Level("b", "", 10, 2)], 2)
    assert [(it.dataset, it.resident_bytes) for it in shown] == [("b", 2), ("a", 1), (OTHER, 9)]


def test_what_is_told_by_name_can_be_written_for_prometheus_whatever_the_names_are() -> None:
    named = CollectorRegistry(auto_describe=False)
    named.register(
        Named(
            [Level('a"\\\n', "t", 10, 5, ranks=2, waited=1.0)], {('a"\\\n', "t"): {"host": 0, "rack": 1, "origin": 0}}
        )
    )
    told = generate_latest(named).decode()
    assert 'quiver_dataset_wait_ratio{dataset="a\\"\\\\\\n",tenant="t"} 0.5' in told
    assert 'quiver_dataset_resident_ratio{dataset="a\\"\\\\\\n",tenant="t"} 0.5' in told
