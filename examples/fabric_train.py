"""Train with Lightning Fabric on two processes, and resume from a checkpoint that ``fabric.save`` wrote.

    python examples/fabric_train.py

``fabric.setup_dataloaders`` keeps the loader's shares and its methods: what it returns has ``state_dict``, and goes
into ``fabric.save`` and ``fabric.load`` like a model. The checkpoint has the state of all ranks.
"""

from __future__ import annotations

import logging
from typing import Any

import made_data
import torch
from lightning.fabric import Fabric

from quiver_client import DataLoader

STOP_AFTER = 7  # steps of the second epoch


def main() -> None:
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    folder = made_data.made()
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    dataset = made_data.dataset(folder)

    run = begun(fabric, dataset)
    read = torch.zeros(len(dataset), dtype=torch.int64)
    train(fabric, run, read)
    report(fabric, 0, read)
    read.zero_()
    train(fabric, run, read, steps=STOP_AFTER)
    fabric.save(folder / "fabric.ckpt", run)
    fabric.print(f"saved after step {STOP_AFTER} of epoch 1")

    run = begun(fabric, dataset)  # as another process would do it
    fabric.load(folder / "fabric.ckpt", run, weights_only=False)
    train(fabric, run, read)
    report(fabric, 1, read)
    run["loader"].close()


def begun(fabric: Fabric, dataset: Any) -> dict[str, Any]:
    """Return a model, its optimizer and a loader, set up by Fabric."""
    model = torch.nn.Linear(1, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.2))
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=16, shuffle=True))
    return {"model": model, "optimizer": optimizer, "loader": loader}


def train(fabric: Fabric, run: dict[str, Any], read: torch.Tensor, steps: int | None = None) -> None:
    """Train for an epoch, or for some steps of it."""
    for step, (numbers, points, values) in enumerate(run["loader"], 1):
        loss = torch.nn.functional.mse_loss(run["model"](points), values)
        run["optimizer"].zero_grad()
        fabric.backward(loss)
        run["optimizer"].step()
        read[numbers] += 1
        if step == steps:
            break


def report(fabric: Fabric, epoch: int, read: torch.Tensor) -> None:
    """Print how many samples were read once by all ranks together."""
    total: Any = fabric.all_reduce(read.clone(), reduce_op="sum")
    fabric.print(f"epoch {epoch}: {int((total == 1).sum())} of {len(read)} samples read once")


if __name__ == "__main__":
    main()
