"""Train with plain PyTorch: our loader, or torch's own over the same dataset, in one process or in several.

    python examples/torch_train.py                                          # or, in two processes:
    torchrun --standalone --nproc-per-node 2 examples/torch_train.py

The first loop is stopped in the middle of an epoch, and the second one resumes from its checkpoint. Under torchrun
every rank reads its share; ``state_dict(merged=True)``, which all ranks call, is the state of all of them.
``ddp_train.py`` has the whole of a script that is killed and started again.
"""

from __future__ import annotations

import os
from pathlib import Path

import made_data
import torch
from torch import distributed
from torch.utils.data import DistributedSampler

from quiver_client import DataLoader

BATCH, STOP_AFTER = 16, 7


def ours(folder: Path) -> list[int]:
    """Read one epoch in two parts, as if the process had been killed between them."""
    dataset = made_data.dataset(folder)
    checkpoint = folder / f"loader.{rank()}.pt"
    numbers: list[int] = []
    loader = DataLoader(dataset, BATCH, shuffle=True)
    for step, (batch, _, _) in enumerate(loader, 1):
        numbers += batch.tolist()
        if step == STOP_AFTER:
            torch.save(loader.state_dict(merged=True), checkpoint)
            break
    loader.close()

    resumed = DataLoader(dataset, BATCH, shuffle=True, num_workers=2)
    resumed.load_state_dict(torch.load(checkpoint))
    for batch, _, _ in resumed:
        numbers += batch.tolist()
    resumed.close()
    return numbers


def stock(folder: Path) -> list[int]:
    """Read one epoch with torch's own loader: a batch of it is one read as well."""
    dataset = made_data.dataset(folder)
    sampler = DistributedSampler(dataset) if distributed.is_initialized() else None
    loader = torch.utils.data.DataLoader(dataset, BATCH, shuffle=sampler is None, sampler=sampler, num_workers=2)
    return [number for batch, _, _ in loader for number in batch.tolist()]


def rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def main() -> None:
    shared: list[str | None] = [str(made_data.made())] if int(os.environ.get("RANK", "0")) == 0 else [None]
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
        distributed.broadcast_object_list(shared)
    folder = Path(str(shared[0]))
    for name, read in (("ours, stopped and resumed", ours), ("torch's", stock)):
        count = torch.bincount(torch.tensor(read(folder)), minlength=made_data.SAMPLES)
        if distributed.is_initialized():
            distributed.all_reduce(count)
        if rank() == 0:
            once = int((count == 1).sum())
            print(f"{name}: {once} of {made_data.SAMPLES} samples read once", flush=True)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
