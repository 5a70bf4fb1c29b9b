"""The error message for a missing package that one of the distribution's extras installs."""

from __future__ import annotations


def what_is_missing(error: ModuleNotFoundError, what: str, extra: str) -> str:
    """Return what a user should install for ``what``. Raises ``error`` again if a module of our own is missing."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "quiver", "quiver_client", "quiver_cacheserver"):
        raise error
    return f"{what} needs {package}, which is not installed; pip install 'quiver-cache[{extra}]'"
