"""A run that records its order in a ledger, and a run that reads in that order again."""

from __future__ import annotations

import errno
import itertools
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiver.substitution import permutation
from quiver_client import BatchSampler, DataLoader, Dataset
from quiver_client.loader.ledger.files import LedgerWriter
from tests.client.test_loader import flat, rows_in
from tests.support.data import Files
from tests.support.residency import scripted

SAMPLES = 150
Make = Callable[..., Dataset]


@pytest.fixture
def keys(files: Files, tmp_path: Path, dataset: Make) -> Dataset:
    """The dataset with its keys only: no bytes are read."""
    return dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB", fields=["__key__"])


def test_a_replay_has_the_same_order_under_another_residency(
    keys: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "run.ledger")
    scripted(monkeypatch, 1)
    run = DataLoader(keys, 16, shuffle=True, ledger=path)
    taken = [rows_in(keys, run), rows_in(keys, run)]
    run.close()
    taken.append(rows_in(keys, run))  # closed in between, and gone on with
    run.close()
    assert taken[0] != [permutation(SAMPLES, 0, 0)[at : at + 16].tolist() for at in range(0, SAMPLES, 16)]
    scripted(monkeypatch, 2)
    for workers in (0, 2):
        again = DataLoader(keys, 16, shuffle=True, replay=path, num_workers=workers)
        assert [rows_in(keys, again) for _ in range(3)] == taken
        with pytest.raises(ValueError, match=r"^replay: .*nothing of epoch 3"):
            next(iter(again))
        again.close()


