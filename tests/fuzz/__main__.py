"""Fuzzes the parsers, and says how many malformed messages were tried and what came of it.

    python -m tests.fuzz --messages 1000000            that many in all, of every target, two at a time
    python -m tests.fuzz --seconds 60 manifest tar     so long on each of these
    python -m tests.fuzz --guided --seconds 3600       so long in all, by atheris where it is installed
    python -m tests.fuzz --replay FILE manifest        one message, for example one that was found

A finding is written to ``--out`` under the name of its target. Put it into ``tests/fuzz/corpus/<target>/`` with the
change that mends it: every run begins with those.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.fuzz import guided, network
from tests.fuzz.run import Outcome, all_targets, run_apart
from tests.fuzz.target import Target


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("targets", nargs="*", help="which targets; all by default")
    parser.add_argument("--messages", type=int, help="how many in all, shared by the targets' cost")
    parser.add_argument("--seconds", type=float, help="for each target; with --guided, for all of them together")
    parser.add_argument("--guided", action="store_true", help="guided by coverage, by atheris")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--replay", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    given = parsed()
    every = list(all_targets())
    targets = [target for target in every if not given.targets or target.name in given.targets]
    unknown = set(given.targets) - {target.name for target in every} - {network.NAME}
    if unknown:
        print(f"no such target: {', '.join(sorted(unknown))}; there are: {', '.join(it.name for it in every)}")
        return 2
    if given.replay is not None:
        print("accepted" if targets[0].fuzz_one(given.replay.read_bytes()) else "refused")
        return 0
    is_guided = given.guided and guided.is_installed()
    if given.guided and not is_guided:
        print("atheris is not installed here (pip install 'quiver-cache[fuzz]'): fuzzing by mutation instead")
    total = sum(target.share for target in targets)
    each_seconds = (given.seconds or 60.0) * (given.jobs / max(len(targets), 1) if given.guided else 1.0)

    def run(target: Target) -> Outcome:
        if given.messages is not None:
            return run_apart(target.name, given.seed, messages=max(given.messages * target.share // total, 1))
        if is_guided:
            return guided.run(target.name, each_seconds, given.out)
        return run_apart(target.name, given.seed, seconds=each_seconds)

    work = [partial(run, target) for target in sorted(targets, key=lambda target: target.share)]
    if not given.targets or network.NAME in given.targets:
        work.insert(0, partial(network.run, given.seed, min(each_seconds, 60.0)))
    with ThreadPoolExecutor(given.jobs) as pool:
        outcomes = []
        for outcome in pool.map(lambda call: call(), work):
            print(outcome.line, flush=True)
            outcomes.append(outcome)
    return told(outcomes, given.out)


def told(outcomes: list[Outcome], out: Path) -> int:
    """Print the sums; write and print what was found."""
    found = [(outcome.target, why, data) for outcome in outcomes for why, data in outcome.findings]
    kinds = [why.split(":", 1)[0] for _, why, _ in found]
    print(
        f"{sum(outcome.messages for outcome in outcomes):,} malformed messages in {len(outcomes)} targets;"
        f" crashes: {kinds.count('crash') + kinds.count('death')}, hangs: {kinds.count('hang') + kinds.count('slow')},"
        f" over their memory: {kinds.count('memory')}, others (leaks, desync): "
        f"{sum(kind not in ('crash', 'death', 'hang', 'slow', 'memory') for kind in kinds)}"
    )
    for target, why, data in found:
        path = out / f"{target}-{hashlib.sha256(data.encode()).hexdigest()[:12]}"
        out.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes.fromhex(data))
        print(f"\n{target}: {why}\n  python -m tests.fuzz --replay {path} {target}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
