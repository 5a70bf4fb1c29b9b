"""Parses the files of deploy/ with the programs and types that will read them in production."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from quiver_cacheserver.config import Config, check
from tests.support.daemon import Daemon
from tests.support.tls import Pki, flags

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FLAGS = {field.encode_name: field for field in msgspec.structs.fields(Config)}
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
DAEMONS = {name: service for name, service in COMPOSE["services"].items() if name != "etcd"}


def unit_settings() -> dict[str, list[str]]:
    """The unit's settings; a key may occur more than once."""
    settings: dict[str, list[str]] = {}
    for line in (DEPLOY / "quiver-cacheserver.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, value = line.split("=", 1)
            settings.setdefault(key, []).append(value)
    return settings


def uncommented(key_pattern: str) -> str:
    """The example TOML with the matching keys uncommented."""
    text = (DEPLOY / "quiver-cacheserver.toml").read_text()
    return re.sub(rf"^#(?=(?:{key_pattern}) = )", "", text, flags=re.MULTILINE)


def config_of(environment: dict[str, str]) -> Config:
    """The configuration of a container, from its QUIVER_* variables."""
    given = {name.removeprefix("QUIVER_").lower().replace("_", "-"): value for name, value in environment.items()}
    given["capacity"] = re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", given["capacity"])
    return check(msgspec.convert(given, Config, strict=False))


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
def test_systemd_accepts_the_unit_without_a_warning(tmp_path: Path) -> None:
    unit = (DEPLOY / "quiver-cacheserver.service").read_text()
    program = unit_settings()["ExecStart"][0].split()[0]
    installed = tmp_path / "quiver-cacheserver.service"
    installed.write_text(unit.replace(f"ExecStart={program}", f"ExecStart={sys.executable}"))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", installed],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )
    # systemd only warns about unknown keys and bad values: the exit status is 0.
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")


def test_the_unit_starts_a_program_that_the_wheel_installs() -> None:
    program, flag, config = unit_settings()["ExecStart"][0].split()
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert Path(program).name in scripts
    assert (flag, Path(config).name) == ("--config", "quiver-cacheserver.toml")


def test_systemd_waits_longer_than_the_daemon_drains() -> None:
    assert float(unit_settings()["TimeoutStopSec"][0]) >= 2 * Config().drain_seconds


def test_the_data_folder_of_the_example_is_the_one_that_the_unit_makes() -> None:
    config = tomllib.loads(uncommented("^"))
    assert config["data-dir"] == f"/var/lib/{unit_settings()['StateDirectory'][0]}"


@pytest.mark.parametrize("discovery", ["etcd", "peers"])
def test_the_example_is_valid_with_every_key_uncommented(discovery: str) -> None:
    config = tomllib.loads(uncommented("[a-z-]+"))
    del config["etcd" if discovery == "peers" else "peers"]  # they exclude each other
    check(msgspec.convert(config, Config))


def test_the_example_is_valid_unchanged() -> None:
    check(msgspec.convert(tomllib.loads(uncommented("^")), Config))


def test_the_example_explains_exactly_the_flags() -> None:
    assert set(tomllib.loads(uncommented("[a-z-]+"))) == set(FLAGS)


def test_the_defaults_that_the_example_shows_are_the_real_ones() -> None:
    config = tomllib.loads(uncommented("[a-z-]+"))
    assert {key: config[key] for key in ("replicas", "drain-seconds", "log-level")} == {
        key: FLAGS[key].default for key in ("replicas", "drain-seconds", "log-level")
    }


def test_the_compose_file_is_valid_by_the_compose_specification() -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_three_daemons_share_only_an_etcd_and_a_rack() -> None:
    configs = [config_of(service["environment"]) for service in DAEMONS.values()]
    assert len(configs) == 3
    assert {(config.etcd, config.rack) for config in configs} == {("http://etcd:2379", "compose")}
    assert [config.node_id for config in configs] == [config.advertise for config in configs] == list(DAEMONS)
    volumes = [volume.split(":")[0] for service in DAEMONS.values() for volume in service["volumes"]]
    assert volumes == list(DAEMONS)


@pytest.mark.parametrize("name", DAEMONS)
def test_compose_waits_longer_than_the_daemon_drains(name: str) -> None:
    grace = seconds(DAEMONS[name]["stop_grace_period"])
    assert grace >= 2 * config_of(DAEMONS[name]["environment"]).drain_seconds


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_every_service_has_a_health_check_a_volume_and_an_image_to_build(name: str) -> None:
    service: dict[str, Any] = COMPOSE["services"][name]
    assert service["healthcheck"]["test"]
    assert {volume.split(":")[0] for volume in service["volumes"]} <= set(COMPOSE["volumes"])
    build = service["build"]
    dockerfile = (DEPLOY / build["context"] / build["dockerfile"]).read_text()
    assert re.search(rf"^FROM \S+ AS {build['target']}$", dockerfile, re.MULTILINE)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_the_health_check_of_the_daemons_succeeds_with_and_without_tls(tmp_path: Path, tls: bool) -> None:
    files = Pki(tmp_path / "tls").node("node1")
    with Daemon(tmp_path / "data", *(flags(files) if tls else ())) as daemon:
        _, python, option, code = DAEMONS["node1"]["healthcheck"]["test"]
        assert python == "python"
        here = code.replace("127.0.0.1:7717", daemon.url.split("//")[1])
        assert here != code
        env = {**os.environ, **({"QUIVER_TLS_CERT": files.cert} if tls else {})}
        checked = subprocess.run([sys.executable, option, here], capture_output=True, text=True, check=False, env=env)
        assert checked.returncode == 0, checked.stderr


def test_the_dockerfile_copies_only_files_that_exist_and_are_not_ignored() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    sources = [source for line in re.findall(r"^COPY (.*) \S+$", dockerfile, re.MULTILINE) for source in line.split()]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored, source
