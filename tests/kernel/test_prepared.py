"""Messages are decoded in threads, so what msgspec learns of their types is learned when their modules are imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PROGRAM = """
import importlib, sys
import msgspec

for module in sys.argv[1:]:
    importlib.import_module(module)

learned = []


def profile(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "get_class_annotations":
        learned.append(frame.f_locals["obj"].__name__)


def kinds(of):
    for kind in of.__subclasses__():
        yield kind
        yield from kinds(kind)


ours = [kind for kind in kinds(msgspec.Struct) if kind.__module__.startswith("quiver")]
sys.setprofile(profile)
for kind in ours:
    msgspec.json.Decoder(kind)
before = list(learned)


class Late(msgspec.Struct):
    name: str


msgspec.json.Decoder(Late)
sys.setprofile(None)
assert learned == [*before, "Late"], "the test no longer sees what msgspec learns"
print(len(ours), *before)
"""


ROOT = Path(__file__).parents[2]
TOP = {"quiver": ROOT, "cacheserver/quiver_cacheserver": ROOT / "cacheserver", "client/quiver_client": ROOT / "client"}


def modules_with_messages() -> Iterator[str]:
    """Yield the modules that define structs. To import all modules would take far longer."""
    for top, root in TOP.items():
        for file in sorted((ROOT / top).rglob("*.py")):
            if "(msgspec.Struct" in file.read_text():
                yield ".".join(file.relative_to(root).with_suffix("").parts)


def test_every_type_of_message_is_prepared_when_its_module_is_imported() -> None:
    modules = list(modules_with_messages())
    assert len(modules) > 10
    told = subprocess.run([sys.executable, "-c", PROGRAM, *modules], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    count, *unprepared = told.stdout.split()
    assert int(count) > 30
    assert unprepared == []
