"""Which sharing domains hold a file: recorded in an attribute of the file itself.

The attribute is written before the file gets its name, and is removed with the file. So at no moment is there a file
with another one's record, and there is no second table that a crash could leave behind. Whatever is lost, an attribute
that was not synced say, is lost in the safe direction: the file belongs to fewer domains, which show again that they
have its bytes. A file system without attributes keeps the record until the daemon ends.

A file without the attribute belongs to ``SINGLE``, the only domain of a daemon without tokens, which writes none.
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Final

from quiver.domain import DOMAIN_BYTES, SINGLE, Domain

log = logging.getLogger(__name__)

Domains = tuple[Domain, ...]  # each once, the one that came to hold the file last at the end

ATTRIBUTE: Final = "user.quiver.domains"  # 16 bytes for each domain
DOMAINS_MAX: Final = 64  # of one file: 1 KiB, where ext4 has less than 4; the one that has held it longest loses it
UNRECORDED: Final[Domains] = (SINGLE,)
NOBODY: Final[Domains] = ()
_SINGLE: Final = bytes(DOMAIN_BYTES)  # in the attribute
_ABSENT: Final = (errno.ENODATA, errno.ENOTSUP, errno.ENOENT)

_warned: list[int] = []


def with_domain(domains: Domains, domain: Domain) -> Domains:
    """Return these domains and one more."""
    return domains if domain in domains else (*domains, domain)[-DOMAINS_MAX:]


def domains_recorded(path: Path) -> Domains:
    """Return the domains that hold a file. One whose attribute is malformed or unreadable belongs to nobody."""
    try:
        data = os.getxattr(path, ATTRIBUTE, follow_symlinks=False)
    except OSError as error:
        return UNRECORDED if error.errno in _ABSENT else NOBODY
    if len(data) % DOMAIN_BYTES or len(data) > DOMAINS_MAX * DOMAIN_BYTES:
        return NOBODY
    each = (data[at : at + DOMAIN_BYTES] for at in range(0, len(data), DOMAIN_BYTES))
    return tuple(dict.fromkeys(SINGLE if it == _SINGLE else Domain(it) for it in each))


def record_domains(file: int | Path, domains: Domains) -> None:
    """Record the domains that hold a file, which is open or has this path.

    If the file system refuses, this is logged once, and the domains fill the file again after a restart.
    """
    try:
        os.setxattr(file, ATTRIBUTE, b"".join(it or _SINGLE for it in domains))
    except OSError as error:
        if not _warned:
            _warned.append(error.errno or 0)
            log.warning(
                "which sharing domains hold a file cannot be recorded (%s): after a restart each fills its shards"
                " again; use a file system with extended attributes, as ext4 and xfs are",
                error.strerror,
            )
