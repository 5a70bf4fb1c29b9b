"""Runs in which jobs or daemons come and go: trials, a sweep, a drain, a move to another rack, a plan.

Each returns what was asked and measured, and what it came from. Sizes do not follow ``--pace``: the times are part of
the question.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final

from bench.allocation.cases import MB, Case, Job, Source
from bench.allocation.fleet import Fleet, fleet, policy_flags
from bench.allocation.jobs import Rank, Running, end_all
from bench.allocation.sources import Indexed, Origin, overhead_of, prepare
from bench.allocation.steady import measured
from bench.servers import etcd

WAIT_SECONDS_MAX: Final = 240.0
POLL_SECONDS: Final = 0.2


@dataclass(frozen=True)
class Stage:
    """Where a story takes place."""

    origin: Origin
    folder: Path
    quick: bool = False

    def at(self, name: str) -> Path:
        """Return an empty folder of that name."""
        where = self.folder / f"{name}-{time.monotonic_ns()}"
        where.mkdir()
        return where

    def size(self, megabytes: int) -> int:
        return MB if self.quick else megabytes * MB

    def seconds(self, seconds: float) -> float:
        return 2.0 if self.quick else seconds


class Cast:
    """The running ranks of a story; the block ends all that still run."""

    def __init__(self, where: Path, daemons: Fleet, indexed: Mapping[str, Indexed]) -> None:
        self._where, self._daemons, self._indexed = where, daemons, indexed
        self._running: list[Running] = []

    def __enter__(self) -> Cast:
        return self

    def __exit__(self, *_: object) -> None:
        end_all(self._running)

    def start(self, job: Job, **more: Any) -> Running:
        """Start a job of one rank."""
        log = self._where / f"{job.name}-{len(self._running)}.log"
        it = Running(Rank(job, 0, str(self._indexed[job.source].manifest), self._daemons.cache, log, **more))
        self._running.append(it)
        return it


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition. Raises ``SystemExit`` if it does not come true."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {WAIT_SECONDS_MAX:.0f} s")
        time.sleep(POLL_SECONDS)


def samples_of(it: Running) -> int:
    return int(next((line["samples"] for line in reversed(it.lines()) if "samples" in line), 0))


def epochs_of(it: Running) -> list[float]:
    return [line["seconds"] for line in it.lines() if "epoch" in line]


def quiver(*arguments: str) -> dict[str, Any]:
    """Run the command ``quiver``; return the JSON that it prints."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("quiver")), *arguments, "--json"],
        capture_output=True, text=True, check=False, timeout=WAIT_SECONDS_MAX,
    )  # fmt: skip
    try:
        told: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        raise SystemExit(f"quiver {' '.join(arguments)}: {done.stderr[-1000:]}") from error
    return told


# -- many short trials beside one long job ----------------------------------------------------------------------------


TRIALS: Final = 4
TRIAL_EVERY: Final = 14.0
LONG: Final = Job("long", "long", 300, tenant="long")


def trials(stage: Stage, policy: str, *flags: str) -> dict[str, Any]:
    """Many short trials, each on a dataset of its own, beside a long job that could use the whole origin."""
    count = 2 if stage.quick else TRIALS
    names = [f"trial-{at}" for at in range(count)]
    sources = (Source("long", stage.size(100), 32_000), *(Source(it, stage.size(10), 24_000) for it in names))
    jobs = (LONG, *(Job(it, it, 200, tenant=it) for it in names))
    case = Case("las", "las", sources, jobs, cached=0.2)
    indexed = prepare(sources, stage.folder, stage.origin)
    # What the long job needs if it has all of the cache: who comes first is served first, and little is left.
    rate = case.need(LONG) * (1 - case.capacity_bytes / sources[0].size_bytes)
    stage.origin.limit(rate * overhead_of(indexed))
    where, load = stage.at("las"), os.getloadavg()[0]
    with (
        fleet(where, stage.origin, indexed, case.capacity_bytes, *flags) as daemons,
        Cast(where, daemons, indexed) as cast,
    ):
        long = cast.start(LONG)
        time.sleep(stage.seconds(35))
        alone = time.monotonic() - stage.seconds(20), time.monotonic()
        began, running = time.monotonic(), []
        for at, job in enumerate(jobs[1:]):
            time.sleep(max(began + at * stage.seconds(TRIAL_EVERY) - time.monotonic(), 0))
            running.append(cast.start(job, epochs=1))
        time.sleep(stage.seconds(TRIAL_EVERY))
        beside = began, time.monotonic()
        until(lambda: all(epochs_of(it) for it in running), "the trials' first epochs")
        lines = [long.lines()]
        firsts = [epochs_of(it)[0] for it in running]
    before, during = (measured(lines, window, 32_000) for window in (alone, beside))
    return {
        "policy": policy,
        "first_epochs": firsts,
        "first_epoch_mean": mean(firsts),
        "first_epoch_at_full_speed": sources[1].size_bytes / case.need(jobs[1]),
        "long_alone": before.bytes_per_second,
        "long_beside": during.bytes_per_second,
        "long_loss": 1 - during.bytes_per_second / before.bytes_per_second if before.bytes_per_second else 0.0,
        "origin": rate,
        "load_average": load,
    }


