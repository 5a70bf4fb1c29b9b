"""``quiver tls init``: an authority and certificates, which daemons and clients accept, and no file overwritten."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
from cryptography import x509

from quiver.transport.tls import Credentials, TlsFiles, identity_of
from quiver_client.cli.main import run


def made(folder: Path, name: str) -> TlsFiles:
    return TlsFiles(str(folder / "ca.pem"), str(folder / f"{name}.pem"), str(folder / f"{name}.key"))


def test_it_makes_what_a_rack_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "tls"
    nodes = ["--node", "n1=host1,10.0.0.1", "--node", "n2=host2,::1", "--client", "alice", "--days", "30"]
    assert run(["tls", "init", str(folder), *nodes, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["new_ca"]
    assert [entry["name"] for entry in told["certificates"]] == ["node-n1", "node-n2", "client-alice"]
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o177 == (0 if path.suffix == ".key" else 0o44), path

    first = Credentials(made(folder, "node-n1"), serves=True)
    assert first.identity.node == "n1"
    first.check_host("host1")
    first.check_host("10.0.0.1")
    second = Credentials(made(folder, "node-n2"), serves=True)
    second.check_host("::1")
    alice = Credentials(made(folder, "client-alice"))
    assert (alice.identity.client, alice.identity.node) == ("alice", "")
    left_days = (alice.expires_at - Path(made(folder, "client-alice").cert).stat().st_mtime) / 86400
    assert 29 < left_days < 31


def test_it_adds_to_the_authority_that_is_there_and_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tls", "init", str(tmp_path), "--node", "n1=a"]) == 0
    said = capsys.readouterr().out
    assert "a new authority" in said
    assert f"--tls-cert {tmp_path}/node-n1.pem" in said
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    assert run(["tls", "init", str(tmp_path), "--node", "n2=b", "--client", "bob"]) == 0
    assert "the authority that was there" in capsys.readouterr().out
    Credentials(made(tmp_path, "client-bob")).client()
    assert run(["tls", "init", str(tmp_path), "--node", "n3=c", "--node", "n1=a"]) == 1
    assert "node-n1.pem is there already, and nothing is overwritten" in capsys.readouterr().err
    assert not (tmp_path / "node-n3.pem").exists(), "nothing at all is made then"
    assert all(path.read_bytes() == data for path, data in before.items())


@pytest.mark.parametrize(
    ("arguments", "status", "why"),
    [
        (["--node", "n1"], 2, "write ID=HOST"),
        (["--node", "n1=a", "--node", "n1=b"], 2, "named twice"),
        (["--node", "n1="], 1, "name its hosts"),
        (["--node", "../n1=a"], 1, "letters, digits"),
        (["--client", "a/b"], 1, "letters, digits"),
        (["--node", "n1=http://a:7717"], 1, "neither a host name nor an address"),
        (["--days", "0", "--client", "a"], 2, "days"),
    ],
)
def test_wrong_use_is_explained_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, why: str
) -> None:
    assert run(["tls", "init", str(tmp_path / "tls"), *arguments]) == status
    assert why in capsys.readouterr().err
    assert not (tmp_path / "tls").exists()


def test_a_folder_whose_authority_is_incomplete_or_another_thing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tls", "init", str(tmp_path), "--client", "a"]) == 0
    key = tmp_path / "ca.key"
    given = key.read_bytes()
    key.write_bytes((tmp_path / "client-a.key").read_bytes())
    assert run(["tls", "init", str(tmp_path), "--client", "b"]) == 1
    assert "not that of its certificate" in capsys.readouterr().err
    key.unlink()
    assert run(["tls", "init", str(tmp_path), "--client", "b"]) == 1
    assert "both files of the authority are needed" in capsys.readouterr().err
    key.write_bytes(given)
    (tmp_path / "client-a.pem").replace(tmp_path / "ca.pem")
    assert run(["tls", "init", str(tmp_path), "--client", "b"]) == 1


def test_without_the_package_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "quiver_client.certificates", raising=False)
    assert run(["tls", "init", str(tmp_path), "--client", "a"]) == 1
    assert "pip install 'quiver-cache[access]'" in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tls", "init", "--help"]) == 0
    said = capsys.readouterr().out
    assert "--node n1=host1,10.0.0.1 --node n2=host2,10.0.0.2 --client alice" in said


def test_a_certificate_is_nobodys_unless_it_names_exactly_one(tmp_path: Path) -> None:
    assert run(["tls", "init", str(tmp_path), "--node", "n1=host1"]) == 0
    names = x509.load_pem_x509_certificate((tmp_path / "node-n1.pem").read_bytes()).extensions
    uris = names.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
        x509.UniformResourceIdentifier
    )
    assert uris == ["quiver://node/n1"]

    def named(*uris: str) -> tuple[str, str]:
        found = identity_of({"subjectAltName": (("DNS", "host1"), *(("URI", uri) for uri in uris))})
        return found.node, found.client

    assert named("quiver://node/n1") == ("n1", "")
    assert named("spiffe://other/thing", "quiver://client/bob") == ("", "bob")
    for wrong in (
        (),
        ("quiver://node/n1", "quiver://client/bob"),
        ("quiver://node/n1", "quiver://node/n2"),
        ("quiver://node/",),
        ("quiver://node/../n1",),
        ("quiver://node/n1\n",),
        ("quiver://NODE/n1",),
        ("quiver:node/n1",),
        ("quiver://node/n1/client",),
        ("spiffe://node/n1",),
    ):
        assert named(*wrong) == ("", ""), wrong
