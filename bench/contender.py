"""One contender in a process of its own: ``python -m bench.contender`` answers commands, all in lines of JSON.

    {"do": "prepare", "peer": …, "data": …, "batch_size": …, "folder": …, "options": …}  → settings, digests
    {"do": "round", "step_seconds": …}                                                   → a Round
    {"do": "servers"}                                                                    → its servers' process ids

It ends, with its servers, when its input ends: also if the process that started it is killed.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np
import torch

from bench.accelerator import Accelerator
from bench.data import Data
from bench.measure import Consumer, Round, digests_of, measure
from bench.peers.base import Peer, Work
from bench.peers.registry import peer
from bench.servers import CannotRun

END_SECONDS_MAX: Final = 20.0
TURNS: Final = 3


class Contender:
    """A peer, its fastest way, and the consumer."""

    def __init__(self, name: str, work: Work) -> None:
        self.work = work
        self.peer: Peer = peer(name)(work)
        self.way = self.peer.ways[0]
        sizes = work.data.offsets[1:] - work.data.offsets[:-1]
        most = int(
            np.sort(sizes)[-work.batch_size :].sum()
        )  # the largest possible batch: some peers read in another order
        decoded_bytes = work.options.get("decoded_bytes", 0) * work.batch_size
        self._consumer = Consumer(max(most, decoded_bytes))

    def prepare(self) -> dict[str, Any]:
        """Prepare and warm up everything, and choose the fastest way."""
        self.peer.check()
        self.peer.prepare()
        tried, failed = self._try_ways()
        if tried:
            self.way = max(tried, key=lambda way: tried[way])
        one_size = self.work.data.sample_bytes if self.work.data.kind == "tokens" else None
        self.peer.before_round()
        content, ordered = digests_of(self.peer.batches(self.way), one_size)
        if len(tried) < 2:
            self.round(Accelerator(), self.way)
        return {
            "settings": self.peer.settings,
            "way": self.way,
            "ways_bytes_a_second": tried,
            "ways_failed": failed,
            "content": content,
            "ordered": ordered,
        }

    def _try_ways(self) -> tuple[dict[str, float], dict[str, str]]:
        """Return the best throughput of each way, if there are several, and why others failed.

        The ways take turns, as contenders do; the first turn only warms them up.
        """
        tried: dict[str, float] = {}
        failed: dict[str, str] = {}
        ways = self.peer.ways if len(self.peer.ways) > 1 else ()
        for turn in range(TURNS):
            for way in [way for way in ways if way not in failed]:
                try:
                    done = self.round(Accelerator(self.work.options.get("trial_step_seconds", 0.0)), way)
                except Exception as error:  # noqa: BLE001 - another way may go
                    traceback.print_exc()
                    failed[way] = f"{type(error).__name__}: {error}"[:300]
                    tried.pop(way, None)
                    continue
                if turn and done.bytes:  # 0 if there are fewer files than workers
                    tried[way] = max(tried.get(way, 0.0), done.bytes_a_second)
        if failed and not tried:
            raise CannotRun("; ".join(failed.values()))
        return tried, failed

    def round(self, accelerator: Accelerator, way: str | None = None) -> Round:
        self.peer.before_round()
        gc.collect()
        way = self.way if way is None else way
        return measure(lambda: self.peer.batches(way), self.work.data.count, self._consumer, accelerator)


def main() -> None:
    # Answers go to the original standard output; what libraries print goes elsewhere and is not mistaken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # And no thread may wait inside sys.stdin, whose lock a fork would inherit.
    commands = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of the terminal; our parent will end us
    torch.set_num_threads(1)
    contender: Contender | None = None
    try:
        for line in _lines(commands):
            try:
                asked = json.loads(line)
                if asked["do"] == "prepare":
                    work = Work(
                        Data.decode(asked["data"]), asked["batch_size"], Path(asked["folder"]), asked["options"]
                    )
                    contender = Contender(asked["peer"], work)
                    _answer(answers, contender.prepare())
                elif contender is None:
                    raise ValueError("prepare comes first")
                elif asked["do"] == "servers":
                    _answer(answers, {"pids": contender.peer.server_pids()})
                else:
                    _answer(answers, contender.round(Accelerator(asked["step_seconds"])).encode())
            except CannotRun as error:
                _answer(answers, {"error": str(error)})
            except Exception as error:  # noqa: BLE001 - whatever a peer meets is the reason that is listed
                traceback.print_exc()
                _answer(answers, {"error": f"{type(error).__name__}: {error}"})
    finally:
        if contender is not None:
            contender.peer.close()


def _lines(commands: int) -> Iterator[bytes]:
    """Yield the commands. Once they end, a peer that hangs is killed after a while, with its servers."""
    coming: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        heard = b""
        while chunk := os.read(commands, 1 << 16):
            *lines, heard = (heard + chunk).split(b"\n")
            for line in lines:
                coming.put(line)
        coming.put(b"")
        time.sleep(END_SECONDS_MAX)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    while line := coming.get():
        yield line


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
