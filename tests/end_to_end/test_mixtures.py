"""A real job that reads a mixture through a rack of two daemons, is killed in the middle of an epoch, and resumes."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.daemon import Daemon, rack_of
from tests.support.data import Files, make_files, random_files
from tests.support.scripts import Script
from tests.support.waiting import until

SIZES = {"a": 90, "b": 40}
JOB = textwrap.dedent("""
    import json, os, sys, torch
    from pathlib import Path
    from quiver_client import DataLoader, Dataset, Mix

    def main():
        cache, folder, workers = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
        parts = {name: Dataset(folder / f"{name}.quiver", cache, fields=["image", "__key__"]) for name in "ab"}
        mix = Mix(parts, weights=[1, 1], part_field="__part__")
        loader = DataLoader(mix, batch_size=6, shuffle=True, num_workers=workers, prefetch_factor=3, job="mixed")
        saved = folder / "state.pt"
        if saved.exists():
            loader.load_state_dict(torch.load(saved)["state"])
        for number, batch in enumerate(loader, 1):
            sizes = [len(image) for image in batch["image"]]
            print(json.dumps(list(zip(batch["__part__"], batch["__key__"], sizes))), flush=True)
            torch.save({"state": loader.state_dict(), "batches": number}, folder / "new.pt")
            os.replace(folder / "new.pt", saved)
        print("done", flush=True)
        loader.close()

    if __name__ == "__main__":
        main()
""")


@pytest.fixture
def rack(tmp_path: Path) -> Iterator[tuple[list[Daemon], dict[str, Files]]]:
    files = {
        name: make_files(tmp_path, random_files(size, seed=size, low=1000, high=9000), name=name, shard_bytes="32KiB")
        for name, size in SIZES.items()
    }
    capacity = sum(each.total_bytes() for each in files.values()) // 3
    origins = [each.folder for each in files.values()]
    with rack_of(2, tmp_path, origins=origins, capacity=str(max(capacity // 2, 160_000))) as daemons:
        yield daemons, files


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mixed_job_that_is_killed_reads_each_part_once_per_pass(
    rack: tuple[list[Daemon], dict[str, Files]], tmp_path: Path, workers: int
) -> None:
    daemons, files = rack
    lines: list[str] = []
    for run in range(3):
        script = Script(JOB, [daemons[run % 2].url, tmp_path, workers], tmp_path / f"run{run}.log")
        if run < 2:
            until(lambda: len(script.lines()) >= 8, 60, "some batches are read")  # noqa: B023
            script.kill()
            # What was printed after the last state was saved is read again.
            lines += script.lines()[: torch.load(tmp_path / "state.pt")["batches"]]
        else:
            assert script.wait(120) == 0, script.lines()[-5:]
            lines += script.lines()
    rows = [tuple(each) for line in lines if line.startswith("[") for each in json.loads(line)]
    assert lines[-1] == "done"
    for name, size in SIZES.items():
        keys = [key for part, key, _ in rows if part == name]
        assert len(keys) == 90
        for begin in range(0, 90, size):
            counts = Counter(keys[begin : begin + size])
            assert max(counts.values()) == 1
    content: dict[str, Any] = {name: each.content for name, each in files.items()}
    assert all(len(content[part][key]) == count for part, key, count in rows)
