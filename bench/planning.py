"""How long planning a batch takes, in a process of its own: ``python -m bench.planning PEERS SAMPLES`` prints JSON.

The manifest's tables are made in memory, with the size of a real one; columns that a plan does not read are one row,
repeated. The ring comes from a server, as for a client.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from quiver.manifest import Field, Header, Manifest
from quiver.manifest.tables import Tables
from quiver.plan import plan_batch
from quiver.ring import Member, Ring
from quiver.wire import RingView
from quiver_client.rack.members import Members
from quiver_client.stats import Stats

BATCH: Final = 256
SAMPLE_BYTES: Final = 110_000
SAMPLES_A_SHARD: Final = 290
PLANS: Final = 600


def synthetic(samples: int) -> Manifest:
    """Return a manifest of this many pictures, shuffled into shards of 32 MiB."""
    shards = -(-samples // SAMPLES_A_SHARD)
    rng = np.random.default_rng(0)
    one = np.zeros((1, 1), np.uint64)
    tables = Tables(
        keys=pa.nulls(0, pa.large_utf8()),
        blob_of=rng.permutation(np.arange(samples, dtype=np.uint32)),
        scalars={},
        offsets=np.tile(np.arange(SAMPLES_A_SHARD, dtype=np.uint64) * SAMPLE_BYTES, shards)[:samples],
        digests=np.broadcast_to(np.zeros((1, 32), np.uint8), (samples, 32)),
        xxh3=np.broadcast_to(one, (samples, 1)),
        lengths=np.full((samples, 1), SAMPLE_BYTES, np.uint64),
        object_of=np.broadcast_to(np.zeros(1, np.uint32), samples),
        origins=np.broadcast_to(one, (samples, 1)),
        shard_digests=rng.integers(0, 256, (shards, 32), np.uint8),
        shard_sizes=np.full(shards, 32 << 20, np.uint64),
        firsts=np.arange(shards, dtype=np.uint32) * np.uint32(SAMPLES_A_SHARD),
        object_paths=pa.nulls(0, pa.large_utf8()),
        object_sizes=np.zeros(0, np.uint64),
        object_etags=pa.nulls(0, pa.large_utf8()),
        object_mtimes=np.zeros(0, np.int64),
    )
    fields = (Field("image", "bytes"),)
    header = Header(
        format=1, layout="mixed", shard_bytes=32 << 20, source="files", base="file:///synthetic/", fields=fields
    )
    return Manifest(Path("synthetic.quiver"), header, tables)


def measure(manifest: Manifest, members: Members) -> dict[str, float]:
    """Return the µs to plan a batch and group it by owner, for shards planned for the first time and for known ones."""
    rng = np.random.default_rng(1)
    batches = [rng.integers(0, len(manifest.tables.blob_of), BATCH) for _ in range(PLANS)]
    choose = getattr(members, "choices", members.ranked)
    times: dict[str, list[float]] = {"first": [], "known": []}
    for taken in times.values():
        for rows in batches:
            begun = time.perf_counter()
            plan = plan_batch(manifest, rows)
            choose(np.unique(plan.shards))
            taken.append(1e6 * (time.perf_counter() - begun))
    return {
        "first_us": median(times["first"][:20]),  # later batches contain known shards
        "known_us": median(times["known"]),
        "known_p99_us": float(np.quantile(times["known"], 0.99)),
    }


def main(peers: int, samples: int) -> None:
    ring = Ring.of("bench", [Member(f"node{at:04}", f"http://node{at}:7717", 1e12) for at in range(peers)])
    told = msgspec.json.encode(RingView.of(ring))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    manifest = synthetic(samples)
    members = Members(manifest, [f"http://127.0.0.1:{server.server_port}"], Stats())
    known = members.refresh()
    assert known is not None
    assert len(known.members) == peers
    print(json.dumps(measure(manifest, members)))
    members.close()
    server.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
