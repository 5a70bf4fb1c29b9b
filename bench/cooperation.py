"""Jobs that share a cache, for real: daemons, jobs and an origin of limited bandwidth, each in its own process.

    python -m bench.cooperation [--case "eight equal"] [--shards mixed|equal] [--units 256] [--unit 0.2]
                                [--json FILE] [--plot FILE]

A job is a loop over ``quiver_client.DataLoader`` that takes a step of fixed length for every batch, as an accelerator
does, and measures how long each ``next`` kept it. A *unit* is what a job of rate 1 takes for one shard; the origin
delivers two shards a unit. Hit ratio: 1 - bytes that the origin sent / bytes that the jobs consumed, first epochs and
all. Beside it the same jobs without substitution, and what least-recently-used by sample would have made of the same
permutations (``lru_hits``: no system, the trace alone). Expected: the issue's table, in about half an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from blake3 import blake3

UNITS: Final = 256
SAMPLES: Final = 16  # of a full shard
SAMPLE_BYTES: Final = 32 << 10  # with a tar's header before each, the origin sends 1.6 % more than the samples
BATCH: Final = 4
DAEMONS: Final = 3
LATENCY_MS: Final = 5.0
READY_SECONDS: Final = 30.0


@dataclass(frozen=True)
class Case:
    """A row of the table. ``starts`` in units after the first job; ``origin`` in shards a unit."""

    name: str
    cached: float
    rates: tuple[float, ...]
    starts: tuple[float, ...]
    bound: float
    measure: str  # "hit", "origin" (bytes an epoch after the first, in datasets) or "waiting" (after the first epoch)
    epochs: int = 4
    origin: float = 2.0
    substitute: bool = True
    shuffle: str = "full"  # or "block", whose order is fixed


EIGHT_SPEEDS: Final = tuple(1 - 0.3 * job / 7 for job in range(8))
CASES: Final = (
    Case("one", 0.2, (1.0,), (0,), 0.80, "origin"),
    Case("three equal", 0.2, (1.0,) * 3, (0, 21, 42), 0.733, "hit"),
    Case("eight equal", 0.1, (1.0,) * 8, tuple(21.0 * job for job in range(8)), 0.887, "hit"),
    Case("three unequal", 0.2, (1.0, 0.85, 0.7), (0,) * 3, 0.686, "hit"),
    Case("eight unequal", 0.1, EIGHT_SPEEDS, (0,) * 8, 0.868, "hit"),
    Case("half", 0.5, (1.0,), (0,), 0.0, "waiting", epochs=3, origin=0.5 * 1.2),
    Case("half, no substitution", 0.5, (1.0,), (0,), 0.0, "waiting", epochs=2, origin=0.5 * 1.2, substitute=False),
    Case("all", 1.3, (1.0,), (0,), 0.0, "waiting", epochs=2),
    Case("three equal, no substitution", 0.2, (1.0,) * 3, (0, 21, 42), 0.2, "hit", epochs=2, substitute=False),
    Case("block", 0.2, (1.0,), (0,), 0.80, "origin", origin=1.1, shuffle="block"),
    Case("block, scarce origin", 0.2, (1.0,), (0,), 0.80, "origin", origin=0.88, shuffle="block"),
    Case("eight equal, no substitution", 0.1, (1.0,) * 8, (0,) * 8, 0.1, "hit", epochs=1, substitute=False),
)


@dataclass
class Outcome:
    """What a case came to. Shares of one."""

    case: str
    bound: float
    value: float
    measure: str
    waiting: list[float] = field(default_factory=list)  # of each job, after its first batch
    waiting_warm: list[float] = field(default_factory=list)  # after its first epoch
    fetched_per_used: float = 0.0
    origin_per_epoch: list[float] = field(default_factory=list)  # of job 0's epochs, in datasets
    peak_resident: float = 0.0  # of the capacity
    lru: float | None = None


# -- one job ----------------------------------------------------------------------------------------------------------


def job(arguments: argparse.Namespace) -> None:
    """Consume some epochs at a given pace; print what it was like as a line of JSON for each epoch."""
    from quiver_client import DataLoader, Dataset

    dataset = Dataset(arguments.manifest, arguments.cache)
    loader = DataLoader(
        dataset,
        batch_size=BATCH,
        shuffle=arguments.shuffle,
        collate_fn=lambda samples: sum(len(sample["bin"]) for sample in samples),
        substitute=not arguments.plain,
        seed=arguments.seed,
        job=f"bench-{arguments.seed}",
    )
    for epoch in range(arguments.epochs):
        used, waited, count = 0, 0.0, 0
        begun = last = time.monotonic()
        batches = iter(loader)
        while True:
            asked = time.monotonic()
            size = next(batches, None)
            if size is None:
                break
            now = time.monotonic()
            waited += now - asked
            used, count = used + size, count + 1
            # A step begins when its batch is there and the step before is done, and takes as long as it takes.
            last = max(last + arguments.step, now)
            time.sleep(max(last + arguments.step - time.monotonic(), 0.0))
        stats = dataset.stats()
        told = {"epoch": epoch, "used": used, "waited": waited, "seconds": time.monotonic() - begun, "batches": count}
        told["fetched"] = sum(stats[f"bytes_{tier}"] for tier in ("host", "rack", "origin"))
        print(json.dumps(told), flush=True)
    loader.close()
    dataset.close()


# -- the rack ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """The dataset, indexed where the origin will serve it."""

    folder: Path
    manifest: Path
    shards: int
    samples: int
    total_bytes: int
    port: int

    @property
    def unit_bytes(self) -> float:
        return self.total_bytes * SAMPLES / self.samples


def prepare(where: Path, port: int, units: int, kind: str) -> Data:
    """Write the dataset as one tar whose samples lie in the order of their shards, so that a shard is one range.

    The layout is ``mixed`` either way. Samples as they come make shards that are half to wholly full; for ``equal``
    ones the samples are chosen by their digests, so many with each prefix.
    """
    from quiver.manifest import Manifest
    from quiver_client import index

    loose, folder = where / "loose", where / "origin"
    loose.mkdir()
    folder.mkdir()
    for number, content in enumerate(_contents(units, kind)):
        (loose / f"{number:06}.bin").write_bytes(content)
    size = SAMPLES * (SAMPLE_BYTES + 40) + 8
    index(str(loose), str(where / "loose.quiver"), layout="mixed", shard_bytes=size)
    manifest = Manifest.open(where / "loose.quiver")
    _write_tar(folder / "data.tar", loose, manifest)
    base = f"http://127.0.0.1:{port}/data.tar"
    with _origin(folder, port):
        index(base, str(where / "data.quiver"), layout="mixed", shard_bytes=size)
    told = Manifest.open(where / "data.quiver")
    sizes = told.tables.shard_sizes
    assert kind == "mixed" or sizes.min() == sizes.max()
    return Data(folder, where / "data.quiver", len(sizes), len(told), int(sizes.sum()), port)


def _contents(units: int, kind: str) -> Iterator[bytes]:
    """Yield the samples of so many full shards' bytes."""
    drawn = (np.random.default_rng(number).bytes(SAMPLE_BYTES) for number in itertools.count())
    if kind == "mixed":
        yield from itertools.islice(drawn, units * SAMPLES)
        return
    wanted = dict.fromkeys(range(units), SAMPLES)
    while wanted:
        content = next(drawn)
        prefix = int.from_bytes(blake3(content).digest()[:4], "big") * units >> 32
        if prefix in wanted:
            wanted[prefix] -= 1
            if not wanted[prefix]:
                del wanted[prefix]
            yield content