def test_a_disk_that_is_full_when_an_epoch_begins_ends_no_training(
    keys: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: LedgerWriter, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LedgerWriter, "begin", full)
    run = DataLoader(keys, 16, shuffle=True, ledger=str(tmp_path / "run.ledger"))
    for _ in range(2):
        assert sorted(flat(rows_in(keys, run))) == list(range(SAMPLES))
    run.close()
    assert caplog.text.count("is not recorded from here on") == 1


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.fault("E1")
def test_a_replay_of_a_resumed_run_has_the_batches_that_counted(
    keys: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    path = str(tmp_path / "run.ledger")
    counted: list[list[list[int]]] = []
    for rank in range(world_size):
        place: dict[str, Any] = {"rank": rank, "world_size": world_size}
        taken: list[list[int]] = []
        state = None
        for attempt in range(3):
            scripted(monkeypatch, 10 * rank + attempt)
            run = DataLoader(keys, 8, shuffle=True, ledger=path, **place)
            if state is not None:
                run.load_state_dict(state)
            batches = iter(run)
            taken += rows_in(keys, (next(batches) for _ in range(2)))
            state = run.state_dict()
            next(batches)  # of no account: the process dies after its checkpoint
            run.close()
        run = DataLoader(keys, 8, shuffle=True, ledger=path, **place)
        assert state is not None
        run.load_state_dict(state)
        taken += rows_in(keys, run)
        run.close()
        counted.append(taken)
    assert Counter(row for rank in counted for row in flat(rank)) == Counter(range(SAMPLES))
    scripted(monkeypatch, 99)
    for rank, taken in enumerate(counted):
        again = DataLoader(keys, 8, shuffle=True, replay=path, rank=rank, world_size=world_size)
        assert rows_in(keys, again) == taken
        again.close()


def test_a_batch_that_raised_comes_last_in_the_replay(
    files: Files, dataset: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "run.ledger")
    reads: list[int] = []

    def once(sample: dict[str, Any]) -> dict[str, Any]:
        reads.append(1)
        if len(reads) == 20:
            raise OSError("a bad moment")
        return sample

    ds = dataset(files.manifest, f"file://{tmp_path}/c?capacity=1GiB", fields=["__key__"], transform=once)
    scripted(monkeypatch, 3)
    run = DataLoader(ds, 16, shuffle=True, ledger=path, prefetch_factor=1)
    batches, taken = iter(run), []
    while True:
        try:
            taken += rows_in(ds, [next(batches)])
        except OSError:
            continue
        except StopIteration:
            break
    run.close()
    failed = sorted(set(range(SAMPLES)) - set(flat(taken)))
    assert len(failed) == 16
    scripted(monkeypatch, 4)
    again = DataLoader(ds, 16, shuffle=True, replay=path)
    replayed = flat(rows_in(ds, again))
    again.close()
    assert replayed[: SAMPLES - 16] == flat(taken)
    assert sorted(replayed[SAMPLES - 16 :]) == failed


def test_a_replay_of_an_epoch_that_was_broken_off_ends_with_the_rest_of_it(
    keys: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "run.ledger")
    scripted(monkeypatch, 1)
    run = DataLoader(keys, 16, shuffle=True, ledger=path)
    taken = flat(rows_in(keys, itertools.islice(run, 3)))
    run.close()
    scripted(monkeypatch, 2)
    again = DataLoader(keys, 16, shuffle=True, replay=path)
    replayed = flat(rows_in(keys, again))
    again.close()
    assert replayed[:48] == taken
    assert sorted(replayed) == list(range(SAMPLES))
    assert "48 of 150" in caplog.text


def test_a_disk_that_refuses_the_ledger_ends_no_training(
    keys: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = DataLoader(keys, 16, shuffle=True, ledger=str(tmp_path / "run.ledger"))
    batches = iter(run)
    taken = rows_in(keys, [next(batches)])

    def full(self: LedgerWriter, *record: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LedgerWriter, "batch", full)
    monkeypatch.setattr(LedgerWriter, "flush", full)
    taken += rows_in(keys, batches)
    assert sorted(flat(taken)) == list(range(SAMPLES))
    assert run.state_dict()["epoch"] == 1
    run.close()
    assert caplog.text.count("is not recorded from here on") == 1


def test_a_ledger_that_is_open_at_a_fork_is_written_by_its_own_process_alone(
    keys: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.ledger"
    scripted(monkeypatch, 1)
    run = BatchSampler(keys, 16, ledger=str(path))
    batches = iter(run)
    taken = [next(batches) for _ in range(2)]  # recorded, and not flushed yet
    before = path.read_bytes()

    def child() -> None:
        run.state_dict()  # flushes, where the ledger is its own
        next(batches)
        run.abandon(run._passes.current)  # type: ignore[arg-type]
        run.close()
        assert len(list(run)) == len(run)  # its own pass goes on, and is not recorded
        assert sum("not this forked child" in message for message in caplog.messages) == 1
        run.close()

    in_a_fork(child)
    assert path.read_bytes() == before
    taken += batches
    run.close()
    in_a_fork(lambda: run.close() if list(run) else None)  # nor does it append to what was closed
    scripted(monkeypatch, 2)
    again = BatchSampler(keys, 16, replay=str(path))
    assert list(again) == taken
    with pytest.raises(ValueError, match="nothing of epoch 1"):
        next(iter(again))
    again.close()


def test_a_loader_that_begins_in_a_fork_records_there(keys: Dataset, tmp_path: Path) -> None:
    path = str(tmp_path / "run.ledger")
    run = BatchSampler(keys, 16, ledger=path, substitute=False)

    def child() -> None:
        list(run)
        run.close()

    in_a_fork(child)
    again = BatchSampler(keys, 16, replay=path)
    assert flat(list(again)) == permutation(SAMPLES, 0, 0).tolist()
    again.close()


def in_a_fork(work: Callable[[], object]) -> None:
    pid = os.fork()
    if not pid:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.fault("E1")
def test_a_checkpoint_is_never_ahead_of_its_ledger(keys: Dataset, tmp_path: Path) -> None:
    """A process that is killed right after a checkpoint leaves a ledger with every batch that this covers."""
    path = str(tmp_path / "ledger")
    killed = BatchSampler(keys, 10, ledger=path)
    first = list(itertools.islice(killed, 4))
    state = killed.state_dict()
    killed._recorder._stop()  # what was not flushed by then is lost
    resumed = BatchSampler(keys, 10, ledger=path)
    resumed.load_state_dict(state)
    rest = list(resumed)
    resumed.close()
    replayed = list(BatchSampler(keys, 10, replay=path))
    assert [row for batch in replayed for row in batch] == [row for batch in first + rest for row in batch]
    killed.close()
