"""Runs targets: counts what was tried, and finds crashes, hangs, memory past the bound, and leaks.

``try_messages`` is the run itself. ``run_apart`` has a process of its own do it, so that a crash of native code, an
endless loop and a runaway allocation cost that process: the message that it worked on is in memory that both share.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from tests.fuzz.mutate import Mutator
from tests.fuzz.target import INPUT_BYTES_MAX, MIB, Target

BATCH: Final = 64  # messages between two looks at the memory
HANG_SECONDS: Final = 30.0  # on a message, by the wall clock: the machine may be loaded
LEAK_BYTES: Final = 48 * MIB  # that a process may have grown by since its first hundred batches
ADDRESS_SPACE_BYTES: Final = 2 << 30  # that a process may map more than it had: past it, memory is refused
_WARM_BATCHES: Final = 20


class Outcome(msgspec.Struct):
    """What came of a run. ``findings``: what was wrong, and the message as hexadecimal digits."""

    target: str
    messages: int = 0
    accepted: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0  # that a batch of messages took, beyond what the process had
    findings: list[tuple[str, str]] = []

    @property
    def line(self) -> str:
        return (
            f"{self.target:16} {self.messages:9,} messages  {self.accepted:8,} accepted  {self.seconds:6.1f} s"
            f"  {self.peak_bytes / MIB:6.1f} MiB  {len(self.findings)} findings"
        )


@dataclass(slots=True)
class Slot:
    """The message that is being tried, in memory that a parent process may read."""

    memory: mmap.mmap | None = None
    count: int = field(default=0)

    def put(self, data: bytes) -> None:
        self.count += 1
        if self.memory is not None:
            self.memory[8 : 16 + len(data)] = len(data).to_bytes(8, "little") + data
            self.memory[:8] = self.count.to_bytes(8, "little")

    @staticmethod
    def read(memory: mmap.mmap) -> tuple[int, bytes]:
        """Return how many messages were begun, and the last one."""
        size = int.from_bytes(memory[8:16], "little")
        return int.from_bytes(memory[:8], "little"), memory[16 : 16 + size]


def try_messages(
    target: Target, seed: int, *, messages: int = sys.maxsize, seconds: float = float("inf"), slot: Slot | None = None
) -> Outcome:
    """Try the corpus, then mutations of it, until so many messages or seconds; stop at the first finding."""
    outcome, slot = Outcome(target.name), slot or Slot()
    corpus = target.corpus()
    mutator = Mutator(corpus, seed, INPUT_BYTES_MAX)
    target.fuzz_one(corpus[0] if corpus else b"")  # which imports what it needs
    gc.collect()
    began = time.monotonic()
    fds, waiting, warm_bytes, batches = _open_fds(), list(corpus), 0, 0
    while not outcome.findings and outcome.messages < messages and (waiting or time.monotonic() - began < seconds):
        _reset_peak()
        before = _memory("VmRSS")
        batch = [waiting.pop() if waiting else _repaired(target, mutator.next()) for _ in range(min(BATCH, messages))]
        for data in batch:
            slot.put(data)
            verdict, why = _tried(target, data)
            outcome.messages += 1
            if why:
                outcome.findings.append((why, data.hex()))
                break
            if verdict:
                outcome.accepted += 1
                mutator.accepted(data)
        took = _memory("VmHWM") - before
        outcome.peak_bytes = max(outcome.peak_bytes, took)
        if took > target.memory_bytes_max:
            outcome.findings.append(_greediest(target, batch))
        batches += 1
        if batches == _WARM_BATCHES:
            gc.collect()
            warm_bytes = _memory("VmRSS")
    gc.collect()
    if not outcome.findings and _open_fds() > fds:
        outcome.findings.append((f"{_open_fds() - fds} descriptors stay open", ""))
    if not outcome.findings and warm_bytes and _memory("VmRSS") - warm_bytes > LEAK_BYTES:
        outcome.findings.append((f"{(_memory('VmRSS') - warm_bytes) // MIB} MiB of memory stay taken", ""))
    outcome.seconds = time.monotonic() - began
    return outcome


def _repaired(target: Target, data: bytes) -> bytes:
    return target.repair(data)[:INPUT_BYTES_MAX]


def _tried(target: Target, data: bytes) -> tuple[bool, str]:
    """Return whether a message was accepted, and what was wrong."""
    began = time.thread_time()
    try:
        verdict = target.fuzz_one(data)
    except Exception:  # noqa: BLE001  whatever a parser raises beyond its own errors is what this looks for
        return False, "crash: " + traceback.format_exc(limit=-3)
    took = time.thread_time() - began
    return verdict, f"slow: {took:.1f} s" if took > target.seconds_max else ""


def _greediest(target: Target, batch: list[bytes]) -> tuple[str, str]:
    taken = []
    for data in batch:
        _reset_peak()
        before = _memory("VmRSS")
        _tried(target, data)
        taken.append((_memory("VmHWM") - before, data))
    most, data = max(taken)
    return f"memory: {most // MIB} MiB where {target.memory_bytes_max // MIB} are allowed", data.hex()


def _memory(name: str) -> int:
    with open("/proc/self/status") as file:  # noqa: PTH123  many times a second
        for line in file:
            if line.startswith(name):
                return int(line.split()[1]) << 10
    return 0


def _reset_peak() -> None:
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:  # noqa: PTH123
        file.write("5")


def _open_fds() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# -- apart ------------------------------------------------------------------------------------------------------------


def run_apart(target: str, seed: int, *, messages: int = sys.maxsize, seconds: float = 1e9) -> Outcome:
    """Run a target in a process of its own; its death, and a message without an end, are findings."""
    fd = os.memfd_create("quiver-fuzz")
    os.ftruncate(fd, 16 + INPUT_BYTES_MAX)
    with contextlib.closing(mmap.mmap(fd, 0)) as memory:
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz.run", target, str(seed), str(messages)]
        child = subprocess.Popen(
            [*command, str(seconds), str(fd)], pass_fds=[fd], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        os.close(fd)
        with child:
            hung = not _watched(child, memory)
            assert child.stdout is not None
            assert child.stderr is not None
            told, log = child.stdout.read(), child.stderr.read().decode(errors="replace")
        count, data = Slot.read(memory)
        if child.returncode == 0 and not hung:
            return msgspec.json.decode(told, type=Outcome)
        why = f"hang: no end after {HANG_SECONDS:.0f} s" if hung else f"death: {child.returncode}: {log[-1500:]}"
        return Outcome(target, count, findings=[(why, data.hex())])


def _watched(child: subprocess.Popen[bytes], memory: mmap.mmap) -> bool:
    """Wait for the process; kill it, and return False, if a message takes for ever."""
    last, since = -1, time.monotonic()
    while True:
        try:
            child.wait(0.2)
        except subprocess.TimeoutExpired:
            count, now = Slot.read(memory)[0], time.monotonic()
            if count != last:
                last, since = count, now
            elif now - since > HANG_SECONDS * (1 if count else 4):  # it starts slowly on a loaded machine
                child.kill()
                return False
        else:
            return True


def all_targets() -> Iterator[Target]:
    """Yield every target. The imports are here: each process imports what it needs once."""
    from tests.fuzz import client_targets, daemon_targets, kernel_targets

    yield from kernel_targets.TARGETS
    yield from daemon_targets.TARGETS
    yield from client_targets.TARGETS


def main() -> None:
    name, seed, messages, seconds, fd = sys.argv[1:]
    found = next(target for target in all_targets() if target.name == name)
    with contextlib.closing(mmap.mmap(int(fd), 0)) as memory:
        mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + ADDRESS_SPACE_BYTES, hard))
        outcome = try_messages(found, int(seed), messages=int(messages), seconds=float(seconds), slot=Slot(memory))
    sys.stdout.buffer.write(msgspec.json.encode(outcome))


if __name__ == "__main__":
    main()
