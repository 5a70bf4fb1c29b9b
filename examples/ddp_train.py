"""Train with DistributedDataParallel under torchrun, in processes that may be killed, and resume with other ones.

    torchrun --standalone --nproc-per-node 2 examples/ddp_train.py [FOLDER]

The loader deals the epoch to the ranks by itself: there is no DistributedSampler, and no set_epoch. Every tenth step
all ranks call ``state_dict(merged=True)``, and rank 0 writes what all of them have read into the checkpoint. A run that
finds one in FOLDER resumes there, with any number of processes; each sample is read exactly once per epoch over both.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import made_data
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from quiver_client import DataLoader

EPOCHS = 3
CHECKPOINT_STEPS = 10


def main() -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    if rank == 0 and len(sys.argv) > 1:
        os.environ[made_data.VARIABLE] = sys.argv[1]
    shared = [made_data.made() if rank == 0 else None]
    distributed.broadcast_object_list(shared)
    folder = Path(str(shared[0]))
    checkpoint = folder / "checkpoint.pt"

    dataset = made_data.dataset(folder)
    loader = DataLoader(dataset, batch_size=16, shuffle=True, job="ddp-example")
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    read = torch.zeros(len(dataset), dtype=torch.int64)  # how often this process read each sample of this epoch
    epoch = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        epoch = saved["epoch"]
        if rank == 0:
            read += saved["read"]

    while epoch < EPOCHS:
        for step, (numbers, points, values) in enumerate(loader, 1):
            loss = torch.nn.functional.mse_loss(model(points), values)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            read[numbers] += 1
            if step % CHECKPOINT_STEPS == 0:
                state, total = loader.state_dict(merged=True), summed(read)
                if rank == 0:
                    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "read": total}
                    torch.save({**saved, "loader": state, "epoch": epoch}, folder / "checkpoint.tmp")
                    (folder / "checkpoint.tmp").replace(checkpoint)
                    print(f"epoch {epoch}, checkpoint after step {step}: loss {loss.item():.4f}", flush=True)
        total = summed(read)
        if rank == 0:
            once = int((total == 1).sum())
            print(f"epoch {epoch}: {once} of {len(dataset)} samples read once, loss {loss.item():.4f}", flush=True)
        read.zero_()
        epoch += 1
    loader.close()
    distributed.destroy_process_group()


def summed(read: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks."""
    total = read.clone()
    distributed.all_reduce(total)
    return total


if __name__ == "__main__":
    main()
