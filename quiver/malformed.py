"""What ``msgspec`` raises for input that is malformed, in one place: its documentation names ``DecodeError`` alone.

Text that is no UTF-8 raises Python's own error, and nesting of thousands of levels ``RecursionError``. A decoder of
untrusted bytes that misses one of them takes down whoever asked.
"""

from __future__ import annotations

from typing import Final

import msgspec

MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
