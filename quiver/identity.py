"""Who reads: a job, the group that it belongs to, and the tenant that it belongs to. Values.

A *job* is what one person starts: all its ranks have its name. A *group* is several jobs that want the same, as the
trials of a sweep: it counts once. A job without one is a group of its own. A *tenant* is who is charged: a user or a
team. All three are names that people gave; they are shown to operators, in tables, metrics and logs.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Final

NAME_BYTES_MAX: Final = 128  # of UTF-8
_NOT_SHOWN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})  # categories that do not print, or mislead


@dataclass(frozen=True, slots=True)
class Identity:
    """Each may be empty: it was not given."""

    job: str = ""
    group: str = ""
    tenant: str = ""


NOBODY: Final = Identity()


def check_name(what: str, name: str) -> str:
    """Return a name that may be shown. Raises ``ValueError`` for one that is too long or does not print.

    ``what``: what the name is given as, for the message, such as ``job=``.
    """
    if len(name.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX:
        raise ValueError(f"{what} has more than {NAME_BYTES_MAX} bytes: {name[:40]!r}…; write a shorter name")
    for char in name:
        if unicodedata.category(char) in _NOT_SHOWN:
            raise ValueError(f"{what} {name!r} contains {char!r}, which does not print; leave it out")
    if name != name.strip():
        raise ValueError(f"{what} {name!r} begins or ends with a space; leave it out")
    return name
