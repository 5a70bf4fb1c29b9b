"""What a fuzzer needs to know of a parser: how to call it, valid messages to begin with, and what it may cost.

Invariant of each ``fuzz_one``: for any bytes it returns whether they were accepted, and raises nothing. The errors that
a parser documents are caught by ``refused`` and nowhere else, so any other exception is a finding; and a value that was
accepted is used as its caller would use it, since a wrong value may do harm only there.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MIB: Final = 1 << 20
INPUT_BYTES_MAX: Final = 64 << 10
CORPUS: Final = Path(__file__).parent / "corpus"  # inputs that once broke a parser: <target>/<what was wrong>


def _no_seeds() -> list[bytes]:
    return []


def _as_is(data: bytes) -> bytes:
    return data


@dataclass(frozen=True, slots=True)
class Target:
    """A parser and its bounds.

    ``seeds`` makes valid messages. ``repair`` makes checksums right again after a mutation, so that it gets past them.
    ``share``: of the messages of a run, relative to other targets: parsers in microseconds get more.
    """

    name: str
    fuzz_one: Callable[[bytes], bool]
    seeds: Callable[[], Sequence[bytes]] = _no_seeds
    repair: Callable[[bytes], bytes] = _as_is
    share: int = 10
    memory_bytes_max: int = 64 * MIB  # that one message may take, beyond what the process had
    seconds_max: float = 2.0  # of CPU time

    def corpus(self) -> list[bytes]:
        """Return the seeds, and the inputs that once broke the parser."""
        folder = CORPUS / self.name
        broke = sorted(folder.iterdir()) if folder.is_dir() else []
        return [*self.seeds(), *(path.read_bytes() for path in broke)]


class Refused(Exception):
    """The message was refused, as documented."""


@contextlib.contextmanager
def refused(*errors: type[BaseException]) -> Iterator[None]:
    """Turn the errors by which a parser refuses a message into ``Refused``."""
    try:
        yield
    except errors as error:
        if type(error) in (UnicodeDecodeError, UnicodeEncodeError) or isinstance(error, MemoryError):
            raise  # a ``ValueError`` by inheritance, but of no parser's making
        raise Refused from error


def accepts(parse: Callable[[bytes], object], *errors: type[BaseException]) -> Callable[[bytes], bool]:
    """Return the ``fuzz_one`` of a function that parses bytes, and refuses by these errors."""

    def fuzz_one(data: bytes) -> bool:
        try:
            with refused(*errors):
                parse(data)
        except Refused:
            return False
        return True

    return fuzz_one


def lazily(make: Callable[[], Callable[[bytes], bool]]) -> Callable[[bytes], bool]:
    """Return the ``fuzz_one`` that ``make`` returns once it is needed: most processes run one target."""
    made: list[Callable[[bytes], bool]] = []

    def fuzz_one(data: bytes) -> bool:
        if not made:
            made.append(make())
        return made[0](data)

    return fuzz_one


def scratch() -> Path:
    """Return a folder for files that parsers read, in memory where possible."""
    shm = Path("/dev/shm")
    folder = tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None, prefix="quiver-fuzz-")
    _kept.append(folder)  # until the process ends
    return Path(folder.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []
