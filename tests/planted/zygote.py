"""A process that has imported the libraries of the tests, and forks to run pytest: else each start takes 2 s of CPU.

It imports nothing of the sources, which differ from run to run, and no plugin of pytest, which would warn of that. A
line on standard input is a list of arguments for pytest; the answers are two lines, the id of the process that runs it,
which leads a group, and its exit status. What pytest says goes to the file ``$PLANTED_LOG``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from typing import Final

LIBRARIES: Final = (
    *("pytest", "torch", "torch.utils.data", "torch.distributed", "numpy", "pyarrow", "pyarrow.parquet"),
    *("aiohttp.web", "uvloop", "msgspec", "blake3", "xxhash", "click", "rich.progress", "prometheus_client"),
)


def main() -> None:
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            _run(json.loads(line))
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(arguments: list[str]) -> None:
    """In the child: run pytest, and end without what the parent would do at its end."""
    code = 3
    try:
        os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        said = os.open(os.environ["PLANTED_LOG"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for fd, to in ((0, nothing), (1, said), (2, said)):
            os.dup2(to, fd)
        import pytest

        sys.argv = ["pytest", *arguments]
        code = int(pytest.main(arguments))
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
