"""The command ``quiver``.

Each of ``index``, ``info``, ``verify``, ``warm``, ``plan``, ``place``, ``status``, ``jobs``, ``datasets``, ``explain``,
``pin``, ``unpin``, ``evict``, ``probe``, ``drain``, ``undrain``, ``tls`` and ``token`` is a command; ``main`` groups
them and turns errors into exit statuses, ``options`` has what they share, ``operating`` and ``pinning`` what those that
ask a whole rack share, ``tables`` and ``progress`` draw tables and progress bars, and ``decoding`` is what ``verify
--decode`` does.
"""

from __future__ import annotations

import sys

from quiver.extras import what_is_missing

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit."""
    try:
        from quiver_client.cli.main import run
    except ModuleNotFoundError as error:
        sys.exit(f"error: {what_is_missing(error, 'quiver', 'client')}")
    sys.exit(run(sys.argv[1:]))
