"""``quiver verify --decode`` names every sample that a training run could not decode."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon import clean_environment
from tests.support.data import Files, make_files, random_files

DECODERS = """
import os

def decode(sample, rng):
    assert set(sample) == {"image", "label", "__key__"} and 0 <= rng.random() < 1
    if sample["__key__"].endswith("7.png"):
        raise ValueError("no image")
    if sample["__key__"].endswith("20.png"):
        os._exit(3)  # as a decoder in C that crashes

def right(sample):
    return len(sample["image"])
"""


@pytest.fixture
def own(tmp_path: Path) -> Files:
    (tmp_path / "decoders.py").write_text(DECODERS)
    return make_files(tmp_path, random_files(30, seed=8, low=100, high=2000), name="own")


def verify(own: Files, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from quiver_client.cli import main; main()", "verify", str(own.manifest)]
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environment(),
        cwd=own.manifest.parent,
    )


def test_samples_that_cannot_be_decoded_are_named_even_if_the_decoder_crashes(own: Files) -> None:
    lost, manifest = "c/0002.png", own.opened()
    (own.folder / lost).unlink()
    found = verify(own, "--decode", "decoders:decode", "--workers", "1", "--json")
    assert found.returncode == 1, found.stderr
    report = json.loads(found.stdout)
    assert not report["ok"]
    decoded = report["decode"]
    assert (decoded["function"], decoded["failed"]) == ("decoders:decode", 5)
    errors = {each["key"]: each["error"] for each in decoded["failures"]}
    assert {key for key, error in errors.items() if error == "ValueError: no image"} == {
        *("b/0007.png", "c/0017.png", "a/0027.png")
    }
    assert errors["c/0020.png"] == "the function ended its process"
    assert errors[lost].startswith("Changed: ")
    assert all(manifest.key(each["index"]) == each["key"] for each in decoded["failures"])


def test_what_can_be_decoded_is_right_and_a_function_that_is_not_there_is_wrong_usage(own: Files) -> None:
    right = verify(own, "--decode", "decoders:right", "--workers", "1")
    assert right.returncode == 0, right.stderr
    assert "all right" in right.stdout
    for decode in ("decoders:absent", "decoders", "no_such_module:decode"):
        wrong = verify(own, "--decode", decode)
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert "--decode" in wrong.stderr
        assert repr(decode) in wrong.stderr
    assert verify(own, "--workers", "2").returncode == 2