def las(stage: Stage) -> dict[str, Any]:
    """Trials under ``las``, beside first come, first served: max-min with weights that fall with every arrival."""
    weights = {"long": 1000.0} | {f"trial-{at}": 0.3**at for at in range(TRIALS)}  # the most, and ever less
    told = {
        "las": trials(stage, "las", *policy_flags("las")),
        "first come": trials(stage, "first come", *policy_flags("max-min"), *weight_flags(stage, weights)),
    }
    ratio = told["las"]["first_epoch_mean"] / told["first come"]["first_epoch_mean"]
    loss = 1 - told["las"]["long_beside"] / told["first come"]["long_beside"]
    return {
        "case": "las",
        "rows": [
            asked("mean first epoch of a trial ÷ first come, first served", "≤ 0.5", ratio, met=ratio <= 0.5),
            asked("what the long job loses", "≤ 15 %", loss, met=loss <= 0.15),
        ],
        "runs": told,
    }


def weight_flags(stage: Stage, weights: Mapping[str, float]) -> tuple[str, ...]:
    """Return the daemon's flags for weights of tenants."""
    path = stage.folder / "tenants.toml"
    path.write_text("".join(f'[tenants."{name}"]\nweight = {weight}\n' for name, weight in weights.items()))
    return ("--config", str(path))


# -- a sweep ----------------------------------------------------------------------------------------------------------


