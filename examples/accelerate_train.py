"""Train with Hugging Face Accelerate, in one process or in several, save its state, and resume.

    python examples/accelerate_train.py                                     # or, in two processes:
    accelerate launch --cpu --num_processes 2 examples/accelerate_train.py

``prepare`` leaves the loader as it is, since each rank has its share already; batches arrive on the Accelerator's
device. ``save_state`` and ``load_state`` include the loader: training goes on with the batch that comes next, and with
no other number of processes if need be. There is no ``skip_first_batches``.
"""

from __future__ import annotations

import os
from pathlib import Path

import made_data
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather

from quiver_client import DataLoader

EPOCHS, BATCH, STOP_AFTER = 2, 16, 7


def train(folder: Path, *, stop_after: int | None = None) -> torch.Tensor:
    """Train from the saved state, if there is one; return how often this process read each sample."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    loader, model, optimizer = accelerator.prepare(
        DataLoader(made_data.dataset(folder), BATCH, shuffle=True), model, torch.optim.SGD(model.parameters(), lr=0.2)
    )
    state = folder / "state"
    if state.exists():
        accelerator.load_state(str(state))
    read = torch.zeros(made_data.SAMPLES, dtype=torch.int64)
    steps = 0
    for _ in range(loader.sampler.epoch, EPOCHS):
        for numbers, points, values in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(points), values)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            read[numbers] += 1
            steps += 1
            if steps == stop_after:
                accelerator.save_state(str(state))
                loader.close()
                return read
    loader.close()
    return read


def main() -> None:
    accelerator = Accelerator(cpu=True)
    shared = [str(made_data.made()) if accelerator.is_main_process else None]
    broadcast_object_list(shared)
    folder = Path(str(shared[0]))
    read = train(folder, stop_after=STOP_AFTER) + train(folder)
    total = gather(read[None]).sum(0)
    if accelerator.is_main_process:
        exact = int((total == EPOCHS).sum())
        print(f"{exact} of {made_data.SAMPLES} samples read {EPOCHS} times in {EPOCHS} epochs", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    main()
