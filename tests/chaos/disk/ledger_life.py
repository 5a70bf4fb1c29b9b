"""A training run that records its order and takes checkpoints, on the folder of its ledger."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Final, Literal

import pytest

from quiver.substitution import permutation
from quiver_client import BatchSampler, Dataset
from tests.chaos.disk.lives import Say
from tests.support.residency import scripted

EPOCHS: Final = 2
Before = Literal["nothing", "an earlier run", "a killed run"]
Order = dict[int, list[int]]  # the samples of each epoch, in the order in which they were consumed


class LedgerLife:
    """Two epochs of one rank. Which samples are resident differs in each life, so only the ledger knows the order.

    ``before``: what the folder holds already: nothing, the ledger of an earlier run that is not continued, or that of a
    run that was killed some batches after its last checkpoint.
    """

    deterministic = True

    def __init__(
        self, dataset: Dataset, before: Before = "nothing", *, rank: int = 0, world_size: int = 1, batch_size: int = 8
    ) -> None:
        self.name = f"ledger after {before}, rank {rank} of {world_size}, batches of {batch_size}"
        self._dataset = dataset
        self._before = before
        self._settings: dict[str, Any] = {"rank": rank, "world_size": world_size}
        self._batch_size = batch_size
        self._every = 1 + batch_size % 3  # batches between two checkpoints

    def prepare(self, root: Path) -> list[str]:
        root.mkdir()
        said: list[str] = []
        if self._before == "an earlier run":
            self.run(root, ["an earlier run"] * 50, said.append)
            return []
        if self._before == "a killed run":
            with contextlib.suppress(_Killed):
                self.run(root, ["a killed run"] * 70, _until_checkpoint(5, said))
            second = [at for at, line in enumerate(said) if line.startswith("checkpoint")][1]
            said = said[: second + 1]  # the user resumes from this one; the ledger is ahead of it
        return said

    def _sampler(self, seed: int, **more: Any) -> BatchSampler:
        scripted(pytest.MonkeyPatch(), seed)
        return BatchSampler(self._dataset, self._batch_size, **self._settings, **more)

    def run(self, root: Path, said: list[str], say: Say) -> None:
        sampler = self._sampler(len(said) + 1, ledger=str(root / "run.ledger"))
        if state := _last_state(said):
            sampler.load_state_dict(state)
        say("began")
        consumed = 0
        while sampler.epoch < EPOCHS:
            for rows in sampler:
                say(f"batch {sampler.epoch} {json.dumps(rows)}")
                consumed += 1
                if consumed % self._every == 0:
                    say(f"checkpoint {_encoded(sampler.state_dict())}")
            say(f"checkpoint {_encoded(sampler.state_dict())}")
        sampler.close()
        say("ended")

    recover = run

    def check(self, root: Path, said: list[str], *, power_cut: bool) -> None:
        told = list(said)
        try:
            self.run(root, told, told.append)
        except ValueError as error:
            if not power_cut or "ledger=" not in str(error) or "remove this one" not in str(error):
                raise  # of a process that was killed every ledger is continued
            for path in root.glob("run.ledger*"):
                path.unlink()
            self.run(root, told, told.append)
        order = _counted(told)
        for epoch in range(EPOCHS):
            share = self._share_of(epoch)
            assert Counter(order[epoch]) == Counter(share), f"epoch {epoch} is not exact"
        # A power cut may leave both names of a rename; the next ledger is written over the other one.
        assert power_cut or len(list(root.iterdir())) == 1, "a leftover"
        for epoch in range(EPOCHS):
            self._check_replay(root, epoch, order[epoch], power_cut=power_cut)

    def _check_replay(self, root: Path, epoch: int, consumed: list[int], *, power_cut: bool) -> None:
        """A replay has the order that was consumed. After a power cut it may refuse, or say how much of it is known."""
        try:
            replayed, said = self._replayed(root, epoch)
        except ValueError as error:
            if not power_cut or "replay" not in str(error):
                raise
            return
        known = re.search(rf"of epoch {epoch} the ledger has (\d+) of", said)
        if known is None:
            assert replayed == consumed, "a replay of another order than was consumed"
        else:
            assert power_cut, said
            assert replayed[: int(known[1])] == consumed[: int(known[1])]
            assert Counter(replayed) == Counter(consumed)

    def _share_of(self, epoch: int) -> list[int]:
        rank, world_size = self._settings["rank"], self._settings["world_size"]
        return permutation(len(self._dataset), 0, epoch)[rank::world_size].tolist()  # type: ignore[no-any-return]

    def _replayed(self, root: Path, epoch: int) -> tuple[list[int], str]:
        """Return the samples of an epoch in the order of the replay, and what was logged meanwhile."""
        log = io.StringIO()
        handler = logging.StreamHandler(log)
        logging.getLogger("quiver_client").addHandler(handler)
        try:
            sampler = self._sampler(99, replay=str(root / "run.ledger"))
            sampler.set_epoch(epoch)
            rows = [row for batch in sampler for row in batch]
            sampler.close()
        finally:
            logging.getLogger("quiver_client").removeHandler(handler)
        return rows, log.getvalue()


class _Killed(Exception):
    pass


def _until_checkpoint(count: int, said: list[str]) -> Say:
    def say(text: str) -> None:
        said.append(text)
        if sum(line.startswith("checkpoint") for line in said) == count:
            raise _Killed

    return say


def _encoded(state: dict[str, Any]) -> str:
    return json.dumps({name: {"hex": it.hex()} if isinstance(it, bytes) else it for name, it in state.items()})


def _last_state(said: list[str]) -> dict[str, Any] | None:
    for line in reversed(said):
        kind, _, text = line.partition(" ")
        if kind == "checkpoint":
            state = json.loads(text)
            return {name: bytes.fromhex(it["hex"]) if isinstance(it, dict) else it for name, it in state.items()}
    return None


def _counted(said: list[str]) -> Order:
    """Return what counts: of a life that was crashed, what it consumed up to its last checkpoint."""
    order: Order = defaultdict(list)
    since: list[tuple[int, list[int]]] = []
    for line in said:
        kind, _, text = line.partition(" ")
        match kind:
            case "began":
                since = []
            case "batch":
                epoch, _, rows = text.partition(" ")
                since.append((int(epoch), json.loads(rows)))
            case "checkpoint":
                for number, consumed in since:
                    order[number] += consumed
                since = []
    return order
