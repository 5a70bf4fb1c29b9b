"""The token that a process sends: where it comes from, when it is read again, and that it shows nowhere."""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path

import pytest

from quiver import token_source
from quiver.errors import Misconfigured
from quiver.token_source import TokenSource
from tests.support.tokens import Signer, replace

SIGNER = Signer()


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_source, "LOOK_SECONDS", 0.0)


def test_a_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIVER_TOKEN", f" {SIGNER.token()}\n")
    assert TokenSource.from_environment().token() == SIGNER.token()
    monkeypatch.delenv("QUIVER_TOKEN")
    assert TokenSource.from_environment().token() == ""
    assert not TokenSource.from_environment()


def test_a_token_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path, first, second = tmp_path / "token", SIGNER.token("a"), SIGNER.token("b")
    path.write_text(first + "\n")
    source = TokenSource(path=str(path))
    assert source.token() == first
    replace(path, second.encode())
    assert source.token() == second


def test_a_token_file_is_looked_at_once_a_second_unless_the_token_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_source, "LOOK_SECONDS", 3600.0)
    path, first, second = tmp_path / "token", SIGNER.token("a"), SIGNER.token("b")
    path.write_text(first)
    source = TokenSource(path=str(path))
    assert source.token() == first
    replace(path, second.encode())
    assert source.token() == first
    assert source.token(fresh=True) == second


def test_a_token_file_that_vanishes_or_breaks_keeps_the_last_token_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, token = tmp_path / "token", SIGNER.token()
    path.write_text(token)
    source = TokenSource(path=str(path))
    assert source.token() == token
    path.unlink()
    with caplog.at_level(logging.WARNING):
        assert source.token() == token
    replace(path, b"half a tok\x00")
    assert source.token() == token
    assert "sending the last token" in caplog.text
    assert token not in caplog.text


@pytest.mark.parametrize("content", [b"", b"a b", b"a\r\nX-Other: b", b"\xff\xfe", b"a" * 2049], ids=repr)
def test_what_is_no_token_is_refused_before_it_could_end_a_header(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(Misconfigured) as caught:
        TokenSource(path=str(path)).token()
    assert str(path) in str(caught.value)
    if content.strip() and content.isascii():
        with pytest.raises(Misconfigured):
            TokenSource(content.decode())


def test_a_missing_file_names_the_variable_and_the_file(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"QUIVER_TOKEN_FILE .*token: No such file"):
        TokenSource(path=str(tmp_path / "token")).token()


def test_both_variables_at_once_are_ambiguous(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="both set"):
        TokenSource("a", str(tmp_path))


def test_a_token_is_in_no_repr_and_leaves_the_process_in_no_pickle() -> None:
    token = SIGNER.token()
    source = TokenSource(token)
    assert token not in repr(source)
    assert token not in source.fault()
    with pytest.raises(TypeError):
        pickle.dumps(source)


def test_the_bearer_is_told_what_to_do() -> None:
    assert "no token was sent" in TokenSource().fault()
    assert "QUIVER_TOKEN_FILE" in TokenSource().fault()
    assert "it expired at 20" in TokenSource(SIGNER.token(seconds=-60)).fault()
    assert "another rack" in TokenSource(SIGNER.token()).fault()
    assert "another rack" in TokenSource("no.token").fault()


def test_a_forked_child_reads_the_file_for_itself(tmp_path: Path) -> None:
    path, first, second = tmp_path / "token", SIGNER.token("a"), SIGNER.token("b")
    path.write_text(first)
    source = TokenSource(path=str(path))
    assert source.token() == first
    replace(path, second.encode())
    child = os.fork()
    if child == 0:
        os._exit(0 if source.token() == second else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert source.token() == second


def test_a_token_in_plain_text_to_another_host_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_source, "_warned", False)
    for host in ("127.0.0.1", "localhost", "[::1]"):
        token_source.warn_of_plain_text(host)
    assert not caplog.text
    token_source.warn_of_plain_text("node1")
    token_source.warn_of_plain_text("node2")
    assert caplog.text.count("unencrypted") == 1
