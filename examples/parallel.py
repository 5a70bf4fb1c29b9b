"""Train with tensor and data parallelism under torchrun: ranks of one tensor-parallel model get the same batches.

    torchrun --standalone --nproc-per-node 4 examples/parallel.py [FOLDER]

``mesh=`` tells the loader which ranks those are: along the mesh's dimension ``dp`` they get different samples, along
``tp`` the same. In each group along ``tp`` one rank decides by what is resident and reports what is needed, and the
others follow it. A run that finds a checkpoint in FOLDER resumes there in any layout: 2 x 2 processes before, and
1 x 4 (TENSOR_PARALLEL=4) now.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import made_data
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from quiver_client import DataLoader

TENSOR_PARALLEL = int(os.environ.get("TENSOR_PARALLEL", "2"))
STEPS_BEFORE_CHECKPOINT = 7


def main() -> None:
    distributed.init_process_group("gloo")
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    if rank == 0 and len(sys.argv) > 1:
        os.environ[made_data.VARIABLE] = sys.argv[1]
    shared = [made_data.made() if rank == 0 else None]
    distributed.broadcast_object_list(shared)
    folder = Path(str(shared[0]))
    checkpoint = folder / "parallel-checkpoint.pt"

    sizes = world_size // TENSOR_PARALLEL, TENSOR_PARALLEL
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    dataset = made_data.dataset(folder)
    loader = DataLoader(dataset, batch_size=16, shuffle=True, mesh=mesh, job="parallel-example")
    resumes = checkpoint.exists()
    if resumes:
        loader.load_state_dict(torch.load(checkpoint, weights_only=True)["loader"])

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    read = torch.zeros(len(dataset), dtype=torch.int64)  # how often this process read each sample
    for step, (numbers, points, values) in enumerate(loader, 1):
        check_same(numbers, mesh["tp"].get_group())
        loss = torch.nn.functional.mse_loss(model(points), values)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        read[numbers] += 1
        if step == STEPS_BEFORE_CHECKPOINT and not resumes:
            state = loader.state_dict(merged=True)
            if rank == 0:
                torch.save({"loader": state}, checkpoint)
    total = read.clone()
    distributed.all_reduce(total)
    if rank == 0:
        once = int((total == TENSOR_PARALLEL).sum())
        rest = ", the others before the checkpoint" if resumes else ""
        said = f"{once} of {len(dataset)} samples read, each by all ranks of one group{rest}"
        print(f"{sizes[0]} x {sizes[1]}: {said}; loss {loss.item():.4f}", flush=True)
    loader.close()
    dataset.close()
    distributed.destroy_process_group()


def check_same(numbers: torch.Tensor, group: distributed.ProcessGroup) -> None:
    """Raise an error if the ranks of the group do not have the same batch."""
    gathered = [torch.empty_like(numbers) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(gathered, numbers, group=group)
    if any(not torch.equal(each, numbers) for each in gathered):
        raise RuntimeError("ranks of one tensor-parallel model got different samples")


if __name__ == "__main__":
    main()
