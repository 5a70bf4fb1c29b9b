"""Can a client tell by the time of an answer that another sharing domain has a shard?

    python -m bench.existence [REQUESTS]

One daemon with tokens. The owner's domain holds some shards; a stranger asks for these (*foreign*), for shards that
nobody has (*absent*), and, to show that the method finds what there is to be found, for shards of its own (*own*), in
random order and one at a time. Printed, by verb, are the median times, and the probability that a foreign shard's
answer takes longer than an absent one's: 0.5 means that the time tells nothing. The interval is that of 95 % if nothing
is told. Expected: every foreign figure within it (one of twenty falls outside by chance), and own ones far outside,
except for uploads, which are all written.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from bench.servers import free_ports
from quiver.digest import Digest
from quiver.errors import QuiverError
from quiver.peer import PeerClient
from quiver.shard import encode_table, name_of
from quiver.token_source import TokenSource
from quiver.wire import RANGE, ReadRequest, RecheckRequest

REQUESTS: Final = 2_000  # of each kind and verb
SHARDS: Final = 64
SAMPLE_BYTES: Final = 64 << 10
KINDS: Final = ("foreign", "absent", "own")

Shards = dict[Digest, bytes]


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else REQUESTS
    with tempfile.TemporaryDirectory() as folder, daemon(Path(folder)) as (url, keys):
        owner, stranger = (PeerClient(url, token=TokenSource(token_of(keys, name))) for name in ("owner", "stranger"))
        shards = {kind: dict(shard(kind, number) for number in range(SHARDS)) for kind in KINDS}
        for kind, client in (("foreign", owner), ("own", stranger)):
            for digest, data in shards[kind].items():
                client.put_shard(digest, data)
        told = {name: measured(verb, shards, count) for name, verb in verbs(stranger).items()}
        uploads = measured_uploads(owner, stranger, max(count // 10, 20))
        print(json.dumps({**told, "PUT": uploads}, indent=1, ensure_ascii=False))
        owner.close()
        stranger.close()


def verbs(client: PeerClient) -> dict[str, Callable[[Digest], object]]:
    def read(digest: Digest, wait_ms: int = 0) -> object:
        ranges = np.zeros(1, RANGE)
        ranges["length"] = 100
        return client.read(ReadRequest(None, (digest,), ranges, wait_ms))

    return {
        "GET": lambda digest: client.load(digest, 1 << 20),
        "HEAD": client.has_shard,
        "stream": read,
        "stream that waits": lambda digest: read(digest, 20_000),
        "recheck": lambda digest: client.recheck(RecheckRequest((digest,))),
    }


def measured(verb: Callable[[Digest], object], shards: dict[str, Shards], count: int) -> dict[str, float]:
    asked = [(kind, digest) for kind in KINDS for digest in random.choices(list(shards[kind]), k=count)]
    random.shuffle(asked)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for digests in shards.values():  # connections, and what is done once
        quietly(verb, next(iter(digests)))
    for kind, digest in asked:
        began = time.perf_counter()
        quietly(verb, digest)
        times[kind].append(time.perf_counter() - began)
    return answer(times)


def measured_uploads(owner: PeerClient, stranger: PeerClient, count: int) -> dict[str, float]:
    """Upload shards once each: some that the owner uploaded before, and some that nobody has."""
    times: dict[str, list[float]] = {kind: [] for kind in KINDS[:2]}
    made = {kind: [shard(f"upload {kind}", number) for number in range(count)] for kind in times}
    for digest, data in made["foreign"]:
        owner.put_shard(digest, data)
    asked = [(kind, *each) for kind, several in made.items() for each in several]
    random.shuffle(asked)
    for kind, digest, data in asked:
        began = time.perf_counter()
        stranger.put_shard(digest, data)
        times[kind].append(time.perf_counter() - began)
    return answer(times)


def answer(times: dict[str, list[float]]) -> dict[str, float]:
    told = {f"{kind} µs": round(float(np.median(several)) * 1e6, 1) for kind, several in times.items()}
    absent = np.sort(times["absent"])
    for kind, several in times.items():
        if kind != "absent":
            told[f"{kind} slower than absent"] = round(float(np.searchsorted(absent, several).mean() / len(absent)), 3)
    n, m = len(absent), len(times["foreign"])
    told["± by chance"] = round(1.96 * math.sqrt((n + m + 1) / (12 * n * m)), 3)
    return told


def quietly(verb: Callable[[Digest], object], digest: Digest) -> None:
    with contextlib.suppress(QuiverError):
        verb(digest)


def shard(kind: str, number: int) -> tuple[Digest, bytes]:
    sample = random.Random(f"{kind} {number}").randbytes(SAMPLE_BYTES)
    digests = np.frombuffer(Digest.of(sample), np.uint8)[None]
    table = encode_table(digests, np.array([len(sample)], np.uint64))
    return name_of(table), sample + table


def token_of(keys: Path, domain: str) -> str:
    (key,) = keys.glob("*.key")
    return quiver("token", "create", "--key", str(key), "--tenant", domain, "--expires", "1h").strip()


def quiver(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("quiver")), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def daemon(folder: Path) -> Iterator[tuple[str, Path]]:
    """Run a daemon with tokens; yield its URL, and the folder of the keys that sign them."""
    keys, public = folder / "keys", folder / "public"
    quiver("token", "keygen", str(keys))
    public.mkdir()
    for path in keys.glob("*.pub"):
        path.rename(public / path.name)
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "quiver_cacheserver.cli", "--listen", f"127.0.0.1:{port}"]
    command += ["--data-dir", str(folder / "data"), "--capacity", "1GiB", "--token-keys", str(public)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            until_healthy(port)
            yield f"http://127.0.0.1:{port}", keys
        finally:
            process.terminate()


def until_healthy(port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/healthz")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.05)
    raise TimeoutError("the daemon does not start")


if __name__ == "__main__":
    main()