def sweep(stage: Stage, policy: str = "max-min") -> dict[str, Any]:
    """Twenty trials of a group, of which ten are killed in the middle of an epoch, beside another job."""
    count = 4 if stage.quick else 20
    sources = Source("swept", stage.size(100), 40_000), Source("other", stage.size(100), 24_000)
    sweeping = tuple(Job(f"trial-{at}", "swept", 25, group="sweep") for at in range(count))
    neighbour = Job("neighbour", "other", 100)
    case = Case("sweep", "sweep", sources, (*sweeping, neighbour), cached=0.2, origin=1.1)
    indexed = prepare(sources, stage.folder, stage.origin)
    stage.origin.limit(case.origin_rate * overhead_of(indexed))
    where, load = stage.at("sweep"), os.getloadavg()[0]
    swept = indexed["swept"]
    with (
        fleet(where, stage.origin, indexed, case.capacity_bytes, *policy_flags(policy)) as daemons,
        Cast(where, daemons, indexed) as cast,
    ):
        before = stage.origin.sent().get(swept.file, 0)
        running = [cast.start(job) for job in sweeping]
        other = cast.start(neighbour)
        half = swept.samples / 2
        until(lambda: mean(map(samples_of, running)) >= half, "half an epoch of the sweep")
        killed_at = time.monotonic()
        for it in running[: count // 2]:
            it.kill()
        left = running[count // 2 :]
        until(lambda: all(epochs_of(it) for it in left), "the end of the sweep's first epoch")
        ended = time.monotonic()
        read = (stage.origin.sent()[swept.file] - before) / swept.overhead / swept.total_bytes
        lines, trial_lines = [other.lines()], [it.lines() for it in left]
    begun = lines[0][0]["t"]
    windows = {"before": (begun + (killed_at - begun) / 3, killed_at), "after": (killed_at, ended)}
    rates = {name: measured(lines, window, 24_000) for name, window in windows.items()}
    trial = measured(trial_lines, windows["after"], 40_000)
    kept = rates["after"].bytes_per_second / rates["before"].bytes_per_second if not stage.quick else 1.0
    return {
        "case": "sweep",
        "policy": policy,
        "rows": [
            asked("origin bytes of the sweep's first epoch ÷ dataset", "≤ 1.1", read, met=read <= 1.1),
            asked("the neighbour's rate after ÷ before ten were killed", "≥ 0.9", kept, met=kept >= 0.9),
        ],
        "neighbour": {name: vars(it) for name, it in rates.items()} | {"need": case.need(neighbour)},
        "trials_idle": trial.idle,
        "load_average": load,
    }


# -- a drain ----------------------------------------------------------------------------------------------------------


def drain(stage: Stage) -> dict[str, Any]:
    """One of three daemons drains in the middle of an epoch; beside it, one that is killed."""
    told = {how: _drained(stage, how) for how in ("drained", "killed")}
    share = told["drained"]["read_again"] / told["drained"]["held"]
    return {
        "case": "drain",
        "rows": [asked("bytes read again ÷ what the drained daemon held", "≤ 2 %", share, met=share <= 0.02)],
        "killed": told["killed"]["read_again"] / told["killed"]["held"],
        "runs": told,
    }


def _drained(stage: Stage, how: str) -> dict[str, Any]:
    source = Source("drained", stage.size(100), 24_000)
    indexed = prepare((source,), stage.folder, stage.origin)
    it, job = indexed["drained"], Job("reader", "drained", 200)
    stage.origin.limit(0)
    where = stage.at("drain")
    with ExitStack() as stack:
        ring = stack.enter_context(etcd(where))
        # Two daemons have room for all: what is read again was lost, and not left out for want of room.
        daemons = stack.enter_context(fleet(where, stage.origin, indexed, 2.0 * it.total_bytes, ring=ring))
        cast = stack.enter_context(Cast(where, daemons, indexed))
        reader = cast.start(job)
        until(lambda: len(epochs_of(reader)) >= 1 and samples_of(reader) >= 1.3 * it.samples, "the second epoch")
        held, sent = daemons.resident_bytes()[1], stage.origin.sent()[it.file]
        began, status = time.monotonic(), dict[str, Any]()
        if how == "drained":
            node = next(
                one["id"] for one in quiver("status", "--cache", daemons.cache)["members"]
                if one["url"] == daemons.urls[1]
            )  # fmt: skip
            status = quiver("drain", node, "--cache", daemons.cache, "--deadline", "30s")
            daemons.servers[1].end()
        else:
            os.kill(daemons.servers[1].pid, 9)
        seconds, done = time.monotonic() - began, len(epochs_of(reader))
        until(lambda: len(epochs_of(reader)) >= done + 2, "two more epochs")
        again = (stage.origin.sent()[it.file] - sent) / it.overhead
        lines = reader.lines()
    window = began, began + max(seconds, 5.0)
    return {
        "held": held, "read_again": again, "seconds": seconds, "status": status,
        "idle_meanwhile": measured([lines], window, 24_000).idle,
    }  # fmt: skip


# -- a move to another rack -------------------------------------------------------------------------------------------


def migrate(stage: Stage) -> dict[str, Any]:
    """A job stops in the middle of an epoch; another rack is warmed by its state, and it resumes there."""
    source = Source("moved", stage.size(100), 24_000)
    indexed = prepare((source,), stage.folder, stage.origin)
    it, job = indexed["moved"], Job("moved", "moved", 200)
    need = 200 * 24_000
    state, where = stage.folder / "state.pt", stage.at("migrate")
    stage.origin.limit(1.2 * need * it.overhead)
    with fleet(where, stage.origin, indexed, 0.2 * it.total_bytes) as first, Cast(where, first, indexed) as cast:
        saved = cast.start(job, save=state, save_after=it.samples // 2)
        until(lambda: not saved.is_alive(), "half an epoch")
        left = it.samples - samples_of(saved)
    where = stage.at("migrate")
    with fleet(where, stage.origin, indexed, 1.2 * it.total_bytes) as second, Cast(where, second, indexed) as cast:
        sent, began = stage.origin.sent()[it.file], time.monotonic()
        warmed = quiver("warm", str(it.manifest), "--cache", second.cache, "--state", str(state))
        warm_seconds, filled = time.monotonic() - began, stage.origin.sent()[it.file] - sent
        resumed = cast.start(job, state=state, epochs=1)
        until(lambda: bool(epochs_of(resumed)), "the end of the epoch")
        read = (stage.origin.sent()[it.file] - sent) / it.overhead
        first_batch = next(line["first_batch"] for line in resumed.lines() if "first_batch" in line)
        rest = samples_of(resumed)
    share = read / (left * 24_000)
    return {
        "case": "migrate",
        "rows": [
            asked("origin bytes ÷ what was left", "≤ 1.05", share, met=share <= 1.05),
            asked("first batch after resuming, seconds", "< 1", first_batch, met=first_batch < 1),
        ],
        "left_samples": left, "resumed_samples": rest, "warm_seconds": warm_seconds,
        "warmed_bytes": filled / it.overhead, "warmed": warmed,
    }  # fmt: skip


# -- the lives of two jobs, as `quiver plan` has them ------------------------------------------------------------------


def plan(stage: Stage) -> dict[str, Any]:
    """Two jobs on two datasets read three epochs each, the second from some seconds later on: planned, and run."""
    sources = (Source("first", stage.size(100), 36_000), Source("second", stage.size(60), 24_000))
    jobs = {Job("x", "first", 300): 0.0, Job("y", "second", 200): stage.seconds(15)}
    capacity, origin_rate, epochs = 0.4 * sum(it.size_bytes for it in sources), 8e6, 3
    where = stage.at("plan")
    text = f'[[racks]]\nname = "r"\nssd_per_node = {capacity:.0f}\norigins = {{ o = {origin_rate:.0f} }}\n'
    for (job, start), source in zip(jobs.items(), sources, strict=True):
        text += f'[[jobs]]\nname = "{job.name}"\ndataset = "{source.name}"\nsize = {source.size_bytes}\norigin = "o"\n'
        text += f"rate = {job.rate * source.sample_bytes:.0f}\nepochs = {epochs}\nstart = {start:.0f}\n"
    (where / "fleet.toml").write_text(text)
    told = quiver("plan", str(where / "fleet.toml"), "--policy", "max-min")["policies"]["max-min"]
    indexed = prepare(sources, stage.folder, stage.origin)
    overhead = overhead_of(indexed)
    stage.origin.limit(origin_rate * overhead)
    sent = stage.origin.sent()
    with fleet(where, stage.origin, indexed, capacity * overhead) as daemons, Cast(where, daemons, indexed) as cast:
        running, began = {}, time.monotonic()
        for job, start in jobs.items():
            until(lambda start=start: time.monotonic() - began >= start, "the start of a job")  # type: ignore[misc]
            running[job.name] = cast.start(job, epochs=epochs)
        until(lambda: all(len(epochs_of(it)) == epochs for it in running.values()), "the end of both")
        after = stage.origin.sent()
        lives = {name: (sum(epochs_of(it)), it.lines()[-1].get("idle", 0.0)) for name, it in running.items()}
    rows, each = [], {}
    for job in jobs:
        planned = next(it for it in told["by_job"] if it["name"] == job.name)
        it = indexed[job.source]
        seconds, idle = lives[job.name]
        read = (after[it.file] - sent.get(it.file, 0)) / it.overhead
        lasts = planned["end_seconds"] - planned["start_seconds"]
        for what, ratio in (("time", seconds / lasts), ("origin bytes", read / planned["origin_bytes"])):
            rows.append(asked(f"{job.name}: {what} ÷ planned", "0.9–1.1", ratio, met=0.9 <= ratio <= 1.1))
        each[job.name] = {
            "seconds": seconds, "planned_seconds": lasts, "waiting": idle / seconds,
            "planned_waiting": planned["waiting"], "origin_bytes": read, "planned_bytes": planned["origin_bytes"],
        }  # fmt: skip
    return {"case": "plan", "rows": rows, "jobs": each, "load_average": os.getloadavg()[0]}


def asked(what: str, reach: str, value: float, *, met: bool) -> dict[str, Any]:
    return {"what": what, "asked": reach, "measured": value, "met": bool(met)}


STORIES: Final[dict[str, Callable[[Stage], dict[str, Any]]]] = {
    "las": las, "sweep": sweep, "drain": drain, "migrate": migrate, "plan": plan,
}  # fmt: skip
