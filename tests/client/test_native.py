"""The native code: built from its source here, and left alone where it cannot be trusted."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver_client import native
from quiver_client.native import LIBRARY, load

SOURCE = LIBRARY.with_name("pieces.c")
HOOK = Path(__file__).parents[2] / "hatch_build.py"
COMPILER = shutil.which("cc") or shutil.which("gcc") or ""
needs_compiler = pytest.mark.skipif(not COMPILER, reason="there is no C compiler")


@pytest.fixture
def built(tmp_path: Path) -> Callable[..., Path]:
    def build(change: Callable[[str], str] = str) -> Path:
        source = tmp_path / "pieces.c"
        source.write_text(change(SOURCE.read_text()))
        target = tmp_path / "pieces.so"
        command = [COMPILER, "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", source, "-o", target]
        subprocess.run(command, check=True)
        return target

    return build


@needs_compiler
def test_the_source_builds_without_a_warning_and_is_taken(built: Callable[..., Path]) -> None:
    pieces = load(built())
    assert pieces is not None
    data = np.arange(20, dtype=np.uint8)
    assert pieces.copy(np.asarray([data.ctypes.data + 3]), 4, np.zeros(1, bool)).tolist() == [[3, 4, 5, 6]]


@needs_compiler
@pytest.mark.skipif(os.environ.get("QUIVER_NATIVE") == "0", reason="it is asked not to be used")
def test_what_is_installed_here_has_it() -> None:
    assert native.pieces is not None, "built by an older make: touch pyproject.toml, then make install"


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        lambda source: source.replace("return 3;", "return 4;"),
        lambda source: source.replace("quiver_pieces_version", "quiver_version"),
        lambda source: source.replace("out[i] = hash(", "out[i] = (sizes[i] > 1000) + hash("),
        lambda source: source.replace("out + i * size", "out"),
        lambda source: source.replace("out + offsets[i]", "out + offsets[0]"),
    ],
    ids=["another version", "no version", "wrong hashes", "wrong copies", "wrong joins"],
)
def test_what_is_of_another_version_or_wrong_is_not_used(
    built: Callable[..., Path], change: Callable[[str], str]
) -> None:
    assert load(built(change)) is None


def test_what_is_no_library_or_not_there_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "junk.so").write_bytes(b"junk")
    assert load(tmp_path / "junk.so") is None
    assert load(tmp_path / "absent.so") is None


@pytest.mark.skipif(native.pieces is None, reason="no native code was built where these tests run")
def test_others_run_meanwhile() -> None:
    """A second thread gets the interpreter while this one hashes, though nothing would take it away in hours."""
    assert native.pieces is not None
    data = np.zeros(64 << 20, np.uint8)
    addresses, sizes = np.full(16, data.ctypes.data), np.full(16, len(data))
    begun, hashed, went_on = threading.Event(), threading.Event(), []
    interval = sys.getswitchinterval()
    thread = threading.Thread(target=lambda: begun.wait() and went_on.append(not hashed.is_set()))
    thread.start()
    sys.setswitchinterval(1000)
    try:
        begun.set()
        native.pieces.xxh3_64(addresses, sizes, np.zeros(16, bool))
        hashed.set()
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    assert went_on == [True]


@pytest.mark.parametrize("turned_off", [False, True])
def test_it_is_not_used_if_that_is_asked(turned_off: bool) -> None:
    script = "from quiver_client import native; print(native.pieces is None)"
    variables = {**os.environ, "QUIVER_NATIVE": "0" if turned_off else "1"}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    told = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == str(turned_off or not LIBRARY.exists())


# -- how it is built --------------------------------------------------------------------------------------------------


class App:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, message: str) -> None:
        self.warnings.append(message)


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The build's hook, for a copy of the tree's native folder."""
    monkeypatch.delenv("QUIVER_NATIVE", raising=False)  # whether it builds is what is tested, whoever runs the tests
    spec = importlib.util.spec_from_file_location("hatch_build", HOOK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path / module.FOLDER
    folder.mkdir(parents=True)
    shutil.copy(SOURCE, folder)
    return module.NativeHook(str(tmp_path), {}, None, None, str(tmp_path), "wheel", App())


def build_of(hook: Any, version: str) -> dict[str, Any]:
    data: dict[str, Any] = {"force_include": {}}
    hook.initialize(version, data)
    hook.finalize(version, data, "")
    return data


@needs_compiler
def test_an_editable_install_has_the_library_beside_its_source(hook: Any) -> None:
    data = build_of(hook, "editable")
    assert data == {"force_include": {}}
    assert load(next(Path(hook.root).rglob("_pieces.so"))) is not None


@needs_compiler
def test_a_wheel_with_the_library_names_the_machine_and_no_version_of_python(hook: Any) -> None:
    data = build_of(hook, "standard")
    assert list(data["force_include"].values()) == ["quiver_client/native/_pieces.so"]
    assert data["pure_python"] is False
    assert data["tag"].startswith("py3-none-linux_")
    assert not list(Path(hook.root).rglob("_pieces.so")), "the tree is as it was"


@pytest.mark.parametrize("version", ["editable", "standard"])
def test_without_a_compiler_it_is_python_alone_and_no_older_library_stays(
    hook: Any, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = next(Path(hook.root).rglob("pieces.c")).with_name("_pieces.so")
    older.write_bytes(b"older")
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CC", raising=False)
    assert build_of(hook, version) == {"force_include": {}}
    assert older.exists() == (version == "standard"), "a wheel is built without touching the tree"
    assert "no C compiler" in hook.app.warnings[0]


@needs_compiler
def test_a_compiler_may_be_named_with_its_options(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{COMPILER} -DNAMED")
    source = next(Path(hook.root).rglob("pieces.c"))
    source.write_text(f"#ifndef NAMED\n#error the options are not passed on\n#endif\n{source.read_text()}")
    assert "tag" in build_of(hook, "standard")


@pytest.mark.parametrize("version", ["editable", "standard"])
@pytest.mark.parametrize("content", ["#!/bin/true\n", "\0 not a program"], ids=["builds nothing", "is no program"])
def test_a_compiler_that_is_none_does_not_fail_the_install(
    hook: Any, version: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(content)
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert build_of(hook, version) == {"force_include": {}}
    assert "pieces.c is not built" in hook.app.warnings[0]


@needs_compiler
def test_a_source_that_cannot_be_built_is_said_and_left_out(hook: Any) -> None:
    next(Path(hook.root).rglob("pieces.c")).write_text("this is not C")
    assert build_of(hook, "standard") == {"force_include": {}}
    assert "pieces.c is not built" in hook.app.warnings[0]
