"""The examples for trainers, as they are: each says how many samples it read exactly as often as it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.scripts import Script

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN = """
import os, runpy, sys, warnings
warnings.simplefilter("ignore")  # of the trainers' own
import multiprocessing
multiprocessing.set_start_method("fork", force=True)  # the default; this process was started by a server of forks
example, folder, rank, ranks, port = sys.argv[1:]
os.environ.update(QUIVER_EXAMPLE_DATA=folder, CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true")
if int(ranks) > 1:
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
sys.path.insert(0, os.path.dirname(example))
sys.argv = [example]
runpy.run_path(example, run_name="__main__")
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("name", "ranks", "said"),
    [
        ("torch_train", 2, ["ours, stopped and resumed: 600 of 600", "torch's: 600 of 600"]),
        ("torchdata_train", 1, ["0 workers: 600 of 600 samples read once", "2 workers: 600 of 600 samples read once"]),
        ("accelerate_train", 2, ["600 of 600 samples read 2 times in 2 epochs"]),
        ("transformers_train", 1, ["600 of 600 samples read 2 times in 2 epochs"]),
    ],
)
@pytest.mark.timeout(300)
def test_an_example_reads_each_sample_once_per_epoch(tmp_path: Path, name: str, ranks: int, said: list[str]) -> None:
    port = free_port()
    started = [
        Script(RUN, [EXAMPLES / f"{name}.py", tmp_path, rank, ranks, port], tmp_path / f"{rank}.log")
        for rank in range(ranks)
    ]
    try:
        for each in started:
            assert each.wait(280) == 0, each.lines()[-20:]
        shown = "\n".join(started[0].lines())
        assert all(line in shown for line in said), shown
    finally:
        for each in started:
            each.kill()
