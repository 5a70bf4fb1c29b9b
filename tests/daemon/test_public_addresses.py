"""Safe by default: a daemon that other machines can reach asks who they are, or was told not to."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from quiver.errors import Misconfigured
from quiver_cacheserver.cli import main
from quiver_cacheserver.config import Config, check
from quiver_cacheserver.serve import bind
from tests.support.daemon import Daemon
from tests.support.tokens import Signer, bearer

PUBLIC = ["0.0.0.0:0", "[::]:0", ":0", "192.0.2.7:0", "[2001:db8::1]:0", "node1:0", "0:0", "127.0.0.1.nip.io:0"]
LOOPBACK = ["127.0.0.1:0", "127.3.2.1:0", "localhost:0", "[::1]:0"]


def config(**settings: object) -> Config:
    return Config(data_dir="/d", capacity="1GiB", **settings)  # type: ignore[arg-type]


@pytest.mark.fault("S9")
@pytest.mark.parametrize("how", ["flag", "variable", "file"])
@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_without_authentication_is_refused_in_one_line_that_says_which_flags(
    tmp_path: Path, address: str, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text(f'listen = "{address}"')
    monkeypatch.delenv("QUIVER_LISTEN", raising=False)
    flags = {"flag": ["--listen", address], "file": ["--config", str(tmp_path / "config.toml")], "variable": []}[how]
    if how == "variable":
        monkeypatch.setenv("QUIVER_LISTEN", address)
    data = tmp_path / "data"
    arguments = ["quiver-cacheserver", "--capacity", "1MiB", "--data-dir", str(data), *flags]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.count("\n") == 1
    for flag in ("--tls-cert", "--tls-key", "--tls-ca", "--token-keys", "--insecure"):
        assert flag in said
    assert not data.exists()


@pytest.mark.fault("S9")
def test_loopback_needs_nothing_and_a_public_address_one_of_the_three(tmp_path: Path) -> None:
    for address in LOOPBACK:
        check(config(listen=address))
    with pytest.raises(Misconfigured):
        check(config(listen=PUBLIC[0]))
    check(config(listen=PUBLIC[0], insecure=True))
    check(config(listen=PUBLIC[0], token_keys=str(tmp_path)))
    check(config(listen=PUBLIC[0], tls_cert="c", tls_key="k", tls_ca="a"))


@pytest.mark.fault("S8")
def test_no_rack_that_requires_tokens_has_the_name_by_which_tokens_are_for_every_rack(tmp_path: Path) -> None:
    check(config(rack="quiver"))
    with pytest.raises(Misconfigured, match="choose another name"):
        check(config(rack="quiver", token_keys=str(tmp_path)))


@pytest.mark.fault("S9")
def test_a_name_of_loopback_that_is_another_address_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = socket.create_server(("0.0.0.0", 0))
    monkeypatch.setattr(socket, "create_server", lambda address, **_: made)  # as /etc/hosts may have it
    with pytest.raises(Misconfigured, match="--insecure"):
        bind(check(config(listen="localhost:0")))
    assert made.fileno() == -1


@pytest.mark.fault("S9")
def test_a_daemon_at_a_public_address_with_tokens_answers_nobody_else(tmp_path: Path) -> None:
    signer = Signer()
    signer.publish(tmp_path / "keys")
    flags = ("--listen", "0.0.0.0:0", "--advertise", "127.0.0.1", "--token-keys", str(tmp_path / "keys"))
    with Daemon(tmp_path / "data", *flags) as daemon:
        assert daemon.ask("GET", "/v1/ring")[0] == 401
        assert daemon.ask("GET", "/healthz")[0] == 200
        assert daemon.ask("GET", "/v1/ring", None, bearer(signer.token()))[0] == 200
        assert "can read and use the tokens" in daemon.log


@pytest.mark.fault("S9")
def test_a_daemon_that_is_told_so_serves_a_trusted_network(tmp_path: Path) -> None:
    with Daemon(tmp_path / "data", "--listen", "0.0.0.0:0", "--advertise", "127.0.0.1", "--insecure") as daemon:
        assert daemon.ask("GET", "/v1/ring")[0] == 200
