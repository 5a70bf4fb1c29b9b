"""Jobs that read in fixed orders, for real: what do they need of the origin, and how long do they wait?

    python -m bench.fixed_order [--case "one, full" ...] [--units 256] [--unit 0.2] [--json FILE]

Three daemons that together hold a fifth of the dataset, jobs of one process each, and an origin of limited bandwidth
that counts what it sends; all as in ``bench.cooperation``, with full shards of 16 samples (``--units`` is a power of
two). No job substitutes. *Least*: what any policy would read of the origin, by ``bench.belady``, in a model in which a
missed sample costs its own bytes, or the fetch of its whole shard. A *stock* reader is torch's own ``DataLoader`` that
reads its first batches and then pauses; it reports nothing. Expected: within a tenth of the least, and hardly a wait
where the origin feeds 1.1 times the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.belady import Uses, needed
from bench.cooperation import (
    BATCH,
    LATENCY_MS,
    SAMPLES,
    Data,
    _free_ports,
    _get,
    _lines,
    _origin,
    _start,
    prepare,
    rack,
)

CACHED: Final = 0.2
STOCK_BATCHES: Final = 20


@dataclass(frozen=True)
class Case:
    """A row of the table. ``starts`` in units after the first job; ``origin`` in shards per unit."""

    name: str
    shuffle: str  # "full", "block", "none"
    starts: tuple[float, ...] = (0.0,)
    origin: float = 2.0
    epochs: int = 3
    stock: bool = False


CASES: Final = (
    Case("one, full", "full"),
    Case("one, full, tight", "full", origin=0.8 * 1.1),
    Case("one, block", "block"),
    Case("one, block, tight", "block", origin=0.8 * 1.1),
    Case("three, full", "full", (0.0, 21.0, 42.0), origin=3.0, epochs=2),
    Case("three, block", "block", (0.0, 21.0, 42.0), epochs=2),
    Case("one, full, beside a paused stock loader", "full", stock=True),
)


@dataclass
class Outcome:
    """What a case came to. Origin bytes in datasets; shares of one."""

    case: str
    origin: float
    least: float
    origin_per_epoch: list[float] = field(default_factory=list)  # of job 0's epochs
    waiting: list[float] = field(default_factory=list)  # of each job
    waiting_warm: list[float] = field(default_factory=list)  # after its first epoch


# -- jobs -------------------------------------------------------------------------------------------------------------


def job(asked: argparse.Namespace) -> None:
    """Consume some epochs at a given pace; print a line of JSON for each epoch."""
    from quiver_client import DataLoader, Dataset

    dataset = Dataset(asked.manifest, asked.cache)
    loader = DataLoader(
        dataset,
        batch_size=BATCH,
        shuffle={"full": True, "none": False}.get(asked.shuffle, asked.shuffle),
        collate_fn=lambda samples: sum(len(sample["bin"]) for sample in samples),
        substitute=False,
        seed=0,
        job=f"bench-{asked.number}",
    )
    for epoch in range(asked.epochs):
        used, waited = 0, 0.0
        begun = last = time.monotonic()
        batches = iter(loader)
        while True:
            before = time.monotonic()
            size = next(batches, None)
            if size is None:
                break
            now = time.monotonic()
            waited, used = waited + now - before, used + size
            last = max(last + asked.step, now)
            time.sleep(max(last + asked.step - time.monotonic(), 0.0))
        told = {"epoch": epoch, "used": used, "waited": waited, "seconds": time.monotonic() - begun}
        print(json.dumps(told), flush=True)
    loader.close()
    dataset.close()


def stock(asked: argparse.Namespace) -> None:
    """Read some batches with torch's own loader, then pause until ended."""
    import torch.utils.data

    from quiver_client import Dataset

    dataset = Dataset(asked.manifest, asked.cache)
    loader = torch.utils.data.DataLoader(dataset, BATCH, shuffle=True, collate_fn=len)
    for number, _ in enumerate(loader):
        if number >= STOCK_BATCHES:
            break
    print(json.dumps({"batches": STOCK_BATCHES}), flush=True)
    signal.pause()


def _command(kind: str, data: Data, urls: list[str], **more: object) -> list[str]:
    command = ["-m", "bench.fixed_order", kind, "--manifest", str(data.manifest), "--cache", ",".join(urls)]
    for name, value in more.items():
        command += [f"--{name}", str(value)]
    return command


# -- a case -----------------------------------------------------------------------------------------------------------


