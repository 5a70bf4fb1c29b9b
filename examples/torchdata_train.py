"""Train with torchdata's StatefulDataLoader over our order, stop in the middle of an epoch, and resume.

    python examples/torchdata_train.py

``StatefulDataLoader`` asks the batch sampler for its state whenever it hands out a batch, so its own ``state_dict`` is
exact with any number of workers. It is the state of one rank: in several, each saves and loads its own.
"""

from __future__ import annotations

import made_data
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from quiver_client import BatchSampler

BATCH, STOP_AFTER = 16, 7


def main() -> None:
    folder = made_data.made()
    dataset = made_data.dataset(folder)
    for workers in (0, 2):
        count = torch.zeros(made_data.SAMPLES, dtype=torch.int64)
        loader = StatefulDataLoader(dataset, batch_sampler=BatchSampler(dataset, BATCH), num_workers=workers)
        for step, (numbers, _, _) in enumerate(loader, 1):
            count[numbers] += 1
            if step == STOP_AFTER:
                torch.save(loader.state_dict(), folder / "loader.pt")
                break

        resumed = StatefulDataLoader(dataset, batch_sampler=BatchSampler(dataset, BATCH), num_workers=workers)
        resumed.load_state_dict(torch.load(folder / "loader.pt"))
        for numbers, _, _ in resumed:
            count[numbers] += 1
        once = int((count == 1).sum())
        print(f"{workers} workers: {once} of {made_data.SAMPLES} samples read once", flush=True)


if __name__ == "__main__":
    main()
