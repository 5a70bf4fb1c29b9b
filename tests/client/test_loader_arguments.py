"""Wrong arguments of the loader: a ``ValueError`` that names the argument, when the loader is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quiver_client import BatchSampler, DataLoader, Dataset
from quiver_client.loader.arguments import job_of, rank_and_world_size
from tests.support.data import Files, make_files, random_files

Loader = Callable[..., DataLoader]


@pytest.fixture
def loader(files: Files, tmp_path: Path, dataset: Callable[..., Dataset]) -> Loader:
    ds = dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB", fields=["__key__"])
    return lambda *args, **named: DataLoader(ds, *args, **named)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("batch_size", {"batch_size": 0}),
        ("batch_size", {"batch_size": -1}),
        ("batch_size", {"batch_size": True}),
        ("batch_size", {"batch_size": None}),
        ("batch_size", {"batch_size": 1.5}),
        ("batch_size", {"batch_size": "8"}),
        ("lookahead", {"lookahead": 0}),
        ("lookahead", {"lookahead": -1}),
        ("lookahead", {"lookahead": "x"}),
        ("lookahead", {"lookahead": None}),
        ("lookahead", {"lookahead": 1.5}),
        ("lookahead", {"lookahead": True}),
        ("sampler", {"sampler": [1, 2], "shuffle": True}),
        ("batch_sampler", {"batch_sampler": [[1, 2]]}),
        ("rank", {"rank": 2, "world_size": 2}),
        ("rank", {"rank": -1, "world_size": 2}),
        ("rank", {"rank": True, "world_size": 2}),
        ("rank", {"world_size": 2}),
        ("world_size", {"rank": 0}),
        ("world_size", {"rank": 0, "world_size": 0}),
        ("seed", {"seed": -1}),
        ("seed", {"seed": 0.5}),
        ("seed", {"seed": None}),
        ("job", {"job": ""}),
        ("job", {"job": 7}),
        ("job", {"job": "a\nb"}),
        ("job", {"job": "x" * 129}),
        ("group", {"group": "\u202e"}),
        ("group", {"group": 7}),
        ("tenant", {"tenant": "x" * 129}),
        ("tenant", {"tenant": " a"}),
        ("prefetch_factor", {"prefetch_factor": 0}),
        ("prefetch_factor", {"prefetch_factor": -1, "num_workers": 2}),
        ("prefetch_factor", {"prefetch_factor": True}),
        ("prefetch_factor", {"prefetch_factor": 2.0}),
        ("ledger", {"ledger": "run.ledger", "in_order": False}),
        ("replay", {"replay": "run.ledger", "in_order": False}),
        ("ledger", {"ledger": "run.ledger", "sampler": [1, 2]}),
        ("replay", {"replay": "run.ledger", "sampler": [1, 2]}),
        ("replay", {"replay": "/nowhere/run.ledger"}),
        ("ledger", {"ledger": ""}),
        ("ledger", {"ledger": 3}),
    ],
)
def test_a_wrong_argument_is_refused_by_name(loader: Loader, name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        loader(**arguments)


def test_what_torch_refuses_is_refused(loader: Loader) -> None:
    with pytest.raises(ValueError, match="num_workers"):
        loader(num_workers=-1)
    with pytest.raises(ValueError, match="persistent_workers"):
        loader(persistent_workers=True)
    with pytest.raises(ValueError, match="timeout"):
        loader(timeout=-1)
    with pytest.raises(TypeError, match="no_such_argument"):
        loader(no_such_argument=1)


@pytest.mark.parametrize("foreign", [[1, 2, 3], None, torch.utils.data.TensorDataset(torch.zeros(3))])
def test_a_foreign_dataset_is_refused(foreign: Any) -> None:
    with pytest.raises(ValueError, match=r"^dataset: .*Dataset"):
        DataLoader(foreign)
    with pytest.raises(ValueError, match=r"^dataset: .*Dataset"):
        BatchSampler(foreign)


def test_an_epoch_is_a_number_from_zero(loader: Loader) -> None:
    for epoch in (-1, 1.0, "1", True):
        with pytest.raises(ValueError, match=r"^epoch="):
            loader().set_epoch(epoch)  # type: ignore[arg-type]


def test_a_ledger_that_cannot_be_written_is_refused_by_name(loader: Loader, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^ledger=.*cannot be written"):
        next(iter(loader(ledger=str(tmp_path / "nowhere" / "run.ledger"))))


@pytest.mark.fault("E6")
def test_a_ledger_of_another_run_is_refused_by_name(
    loader: Loader, tmp_path: Path, dataset: Callable[..., Dataset]
) -> None:
    path = str(tmp_path / "run.ledger")
    run = loader(8, shuffle=True, ledger=path)
    assert len(list(run)) == len(run)
    run.close()
    for other in ({"batch_size": 9}, {"seed": 1}, {"shuffle": False}, {"drop_last": True}):
        with pytest.raises(ValueError, match=r"^replay"):
            loader(**{"batch_size": 8, "shuffle": True, "replay": path, **other})
    foreign = make_files(tmp_path, random_files(150, seed=9, high=2_000), name="foreign")
    with pytest.raises(ValueError, match=r"^replay"):
        DataLoader(dataset(foreign.manifest, f"file://{tmp_path}/cache"), 8, shuffle=True, replay=path)
    with pytest.raises(ValueError, match=r"^ledger=.*of another seed"):
        loader(8, shuffle=True, ledger=path, seed=1)
    Path(path).write_bytes(b"something else")
    for name in ("replay", "ledger"):
        with pytest.raises(ValueError, match=rf"^{name}"):
            loader(8, shuffle=True, **{name: path})
    assert Path(path).read_bytes() == b"something else"


def test_integers_of_numpy_and_torch_are_integers(loader: Loader) -> None:
    made = loader(np.int64(8), lookahead=np.int32(64), seed=np.uint8(3), rank=torch.tensor(0), world_size=np.int64(2))
    assert (made.order.deal.batch_size, made.order.deal.seed, made.order.deal.world_size) == (8, 3, 2)
    assert type(made.state_dict()["seed"]) is int


def test_rank_and_world_size_come_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert rank_and_world_size(None, None) == (0, 1)
    monkeypatch.setenv("RANK", "2")
    assert rank_and_world_size(None, None) == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert rank_and_world_size(None, None) == (2, 4)
    assert rank_and_world_size(0, 1) == (0, 1)
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(ValueError, match=r"^rank=4"):
        rank_and_world_size(None, None)


def test_a_job_has_the_given_name_or_a_unique_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # as torchrun calls every job that was not named
    assert job_of(None) != job_of(None)
    assert job_of("mine") == "mine"


def test_rank_and_world_size_are_checked_beside_a_sampler(loader: Loader) -> None:
    with pytest.raises(ValueError, match=r"^rank=5"):
        loader(sampler=[0, 1], rank=5, world_size=2)


def test_a_sampler_that_gives_indices_out_of_range_is_refused_by_name(loader: Loader) -> None:
    for wrong in ([0, 150], [-1, 3]):
        with pytest.raises(ValueError, match=r"^sampler: .*150 samples"):
            next(iter(loader(sampler=wrong)))