def _write_tar(target: Path, loose: Path, manifest: Any) -> None:
    import tarfile

    with tarfile.open(target, "w", format=tarfile.USTAR_FORMAT) as tar:
        first_of_blob = np.zeros(len(manifest.tables.offsets), np.int64)
        first_of_blob[manifest.tables.blob_of] = np.arange(len(manifest))
        for serial, row in enumerate(first_of_blob.tolist()):
            info = tarfile.TarInfo(f"{serial:06}.bin")
            info.size = SAMPLE_BYTES
            with (loose / manifest.key(row)).open("rb") as file:
                tar.addfile(info, file)


@contextlib.contextmanager
def _origin(folder: Path, port: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        _start(stack, folder.parent / "origin.log", ["-m", "bench.origin", str(folder), str(port)])
        _wait_for(f"http://127.0.0.1:{port}/-/sent")
        yield


@contextlib.contextmanager
def rack(where: Path, data: Data, cached: float) -> Iterator[list[str]]:
    """Yield the URLs of fresh daemons that hold this share of the dataset together."""
    from quiver_cacheserver.config import allowed  # noqa: F401 - say at once if the daemon is not installed

    with contextlib.ExitStack() as stack:
        urls = [f"http://127.0.0.1:{port}" for port in _free_ports(DAEMONS)]
        capacity = int(cached * data.total_bytes / DAEMONS) + data.manifest.stat().st_size
        for number, url in enumerate(urls):
            command = ["-m", "quiver_cacheserver.cli", "--listen", url.removeprefix("http://")]
            command += ["--data-dir", str(where / f"node{number}"), "--capacity", str(capacity), "--rack", "bench"]
            command += ["--origin", f"http://127.0.0.1:{data.port}/"]
            command += ["--peers", ",".join(urls)]
            _start(stack, where / f"node{number}.log", command)
        for url in urls:
            _wait_for(f"{url}/readyz")
        yield urls


# -- a case -----------------------------------------------------------------------------------------------------------


def run(case: Case, data: Data, where: Path, unit: float) -> Outcome:
    """Run one case and return what it came to."""
    limit = case.origin * data.unit_bytes / unit
    folder = where / case.name.replace(" ", "-").replace(",", "")
    folder.mkdir()
    control = f"http://127.0.0.1:{data.port}/-"
    with _origin(data.folder, data.port), rack(folder, data, case.cached) as urls, contextlib.ExitStack() as stack:
        _get(f"{control}/limit/{limit:.0f}/{LATENCY_MS}")
        begun, jobs, told = time.monotonic(), [], [[] for _ in case.rates]  # type: ignore[var-annotated]
        origin, marks, peak = 0, [0], 0.0
        waiting_to_start = sorted(zip(case.starts, range(len(case.rates)), strict=True))
        while waiting_to_start or any(process.poll() is None for process in jobs):
            while waiting_to_start and time.monotonic() - begun >= waiting_to_start[0][0] * unit:
                _, number = waiting_to_start.pop(0)
                jobs.append(_start(stack, folder / f"job{number}.log", _job_command(case, number, data, urls, unit)))
            time.sleep(0.2)
            origin += _get(f"{control}/sent")
            statuses = [json.loads(_text(f"{url}/v1/status")) for url in urls]
            peak = max([peak, *(status["resident_bytes"] / status["capacity_bytes"] for status in statuses)])
            if len(_lines(folder / "job0.log")) >= len(marks):
                marks.append(origin)
        origin += _get(f"{control}/sent")
        if any(process.returncode for process in jobs):
            errors = "".join(path.read_text()[-2000:] for path in sorted(folder.glob("job*.err")))
            raise SystemExit(f"{case.name}: a job failed:\n{errors}")
    told = [_lines(folder / f"job{number}.log") for number in range(len(case.rates))]
    return _outcome(case, told, origin, marks, peak, data)


def _outcome(
    case: Case, told: list[list[dict[str, Any]]], origin: int, marks: list[int], peak: float, data: Data
) -> Outcome:
    used = sum(line["used"] for lines in told for line in lines)
    per_epoch = [count / data.total_bytes for count in np.diff([*marks[: case.epochs], origin])]
    warm = [
        sum(line["waited"] for line in lines[1:]) / max(sum(line["seconds"] for line in lines[1:]), 1e-9)
        for lines in told
    ]
    value = {
        "hit": 1 - origin / used,
        "origin": float(np.mean(per_epoch[1:])) if len(per_epoch) > 1 else 0.0,
        "waiting": max(warm),
    }[case.measure]
    return Outcome(
        case=case.name,
        bound=case.bound,
        value=value,
        measure=case.measure,
        waiting=[sum(line["waited"] for line in lines) / sum(line["seconds"] for line in lines) for lines in told],
        waiting_warm=warm,
        fetched_per_used=sum(lines[-1]["fetched"] for lines in told) / used,
        origin_per_epoch=per_epoch,
        peak_resident=peak,
        lru=lru_hits(case, data.samples),
    )


def lru_hits(case: Case, count: int) -> float:
    """Return the hit ratio of least-recently-used over samples, with the jobs' own permutations and no substitution."""
    from quiver.substitution import permutation

    room, hits = int(case.cached * count), 0
    held: OrderedDict[int, None] = OrderedDict()
    orders = [
        np.concatenate([permutation(count, job, e) for e in range(case.epochs)]) for job in range(len(case.rates))
    ]
    times = [
        start + np.arange(len(o)) / SAMPLES / r for start, o, r in zip(case.starts, orders, case.rates, strict=True)
    ]
    trace = np.concatenate(orders)[np.argsort(np.concatenate(times), kind="stable")]
    for sample in trace.tolist():
        if sample in held:
            hits += 1
            held.move_to_end(sample)
        else:
            held[sample] = None
            if len(held) > room:
                held.popitem(last=False)
    return hits / len(trace)


def _job_command(case: Case, number: int, data: Data, urls: list[str], unit: float) -> list[str]:
    step = unit * BATCH / SAMPLES / case.rates[number]
    command = ["-m", "bench.cooperation", "job", "--manifest", str(data.manifest), "--cache", ",".join(urls)]
    command += ["--step", str(step), "--epochs", str(case.epochs), "--seed", str(number)]
    command += ["--shuffle", case.shuffle]
    return command if case.substitute else [*command, "--plain"]


# -- processes --------------------------------------------------------------------------------------------------------


def _start(stack: contextlib.ExitStack, log: Path, command: list[str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as output, log.with_suffix(".err").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=output, stderr=errors, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    stack.callback(_stop, process)
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def _get(url: str) -> int:
    return int(_text(url))


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            _text(url)
            return
        time.sleep(0.05)
    raise SystemExit(f"{url} does not answer after {READY_SECONDS:.0f} s")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


# -- the table --------------------------------------------------------------------------------------------------------


def show(outcome: Outcome) -> None:
    what = {"hit": "hit ratio", "origin": "origin bytes an epoch", "waiting": "waiting"}[outcome.measure]
    print(
        f"{outcome.case:30s} {what:22s} {outcome.value:7.3f}   bound {outcome.bound:.3f}   LRU {outcome.lru:.3f}   "
        f"waiting {max(outcome.waiting):.3f} (warm {max(outcome.waiting_warm):.3f})   "
        f"fetched/used {outcome.fetched_per_used:.3f}   peak {outcome.peak_resident:.2f}",
        flush=True,
    )


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw hit ratios beside their bounds, and waiting."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    hits = [outcome for outcome in outcomes if outcome.measure == "hit"]
    waits = [outcome for outcome in outcomes if outcome.measure == "waiting"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), width_ratios=[max(len(hits), 1), max(len(waits), 1)])
    at = np.arange(len(hits))
    left.bar(at - 0.2, [outcome.value for outcome in hits], 0.38, label="measured", color="#2b6cb0")
    left.bar(at + 0.2, [outcome.lru or 0.0 for outcome in hits], 0.38, label="LRU by sample (trace)", color="#cbd5e0")
    left.hlines([outcome.bound for outcome in hits], at - 0.45, at + 0.45, color="black", label="bound")
    left.set_xticks(at, [outcome.case for outcome in hits], rotation=20, ha="right")
    left.set_ylabel("hit ratio")
    left.legend()
    right.bar(range(len(waits)), [outcome.value for outcome in waits], color="#2b6cb0")
    right.set_xticks(range(len(waits)), [outcome.case for outcome in waits], rotation=20, ha="right")
    right.set_ylabel("share of time waited, after the first epoch")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    one = commands.add_parser("job")
    for name, kind in (("manifest", str), ("cache", str), ("step", float), ("epochs", int), ("seed", int)):
        one.add_argument(f"--{name}", type=kind, required=True)
    one.add_argument("--plain", action="store_true")
    one.add_argument("--shuffle", choices=("full", "block"), default="full")
    parser.add_argument("--case", action="append", help="only this case; may be given several times")
    parser.add_argument("--unit", type=float, default=0.2, help="seconds in which a job of rate 1 reads a shard")
    parser.add_argument("--shards", choices=("mixed", "equal"), default="mixed", help="how full the shards are")
    parser.add_argument("--units", type=int, default=UNITS, help="full shards' bytes in the dataset")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "job":
        job(arguments)
        return
    if arguments.shards == "equal" and arguments.units.bit_count() != 1:
        parser.error("--units: equal shards of the mixed layout are a power of two")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and leave no process behind
    chosen = [case for case in CASES if not arguments.case or case.name in arguments.case]
    with tempfile.TemporaryDirectory(prefix="quiver-bench-") as folder:
        where = Path(folder)
        data = prepare(where, *_free_ports(1), arguments.units, arguments.shards)
        outcomes = []
        for case in chosen:
            outcomes.append(run(case, data, where, arguments.unit))
            show(outcomes[-1])
            if arguments.json:
                facts = {"unit_seconds": arguments.unit, "cpus": os.cpu_count(), "shards": data.shards}
                facts |= {"sizes": arguments.shards, "units": arguments.units}
                arguments.json.write_text(json.dumps(facts | {"cases": [asdict(each) for each in outcomes]}, indent=1))
    if arguments.plot:
        plot(outcomes, arguments.plot)


if __name__ == "__main__":
    main()
