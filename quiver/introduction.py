"""What a process says of itself to the daemons that it reads from: a value, sent as the header ``Quiver-Reader``.

A loader of ours reports what it needs. A stock ``DataLoader`` reports nothing, so its reads are all that a daemon sees
of it; with this header the daemon knows whose they are. ``reader`` is drawn once per process, and is the same in all
that got a dataset from it by fork or pickle, as a loader's workers did. Reports of needs name it too, so that what is
read for a loader which reports is not counted a second time. Ranks that get the same samples as another one report
nothing either: they say that they follow.

    Quiver-Reader: id=<32 hex digits>&job=train&group=sweep&tenant=vision&dataset=imagenet

The value is ``application/x-www-form-urlencoded``; only ``id`` is required, and unknown keys are ignored.
``follows=1``: another process reports what this one reads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlencode

from quiver.errors import BadRequest
from quiver.identity import NAME_BYTES_MAX, NOBODY, Identity, check_name

HEADER: Final = "Quiver-Reader"
READER_BYTES: Final = 16
TEXT_BYTES_MAX: Final = 64 + 4 * (3 * NAME_BYTES_MAX + 16)  # each byte of a name may take three
FIELDS_MAX: Final = 16
_READER: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Introduction:
    """Who reads a dataset, and what people call it. ``reader``: 16 bytes, of one process and those that it made.

    ``follows``: another process reports what this one reads.
    """

    reader: bytes
    identity: Identity = NOBODY
    dataset_name: str = ""
    follows: bool = False

    def encode(self) -> str:
        """Return the value of the header."""
        who = self.identity
        named = {"job": who.job, "group": who.group, "tenant": who.tenant, "dataset": self.dataset_name}
        if self.follows:
            named["follows"] = "1"
        return urlencode({"id": self.reader.hex(), **{key: name for key, name in named.items() if name}})

    @classmethod
    def parse(cls, text: str) -> Introduction:
        """Parse the value of the header. Raises ``BadRequest`` for one that breaks a limit or is malformed."""
        if len(text) > TEXT_BYTES_MAX:
            raise BadRequest(f"{HEADER} has at most {TEXT_BYTES_MAX} bytes, not {len(text)}")
        try:
            pairs = parse_qsl(text, strict_parsing=True, max_num_fields=FIELDS_MAX, errors="strict")
            told = dict(pairs)
            job, group, tenant, dataset = (
                check_name(what, told.get(what, "")) for what in ("job", "group", "tenant", "dataset")
            )
        except ValueError as error:
            raise BadRequest(f"malformed {HEADER}: {error}") from error
        if not _READER.fullmatch(told.get("id", "")):
            raise BadRequest(f"malformed {HEADER}: id is not {2 * READER_BYTES} hexadecimal digits")
        follows = told.get("follows") == "1"
        return cls(bytes.fromhex(told["id"]), Identity(job, group, tenant), dataset, follows)


def introduced(text: str) -> Introduction | None:
    """Parse what a reader says of itself. Anything malformed counts as nothing said.

    It decides only what operators see and how the cache is shared, and must not keep anybody from reading.
    """
    try:
        return Introduction.parse(text) if text else None
    except BadRequest:
        return None
