"""``quiver index`` and ``quiver info`` as programs: output, exit status, and never a traceback."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from quiver import __version__
from quiver.manifest import Manifest
from tests.indexing.support import shard_names, write_tar, write_tree

QUIVER = [sys.executable, "-c", "from quiver_client.cli import main; main()"]


def quiver(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*QUIVER, *map(str, arguments)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "d", {"cat/1.png": b"1", "cat/2.png": b"1", "dog/3.png": b"333", "README": b"-"})


def test_the_version_says_whether_there_is_native_code() -> None:
    assert f"version {__version__} (" in quiver("--version").stdout
    assert "in Python" in quiver("--version", QUIVER_NATIVE="0").stdout


def test_index_then_info_as_text_and_as_json(tmp_path: Path, images: Path) -> None:
    output = tmp_path / "m.quiver"
    done = quiver("index", images, "-o", output)
    assert done.returncode == 0
    said = "3 samples (1 of them equal to others), 4 B in 1 shards (imagefolder, mixed); see the warnings above (1)"
    assert done.stdout == f"{output}: {said}\n"
    assert done.stderr == "warning: left out, not images by their names (1): README\n"
    said = json.loads(quiver("info", output, "--json").stdout)
    manifest = Manifest.open(output)
    assert (
        said
        | {
            "digest": str(manifest.digest),
            "samples": 3,
            "shards": 1,
            "bytes": 4,
            "layout": "mixed",
            "fields": [
                {"name": "image", "type": "bytes"},
                {"name": "label", "type": "int64", "classes": ["cat", "dog"]},
            ],
            "origins": [f"file://{images}/"],
        }
        == said
    )
    words = quiver("info", f"file://{output}").stdout
    assert str(manifest.digest) in words
    assert "2 classes: cat, dog" in words


def test_a_name_is_stored_and_shown_and_else_it_is_the_files(tmp_path: Path, images: Path) -> None:
    assert quiver("index", images, "-o", tmp_path / "m.quiver", "--name", "cats & dogs").returncode == 0
    assert json.loads(quiver("info", tmp_path / "m.quiver", "--json").stdout)["name"] == "cats & dogs"
    assert "name     cats & dogs\n" in quiver("info", tmp_path / "m.quiver").stdout
    done = quiver("index", images, "-o", tmp_path / "m.quiver", "--name", "a\nb", "--force")
    assert done.returncode != 0
    assert "name" in done.stderr
    assert len(done.stderr.splitlines()) == 1, "one clear line"
    assert Manifest.open(tmp_path / "m.quiver").header.name == "cats & dogs", "the old manifest stays"


def test_info_prints_a_line_for_each_shard(tmp_path: Path) -> None:
    write_tree(tmp_path / "d", {f"{i}": os.urandom(900) for i in range(20)})
    assert quiver("index", tmp_path / "d", "-o", tmp_path / "m.quiver", "--shard-size", "4KiB").returncode == 0
    lines = [line.split(" ") for line in quiver("info", tmp_path / "m.quiver", "--shards").stdout.splitlines()]
    assert [digest for digest, _ in lines] == shard_names(tmp_path / "m.quiver")
    assert [int(size) for _, size in lines] == Manifest.open(tmp_path / "m.quiver").tables.shard_sizes.tolist()


def test_index_reports_in_json_with_its_warnings(tmp_path: Path) -> None:
    write_tar(tmp_path / "t.tar", [("a.jpg", b"1"), ("a.cls", b"1"), ("b.jpg", b"2")])
    done = quiver("index", tmp_path / "t.tar", "-o", tmp_path / "m.quiver", "--json")
    said = json.loads(done.stdout)
    assert (said["samples"], said["format"], said["layout"]) == (2, "webdataset", "sequential")
    assert said["warnings"] == [{"what": "samples without a member .cls", "count": 1, "names": ["b"]}]
    assert "b" in done.stderr


def test_options_come_from_the_environment_and_flags_take_precedence(tmp_path: Path, images: Path) -> None:
    wished = {"QUIVER_INDEX_FORMAT": "files", "QUIVER_INDEX_LAYOUT": "sequential"}
    quiver("index", images, "-o", tmp_path / "m.quiver", "--layout", "mixed", **wished)
    header = Manifest.open(tmp_path / "m.quiver").header
    assert (header.source, header.layout) == ("files", "mixed")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["index", "x"], "Missing option '-o' / '--output'"),
        (["index", "-o", "m"], "Missing argument 'SOURCE'"),
        (["index", "x", "-o", "m", "--format", "zip"], "'zip' is not one of"),
        (["index", "x", "-o", "m", "--shard-size", "many"], "not a size: 'many'"),
        (["index", "x", "-o", "m", "--shard-size", "1B"], "a shard holds 4 KiB to 1 GiB"),
        (["info"], "Missing argument 'M.quiver'"),
        (["info", "--what", "m"], "No such option"),
        (["inspect"], "No such command 'inspect'"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_status_2(arguments: list[str], says: str) -> None:
    done = quiver(*arguments)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_a_failure_is_one_line_and_exit_status_1(tmp_path: Path) -> None:
    (tmp_path / "foreign.quiver").write_bytes(b"not a manifest")
    (tmp_path / "empty").mkdir()
    for arguments, says in (
        (["index", tmp_path / "missing", "-o", tmp_path / "m"], "there is no"),
        (["index", tmp_path / "empty", "-o", tmp_path / "m"], "holds no objects"),
        (["info", tmp_path / "missing.quiver"], "make one with `quiver index"),
        (["info", tmp_path / "foreign.quiver"], "is not a manifest"),
        (["info", tmp_path], "is not a manifest"),
        (["info", "s3://bucket/m.quiver"], "is not on this machine"),
    ):
        done = quiver(*arguments)
        assert done.returncode == 1
        [line] = done.stderr.splitlines()
        assert line.startswith("error: ")
        assert says in line
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("command", [[], ["index"], ["info"]])
def test_every_help_has_an_example(command: list[str]) -> None:
    done = quiver(*command, "--help")
    assert done.returncode == 0
    assert "Example" in done.stdout


def test_the_bare_command_shows_its_help_and_is_a_usage_error() -> None:
    done = quiver()
    assert done.returncode == 2
    assert "Commands:" in done.stderr


def test_a_terminal_gets_a_progress_bar(tmp_path: Path) -> None:
    write_tree(tmp_path / "d", {"x": b"1"})
    ours, theirs = pty.openpty()
    command = [*QUIVER, "index", str(tmp_path / "d"), "-o", str(tmp_path / "m.quiver")]
    done = subprocess.run(command, stderr=theirs, stdout=subprocess.PIPE, check=True, timeout=60)
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert "indexing" in shown
    assert b"1 samples" in done.stdout


def test_an_interrupt_ends_with_status_130_and_leaves_nothing(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "d", {"x": b"1"})
    # Raised where Ctrl-C usually interrupts a long run: while a worker reads.
    command = (
        "import os, signal; from quiver_client.indexing import reading; whole = reading.hash_object\n"
        "def slow(*a): os.kill(os.getpid(), signal.SIGINT); return whole(*a)\n"
        "from quiver_client.indexing import files; files.hash_object = slow\n"
        "from quiver_client.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", command, "index", str(source), "-o", str(tmp_path / "m.quiver")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr.strip()) == (130, "error: interrupted")
    assert not list(tmp_path.glob("*.quiver*"))