def run(case: Case, data: Data, where: Path, unit: float) -> Outcome:
    """Run one case and return what it came to."""
    folder = where / case.name.replace(" ", "-").replace(",", "")
    folder.mkdir()
    control = f"http://127.0.0.1:{data.port}/-"
    step = unit * BATCH / SAMPLES
    with _origin(data.folder, data.port), rack(folder, data, CACHED) as urls, contextlib.ExitStack() as stack:
        _get(f"{control}/limit/{case.origin * data.unit_bytes / unit:.0f}/{LATENCY_MS}")
        if case.stock:
            _start(stack, folder / "stock.log", _command("stock", data, urls))
            while not _lines(folder / "stock.log"):
                time.sleep(0.05)
            _get(f"{control}/sent")
        begun, jobs, origin, marks = time.monotonic(), list[Any](), 0, [0]
        waiting_to_start = list(enumerate(case.starts))
        while waiting_to_start or any(process.poll() is None for process in jobs):
            while waiting_to_start and time.monotonic() - begun >= waiting_to_start[0][1] * unit:
                number, _ = waiting_to_start.pop(0)
                more = {"number": number, "step": step, "epochs": case.epochs, "shuffle": case.shuffle}
                jobs.append(_start(stack, folder / f"job{number}.log", _command("job", data, urls, **more)))
            time.sleep(0.1)
            origin += _get(f"{control}/sent")
            if len(_lines(folder / "job0.log")) >= len(marks):
                marks.append(origin)
        origin += _get(f"{control}/sent")
        if any(process.returncode for process in jobs):
            errors = "".join(path.read_text()[-2000:] for path in sorted(folder.glob("job*.err")))
            raise SystemExit(f"{case.name}: a job failed:\n{errors}")
    told = [_lines(folder / f"job{number}.log") for number in range(len(case.starts))]
    return Outcome(
        case=case.name,
        origin=origin / data.total_bytes,
        least=least(case, data, unit),
        origin_per_epoch=[count / data.total_bytes for count in np.diff(marks)],
        waiting=[sum(it["waited"] for it in lines) / sum(it["seconds"] for it in lines) for lines in told],
        waiting_warm=[sum(it["waited"] for it in lines[1:]) / sum(it["seconds"] for it in lines[1:]) for lines in told],
    )


def least(case: Case, data: Data, unit: float) -> float:
    """Return what any policy would read of the origin, in datasets."""
    from quiver.manifest import Manifest
    from quiver_client import DataLoader, Dataset

    shuffle: Any = {"full": True, "none": False}.get(case.shuffle, case.shuffle)
    manifest = Manifest.open(data.manifest)
    tables = manifest.tables
    shard_of = np.searchsorted(tables.firsts.astype(np.int64), tables.blob_of, "right") - 1
    orders = []
    with contextlib.closing(Dataset(str(data.manifest), None)) as dataset:
        loader = DataLoader(dataset, batch_size=BATCH, shuffle=shuffle, substitute=False, seed=0)
        for epoch in range(case.epochs):
            loader.set_epoch(epoch)
            orders.append(np.concatenate([shard_of[rows] for rows in loader.batch_sampler]))
        loader.close()
    counts = np.bincount(shard_of, minlength=manifest.shard_count)
    order = np.concatenate(orders)
    jobs = len(case.starts)
    uses = Uses.merged([order] * jobs, [start * unit for start in case.starts], [unit / SAMPLES] * jobs)
    return needed(uses, counts, CACHED * counts.sum()) / float(counts.sum())


def show(it: Outcome) -> None:
    per_epoch = " ".join(f"{each:.3f}" for each in it.origin_per_epoch)
    print(
        f"{it.case:40s} origin {it.origin:6.3f}   least {it.least:6.3f}   ratio {it.origin / it.least:5.3f}"
        f"   job 0's epochs {per_epoch}   waiting {max(it.waiting):.3f} (warm {max(it.waiting_warm):.3f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    for kind in ("job", "stock"):
        one = commands.add_parser(kind)
        one.add_argument("--manifest", required=True)
        one.add_argument("--cache", required=True)
        if kind == "job":
            for name, of in (("number", int), ("step", float), ("epochs", int), ("shuffle", str)):
                one.add_argument(f"--{name}", type=of, required=True)
    parser.add_argument("--case", action="append", help="only this case; may be given several times")
    parser.add_argument("--unit", type=float, default=0.2, help="seconds in which a job reads a shard")
    parser.add_argument("--units", type=int, default=256, help="shards in the dataset, a power of two")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.command:
        {"job": job, "stock": stock}[asked.command](asked)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and leave no process behind
    chosen = [case for case in CASES if not asked.case or case.name in asked.case]
    with tempfile.TemporaryDirectory(prefix="quiver-bench-") as folder:
        where = Path(folder)
        data = prepare(where, *_free_ports(1), asked.units, "equal")
        outcomes = []
        for case in chosen:
            outcomes.append(run(case, data, where, asked.unit))
            show(outcomes[-1])
            if asked.json:
                facts = {"unit_seconds": asked.unit, "cpus": os.cpu_count(), "shards": data.shards}
                asked.json.write_text(json.dumps(facts | {"cases": [asdict(each) for each in outcomes]}, indent=1))


if __name__ == "__main__":
    main()
