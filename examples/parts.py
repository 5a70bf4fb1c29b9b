"""Parts of datasets: filter, split by user, concatenate, join, and resume, without making another manifest.

    python examples/parts.py

The example writes a small Parquet file of "recordings" and one of "transcripts", indexes them in place, and reads them
through an embedded cache. Everything but the data is what a training script would say.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from torch.utils.data import Subset, random_split

from quiver_client import DataLoader, Dataset, index

SPEAKERS = 12
RECORDINGS = 300
SECONDS_MIN = 2.0


def write_data(folder: Path) -> None:
    """Write recordings of several speakers, and transcripts of most of them, in another order."""
    random = np.random.default_rng(0)
    ids = np.arange(RECORDINGS)
    recordings = pa.table(
        {
            "audio": [random.bytes(4000) for _ in ids],
            "id": ids,
            "speaker": random.integers(0, SPEAKERS, RECORDINGS),
            "seconds": random.uniform(0.5, 10.0, RECORDINGS),
        }
    )
    known = random.permutation(ids)[: RECORDINGS - 20]
    transcripts = pa.table({"text": [f"words of recording {each}".encode() for each in known], "id": known})
    for name, table in (("recordings", recordings), ("transcripts", transcripts)):
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=50)
        index(folder / f"{name}.parquet", folder / f"{name}.quiver", shard_bytes="64KiB")


def ids_of(loader: DataLoader, batches: int = sys.maxsize) -> list[int]:
    """Return the ids of the samples of a pass, or of its first batches."""
    found: list[int] = []
    for _, batch in zip(range(batches), loader, strict=False):
        found += batch["id"].tolist()
    return found


def train_on_parts(folder: Path) -> None:
    cache = f"file://{folder}/cache?capacity=1GiB"
    recordings = Dataset(folder / "recordings.quiver", cache)
    print(recordings)

    # A filter is an expression over scalar fields: no byte is read, and no manifest is made.
    long = recordings.select(pc.field("seconds") >= SECONDS_MIN)
    print(f"{len(long)} of {len(recordings)} are long enough")

    # No speaker is in both parts.
    train, valid = long.split(0.8, 0.2, seed=1, by="speaker")
    speakers = [set(part.scalars["speaker"].to_pylist()) for part in (train, valid)]
    assert not speakers[0] & speakers[1]
    print(f"train {len(train)}, valid {len(valid)}")

    # A pass that is interrupted resumes; the state of other parts is refused.
    loader = DataLoader(train, batch_size=16, shuffle=True, seed=3)
    before = ids_of(loader, batches=4)
    state = loader.state_dict()
    loader.close()
    resumed = DataLoader(train, batch_size=16, shuffle=True, seed=3)
    resumed.load_state_dict(state)
    after = ids_of(resumed)
    assert sorted(before + after) == sorted(train.scalars["id"].to_pylist())
    resumed.close()
    other = DataLoader(valid, batch_size=16, shuffle=True, seed=3)
    try:
        other.load_state_dict(state)
    except ValueError as error:
        print(f"refused: {error}")

    # torch's own parts work as well.
    first, _ = random_split(recordings, [0.5, 0.5])
    more: Any = Subset(recordings, range(10)) + Subset(recordings, range(10, 20))
    for part in (first, more, valid + recordings[:10]):
        with_torch = DataLoader(part, batch_size=16, shuffle=True)
        assert len(ids_of(with_torch)) == len(part)
        with_torch.close()

    # Fields of two datasets about the same recordings.
    both = Dataset.join(train, Dataset(folder / "transcripts.quiver", cache), on="id")
    sample = both[0]
    assert sample["text"] == f"words of recording {sample['id']}".encode()
    print(f"{len(both)} of {len(train)} have a transcript; fields {', '.join(both.fields)}")
    both.close()
    other.close()
    recordings.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        train_on_parts(Path(folder))


if __name__ == "__main__":
    main()
