"""The example of docs/planning.md is a plan, and gives what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from quiver_client.cli.plan import command

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()


def test_the_example_of_the_page_gives_what_the_page_shows(tmp_path: Path) -> None:
    for name, kind in (("fleet.toml", "toml"), ("jobs.csv", "csv")):
        (tmp_path / name).write_text(re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0])
    shown = re.findall(r"^```console\n\$ quiver plan fleet.toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0]
    result = CliRunner().invoke(command, [str(tmp_path / "fleet.toml")])
    assert result.exit_code == 0
    assert [line.split() for line in result.output.splitlines()] == [line.split() for line in shown.splitlines()]
