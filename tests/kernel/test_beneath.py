"""Files below a folder: whatever links there are, and whoever exchanges them meanwhile, nothing above it is opened."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.origin import beneath
from quiver.origin.beneath import Beneath

Open = Callable[[Beneath, str], int]
WAYS: dict[str, Open] = {"openat2": Beneath.open, "by names": Beneath.walk}


def content(folder: Path, path: str, way: Open) -> bytes:
    with Beneath(str(folder)) as opened:
        fd = way(opened, path)
    try:
        return os.read(fd, 100)
    finally:
        os.close(fd)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "f").write_bytes(b"secret")
    inside = tmp_path / "inside"
    (inside / "a" / "b").mkdir(parents=True)
    (inside / "a" / "b" / "f").write_bytes(b"fine")
    (tmp_path / "alias").symlink_to(inside)
    links = {
        "relative": "a/b",
        "deep/up": "../a/b",
        "absolute": inside / "a" / "b",
        "absolute-file": inside / "a" / "b" / "f",
        "chain": "relative",
        "whole": inside,
        "out": "../secret",
        "out-absolute": tmp_path / "secret",
        "out-and-in": "../inside/a/b",
        "a/over-the-top": "../../secret",
        "absolute-up": f"{inside}/../secret",
        "beside": f"{inside}-not",
        "loop": "loop",
        "proc": "/proc/self/root",
        "root": "/",
    }
    (inside / "deep").mkdir()
    for name, target in links.items():
        (inside / name).symlink_to(target)
    (tmp_path / "inside-not").symlink_to(tmp_path / "secret")
    return inside


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "path",
    [
        *("a/b/f", "relative/f", "deep/up/f", "absolute/f", "absolute-file", "chain/f", "whole/a/b/f", "a/./b/f"),
        *("a/../a/b/f", "whole/absolute/f"),
    ],
)
def test_links_inside_are_followed(tree: Path, way: str, path: str) -> None:
    assert content(tree, path, WAYS[way]) == b"fine"
    assert content(tree.parent / "alias", path, WAYS[way]) == b"fine", "the folder itself may be a link"


@pytest.mark.fault("S6")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "path",
    [
        *("../secret/f", "out/f", "out-absolute/f", "out-and-in/f", "a/over-the-top/f", "absolute-up/f", "beside/f"),
        *("a/../../secret/f", "proc/etc/passwd", "root/etc/passwd"),
    ],
)
def test_nothing_leads_out(tree: Path, way: str, path: str) -> None:
    with pytest.raises(OSError, match="cross-device") as caught:
        content(tree, path, WAYS[way])
    assert caught.value.errno == errno.EXDEV


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("path", "number"),
    [("a/x", errno.ENOENT), ("a/b/f/x", errno.ENOTDIR), ("loop", errno.ELOOP), ("loop/f", errno.ELOOP)],
)
def test_what_is_not_there_is_said_as_open_says_it(tree: Path, way: str, path: str, number: int) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011  the number says which
        content(tree, path, WAYS[way])
    assert caught.value.errno == number


def test_a_kernel_without_the_call_is_no_hindrance(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beneath, "_OPENAT2", 100_000)  # no such call
    assert content(tree, "absolute/f", Beneath.open) == b"fine"
    with pytest.raises(OSError, match="cross-device"):
        content(tree, "out/f", Beneath.open)


@pytest.mark.fault("S6")
@pytest.mark.parametrize("way", WAYS)
def test_a_folder_that_is_exchanged_for_a_link_meanwhile_never_leads_out(tree: Path, way: str) -> None:
    (tree / "real").mkdir()
    (tree / "real" / "f").write_bytes(b"fine")
    (tree / "trap").symlink_to("../secret")
    done = threading.Event()

    def exchange() -> None:
        while not done.is_set():
            for name in ("real", "trap"):
                (tree / name).rename(tree / "now")
                (tree / "now").rename(tree / name)

    thread = threading.Thread(target=exchange)
    thread.start()
    seen = set()
    try:
        for _ in range(2000):
            with contextlib.suppress(OSError):
                seen.add(content(tree, "now/f", WAYS[way]))
    finally:
        done.set()
        thread.join()
    assert seen <= {b"fine"}


NAMES = st.sampled_from(["a", "b", "c"])
PARTS = st.lists(st.sampled_from(["a", "b", "c", "..", "."]), min_size=1, max_size=5).map("/".join)
LINKS = st.dictionaries(st.tuples(NAMES, NAMES).map("/".join), st.tuples(st.booleans(), PARTS), max_size=5)


@pytest.mark.fault("S6")
@settings(max_examples=150, deadline=None)
@given(LINKS, PARTS)
def test_whatever_links_there_are_both_ways_agree_and_stay_inside(
    tmp_path_factory: pytest.TempPathFactory, links: dict[str, tuple[bool, str]], path: str
) -> None:
    top = tmp_path_factory.mktemp("links")
    inside = top / "in" / "side"
    for name in ("a", "b"):
        (inside / name).mkdir(parents=True)
        (inside / name / "a").write_bytes(b"fine")
        (top / name).write_bytes(b"secret")
        (top / "in" / name).write_bytes(b"secret")
    for name, (absolute, target) in links.items():
        with contextlib.suppress(OSError):
            (inside / name).symlink_to(inside / target if absolute else target)
    found = []
    for way in WAYS.values():
        try:
            found.append(content(inside, path, way))
        except OSError as error:
            found.append(str(error.errno).encode())
    assert found[0] == found[1]
    assert b"secret" not in found
    if found[0] == b"fine":
        assert os.path.realpath(inside / path).startswith(f"{inside}/")
