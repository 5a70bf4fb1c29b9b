"""``quiver token``: the keys it makes, the tokens it signs, and what it prints of them."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from quiver.claims import Right
from quiver_cacheserver.access.keys import PublicKeys
from quiver_cacheserver.access.tokens import Tokens
from quiver_client.cli.token import command


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    assert run("keygen", tmp_path / "keys").exit_code == 0
    return tmp_path / "keys"


def key_of(folder: Path) -> Path:
    return next(folder.glob("*.key"))


def test_a_token_that_the_command_signs_is_one_that_a_daemon_accepts(keys: Path) -> None:
    made = run(
        *("create", "--tenant", "vision", "--expires", "12h", "--key", key_of(keys)),
        *("--domain", "shared", "--rights", "read,operate", "--quota", "batch", "--rack", "r7"),
    )
    assert made.exit_code == 0, made.output
    claims, key_id = Tokens(PublicKeys(keys), "r7").verify(made.stdout.strip())
    assert (claims.tenant, claims.domain, claims.quota, claims.audience) == ("vision", "shared", "batch", "r7")
    assert claims.rights == {Right.READ, Right.OPERATE}
    assert claims.expires_at - claims.issued_at == 12 * 3600
    assert key_of(keys).stem == key_id


def test_the_token_and_nothing_else_is_on_the_standard_output(keys: Path) -> None:
    key_of(keys).chmod(0o644)
    made = run("create", "--tenant", "vision", "--expires", "12h", "--key", key_of(keys))
    assert made.stdout.count("\n") == 1
    assert made.stdout.count(".") == 2
    assert "chmod 600" in made.stderr


def test_the_private_key_is_the_owners_alone(keys: Path) -> None:
    assert stat.S_IMODE(key_of(keys).stat().st_mode) == 0o600
    assert key_of(keys).with_suffix(".pub").exists()
    assert len(PublicKeys(keys / f"{key_of(keys).stem}.pub").by_id) == 1


def test_show_prints_the_claims_and_not_the_token(keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run("create", "--tenant", "vision", "--expires", "30m", "--key", key_of(keys), "--json")
    token = json.loads(made.stdout)["token"]
    path = tmp_path / "token"
    path.write_text(token)
    shown = run("show", path, "--json")
    told = json.loads(shown.stdout)
    assert told == {name: value for name, value in json.loads(made.stdout).items() if name != "token"}
    assert (told["tenant"], told["domain"], told["rights"]) == ("vision", "vision", ["read", "fill"])
    assert not any(part in shown.output for part in token.split("."))
    monkeypatch.setenv("QUIVER_TOKEN_FILE", str(path))
    assert run("show").stdout == run("show", path).stdout


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--expires", "12"),
        ("--expires", "0h"),
        ("--expires", "400d"),
        ("--tenant", "a b"),
        ("--domain", "../x"),
        ("--rights", "write"),
        ("--rights", ""),
        ("--quota", "a b"),
        ("--rack", "a b"),
    ],
)
def test_a_wrong_value_is_wrong_usage_and_signs_nothing(keys: Path, flag: str, value: str) -> None:
    asked = {"--tenant": "vision", "--expires": "12h", "--key": str(key_of(keys)), flag: value}
    made = run("create", *(part for pair in asked.items() for part in pair))
    assert made.exit_code == 2
    assert not made.stdout


def test_a_file_that_is_no_private_key_is_said_to_be_none(keys: Path) -> None:
    made = run("create", "--tenant", "vision", "--expires", "12h", "--key", key_of(keys).with_suffix(".pub"))
    assert made.exit_code != 0
    assert "no private key" in str(made.exception)


def test_show_refuses_what_is_no_token(tmp_path: Path) -> None:
    for content in ("", "a.b.c", "e30.e30.x", "." * 100):
        (tmp_path / "token").write_text(content)
        assert run("show", tmp_path / "token").exit_code != 0
