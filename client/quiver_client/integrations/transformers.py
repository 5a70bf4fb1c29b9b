"""``QuiverCallback``: the state of the loader in the checkpoints of Hugging Face's Trainer.

The Trainer resumes by skipping as many batches as were trained, which is right only for an order that is the same each
time. With this callback each checkpoint holds the merged state of all ranks, and the loader takes the batches that the
Trainer skips from it: they are neither read nor counted again, and the Trainer's own counters stay right.

A loader that the Trainer iterates adds the callback by itself (``attend``), and finds the checkpoint that the Trainer
resumes from, by the frame that iterates it. So nothing need be written in a training script. Where neither is found, in
a release that names things otherwise say, resuming is refused, and the message names the callback.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from transformers import TrainerCallback

from quiver_client.loader.order_sampler import OrderSampler

log = logging.getLogger("quiver_client")

FILE: Final = "quiver_loader.pt"  # beside trainer_state.json, in the folder of a checkpoint
WRAPPED_MAX: Final = 8  # batch samplers around an order


class QuiverCallback(TrainerCallback):
    """Saves the state of the training loader with each checkpoint, from which the loader then resumes.

        Trainer(..., callbacks=[QuiverCallback()])  # or none: the loader adds it

    The loader is what ``get_train_dataloader`` returns: a ``quiver_client.DataLoader``, or a stock one that takes a
    ``quiver_client.BatchSampler``. For any other loader it does nothing.
    """

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Write the state, in rank 0; all ranks take part."""
        loader = more.get("train_dataloader")
        order = order_of(loader)
        if order is None or loader is None:
            return
        # A stock loader has drawn more batches than were trained.
        trained = round(state.epoch % 1 * len(loader)) or None
        saved = order.state_dict(merged=True, batches=trained)
        folder = _folder(args, state)
        if not args.should_save:
            return
        if not folder.is_dir():
            log.warning("%s: no such folder, so the loader's state is not saved; training cannot resume there", folder)
            return
        partial = folder / f"{FILE}.partial"
        torch.save(saved, partial)
        partial.replace(folder / FILE)


def order_of(loader: Any) -> OrderSampler | None:
    """Return the order that a loader reads, through what other libraries wrap around it; ``None`` if it is not ours."""
    order = getattr(loader, "batch_sampler", None)
    for _ in range(WRAPPED_MAX):
        if order is None or isinstance(order, OrderSampler):
            return order
        order = getattr(order, "batch_sampler", None)
    return None


def attend(order: OrderSampler, training: FrameType) -> None:
    """Add the callback to the Trainer whose frame reads an epoch of this order, and load what it resumes from.

    Raises ``RuntimeError`` if the checkpoint is in another epoch than the Trainer resumes in.
    """
    names = training.f_locals
    trainer: Any = names.get("self")
    if order_of(names.get("train_dataloader")) is not order or not hasattr(trainer, "callback_handler"):
        return  # it evaluates, and reads another loader
    if not any(isinstance(each, QuiverCallback) for each in trainer.callback_handler.callbacks):
        trainer.add_callback(QuiverCallback())
    folder, epoch = names.get("resume_from_checkpoint"), names.get("epoch")
    if isinstance(folder, str | Path) and isinstance(epoch, int) and epoch == names.get("epochs_trained"):
        _load(order, Path(folder), epoch)


def _load(order: OrderSampler, folder: Path, epoch: int) -> None:
    """Load the state in a checkpoint's folder, unless there is none, or the user has loaded one."""
    file = folder / FILE
    if order.handed_out or not file.is_file():
        return
    state = torch.load(file, weights_only=True)
    # The parts of a mixture go on where they were at the end of the epoch before.
    if state["epoch"] == epoch or ("parts" in state and state["epoch"] == epoch - 1):
        order.load_state_dict(state)
        order.set_epoch(epoch)
    elif state["epoch"] != epoch - 1:
        raise RuntimeError(
            f"{folder}: its loader was in epoch {state['epoch']}, and the Trainer resumes in epoch {epoch}. It counts"
            " epochs by steps, so the number of processes, the batch size or the gradient accumulation has changed:"
            " resume with those of the checkpoint"
        )


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}")
