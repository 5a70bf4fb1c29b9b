"""What datasets are called: by their manifests, else by their readers, and each differently."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quiver.digest import Digest
from quiver.domain import SINGLE, domain_named
from quiver.identity import told_apart
from quiver_cacheserver.dataset_names import DATASETS_MAX, TOLD_MAX, UNNAMED, DatasetNames


def digest(number: int) -> Digest:
    return Digest(number.to_bytes(32, "big"))


A, B, C = digest(1), digest(2), digest(3)


def test_a_manifests_own_name_comes_before_what_clients_call_it() -> None:
    names = DatasetNames()
    assert names.shown(A) == UNNAMED
    names.heard(A, told="copy-of-imagenet")
    assert names.shown(A) == "copy-of-imagenet"
    names.heard(A, own="imagenet")
    names.heard(A, told="another")
    assert names.shown(A) == "imagenet"


def test_what_clients_call_a_dataset_does_not_depend_on_who_was_heard_first() -> None:
    one, other = DatasetNames(), DatasetNames()
    for told in ("b", "a", "c"):
        one.heard(A, told=told)
    for told in ("c", "a", "b"):
        other.heard(A, told=told)
    assert one.shown(A) == other.shown(A) == "a"


def test_manifests_of_one_name_are_numbered_in_the_order_of_their_digests() -> None:
    names = DatasetNames()
    for each in (C, A, B):
        names.heard(each, told="train")
    assert [names.shown(each) for each in (A, B, C)] == ["train", "train (2)", "train (3)"]
    assert [names.find(name) for name in ("train", "train (3)", "train (4)")] == [A, C, None]


def test_a_name_with_a_number_is_not_given_twice() -> None:
    names = DatasetNames()
    names.heard(A, own="train")
    names.heard(B, own="train")
    names.heard(C, own="train (2)")
    assert [names.shown(each) for each in (A, B, C)] == ["train", "train (3)", "train (2)"]


@given(st.dictionaries(st.integers(0, 50), st.sampled_from(["a", "b", "a (2)", "a (2) (2)", "a (3)", UNNAMED])))
def test_every_dataset_has_a_name_of_its_own(given_names: dict[int, str]) -> None:
    apart = told_apart({digest(number): name for number, name in given_names.items()})
    assert len(set(apart.values())) == len(apart) == len(given_names)
    assert set(given_names.values()) <= set(apart.values())


def test_what_other_domains_read_changes_no_name() -> None:
    names, alice, bob = DatasetNames(), domain_named("alice"), domain_named("bob")
    names.heard(A, alice, told="train")
    names.heard(B, bob, told="train")
    assert (names.shown(A, alice), names.shown(B, bob)) == ("train", "train")
    assert names.shown(A, bob) == names.shown(A, SINGLE) == UNNAMED
    assert names.find("train", bob) == B


def test_names_are_bounded() -> None:
    names = DatasetNames()
    for number in range(DATASETS_MAX + 10):
        names.heard(digest(number), told=f"dataset {number}")
    assert len(names) == DATASETS_MAX
    assert names.shown(digest(3)) == UNNAMED
    for number in range(100):
        names.heard(A, told=f"{number:03}")
    assert names.shown(A) == f"{100 - TOLD_MAX:03}"


def test_thousands_of_datasets_of_one_name_are_told_apart_at_once() -> None:
    """In a few milliseconds: it is done in the event loop, whenever a name changes."""
    looked_up = 0

    class Name(str):
        __slots__ = ()

        def __format__(self, spec: str) -> str:
            nonlocal looked_up
            looked_up += 1
            return super().__format__(spec)

    apart = told_apart({digest(number): Name("train") for number in range(DATASETS_MAX)})
    assert apart[digest(DATASETS_MAX - 1)] == f"train ({DATASETS_MAX})"
    assert len(set(apart.values())) == DATASETS_MAX
    assert looked_up <= 3 * DATASETS_MAX
