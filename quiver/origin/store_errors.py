"""Maps obstore's exceptions to our own errors, by their types and their text."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Final

from quiver.errors import BadRequest, Forbidden, NotFound, Unavailable
from quiver.location import shown

_STATUS: Final = re.compile(r"status code: (\d{3})([^:\n]*)")
_CODE: Final = re.compile(r"<Code>(\w{1,80})</Code>")
_AGAIN: Final = frozenset({408, 425, 429})  # the statuses below 500 after which a retry may help
_LASTING: Final = re.compile(r"certificate|unsupported scheme|builder error", re.IGNORECASE)


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


@contextlib.contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Map obstore's exceptions. Raises ``NotFound``, ``Forbidden``, ``Unavailable``."""
    try:
        from obstore import exceptions as failed
    except ImportError:  # plain HTTP does not need it, and raises our errors itself
        yield
        return
    try:
        yield
    except (failed.NotFoundError, FileNotFoundError):
        raise NotFound(f"{url} does not exist") from None
    except (failed.PermissionDeniedError, failed.UnauthenticatedError) as error:
        raise Forbidden(f"{url}: the store refuses the credentials; set the usual variables of the store") from error
    except (failed.BaseError, OSError) as error:
        if "404 Not Found" in str(error):  # in a listing: there is no such bucket
            raise NotFound(f"{url} does not exist") from error
        raise _unavailable(url, error) from error


@contextlib.contextmanager
def path_errors(url: str) -> Iterator[None]:
    """Map obstore's error for a key that it cannot request. Raises ``BadRequest``."""
    try:
        from obstore.exceptions import InvalidPathError
    except ImportError:
        yield
        return
    try:
        yield
    except InvalidPathError as error:
        why = first_line(error)
        raise BadRequest(f"{shown(url)}: {shown(why)}; rename the object, or index a folder without it") from error


def _unavailable(url: str, error: BaseException) -> Unavailable:
    """Return an obstore error as ``Unavailable``, marked as lasting or passing."""
    found = _STATUS.search(str(error))
    if found is None:
        return Unavailable(url, first_line(error), lasting=_LASTING.search(str(error)) is not None)
    status, code = int(found[1]), _CODE.search(str(error))
    named = f" ({code[1]})" if code else ""
    return Unavailable(url, f"answers {status}{found[2]}{named}", lasting=status < 500 and status not in _AGAIN)


def status_of(error: Unavailable) -> int:
    found = re.match(r"answers (\d{3})", error.why)
    return int(found[1]) if found else 0
