"""States and ledgers of parts: they resume with any number of ranks, and those of other parts are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from torch.utils.data import ConcatDataset, Subset, random_split

from quiver_client import DataLoader, Dataset, merge_states
from tests.support.people import make_people

Make = Callable[..., Dataset]
Build = Callable[[Dataset, Dataset], torch.utils.data.Dataset[Any]]


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("people")
    return make_people(folder), make_people(folder, 60, name="more", seed=1, low_id=1000)


@pytest.fixture
def people(manifests: tuple[Path, Path], dataset: Make, tmp_path: Path) -> Dataset:
    return dataset(manifests[0], f"file://{tmp_path}/cache?capacity=1GiB", fields=["id", "label"])


@pytest.fixture
def more(manifests: tuple[Path, Path], dataset: Make, tmp_path: Path) -> Dataset:
    return dataset(manifests[1], f"file://{tmp_path}/cache?capacity=1GiB", fields=["id", "label"])


def halves(data: torch.utils.data.Dataset[Any]) -> torch.utils.data.Dataset[Any]:
    return random_split(data, [0.5, 0.5], torch.Generator().manual_seed(4))[0]


PARTS: dict[str, Build] = {
    "select": lambda one, two: one.select(range(7, 110, 2)),
    "split": lambda one, two: one.split(0.6, 0.4, seed=2)[0],
    "Subset": lambda one, two: Subset(one, list(range(90, 20, -1))),
    "concatenation": lambda one, two: one[:50] + two,
    "ConcatDataset": lambda one, two: ConcatDataset([one, Subset(two, range(30))]),
    "random_split": lambda one, two: halves(one + two),
    "join": lambda one, two: Dataset.join(one, one[::2], suffixes=("", "_2")),
}


def read(loader: DataLoader, batches: int = 10**9) -> list[int]:
    found: list[int] = []
    for _, batch in zip(range(batches), loader, strict=False):
        found += batch["id"].tolist()
    return found


@pytest.mark.parametrize("kind", PARTS)
def test_a_pass_over_a_part_resumes_with_another_number_of_ranks(people: Dataset, more: Dataset, kind: str) -> None:
    def loader(rank: int, world_size: int) -> DataLoader:
        part = PARTS[kind](people, more)  # built again, as a restarted job builds it
        return DataLoader(part, 4, shuffle=True, seed=5, rank=rank, world_size=world_size)

    whole = sorted(part["id"] for part in PARTS[kind](people, more))  # type: ignore[attr-defined]
    got, states = [], []
    for rank in range(2):
        each = loader(rank, 2)
        got += read(each, 3)
        states.append(each.state_dict())
        each.close()
    merged = merge_states(states)
    rest = []
    for rank in range(3):
        each = loader(rank, 3)
        each.load_state_dict(merged)
        rest += read(each)
        each.close()
    assert set(got).isdisjoint(rest)
    assert len(rest) - len(set(rest)) <= 2  # padding, so that three ranks have equally many
    assert sorted(set(got) | set(rest)) == sorted(set(whole))


def test_a_state_of_other_parts_is_refused(people: Dataset, more: Dataset) -> None:
    parts = [people, people[:60], people[60:], people + more, more + people, people.select(range(59, -1, -1))]
    loaders = [DataLoader(part, 8, shuffle=True) for part in parts]
    states = []
    for loader in loaders:
        read(loader, 2)
        states.append(loader.state_dict())
    for at, loader in enumerate(loaders):
        loader.load_state_dict(states[at])
        for other, state in enumerate(states):
            if other != at:
                with pytest.raises(ValueError, match=r"state: it is of (dataset|a dataset of)"):
                    loader.load_state_dict(state)
        loader.close()


def test_the_state_of_a_whole_dataset_is_named_by_its_manifest_as_ever(people: Dataset) -> None:
    loader = DataLoader(people[:], 8, shuffle=True)
    read(loader, 1)
    assert loader.state_dict()["dataset"] == str(people.manifest.digest)
    loader.close()


@pytest.mark.parametrize("kind", ["select", "random_split", "join"])
def test_a_ledger_of_a_part_is_replayed_and_that_of_another_part_is_refused(
    people: Dataset, more: Dataset, kind: str, tmp_path: Path
) -> None:
    ledger = str(tmp_path / "ledger")
    part = PARTS[kind](people, more)
    recorded = DataLoader(part, 4, shuffle=True, ledger=ledger)
    first = read(recorded)
    recorded.close()
    replayed = DataLoader(PARTS[kind](people, more), 4, shuffle=True, replay=ledger)
    assert read(replayed) == first
    replayed.close()
    with pytest.raises(ValueError, match=r"replay=.* cannot be replayed"):
        DataLoader(people[3:30], 4, shuffle=True, replay=ledger)


def test_one_job_may_read_several_parts_of_one_dataset_in_turn(people: Dataset) -> None:
    train, valid = people.split(0.8, 0.2)
    loaders = {
        name: DataLoader(part, 8, shuffle=name == "train", num_workers=2, job="one")
        for name, part in (("train", train), ("valid", valid))
    }
    for _ in range(2):
        seen = {name: read(loader) for name, loader in loaders.items()}
        assert sorted(seen["train"] + seen["valid"]) == sorted(sample["id"] for sample in people)
        assert seen["valid"] == [sample["id"] for sample in valid]
    for loader in loaders.values():
        loader.close()
