"""Look the pinned versions up among known vulnerabilities, where a service answers: ``make audit``.

A finding is printed and fails the command only with ``--strict``: advisories appear without any change here, and
``make check`` has to give one answer for one commit. Where no service answers within seconds, one line says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

CONSTRAINTS: Final = Path(__file__).parents[1] / "constraints.txt"
PROBE: Final = "cryptography"  # one of the pins, to find out whether a service answers
PROBE_SECONDS: Final = 10.0
AUDIT_SECONDS: Final = 240.0


def audited(pins: list[str], seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Return what was looked up of these pins, and why nothing was."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, told = Path(folder, "wanted.txt"), Path(folder, "told.json")
        wanted.write_text("\n".join(pins) + "\n")
        command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--no-deps", "--timeout", "5"]
        command += ["--progress-spinner", "off", "--format", "json", "--output", str(told), "-r", str(wanted)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
            found = json.loads(told.read_text())["dependencies"]
        except subprocess.TimeoutExpired:
            return [], f"no answer in {seconds:.0f} s"
        except (OSError, ValueError, KeyError):
            return [], (ended.stderr.strip().splitlines() or ["no answer"])[-1][:200]
    known = [each for each in found if "skip_reason" not in each]
    return known, "" if known else "the service that answers knows none of the packages"


def main() -> int:
    pins = [line.strip() for line in CONSTRAINTS.read_text().splitlines() if "==" in line and not line.startswith("#")]
    known, why = audited([pin for pin in pins if pin.startswith(f"{PROBE}==")], PROBE_SECONDS)
    if not why:
        known, why = audited(pins, AUDIT_SECONDS)
    vulnerable = [(each, flaw) for each in known for flaw in each["vulns"]]
    lines = [f"{each['name']} {each['version']}: {flaw['id']}" for each, flaw in vulnerable]
    total = f"{len(known)} of {len(pins)} pinned packages looked up, {len(vulnerable)} known vulnerabilities"
    for line in [f"skipped: {why}"] if why else [*lines, total]:
        sys.stdout.write(f"audit: {line}\n")
    return int(bool(vulnerable) and "--strict" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
