"""Who reads: a job, the group that it belongs to, and the tenant that it belongs to. Values.

A *job* is what one person starts: all its ranks have its name. A *group* is several jobs that want the same, as the
trials of a sweep: it counts once. A job without one is a group of its own. A *tenant* is who is charged: a user or a
team. All three are names that people gave; they are shown to operators, in tables, metrics and logs.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

NAME_BYTES_MAX: Final = 128  # of UTF-8
_NOT_SHOWN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})  # categories that do not print, or mislead


class _Ordered(Protocol):
    def __lt__(self, other: Any, /) -> bool: ...


K = TypeVar("K", bound=_Ordered)


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


def told_apart(names: Mapping[K, str]) -> dict[K, str]:
    """Return a name of its own for each key: the given one, or, after the first key that has it, that with a number.

    Keys in order: whoever knows the same keys and names tells them apart the same way.
    """
    taken = set(names.values())  # something may really be called "a (2)"
    last: dict[str, int] = {}  # number given for each name: thousands of datasets may be called the same
    apart: dict[K, str] = {}
    for key in sorted(names):
        name = names[key]
        if name in last:
            number = last[name] + 1
            while f"{name} ({number})" in taken:
                number += 1
            last[name], name = number, f"{name} ({number})"
            taken.add(name)
        last.setdefault(name, 1)
        apart[key] = name
    return apart
