"""What a user's typed program says: ``make check`` runs mypy --strict over it, and a test runs it."""

from __future__ import annotations

from typing import Any, assert_type

import pyarrow.compute as pc
import torch
from torch.utils.data import Subset, random_split

from quiver_client import BatchSampler, Concatenated, DataLoader, Dataset, Joined, merge_states


class Labelled(Dataset):
    """A dataset of one's own."""

    def label(self, index: int) -> int:
        return int(self[index]["label"])


def decode(sample: dict[str, Any]) -> tuple[bytes, int]:
    return sample["image"], sample["label"]


def main(manifest: str, cache: str) -> int:
    dataset = Labelled(manifest, cache)
    part = dataset.select(pc.field("label") == 1)
    assert_type(part, Labelled)
    assert_type(part.select([0, 1]), Labelled)
    assert_type(dataset[2:4], Labelled)
    train, valid = dataset.split(0.9, 0.1, seed=1, by="user")
    assert_type(train, Labelled)
    both = train + valid
    assert_type(both, Concatenated)
    assert_type(both[1:3], Concatenated)
    joined = Dataset.join(train, dataset, suffixes=("", "_whole"))[1:]
    assert_type(joined, Joined)
    names: tuple[str, ...] = joined.fields
    types: dict[str, str] = {name: feature.dtype for name, feature in dataset.features.items()}
    halves = random_split(train, [0.5, 0.5], torch.Generator().manual_seed(0))
    samples = 0
    for each in (train, both, joined, halves[0], Subset(valid, [0, 1]), part):
        loader = DataLoader(each, batch_size=4, shuffle=True, num_workers=0)
        for batch in loader:
            labels: torch.Tensor = batch["label"]
            samples += len(labels)
        state: dict[str, Any] = merge_states([loader.state_dict()])
        loader.load_state_dict(state)
        loader.close()
    stock = torch.utils.data.DataLoader(
        Dataset(manifest, cache, transform=decode), batch_sampler=BatchSampler(train, 4)
    )
    stream = torch.utils.data.DataLoader(train.iterable(shuffle=True), batch_size=4)
    label: int = valid.label(0)
    dataset.close()
    return samples + len(names) + len(types) + label + 0 * (len(stock) + len(stream))
