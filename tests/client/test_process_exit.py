"""The interpreter's end, at any moment of a pass: as it is without us, and in silence.

Four exits for each moment are enough to find a thread that is not stopped. What takes chance to see takes more:
``QUIVER_TEST_EXITS=500 pytest tests/client/test_process_exit.py -k meets``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.daemon import Daemon
from tests.support.data import Files
from tests.support.endings import FINALIZING, Ended, ended

LOADER = """
    import os, sys, time, torch
    from quiver_client import DataLoader, Dataset

    def loader(cache=None, **more):
        dataset = Dataset({manifest!r}, cache=cache or {cache}, transform=more.pop("transform", None))
        return DataLoader(dataset, batch_size=16, shuffle=True, **more)

    def slow(sample):
        image = torch.frombuffer(bytearray(sample["image"]), dtype=torch.uint8)[:900].float()
        for _ in range(100):
            image = image + 1
            time.sleep(0)
        return image
"""

EXITS = int(os.environ.get("QUIVER_TEST_EXITS", "24"))
MOMENTS = {
    "after a break": """
        for at, _ in enumerate(loader(transform=slow if number % 2 else None)):
            if at == number % 3:
                break
    """,
    "with iterators of two loaders alive": """
        one, two = iter(loader(transform=slow)), iter(loader())
        for _ in range(number % 4):
            next(one), next(two)
    """,
    "after an exception": """
        for _ in loader(transform=slow):
            raise ValueError("the user's own")
    """,
    "by sys.exit, before the first batch": """
        kept = iter(loader(transform=slow))
        sys.exit(3)
    """,
    "in the middle of fills": """
        kept = loader(cache=f"file://{folder}/cold{number}?capacity=1GiB")
        batches = iter(kept)
        if number % 2:
            next(batches)
    """,
    "by a dataset alone": """
        dataset = loader().dataset
        dataset[number]
    """,
}


def script(files: Files, moment: str, cache: str = "f'file://{folder}/warm?capacity=1GiB'") -> str:
    """Return a script that makes loaders and does what there is to do: a text, or the name of one of ``MOMENTS``."""
    made = textwrap.dedent(LOADER.format(manifest=str(files.manifest), cache=cache))
    return made + textwrap.dedent(MOMENTS.get(moment, moment))


def unclean(found: list[Ended]) -> list[Ended]:
    return [it for it in found if it.status != FINALIZING or ("ValueError" not in it.printed and it.printed)]


@pytest.mark.fault("E10")
@pytest.mark.parametrize("moment", MOMENTS)
def test_no_thread_meets_an_interpreter_that_ends(moment: str, files: Files, tmp_path: Path) -> None:
    assert not unclean(ended([script(files, moment)] * -(-EXITS // len(MOMENTS)), tmp_path))


@pytest.mark.fault("E10")
def test_no_thread_meets_an_interpreter_that_ends_while_a_rack_is_read(
    lone: Daemon, files: Files, tmp_path: Path
) -> None:
    moments = ("after a break", "with iterators of two loaders alive", "by a dataset alone")
    scripts = [script(files, moment, repr(lone.url)) for moment in moments for _ in range(2)]
    assert not unclean(ended(scripts, tmp_path))


@pytest.mark.fault("E10")
def test_a_thread_that_runs_for_ever_is_interrupted(files: Files, tmp_path: Path) -> None:
    moment = """
        import threading
        begun = threading.Event()
        def endless(sample):
            begun.set()
            while True:
                torch.ones(10) + 1
        kept = iter(loader(transform=endless))
        begun.wait()
    """
    assert not unclean(ended([script(files, moment)], tmp_path))


def test_a_thread_that_waits_for_somebody_else_holds_the_end_up_for_a_moment_only(tmp_path: Path) -> None:
    text = """
        import atexit, threading, time
        from quiver_client import process_exit

        atexit.unregister(process_exit._exit)
        process_exit.start(threading.Event().wait, "waiting")
        began = time.monotonic()
        process_exit._exit()
        took = time.monotonic() - began
        assert 1 < took < 10, took
    """
    assert ended([textwrap.dedent(text)], tmp_path) == [Ended(FINALIZING, "")]


def test_nothing_is_printed_by_what_outlives_its_modules(files: Files, lone: Daemon, tmp_path: Path) -> None:
    """Where something refers to the script's module, its variables are freed after ours are set to ``None``."""
    text = f"""
        import sys, torch, quiver_client
        torch.kept = sys.modules["__main__"]
        manifest, cache = {str(files.manifest)!r}, "file://{tmp_path}/cache"
        views = quiver_client.Dataset(manifest, cache, copy=False)
        others = quiver_client.Dataset(manifest, {lone.url!r})
        kept = views[2], others[1]
        loader = quiver_client.DataLoader(views, batch_size=4)
        batches = iter(loader)
        next(batches)
    """
    whole = textwrap.dedent(text)
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nothing_is_printed_by_datasets_that_were_read_without_a_loader(files: Files, tmp_path: Path) -> None:
    script = f"from quiver_client import Dataset\nd = Dataset({str(files.manifest)!r}, 'file://{tmp_path}/a'); d[0]\n"
    script += f"e = Dataset({str(files.manifest)!r}, 'file://{tmp_path}/b'); e[0]"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
