"""Train with the Trainer of Hugging Face, in one process or in several, and resume from its checkpoint.

    python examples/transformers_train.py                                   # or, in two processes:
    torchrun --standalone --nproc-per-node 2 examples/transformers_train.py

Two lines give the Trainer our loader. The loader keeps its state in the Trainer's checkpoints by itself, and on
resuming takes the batches from it that the Trainer skips, so each sample is read once per epoch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import made_data
import torch
from torch import distributed
from transformers import Trainer, TrainerCallback, TrainingArguments

from quiver_client import DataLoader

EPOCHS, BATCH, SAVE_STEPS = 2, 16, 7


class Line(torch.nn.Module):
    """A model that returns its loss, as the Trainer wants it, and remembers which samples it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.read = torch.zeros(made_data.SAMPLES, dtype=torch.int64)

    def forward(self, numbers: torch.Tensor, points: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        self.read[numbers] += 1
        return {"loss": torch.nn.functional.mse_loss(self.layer(points), values)}


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    numbers, points, values = torch.utils.data.default_collate(samples)
    return {"numbers": numbers, "points": points, "values": values}


class QuiverTrainer(Trainer):
    def get_train_dataloader(self) -> DataLoader:
        loader = DataLoader(self.train_dataset, self._train_batch_size, shuffle=True, collate_fn=collate)
        return self.accelerator.prepare(loader)


class Stop(TrainerCallback):
    """Stops at the first checkpoint, as if the process had been killed there."""

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop = True


def train(folder: Path, *, resume: bool, callbacks: list[TrainerCallback]) -> torch.Tensor:
    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        save_steps=SAVE_STEPS,
        use_cpu=True,
        report_to=[],
        remove_unused_columns=False,  # the dataset's samples have no columns that could be removed
        disable_tqdm=True,
    )
    model = Line()
    trainer = QuiverTrainer(model, arguments, train_dataset=made_data.dataset(folder), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return model.read


def main() -> None:
    shared: list[str | None] = [str(made_data.made())] if int(os.environ.get("RANK", "0")) == 0 else [None]
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
        distributed.broadcast_object_list(shared)
    folder = Path(str(shared[0]))
    read = train(folder, resume=False, callbacks=[Stop()]) + train(folder, resume=True, callbacks=[])
    if distributed.is_initialized():
        distributed.all_reduce(read)
    if int(os.environ.get("RANK", "0")) == 0:
        exact = int((read == EPOCHS).sum())
        print(f"{exact} of {made_data.SAMPLES} samples read {EPOCHS} times in {EPOCHS} epochs", flush=True)


if __name__ == "__main__":
    main()
