"""A planted bug: an edit of one file, and the tests that have to fail with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Planted:
    """A bug. ``before`` is the exact text of ``file`` that ``after`` replaces; ``caught_by``: ids of tests."""

    name: str
    file: str
    before: str
    after: str
    caught_by: tuple[str, ...]

    def occurrences(self, root: Path = ROOT) -> int:
        return (root / self.file).read_text().count(self.before)

    def planted(self, root: Path = ROOT) -> str:
        """Return the text of the file with the bug."""
        return (root / self.file).read_text().replace(self.before, self.after)
