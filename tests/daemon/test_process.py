"""The process: flags over variables over TOML, one clear line for what cannot work, and a clean end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from quiver_cacheserver.cli import main
from tests.support.daemon import FreshDaemon as Daemon
from tests.support.daemon import clean_environment
from tests.support.etcd import Etcd, free_ports


def run(*flags: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a daemon that is expected to end by itself; return its exit status and what it said."""
    command = [sys.executable, "-m", "quiver_cacheserver.cli", *flags]
    variables = {**clean_environment(), **(environment or {})}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=variables)
    return ended.returncode, ended.stdout + ended.stderr


GOOD = ("--listen", "127.0.0.1:0", "--capacity", "1MiB")

WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "unknown flag": (("--nonsense",), "--nonsense"),
    "no data folder": ((), "--data-dir"),
    "capacity": (("--data-dir", "{}/d", "--capacity", "lots"), "200GiB"),
    "no port": (("--data-dir", "{}/d", "--listen", "localhost"), "HOST:PORT"),
    "port too large": (("--data-dir", "{}/d", "--listen", "localhost:99999"), "HOST:PORT"),
    "rack": (("--data-dir", "{}/d", "--rack", "a/b"), "--rack"),
    "node id": (("--data-dir", "{}/d", "--node-id", "a b"), "--node-id"),
    "etcd and peers": (("--data-dir", "{}/d", "--etcd", "http://e:2379", "--peers", "http://a:1"), "exclude"),
    "etcd": (("--data-dir", "{}/d", "--etcd", "e:2379"), "2379"),
    "several etcds, one wrong": (("--data-dir", "{}/d", "--etcd", "http://e:2379,e:2379"), "'e:2379'"),
    "an address that only this machine reaches": (
        ("--data-dir", "{}/d", "--etcd", "http://e:2379"),
        "--listen 0.0.0.0:",
    ),
    "peers elsewhere": (("--data-dir", "{}/d", "--peers", "http://node1:7717"), "--listen 0.0.0.0:"),
    "quota without tokens": (("--data-dir", "{}/d", "--quota", "batch=0.5"), "--token-keys"),
    "quota": (("--data-dir", "{}/d", "--token-keys", "{}", "--quota", "batch"), "CLASS=WEIGHT"),
    "weight": (("--data-dir", "{}/d", "--token-keys", "{}", "--quota", "batch=0"), "0.01 to 100"),
    "capacity without a unit": (("--data-dir", "{}/d", "--capacity", "200"), "200GiB"),
    "peers": (("--data-dir", "{}/d", "--peers", "ftp://a:1"), "http://HOST:PORT"),
    "origin": (("--data-dir", "{}/d", "--origin", "relative/path"), "absolute"),
    "origin's scheme": (("--data-dir", "{}/d", "--origin", "ftp://host/x"), "s3://"),
    "replicas": (("--data-dir", "{}/d", "--replicas", "0"), "--replicas"),
    "replicas in words": (("--data-dir", "{}/d", "--replicas", "two"), "--replicas"),
    "missing TOML": (("--data-dir", "{}/d", "--config", "{}/none.toml"), "none.toml"),
    "broken TOML": (("--data-dir", "{}/d", "--config", "{}/broken.toml"), "broken.toml"),
    "unknown key": (("--data-dir", "{}/d", "--config", "{}/unknown.toml"), "capcity"),
}


