"""Where the time of a batch goes: the stages of one thread that makes batches, with nothing else running."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from statistics import median
from typing import Any, Final

import numpy as np
import torch

import quiver_client.dataset
from bench.data import Data
from bench.questions.base import BATCH, TOKENS_BATCH, Answer, Question, Ratio, Setting
from bench.servers import quiver_rack
from quiver_client.batch import Batch
from quiver_client.collated_dataset import CollatedDataset
from quiver_client.dataset import Dataset
from quiver_client.embedded.tier import EmbeddedTier
from quiver_client.rack.tier import RackTier

Clock = Counter[str]
PARTS: Final[tuple[tuple[str, Any, str], ...]] = (
    ("plan", quiver_client.dataset, "plan_batch"),
    ("find the maps", EmbeddedTier, "fetch"),
    ("ask and receive", RackTier, "fetch"),
    ("check", Batch, "check"),
)


@contextlib.contextmanager
def stopwatches(clock: Clock) -> Iterator[None]:
    """Add to the clock the seconds spent in each part; parts do not nest."""

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(work)
        def timing(*args: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return work(*args, **named)
            finally:
                clock[name] += time.perf_counter() - begun  # type: ignore[assignment]

        return timing

    before = [(owner, name, getattr(owner, name)) for _, owner, name in PARTS]
    for (stage, owner, name), (_, _, work) in zip(PARTS, before, strict=True):
        setattr(owner, name, timed(stage, work))
    try:
        yield
    finally:
        for owner, name, work in before:
            setattr(owner, name, work)


def stages(setting: Setting) -> Answer:
    answer = Answer()
    for kind, batch_size in (("blobs", BATCH), ("tokens", TOKENS_BATCH)):
        data = setting.data("tokens" if kind == "tokens" else "blobs")
        room = 2 * data.total_bytes + (256 << 20)
        _profile(setting, answer, data, batch_size, f"file://{setting.folder}/cache-{kind}?capacity={room}", "host")
        with quiver_rack(setting.folder / f"rack-{kind}", data.folder, room, count=3) as (urls, _):
            _profile(setting, answer, data, batch_size, ",".join(urls), "rack")
    return answer


def _profile(setting: Setting, answer: Answer, data: Data, batch_size: int, cache: str, tier: str) -> None:
    dataset = Dataset(data.manifest(), cache, copy=False)
    out = torch.empty(2 * batch_size * data.sample_bytes, dtype=torch.uint8)
    rounds: list[Clock] = []
    try:
        _pass(dataset, data, batch_size, out, Counter())
        for at in range(setting.rounds):
            setting.say(f"{tier}, {data.kind}, round {at + 1}")
            clock: Clock = Counter()
            with stopwatches(clock):
                _pass(dataset, data, batch_size, out, clock)
            rounds.append(clock)
    finally:
        dataset.close()
    batches = data.count // batch_size
    names = list(dict.fromkeys(name for clock in rounds for name in clock))
    each = {name: [1e6 * clock[name] / batches for clock in rounds] for name in names}
    label = f"{tier} tier, {batch_size} samples of {data.sample_bytes} bytes"
    answer.more[label] = each
    for name in names:
        taken = tuple(each[name])
        answer.ratios.append(Ratio(f"{label}: {name}", median(taken), unit=" µs", each=taken))


def _pass(dataset: Dataset, data: Data, batch_size: int, out: torch.Tensor, clock: Clock) -> None:
    """Read an epoch as the loader's threads do, and copy every byte into a tensor, as a training loop does."""
    source = CollatedDataset(dataset)
    field = dataset.manifest.header.blobs[0].name
    whole = 0.0
    for at in range(0, data.count - batch_size + 1, batch_size):
        begun = time.perf_counter()
        batch = source.__getitems__(data.order[at : at + batch_size].tolist())
        ended = time.perf_counter()
        whole += ended - begun
        _copy(batch[field], out.numpy())
        clock["the loop's copy"] += time.perf_counter() - ended  # type: ignore[assignment]
    known = sum(seconds for name, seconds in clock.items() if name != "the loop's copy")
    clock["collate, and the rest"] += whole - known  # type: ignore[assignment]


def _copy(samples: Any, out: np.ndarray[Any, Any]) -> None:
    if isinstance(samples, torch.Tensor):
        flat = samples.numpy().reshape(-1).view(np.uint8)
        out[: len(flat)] = flat
        return
    start = 0
    for sample in samples:
        end = start + len(sample)
        out[start:end] = np.frombuffer(sample, np.uint8)
        start = end


QUESTIONS = (Question("stages", "Where does the time of a batch go?", stages),)
