"""``python -m tests.chaos.disk.crash_points``: a process is killed at every change that it makes to its folder.

Each life (``lives``, ``ledger_life``) is run once to count its changes, then killed by SIGKILL before each of them, and
in the middle of each write; every third time its successor is killed too, while it recovers. After that the folder is
opened and compared with what was said. The processes are forked from this one, which holds nothing open.
``--power-cuts`` instead opens what a power cut behind each call may leave (``power_cut``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

from tests.chaos.disk.faultfs import Control, Op, mark, recorded
from tests.chaos.disk.lives import Life, Say, StoreLife
from tests.chaos.disk.power_cut import Disk

LIVES: Final = ("owned", "shared", "embedded", "daemon", "ledger")


class Point(NamedTuple):
    number: int  # the change before which the process is killed, from 1
    torn: bool  # after half of it: it is a write


class Crashes:
    """The crashes of one life, in ``folder``."""

    def __init__(self, life: Life, control: Control, folder: Path, seed: int) -> None:
        self._life = life
        self._control = control
        self._base, self._root, self._said = folder / "base", folder / "root", folder / "said"
        self._random = random.Random(seed)
        folder.mkdir()
        control.root = Path("/nowhere")
        self._before = life.prepare(self._base)
        control.root = self._root

    def points(self) -> list[Point]:
        """Live once to the end; return where to crash: at every change, and within every write."""
        record = self._said.with_name("record")
        record.unlink(missing_ok=True)
        self._begin()
        self._control.record_to(record)
        status = self._live(self._life.run)
        self._control.page.recording = 0
        assert status == 0, f"{self._life.name}: it ended with {status}"
        self._check(self._root, self._lines(), "lived to its end", power_cut=False)
        changes = [it.op for it in recorded(record) if it.op < Op.READ]
        return [Point(at, torn) for at, op in enumerate(changes, 1) for torn in ((False, True)[: 1 + (op is Op.WRITE)])]

    def cut(self, variants: int, every: int, offset: int) -> int:
        """Cut the power behind every call of one life, and check what may be left; return in how many ways."""
        self.points()
        target, said, cuts = self._root.with_name("left"), list(self._before), 0
        disk = Disk(str(self._root), self._base)
        for number, call in enumerate([*recorded(self._said.with_name("record")), None]):
            if (number - offset) % every == 0:
                for keep in [None, 0.0, *self._random.choices((0.2, 0.5, 0.8, 0.95), k=variants)]:
                    disk.leave(target, None if keep is None else self._random, keep or 0.0)
                    self._check(target, said, f"power cut before call {number}, {call}, keeping {keep}", power_cut=True)
                    shutil.rmtree(target)
                    cuts += 1
            if call is not None and call.op is Op.MARK:
                said.append(call.path)
            elif call is not None:
                disk.apply(call)
        return cuts

    def crash(self, point: Point) -> int:
        """Crash at a point, and perhaps again while recovering; check. Return how often a process was killed."""
        self._begin()
        self._control.crash_at(point.number, torn=point.torn)
        status = self._live(self._life.run)
        if status == 0 and not self._life.deterministic:
            return 0
        assert status == -signal.SIGKILL, f"it was not killed: {status}"
        killed = 1
        if self._random.random() < 1 / 3:
            self._control.crash_at(self._random.randint(1, 6), torn=self._random.random() < 0.5)
            killed += self._live(self._life.recover) == -signal.SIGKILL
        self._control.crash_at(0)
        self._check(self._root, self._lines(), f"crashed at {point}", power_cut=False)
        return killed

    def _check(self, root: Path, said: list[str], what: str, *, power_cut: bool) -> None:
        status = self._live(lambda root, said, say: self._life.check(root, said, power_cut=power_cut), root, said)
        if status != 0:
            sys.stderr.write("\n".join([f"{self._life.name}: {what}; it had said", *said, ""]))
            sys.exit(1)

    def _begin(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
        shutil.copytree(self._base, self._root)
        self._said.write_text("".join(f"{line}\n" for line in self._before))
        self._control.crash_at(0)

    def _lines(self) -> list[str]:
        return self._said.read_text().splitlines()

    def _live(
        self, run: Callable[[Path, list[str], Say], None], root: Path | None = None, said: list[str] | None = None
    ) -> int:
        """Run in a forked process; return its exit status, or the negative number of the signal that ended it."""
        lines = self._lines() if said is None else said
        child = os.fork()
        if child == 0:
            status = 1
            try:
                fd = os.open(self._said, os.O_WRONLY | os.O_APPEND)
                run(root or self._root, lines, lambda text: (os.write(fd, f"{text}\n".encode()), mark(text))[1])
                status = 0
            except BaseException:  # noqa: BLE001 - the exit status says it
                traceback.print_exc()
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def lives_of(names: list[str], folder: Path, seed: int) -> Iterator[Life]:
    """Yield the lives of these names; of ledgers, without end, in other settings each time."""
    for name in names:
        if name in ("owned", "shared"):
            yield StoreLife(shared=name == "shared")
    from quiver_client import Dataset
    from tests.chaos.disk.ledger_life import Before, LedgerLife
    from tests.chaos.disk.process_lives import DaemonLife, EmbeddedLife
    from tests.support.data import make_files, random_files

    for name in names:
        if name in ("embedded", "daemon"):
            folder = folder / name
            files = make_files(folder, random_files(40, low=2000, high=6000), shard_bytes="16KiB")
            yield EmbeddedLife(files) if name == "embedded" else DaemonLife(files)
    if "ledger" not in names:
        return
    chance = random.Random(seed)
    files = make_files(folder, random_files(120, low=1000, high=3000), shard_bytes="16KiB")
    dataset = Dataset(files.manifest, f"file://{folder}/cache?capacity=1GiB", fields=["__key__"])
    yield LedgerLife(dataset)
    while True:
        world_size = chance.randint(1, 3)
        before = chance.choice(get_args(Before))
        rank, batch_size = chance.randrange(world_size), chance.choice((4, 6, 7, 8))
        yield LedgerLife(dataset, before, rank=rank, world_size=world_size, batch_size=batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.disk.crash_points", description=__doc__)
    parser.add_argument("--lives", default=",".join(LIVES), help="of %(default)s")
    parser.add_argument(
        "--points", type=int, default=0, help="so many at least, in ever other ledgers; 0: each life once"
    )
    parser.add_argument(
        "--every", type=int, default=1, help="only every so many-th point, from one that the seed chooses"
    )
    parser.add_argument(
        "--power-cuts", type=int, default=0, help="cut the power instead, so many random ways each time"
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quiver-crash-") as folder:
        if "FAULTFS_CONTROL" not in os.environ:  # this process, started again with the library
            command = [sys.executable, "-m", "tests.chaos.disk.crash_points", *sys.argv[1:]]
            environment = {**os.environ, **Control(Path(folder)).environment}
            sys.exit(subprocess.run(command, env=environment, check=False).returncode)
        control = Control(Path(os.environ["FAULTFS_CONTROL"]).parent)
        sys.stdout.write(json.dumps(run(arguments, control, Path(folder))) + "\n")


def run(arguments: argparse.Namespace, control: Control, folder: Path) -> dict[str, Any]:
    """Crash all lives; return how many points were tried and found exact."""
    names, begun = arguments.lives.split(","), time.monotonic()
    counts: dict[str, int] = {}
    killed = 0
    for number, life in enumerate(lives_of(names, folder, arguments.seed)):
        if number >= len(names) and sum(counts.values()) >= arguments.points:
            break
        crashes = Crashes(life, control, folder / str(number), arguments.seed + number)
        if arguments.power_cuts:
            counts[life.name] = counts.get(life.name, 0) + crashes.cut(
                arguments.power_cuts, arguments.every, arguments.seed
            )
            continue
        points = crashes.points()
        for point in itertools.islice(points, arguments.seed % arguments.every, None, arguments.every):
            crashed = crashes.crash(point)
            killed += crashed
            counts[life.name] = counts.get(life.name, 0) + (crashed > 0)
    points = sum(counts.values())  # the first that is not exact raises
    figures = {"points": points, "exact": points, "killed": killed, "seed": arguments.seed}
    return {**figures, "seconds": round(time.monotonic() - begun, 1), "lives": counts}


if __name__ == "__main__":
    main()
