"""What tokens cost: the same reads of a daemon that requires none and of one that does, and of a single check.

    python -m bench tokens

One process reads batches of a dataset that a daemon holds, by stream, where a token is sent once per connection, and
over HTTP, where each request carries it: one round of each way, then the next round. Printed are medians over the
rounds: throughput in percent of the daemon without tokens in the same round, and the CPU of reader and daemon.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import tls
from bench.data import Data, make_data
from bench.servers import Server, quiver_rack

SIZES: Final = ((110_000, 256, 256 << 20), (4_096, 1_024, 128 << 20))  # of samples, batches, the dataset
CARRIERS: Final = ("stream", "HTTP")
CHECKS: Final = 2_000
VARIABLE: Final = "QUIVER_TOKEN"
ROUNDS_MORE: Final = 4  # times as many are tried as are counted


def measure(folder: Path, *, rounds: int, seconds: float, quick: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Return what the command prints, as JSON would have it."""
    readings: list[dict[str, Any]] = []
    keys, token = _signed(folder)
    for sample_bytes, batch_size, total_bytes in SIZES:
        count = (8 << 20 if quick else total_bytes) // sample_bytes
        data = make_data(folder / str(sample_bytes), "blobs", count, sample_bytes)
        with _daemons(folder / f"rack{sample_bytes}", data, keys) as daemons:
            for carrier in CARRIERS:
                took = _rounds(data, min(batch_size, count), daemons, token, carrier, rounds=rounds, seconds=seconds)
                readings += [{"sample_bytes": sample_bytes, "carrier": carrier, **each} for each in took]
    return {"readings": readings, "checks": _checks(keys, token, 100 if quick else CHECKS)}


def show(measured: dict[str, list[dict[str, Any]]], console: Console) -> None:
    table = Table("sample", "carrier", "daemon", "GB/s", "% of none", "reader CPU s/GB", "daemon CPU s/GB")
    for it in measured["readings"]:
        cpu = (f"{it[name]:.3f}" for name in ("reader_cpu_seconds_per_gigabyte", "daemon_cpu_seconds_per_gigabyte"))
        rate = f"{it['gigabytes_per_second']:.2f}", f"{it['percent_of_none']:.1f}"
        table.add_row(str(it["sample_bytes"]), it["carrier"], it["daemon"], *rate, *cpu)
    console.print(table)
    table = Table("one check of a token", "µs")
    for it in measured["checks"]:
        table.add_row(it["token"], f"{it['microseconds']:.1f}")
    console.print(table)


def _signed(folder: Path) -> tuple[Path, str]:
    """Return a folder with a public key, and a token that its key signed."""
    from click.testing import CliRunner

    from quiver_client.cli.token import command

    keys = folder / "keys"
    if CliRunner().invoke(command, ["keygen", str(keys)]).exit_code:
        raise RuntimeError("no keys; install the extra `access`")
    key = next(keys.glob("*.key"))
    made = CliRunner().invoke(command, ["create", "--tenant", "bench", "--expires", "1h", "--key", str(key)])
    key.unlink()
    return keys, made.stdout.strip()


@contextmanager
def _daemons(folder: Path, data: Data, keys: Path) -> Iterator[dict[str, tuple[str, Server]]]:
    """Run a daemon without tokens and one that requires them."""
    folder.mkdir()
    capacity = data.total_bytes * 2 + (64 << 20)
    with ExitStack() as stack:
        made = {}
        for name, more in (("none", ()), ("tokens", (f"--token-keys={keys}",))):
            urls, servers = stack.enter_context(quiver_rack(folder / name, data.folder, capacity, *more, count=1))
            made[name] = urls[0], servers[0]
        yield made


def _rounds(
    data: Data,
    batch_size: int,
    daemons: dict[str, tuple[str, Server]],
    token: str,
    carrier: str,
    *,
    rounds: int,
    seconds: float,
) -> list[dict[str, Any]]:
    """Return the medians of the daemon without tokens and of the one with."""
    from quiver.transport import stream
    from quiver_client import Dataset

    rng = np.random.default_rng(0)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in daemons}
    read = stream.ReadStreams.read
    with ExitStack() as stack:
        if carrier == "HTTP":
            stream.ReadStreams.read = lambda self, request: None  # type: ignore[method-assign]
            stack.callback(setattr, stream.ReadStreams, "read", read)
        datasets = {}
        for name, (url, _) in daemons.items():
            os.environ[VARIABLE] = token if name == "tokens" else ""
            datasets[name] = Dataset(data.manifest(), url, copy=False)
            stack.callback(datasets[name].close)
            for at in range(0, len(datasets[name]), batch_size):  # the daemon fills everything
                datasets[name].__getitems__(range(at, min(at + batch_size, len(datasets[name]))))
        for number in range(ROUNDS_MORE * rounds):
            batches = [rng.permutation(len(datasets["none"]))[:batch_size].tolist() for _ in range(16)]
            try:
                took = {
                    name: tls._round(datasets[name], batches, daemons[name][1].pid, seconds)
                    for name in sorted(daemons, reverse=bool(number % 2))
                }
            except (
                RuntimeError
            ):  # on a busy machine a daemon may be passed over for a moment: that round does not count
                time.sleep(2.0)
                continue
            for name, each in took.items():
                found[name].append(each)
            if len(found["none"]) == rounds:
                break
        else:
            raise RuntimeError("this machine is too busy: in most rounds a daemon did not answer in time")
    ratios = [100 * mine[0] / none[0] for mine, none in zip(found["tokens"], found["none"], strict=True)]
    return [_row(name, took, median(ratios) if name == "tokens" else 100.0) for name, took in found.items()]


def _row(daemon: str, took: list[tuple[float, float, float]], percent: float) -> dict[str, Any]:
    rate, mine, its = (median(each) for each in zip(*took, strict=True))
    return {
        "daemon": daemon,
        "gigabytes_per_second": rate,
        "percent_of_none": percent,
        "reader_cpu_seconds_per_gigabyte": mine,
        "daemon_cpu_seconds_per_gigabyte": its,
    }


def _checks(keys: Path, token: str, count: int) -> list[dict[str, Any]]:
    """Return what a check of a token takes: of the first, of a known one, and of those that are refused."""
    from quiver_cacheserver.access.keys import PublicKeys
    from quiver_cacheserver.access.tokens import Refused, Tokens

    tokens = Tokens(PublicKeys(keys), "bench")
    head, payload, _ = token.split(".")
    tried: list[tuple[str, Callable[[], object]]] = [
        ("verified for the first time", lambda: tokens._verify(token)),
        ("known already", lambda: tokens.verify(token)),
        ("missing", lambda: tokens.verify("")),
        ("malformed", lambda: tokens.verify("a.b.c")),
        ("bad signature", lambda: tokens.verify(f"{head}.{payload}.{'A' * 86}")),
    ]
    tokens.verify(token)
    made = []
    for name, check in tried:
        took = []
        for _ in range(count):
            began = time.perf_counter()
            with suppress(Refused):
                check()
            took.append(time.perf_counter() - began)
        made.append({"token": name, "microseconds": 1e6 * median(took)})
    return made
