"""Train a small language model on packed tokens, in an order that is fixed: `shuffle="block"`.

The script writes token sequences to Parquet files, indexes them in place, and trains from a cache that holds a fifth of
them. In the middle of an epoch it saves model, optimizer and loader in one checkpoint, ends, and resumes from that with
two workers in place of threads. The two halves together are the run that was never interrupted: the same sequences in
the same order, and so the same loss to the last bit.

    python examples/language_model.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from quiver_client import DataLoader, Dataset, index

VOCABULARY = 64
LENGTH = 128  # tokens of a sequence
SEQUENCES = 1024
BATCH = 32
STOP_AFTER = 20  # batches, of 32 per epoch


def write_tokens(folder: Path) -> None:
    """Write sequences that a model can learn something of: each token mostly follows from the one before."""
    chance = np.random.default_rng(0)
    follows = chance.permutation(VOCABULARY)
    tokens = np.empty((SEQUENCES, LENGTH), np.int32)
    tokens[:, 0] = chance.integers(0, VOCABULARY, SEQUENCES)
    for at in range(1, LENGTH):
        at_random = chance.random(SEQUENCES) < 0.1
        tokens[:, at] = np.where(at_random, chance.integers(0, VOCABULARY, SEQUENCES), follows[tokens[:, at - 1]])
    for number, part in enumerate(np.split(tokens, 4)):
        column = pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1)), LENGTH)
        pq.write_table(pa.table({"tokens": column}), folder / f"{number}.parquet", row_group_size=128)


def make(manifest: Path, cache: str, workers: int) -> tuple[DataLoader, nn.Module, torch.optim.Optimizer]:
    """Return loader, model and optimizer as a run begins with them."""
    loader = DataLoader(Dataset(manifest, cache), batch_size=BATCH, shuffle="block", seed=1, num_workers=workers)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY))
    return loader, model, torch.optim.SGD(model.parameters(), lr=2.0)


def train(loader: Any, model: nn.Module, optimizer: torch.optim.Optimizer, batches: int | None = None) -> list[float]:
    """Train to the end of the epoch, or for some batches; return the losses."""
    losses = []
    for batch in loader:
        tokens = batch["tokens"].long()
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == batches:
            break
    return losses


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="quiver-lm-") as name:
        folder = Path(name)
        (folder / "tokens").mkdir()
        write_tokens(folder / "tokens")
        manifest, checkpoint = folder / "tokens.quiver", folder / "checkpoint.pt"
        index(folder / "tokens", manifest, shard_bytes="32KiB")
        cache = f"file://{folder}/cache?capacity={SEQUENCES * LENGTH * 4 // 5}"

        loader, model, optimizer = make(manifest, cache, workers=0)
        whole = [loss for _ in range(2) for loss in train(loader, model, optimizer)]
        print(f"uninterrupted:  {len(whole)} batches, loss {whole[0]:.3f} -> {whole[-1]:.6f}")
        loader.close()

        loader, model, optimizer = make(manifest, cache, workers=0)
        losses = train(loader, model, optimizer, STOP_AFTER)
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
        torch.save(states, checkpoint)
        print(f"checkpoint:     after {len(losses)} batches, {len(str(states['loader']))} characters of loader state")
        loader.close()

        loader, model, optimizer = make(manifest, cache, workers=2)
        states = torch.load(checkpoint)
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
        loader.load_state_dict(states["loader"])
        losses += [loss for _ in range(2) for loss in train(loader, model, optimizer)]
        print(f"resumed:        {len(losses)} batches, loss {losses[0]:.3f} -> {losses[-1]:.6f}")
        loader.close()
        print("the same losses" if losses == whole else "other losses")


if __name__ == "__main__":
    main()