@pytest.mark.parametrize(("flags", "says"), WRONG.values(), ids=list(WRONG))
def test_wrong_use_is_one_line_and_exit_2(
    tmp_path: Path,
    flags: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "broken.toml").write_text("= 1")
    (tmp_path / "unknown.toml").write_text('capcity = "1GiB"')
    monkeypatch.setattr(sys, "argv", ["quiver-cacheserver", *GOOD, *(flag.format(tmp_path) for flag in flags)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = "".join(capsys.readouterr())
    assert ended.value.code == 2, said
    assert said.count("\n") == 1, said
    assert says in said
    assert not (tmp_path / "d").exists()


def test_a_port_in_use_is_one_line_and_exit_1(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = run(*GOOD, "--listen", f"127.0.0.1:{port}", "--data-dir", str(tmp_path / "d"))
    assert code == 1
    assert said.count("\n") == 1
    assert str(port) in said
    assert "another daemon" in said


@pytest.mark.parametrize(
    ("address", "says"),
    [("192.0.2.7:0", "no address of this machine"), ("no.such.host.invalid:0", "no.such.host.invalid")],
)
def test_an_address_that_is_not_this_machine_s_is_one_line_and_exit_1(tmp_path: Path, address: str, says: str) -> None:
    code, said = run(*GOOD, "--insecure", "--listen", address, "--data-dir", str(tmp_path / "d"))
    assert code == 1
    assert said.count("\n") == 1
    assert says in said
    assert "another daemon" not in said


@pytest.mark.fault("M8")
def test_a_data_folder_in_use_is_one_line_and_exit_1(tmp_path: Path) -> None:
    with Daemon(tmp_path / "d") as daemon:
        code, said = run(*GOOD, "--data-dir", str(tmp_path / "d"))
        assert code == 1
        assert said.count("\n") == 1
        assert "in use" in said
        assert "--data-dir" in said
        assert daemon.ask("GET", "/healthz")[0] == 200


def test_a_folder_that_cannot_be_written_is_one_line_and_exit_1(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, said = run(*GOOD, "--data-dir", str(tmp_path / "file" / "d"))
    assert code == 1
    assert said.count("\n") == 1
    assert str(tmp_path / "file") in said


def test_help_has_an_example_and_the_version_is_told() -> None:
    code, said = run("--help")
    assert code == 0
    assert "Example" in said
    for flag in ("--listen", "--data-dir", "--capacity", "--rack", "--node-id", "--etcd", "--peers", "--origin"):
        assert flag in said
    assert run("--version")[0] == 0


def test_flags_stand_over_variables_and_variables_over_toml(tmp_path: Path) -> None:
    toml = tmp_path / "q.toml"
    toml.write_text(
        f'rack = "from-toml"\nnode-id = "from-toml"\ncapacity = "9MiB"\norigin = "{tmp_path}"\n'
        f'data-dir = "{tmp_path}/toml"\npeers = ["http://127.0.0.1:9"]\n'
    )
    environment = {"QUIVER_RACK": "from-variable", "QUIVER_CAPACITY": "7MiB", "QUIVER_CONFIG": str(toml)}
    with Daemon(tmp_path / "flag", "--rack", "from-flag", capacity="5MiB", environment=environment) as daemon:
        status = daemon.status()
        assert (status["rack"], status["capacity_bytes"]) == ("from-flag", 5 << 20)
        assert status["ring_members"] == 2, "the peers of the TOML file"
        assert (tmp_path / "flag" / "shards").is_dir()
        assert not (tmp_path / "toml").exists()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_daemon_ends_at_once_and_cleanly_when_told(tmp_path: Path, sig: signal.Signals) -> None:
    with Daemon(tmp_path / "d", "--drain-seconds", "0") as daemon:
        daemon.signal(sig)
        assert daemon.wait() == 0
        assert "Traceback" not in daemon.log


def test_a_daemon_that_waits_for_idle_connections_does_not_wait_for_ever(tmp_path: Path) -> None:
    with (
        Daemon(tmp_path / "d", "--drain-seconds", "0.2") as daemon,
        socket.create_connection(daemon.address) as idle,
    ):
        idle.sendall(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n")  # and never the rest
        assert daemon.stop() == 0


def test_peers_that_are_away_do_not_keep_a_daemon_from_serving(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with Daemon(tmp_path / "d", "--peers", f"http://127.0.0.1:{port}") as daemon:
        assert daemon.ask("GET", "/readyz")[0] == 200
        assert len(daemon.json("/v1/ring")["members"]) == 2


def test_a_daemon_finds_itself_among_peers_that_are_named_otherwise(tmp_path: Path) -> None:
    ports = free_ports(2)
    peers = ",".join(f"http://localhost:{port}" for port in ports)
    with Daemon(tmp_path / "d", "--peers", peers, port=ports[0]) as daemon:
        assert [member["url"] for member in daemon.json("/v1/ring")["members"]] == sorted(peers.split(","))


def test_the_flag_for_etcd_may_be_repeated_and_the_next_one_is_used_where_one_is_dead(tmp_path: Path) -> None:
    dead = f"http://127.0.0.1:{free_ports(1)[0]}"
    with Etcd() as etcd:
        for number, flags in enumerate([("--etcd", dead, "--etcd", etcd.url), ("--etcd", f"{dead},{etcd.url}")]):
            rack = f"r{number}"
            with Daemon(tmp_path / rack, "--rack", rack, *flags) as daemon:
                assert daemon.url in etcd.ctl("get", "--prefix", f"/quiver/racks/{rack}/members/")
