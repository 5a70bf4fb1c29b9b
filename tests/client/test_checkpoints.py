"""Loaders' states are found wherever a trainer keeps them, and no code of a checkpoint is run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from quiver.errors import BadRequest, NotFound
from quiver_client.loader.merged_state import packed
from quiver_client.migration.checkpoint import Found, states_in
from quiver_client.migration.choice import chosen

MINE, OTHER = "ab" * 32, "cd" * 32


def state_of(dataset: str = MINE, **changes: Any) -> dict[str, Any]:
    state = {
        "version": 1,
        "dataset": dataset,
        "samples": 80,
        "seed": 0,
        "shuffle": True,
        "epoch": 3,
        "rank": 0,
        "world_size": 1,
        "batch_size": 8,
        "drop_last": False,
        "batches": 4,
        "done": b"\xff\x00" * 5,
        "own": None,
    }
    return state | changes


def mix_of(*datasets: str) -> dict[str, Any]:
    parts = {f"part {at}": {"weight": 1, "deficit": 0, "passes": [state_of(it)]} for at, it in enumerate(datasets)}
    return {**state_of("ef" * 32), "mix_seed": 0, "taken": 1, "before": 0, "left": 2, "parts": parts}


NESTED = {
    "plain": lambda state: state,
    "torch": lambda state: {"model": {"weight": torch.zeros(3, 4)}, "epoch": 3, "loader": state},
    "lightning": lambda state: {"loops": {"fit_loop": {"state_dict": {"combined_loader": [state]}}}},
    "torchdata": lambda state: {"_snapshot": {"_main_snapshot": {"_sampler_iter_state": (None, state)}}},
    "fsdp": lambda state: {"app": packed(state)},
}


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("state", [state_of(), mix_of(MINE, OTHER)], ids=["of one", "of a mixture"])
def test_a_state_is_found_in_what_torch_saves(name: str, state: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "last.ckpt"
    for zipped in (True, False):
        torch.save(NESTED[name](state), file, _use_new_zipfile_serialization=zipped)
        [found] = states_in(file)
        assert found.state == state


@pytest.mark.parametrize(
    "state", [state_of(), state_of(done=None), mix_of(MINE)], ids=["of one", "new", "of a mixture"]
)
def test_a_state_is_found_in_json_with_its_bytes(state: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    for text in (msgspec.json.encode({"a": [1, {"state": state}]}), json.dumps(state, default=list).encode()):
        for before in (b" \n", b"\xef\xbb\xbf"):  # as some editors begin a file
            file.write_bytes(before + text)
            assert [it.state for it in states_in(file)] == [state]
    assert states_in(file)[0].key == ""


def test_the_states_in_a_folder_are_found_whatever_else_is_there(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    torch.save({"momentum": torch.ones(3)}, tmp_path / "optimizer.pt")
    (tmp_path / "rng_state.pth").write_bytes(b"\x80\x04no checkpoint")
    (tmp_path / "README.md").write_text("{}")
    for number in (0, 1, 10):
        torch.save(state_of(rank=number, world_size=3), tmp_path / "inside" / f"dl_state_dict_{number}.bin")
    assert [it.state["rank"] for it in states_in(tmp_path)] == [0, 1, 10]


class Runs:
    """Pickles as code that makes a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._folder),)


def test_nothing_in_a_checkpoint_is_run(tmp_path: Path) -> None:
    file, made = tmp_path / "last.ckpt", tmp_path / "made"
    torch.save({"loader": state_of(), "model": Runs(made)}, file)
    with pytest.raises(BadRequest, match=r"could run its code.*in a file of its own"):
        states_in(file)
    with pytest.raises(NotFound, match="no loader's state is in any file"):
        states_in(tmp_path)
    assert not made.exists()


