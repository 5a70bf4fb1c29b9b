"""Train with Lightning on two processes (``ddp``), stop in mid-epoch, and resume from Lightning's checkpoint.

    python examples/lightning_train.py

Nothing of Lightning's needs a setting: it leaves the loader's shares as they are (``use_distributed_sampler`` at its
default), saves the loader's state in each checkpoint, that of all ranks, and loads it again. The same loader object may
validate as well.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import made_data
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import distributed

from quiver_client import DataLoader


class Line(pl.LightningModule):
    """A linear model, which counts how often each sample was read in an epoch."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.read = torch.zeros(samples, dtype=torch.int64)  # no buffer: DDP makes those equal in all ranks

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        numbers, points, values = batch
        self.read[numbers] += 1
        loss = torch.nn.functional.mse_loss(self.layer(points), values)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        _, points, values = batch
        self.log("error", torch.nn.functional.mse_loss(self.layer(points), values), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        total = self.read.clone()
        distributed.all_reduce(total)
        checkpoint["read"] = total

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.read = checkpoint["read"] * (distributed.get_rank() == 0)

    def on_train_epoch_end(self) -> None:
        distributed.all_reduce(self.read)
        once = int((self.read == 1).sum())
        self.print(f"epoch {self.current_epoch}: {once} of {len(self.read)} samples read once")
        self.read.zero_()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2)


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    folder = made_data.made()
    for steps, resumed in ((26, False), (-1, True)):  # an epoch has 19 steps, and every tenth a checkpoint
        dataset = made_data.dataset(folder)
        loader = DataLoader(dataset, batch_size=16, shuffle=True, job="lightning-example")
        saves = ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=10, filename="last", save_top_k=-1)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_epochs=3,
            max_steps=steps,
            callbacks=[saves],
            val_check_interval=10,
            default_root_dir=tempfile.gettempdir(),
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        # The newest one is of step 20, in the second epoch: what was read since is read again.
        path = newest(folder) if resumed else None
        trainer.fit(Line(len(dataset)), loader, loader, ckpt_path=path, weights_only=False)
        trainer.print(f"stopped at step {trainer.global_step}")
        trainer.strategy.barrier()
        loader.close()


def newest(folder: Path) -> str:
    """Return the checkpoint that was written last."""
    return str(max((folder / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns))


if __name__ == "__main__":
    main()
