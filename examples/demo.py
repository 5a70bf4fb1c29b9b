"""`make demo`: train on real images through a rack of three daemons, one of which is killed during training.

The demo writes scikit-learn's handwritten digits as PNG files in class folders, indexes them in place, and reads them
with a stock torch DataLoader through the daemons. The table shows that the origin is read only once, and that killing a
daemon causes a few more origin reads and loses no sample.
"""

from __future__ import annotations

import io
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rack import Daemon, run_rack
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, get_worker_info

from quiver_client import Dataset, index

EPOCHS = 8
KILL_IN_EPOCH = 4
BATCH = 64
ACCURACY_WANTED = 0.95
TIERS = ("host", "rack", "origin")


@dataclass
class Epoch:
    """The results of one pass over the training data."""

    number: int
    accuracy: float = 0.0
    samples: int = 0
    seconds: float = 0.0
    tiers: dict[str, int] = field(default_factory=dict)
    origin_bytes: int = 0
    note: str = ""


def write_digits(folder: Path) -> None:
    """Write the digits as an image folder: train/<digit>/<number>.png and test/<digit>/<number>.png."""
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        split = "test" if number % 5 == 0 else "train"
        target = folder / split / str(label) / f"{number:04d}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15.9375).astype(np.uint8)).save(target)


def decode(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """The user's own transform: PNG bytes to a tensor."""
    pixels = np.asarray(Image.open(io.BytesIO(sample["image"])), np.float32) / 255
    return torch.from_numpy(pixels)[None], sample["label"]


def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor, int, dict[str, int]]:
    """Stack a batch, and add the worker's id and its counters so far."""
    worker = get_worker_info()
    assert worker is not None
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels), worker.id, worker.dataset.stats()


def loader(manifest: Path, cache: str, *, shuffle: bool) -> DataLoader[Any]:
    """Return a stock DataLoader; only its dataset is Quiver's."""
    dataset = Dataset(manifest, cache=cache, transform=decode)
    return DataLoader(
        dataset, batch_size=BATCH, shuffle=shuffle, num_workers=2, persistent_workers=True, collate_fn=collate
    )


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


class Trainer:
    """An ordinary training loop, with counters."""

    def __init__(self, train: DataLoader[Any], test: DataLoader[Any], daemons: list[Daemon]) -> None:
        self.train, self.test, self.daemons = train, test, daemons
        self.model = network()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.workers: dict[int, dict[str, int]] = {}

    def epoch(self, number: int, victim: Daemon | None) -> Epoch:
        result = Epoch(number)
        before, origin_before = self._tiers(), self._origin_bytes()
        started = time.monotonic()
        for at, (images, labels, worker, stats) in enumerate(self.train):
            if victim is not None and at == len(self.train) // 2:
                victim.status()
                victim.process.kill()
                victim.process.wait()
                result.note = "a daemon was killed"
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(images), labels).backward()
            self.optimizer.step()
            self.workers[worker] = stats
            result.samples += len(labels)
        result.seconds = time.monotonic() - started
        result.tiers = {tier: count - before[tier] for tier, count in self._tiers().items()}
        result.origin_bytes = self._origin_bytes() - origin_before
        result.accuracy = self.accuracy()
        return result

    @torch.no_grad()
    def accuracy(self) -> float:
        hits = [(self.model(images).argmax(1) == labels).sum() for images, labels, _, _ in self.test]
        return int(sum(hits)) / len(self.test.dataset)  # type: ignore[arg-type]

    def _tiers(self) -> dict[str, int]:
        return {tier: sum(stats[f"bytes_{tier}"] for stats in self.workers.values()) for tier in TIERS}

    def _origin_bytes(self) -> int:
        """Return the bytes read from the origin so far, by the daemons and by the training workers."""
        daemons = sum(daemon.status()["origin_read_bytes"] for daemon in self.daemons)
        return daemons + self._tiers()["origin"]


def show(console: Console, epochs: list[Epoch], dataset_bytes: int) -> None:
    table = Table(title="Handwritten digits through a rack of three daemons", title_justify="left")
    for name in ("epoch", "test accuracy", "samples/s", *(f"from {tier}" for tier in TIERS), "origin ÷ dataset"):
        table.add_column(name, justify="right")
    table.add_column("")
    for e in epochs:
        tiers = [f"{e.tiers[tier]:,}" for tier in TIERS]
        rate, share = f"{e.samples / e.seconds:,.0f}", f"{e.origin_bytes / dataset_bytes:.2f}"
        table.add_row(str(e.number), f"{e.accuracy:.1%}", rate, *tiers, share, e.note)
    console.print(table)
    console.print("From host, rack, origin: bytes that the training processes read. Origin ÷ dataset: bytes that the")
    console.print("daemons and training processes read from the origin, divided by the size of the training data.")


def run(console: Console, folder: Path) -> float:
    torch.manual_seed(0)
    write_digits(folder)
    for split in ("train", "test"):
        report = index(folder / split, folder / f"{split}.quiver", shard_bytes="8KiB")
        console.print(f"indexed {split} in place: {report.samples} samples in {report.shards} shards")
    with run_rack(folder, [folder / "train", folder / "test"]) as daemons:
        console.print(f"etcd and {len(daemons)} daemons are up; training for {EPOCHS} epochs")
        cache = ",".join(daemon.url for daemon in daemons)
        train = loader(folder / "train.quiver", cache, shuffle=True)
        trainer = Trainer(train, loader(folder / "test.quiver", cache, shuffle=False), daemons)
        trainer.accuracy()  # fills the test split, so that the counters below see only training's reads
        victims = {KILL_IN_EPOCH: daemons[1]}
        epochs = [trainer.epoch(number, victims.get(number)) for number in range(1, EPOCHS + 1)]
        show(console, epochs, train.dataset.manifest.total_bytes)  # type: ignore[attr-defined]
    return epochs[-1].accuracy


def main() -> int:
    console = Console(width=120)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with tempfile.TemporaryDirectory(prefix="quiver-demo-") as folder:
            accuracy = run(console, Path(folder))
    except KeyboardInterrupt:
        console.print("stopped, with all processes that the demo started")
        return 130
    if accuracy < ACCURACY_WANTED:
        console.print(f"accuracy {accuracy:.1%} is below {ACCURACY_WANTED:.0%}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
