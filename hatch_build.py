"""Compiles ``quiver_client/native/pieces.c``, the only native code, if there is a C compiler.

Without a compiler, or if it fails, only Python is installed, which does the same more slowly. With ``QUIVER_NATIVE=0``
nothing is compiled.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("client", "quiver_client", "native")
NAME = "_pieces.so"
FLAGS = ("-O3", "-std=c11", "-Wall", "-Wextra", "-shared", "-fPIC", "-fvisibility=hidden")


class NativeHook(BuildHookInterface):  # type: ignore[type-arg]
    """An editable install keeps the library beside its source; a wheel contains it and is tagged for the machine."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        source = Path(self.root) / FOLDER / "pieces.c"
        if version == "editable":
            self._compile(source, source.with_name(NAME))
            return
        self._scratch = tempfile.TemporaryDirectory()
        built = Path(self._scratch.name) / NAME
        if self._compile(source, built):
            build_data["force_include"][str(built)] = f"quiver_client/native/{NAME}"
            build_data["pure_python"] = False
            # The library does not use Python's C API: any Python version on such a machine can load it.
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_scratch"):
            self._scratch.cleanup()

    def _compile(self, source: Path, target: Path) -> bool:
        """Compile the library, replacing an older one atomically; return whether it was compiled."""
        # On macOS a wheel may be for two architectures.
        if os.environ.get("QUIVER_NATIVE") == "0" or sys.platform == "darwin":
            return False
        try:
            target.unlink(missing_ok=True)  # it may be of an older source: no library is better
            asked = shlex.split(os.environ.get("CC", ""))
            compiler = next((one for one in (asked, ["cc"], ["gcc"], ["clang"]) if one and shutil.which(one[0])), None)
            if compiler is None:
                self.app.display_warning("no C compiler: batches will be copied and hashed by Python, which is slower")
                return False
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                built = Path(folder) / NAME
                command = [*compiler, *FLAGS, str(source), "-o", str(built)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if not done.returncode:
                    built.replace(target)
                    return True
                why = done.stderr.strip()
        except OSError as error:
            why = str(error)
        self.app.display_warning(f"{source.name} is not built; Python does the same, more slowly: {why}")
        return False