@pytest.mark.parametrize(
    ("content", "kind", "says"),
    [
        (None, NotFound, "there is no checkpoint"),
        (b'{"loader": 1}', NotFound, "no loader's state is in it"),
        (b'{"loader": ', BadRequest, "it is no JSON"),
        (b"[" * 100_000, BadRequest, "it is no JSON"),
        (b"", BadRequest, "does not load it"),
        (b"PK\3\4 and so on", BadRequest, "does not load it"),
        (b"q\0", BadRequest, "does not load it"),  # the top of an empty stack
        (b"X\x12", BadRequest, "does not load it"),  # the length of a text, cut
        (msgspec.json.encode(state_of(done="no Base64!")), BadRequest, r"last\.pt: state: 'done'"),
        (b'{"loader": %s}' % (b"9" * 5000), BadRequest, "it is no JSON"),
        (msgspec.json.encode(state_of(seed=[])), BadRequest, "'seed' is no whole number"),
        (msgspec.json.encode(state_of(rank={})), BadRequest, "'rank' is no whole number"),
        (msgspec.json.encode(mix_of(MINE) | {"parts": {"a": 1}}), BadRequest, "part 'a' of a mixture has no list"),
        (msgspec.json.encode(mix_of(MINE) | {"parts": {"a": {"passes": [1]}}}), BadRequest, "part 'a'"),
        (b'{"app": {"quiver": "QUJD"}}', NotFound, "no loader's state is in it"),
    ],
)
def test_what_is_no_checkpoint_is_refused_in_a_line(
    content: bytes | None, kind: type[Exception], says: str, tmp_path: Path
) -> None:
    file = tmp_path / "last.pt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(kind, match=says) as raised:
        states_in(file)
    assert "\n" not in str(raised.value)


def test_a_folder_that_has_to_be_unpickled_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(BadRequest, match="unpickling"):
        states_in(tmp_path)


def found(*states: dict[str, Any]) -> list[Found]:
    return [Found(Path("f.pt"), f"loops.loader {at}", state) for at, state in enumerate(states)]


def test_of_several_states_those_of_the_warmed_dataset_are_taken() -> None:
    mine, others = state_of(), [state_of(OTHER), mix_of(OTHER)]
    assert [it.state for it in chosen(found(*others, mine, dict(mine)), MINE)] == [mine]
    assert [it.state for it in chosen(found(mix_of(OTHER, MINE), *others), MINE)] == [mix_of(OTHER, MINE)]
    ranks = [state_of(rank=rank, world_size=2) for rank in range(2)]
    assert [it.state for it in chosen(found(*ranks, others[0]), MINE)] == ranks
    assert len(chosen(found(others[0]), MINE)) == 1  # of another dataset: to be refused by that name


def test_states_of_several_jobs_have_to_be_chosen_from_by_key() -> None:
    both = found(state_of(seed=1), state_of(seed=2))
    with pytest.raises(BadRequest, match=r"--state-key: f\.pt: loops\.loader 0, f\.pt: loops\.loader 1"):
        chosen(both, MINE)
    assert chosen(both, MINE, "loader 1") == [both[1]]
    assert chosen(both, MINE, "loops.loader 0") == [both[0]]
    with pytest.raises(BadRequest, match=r"there are loops\.loader 0"):
        chosen(both, MINE, "model")
    with pytest.raises(BadRequest, match="not those of the ranks of one job"):
        chosen(found(state_of(epoch=1), state_of(epoch=2)), MINE)


@pytest.mark.parametrize(
    "other", ["0.12.1", "MTIz", "", b"\x00\xff", packed([1])["quiver"], packed({"a": 1})["quiver"]]
)  # type: ignore[arg-type]
def test_what_only_has_the_key_of_a_packed_state_is_passed_over(other: str | bytes, tmp_path: Path) -> None:
    file = tmp_path / "last.json"
    file.write_bytes(msgspec.json.encode({"versions": {"quiver": other}, "loader": state_of()}))
    assert [it.key for it in states_in(file)] == ["loader"]
