"""Sizes as people write them: ``200GiB``, ``32 MiB``, ``1.5TB``, ``4096``.

What a cache holds is shown in binary units. Rates are shown in decimal ones, and so is what is reckoned with them.
"""

from __future__ import annotations

import re
from typing import Final

from quiver.errors import Misconfigured

SIZE_BYTES_MAX: Final = (1 << 63) - 1  # what the system counts files in
_BINARY: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_DECIMAL: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([KMGTP]?)(i?)(B?)\s*", re.ASCII | re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Return bytes. ``KiB`` … ``PiB`` (and a bare ``K`` … ``P``) are powers of 1024, ``KB`` … ``PB`` powers of 1000."""
    if isinstance(text, int):
        return _checked(text, text)
    match = _SIZE.fullmatch(text)
    if not match or (match[3] and not match[2]):
        raise Misconfigured(f"not a size: {text!r}; write it like 200GiB, 32MiB or 1.5TB")
    number, prefix, binary, unit = match[1], match[2].upper(), match[3], match[4]
    scale = _DECIMAL if unit and not binary else _BINARY
    size_bytes = int(float(number) * scale[prefix]) if "." in number else int(number) * scale[prefix]
    return _checked(size_bytes, text)


def _checked(size_bytes: int, text: str | int) -> int:
    if size_bytes <= 0:
        raise Misconfigured(f"a size must be positive: {text!r}")
    if size_bytes > SIZE_BYTES_MAX:
        raise Misconfigured(f"a size of {str(text)[:40]} is more than any disk has")
    return size_bytes


def format_size(size_bytes: float) -> str:
    """Return the size to three digits with a binary unit, for people: ``31.9 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{_three_digits(size_bytes)} {unit}"
        size_bytes /= 1024
    return f"{_three_digits(size_bytes)} PiB"


def format_decimal(size_bytes: float) -> str:
    """Return the size to three digits with a decimal unit, as datasets and disks are stated: ``4.8 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size_bytes) < 999.5:
            return f"{_three_digits(size_bytes)} {unit}"
        size_bytes /= 1000
    return f"{_three_digits(size_bytes)} TB"


def format_rate(bytes_per_second: float) -> str:
    """Return the rate with a decimal unit, as bandwidth is stated: ``4.8 MB/s``."""
    return f"{format_decimal(bytes_per_second)}/s"


def _three_digits(number: float) -> str:
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:,.0f}"
