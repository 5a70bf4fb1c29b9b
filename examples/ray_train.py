"""Train with Ray Train on two workers, and resume from the state that they report.

    python examples/ray_train.py
    torchrun --standalone --nproc-per-node 2 examples/ray_train.py

The first line starts a cluster of this machine. With the second, Ray Train starts none and runs in the processes of
torchrun. ``prepare_data_loader`` leaves the shares of the loader as they are and moves batches to the device of the
worker; what it returns has the methods of the loader.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_TRAIN_V2_ENABLED="1")  # before Ray is imported

import made_data
import ray.train
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import distributed

from quiver_client import DataLoader

STOP_AFTER = 7  # steps of the second epoch


def train(config: dict[str, Any]) -> None:
    """Run in each worker."""
    folder = Path(config["folder"])
    dataset = made_data.dataset(folder)
    model: Any = ray.train.torch.prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    def prepared() -> Any:
        return ray.train.torch.prepare_data_loader(DataLoader(dataset, batch_size=16, shuffle=True))

    def steps(loader: Any, read: torch.Tensor, stop_after: int | None = None) -> None:
        for step, (numbers, points, values) in enumerate(loader, 1):
            loss = torch.nn.functional.mse_loss(model(points), values)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            read[numbers] += 1
            if step == stop_after:
                break

    loader = prepared()
    read = torch.zeros(2, len(dataset), dtype=torch.int64)
    steps(loader, read[0])
    steps(loader, read[1], STOP_AFTER)
    state = loader.state_dict(merged=True)  # in all workers; each gets the state of all
    again = prepared()
    again.load_state_dict(state)
    steps(again, read[1])
    distributed.all_reduce(read)
    once = (read == 1).sum(1).tolist()
    if distributed.get_rank() == 0:
        for epoch, number in enumerate(once):
            print(f"epoch {epoch}: {number} of {len(dataset)} samples read once", flush=True)
    ray.train.report({"read once": once})
    again.close()
    loader.close()


def main() -> None:
    local = "LOCAL_RANK" in os.environ  # torchrun sets it
    config = {"folder": str(made_data.made())}
    scaling = ScalingConfig(num_workers=0 if local else 2, use_gpu=False)
    if local:
        TorchTrainer(train, train_loop_config=config, scaling_config=scaling).fit()
        return
    ray.init(include_dashboard=False, num_cpus=2)
    with tempfile.TemporaryDirectory() as results:
        run = RunConfig(storage_path=results)
        result = TorchTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run).fit()
        print(result.error or "finished")
    ray.shutdown()


if __name__ == "__main__":
    main()
