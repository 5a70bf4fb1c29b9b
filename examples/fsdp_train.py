"""Train with FSDP (``fully_shard``) under torchrun; the checkpoint is sharded, and the loader's state is in it.

    torchrun --standalone --nproc-per-node 2 examples/fsdp_train.py [FOLDER]

torch.distributed.checkpoint saves and loads model and optimizer by shards, and resumes with another number of
processes. The loader goes in as it is: it has a ``state_dict``, which is that of all ranks there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import made_data
import torch
import torch.distributed.checkpoint as checkpoints
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from quiver_client import DataLoader

STEPS_BEFORE_CHECKPOINT = 7


def main() -> None:
    distributed.init_process_group("gloo")
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    if rank == 0 and len(sys.argv) > 1:
        os.environ[made_data.VARIABLE] = sys.argv[1]
    shared = [made_data.made() if rank == 0 else None]
    distributed.broadcast_object_list(shared)
    folder = Path(str(shared[0]))
    saved = folder / "fsdp-checkpoint"

    dataset = made_data.dataset(folder)
    loader = DataLoader(dataset, batch_size=16, shuffle=True, job="fsdp-example")
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("data",))
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    read = torch.zeros(len(dataset), dtype=torch.int64)
    resumed = saved.exists()
    if resumed:
        state = everything(model, optimizer, loader, torch.zeros_like(read))
        checkpoints.load(state, checkpoint_id=saved)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        if rank == 0:
            read += state["read"]

    for step, (numbers, points, values) in enumerate(loader, 1):
        loss = torch.nn.functional.mse_loss(model(points), values)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        read[numbers] += 1
        if step == STEPS_BEFORE_CHECKPOINT and not resumed:
            state = everything(model, optimizer, loader, summed(read))
            checkpoints.save(state, checkpoint_id=saved)
            if rank == 0:
                print(f"checkpoint after step {step} of {world_size} ranks: loss {loss.item():.4f}", flush=True)
            break
    else:
        total = summed(read)
        if rank == 0:
            once = int((total == 1).sum())
            print(f"{once} of {len(dataset)} samples read once, loss {loss.item():.4f}", flush=True)
    loader.close()
    distributed.destroy_process_group()


def everything(model: Any, optimizer: Any, loader: DataLoader, read: torch.Tensor) -> dict[str, Any]:
    """Return what a checkpoint holds, or where ``checkpoints.load`` puts it."""
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments, "loader": loader, "read": read}


def summed(read: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks."""
    total = read.clone()
    distributed.all_reduce(total)
    return total


if __name__ == "__main__":
    main()
