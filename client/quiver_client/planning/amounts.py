"""Values of a plan as people write them: ``4TB``, ``200MB/s``, ``2d``, ``true``. Each error says what is wrong in a
line.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

from quiver.errors import Misconfigured
from quiver.identity import check_name
from quiver.sizes import parse_size

_SECONDS: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([a-z]*)\s*", re.ASCII)
_YES, _NO = {"true", "yes", "1"}, {"false", "no", "0", ""}
DIGITS_MAX: Final = 20
DURATION_SECONDS_MAX: Final = 100 * 365 * 86400.0
EPOCHS_MIN, EPOCHS_MAX = 1e-6, 1e9  # past them a simulation is rounding
WEIGHT_MIN, WEIGHT_MAX = 1e-3, 1e3  # of a tenant, as a daemon takes it
_SHOWN_MAX: Final = 60


def _said(value: Any) -> str:
    """Return a value as errors show it, in a line that is not too long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"


def size(what: str, value: Any) -> float:
    """Return bytes of a size such as ``4TB``; a number counts bytes."""
    if isinstance(value, str) and len(value) > _SHOWN_MAX:
        raise Misconfigured(f"{what} is {_said(value)}, which is no size; write it like 4TB or 200GiB")
    if isinstance(value, float) and math.isfinite(value):
        value = math.floor(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Misconfigured(f"{what} is {_said(value)}, which is no size; write it like 4TB or 200GiB")
    try:
        return float(parse_size(value))
    except Misconfigured as error:
        raise Misconfigured(f"{what}: {error}") from error


def rate(what: str, value: Any) -> float:
    """Return bytes per second of a rate such as ``200MB/s``."""
    try:
        return size(what, value.strip().removesuffix("/s") if isinstance(value, str) else value)
    except Misconfigured:
        raise Misconfigured(f"{what} is {_said(value)}, which is no rate; write it like 200MB/s, more than 0") from None


def duration(what: str, value: Any, *, zero: bool = False) -> float:
    """Return seconds of a duration such as ``90s``, ``12h`` or ``2d``; a number counts seconds."""
    match = _DURATION.fullmatch(str(value)) if not isinstance(value, bool) else None
    scale = _SECONDS.get(match[2] or "s") if match else None
    if match is None or scale is None:
        raise Misconfigured(f"{what} is {_said(value)}, which is no duration; write it like 90s, 12h or 2d")
    seconds = float(match[1]) * scale
    if seconds > DURATION_SECONDS_MAX or (seconds <= 0 and not zero):
        raise Misconfigured(f"{what} is {_said(value)}; it must be more than 0 and less than 100 years")
    return seconds


def count(what: str, value: Any, most: int = 10**6) -> int:
    """Return a number of things, at least one."""
    text = str(value).strip()
    is_digits = text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX
    if isinstance(value, bool) or not is_digits or not 1 <= int(text) <= most:
        raise Misconfigured(f"{what} is {_said(value)}; it must be a whole number from 1 to {most}")
    return int(text)


def number(what: str, value: Any, least: float, most: float) -> float:
    """Return a number in these bounds."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not least <= found <= most:
        raise Misconfigured(f"{what} is {_said(value)}; it must be a number from {least:g} to {most:g}")
    return found


def weight(what: str, value: Any) -> float:
    """Return a tenant's weight."""
    return number(what, value, WEIGHT_MIN, WEIGHT_MAX)


def flag(what: str, value: Any) -> bool:
    text = str(value).strip().lower()
    if text not in _YES | _NO:
        raise Misconfigured(f"{what} is {_said(value)}; write true or false")
    return text in _YES


def name(what: str, value: Any, *, empty: bool = False) -> str:
    """Return a name that may be shown."""
    if not isinstance(value, str) or (not value and not empty):
        raise Misconfigured(
            f"{what} is missing" if value in (None, "") else f"{what} is {_said(value)}, which is no name"
        )
    try:
        return check_name(what, value)
    except ValueError as error:
        raise Misconfigured(str(error)) from error
