"""The wheel, built as for a release and installed into an environment that cannot see the repository."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import quiver

ROOT = Path(__file__).parents[2]
NATIVE = "quiver_client/native/_pieces.so"
PACKAGES = ["quiver", "quiver_cacheserver", "quiver_client"]
# What each extra must not install: the packages of the other side.
SERVER_ONLY = {"aetcd", "aiohttp", "prometheus-client", "uvloop"}
CLIENT_ONLY = {"torch", "rich"}
NOWHERE = "/nowhere.quiver"
USES = {
    "index": ["/nowhere", "-o", NOWHERE],
    "info": [NOWHERE],
    "verify": [NOWHERE],
    "warm": [NOWHERE, "--cache", "http://127.0.0.1:9"],
    "status": ["--cache", "http://127.0.0.1:9"],
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder]
    variables = {name: value for name, value in os.environ.items() if name != "QUIVER_NATIVE"}
    subprocess.run(build, cwd=ROOT, env=variables, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean environment with the wheel and nothing else; returns its interpreter."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--quiet"]
    subprocess.run([*install, "install", "--no-deps", "--no-index", wheel], check=True, capture_output=True)
    return python


def in_environment(python: Path, *arguments: str, dependencies: bool = False) -> subprocess.CompletedProcess[str]:
    """Run in the clean environment, outside the repository; with ``dependencies``, our libraries come after its own."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if dependencies:
        # A plain path, so that Python ignores the .pth file of the editable install, which would add the repository.
        variables["PYTHONPATH"] = next(path for path in sys.path if path.endswith("site-packages"))
    return subprocess.run(
        [python, *arguments], cwd=python.parent, env=variables, capture_output=True, text=True, check=False
    )


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if ".dist-info/" not in name]


def requirements(extra: str | None) -> set[str]:
    """Names that the distribution requires with this extra, beyond those that it always requires."""
    lines = metadata.requires("quiver-cache") or []
    condition = re.compile(rf"extra == ['\"]{extra}['\"]" if extra else r"^(?!.*extra ==)")
    return {re.split(r"[^A-Za-z0-9._-]", line)[0] for line in lines if condition.search(line)}


def test_the_wheel_holds_exactly_three_top_level_names(wheel: Path) -> None:
    assert sorted({name.split("/")[0] for name in names_in(wheel)}) == PACKAGES


def test_every_module_of_the_tree_is_in_the_wheel(wheel: Path) -> None:
    sources = {"quiver": ROOT, "quiver_client": ROOT / "client", "quiver_cacheserver": ROOT / "cacheserver"}
    expected = {str(file.relative_to(root)) for name, root in sources.items() for file in (root / name).rglob("*.py")}
    assert {name for name in names_in(wheel) if name.endswith(".py")} == expected


@pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="there is no C compiler")
def test_the_wheel_has_the_native_code_built_and_is_for_this_machine(wheel: Path, environment: Path) -> None:
    assert [name for name in names_in(wheel) if "_pieces" in name or name.endswith(".c")] == [NATIVE]
    assert re.search(r"-py3-none-linux_\w+\.whl$", wheel.name)
    script = "from quiver_client import native; print(native.pieces is not None)"
    assert in_environment(environment, "-c", script, dependencies=True).stdout == "True\n"


def test_every_package_says_that_it_is_typed(wheel: Path) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names_in(wheel))


def test_the_wheel_names_its_version_its_licence_and_its_programs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    assert info == f"quiver_cache-{quiver.__version__}.dist-info"
    programs = configparser.ConfigParser()
    programs.read_string(entry_points)
    assert dict(programs["console_scripts"]) == {
        "quiver": "quiver_client.cli:main",
        "quiver-cacheserver": "quiver_cacheserver.cli:main",
    }


def test_the_wheel_installs_three_names_and_two_programs(environment: Path) -> None:
    listing = in_environment(environment, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    installed = {path.name for path in Path(listing.stdout.strip()).iterdir() if path.suffix != ".dist-info"}
    assert installed - {"__pycache__"} == set(PACKAGES)
    assert {"quiver", "quiver-cacheserver"} <= {path.name for path in environment.parent.iterdir()}


def test_all_three_import_from_the_wheel(environment: Path) -> None:
    script = f"import json, {', '.join(PACKAGES)}; print(json.dumps([m.__file__ for m in ({', '.join(PACKAGES)})]))"
    imported = in_environment(environment, "-W", "error", "-c", script, dependencies=True)
    assert imported.returncode == 0, imported.stderr
    for file in json.loads(imported.stdout):
        assert Path(file).is_relative_to(environment.parents[1])


@pytest.mark.parametrize("program", ["quiver", "quiver-cacheserver"])
def test_the_installed_programs_answer_help(environment: Path, program: str) -> None:
    asked = in_environment(environment, str(environment.parent / program), "--help", dependencies=True)
    assert asked.returncode == 0, asked.stderr
    assert "Usage" in asked.stdout or "usage" in asked.stdout


@pytest.mark.parametrize(("program", "extra"), [("quiver", "client"), ("quiver-cacheserver", "server")])
def test_a_program_without_its_extra_says_what_to_install(environment: Path, program: str, extra: str) -> None:
    asked = in_environment(environment, str(environment.parent / program), "--help")
    assert (asked.returncode, asked.stdout) == (1, "")
    assert (
        asked.stderr == f"error: {program} needs click, which is not installed; pip install 'quiver-cache[{extra}]'\n"
    )


@pytest.mark.parametrize("command", ["index", "info", "verify", "warm", "status"])
def test_with_only_the_server_installed_each_command_works_or_says_what_to_install(
    environment: Path, command: str
) -> None:
    absent = "".join(f"sys.modules['{name}'] = None; " for name in ("torch", "rich", "braceexpand"))
    script = f"import sys; {absent}from quiver_client.cli import main; main()"
    asked = in_environment(environment, "-c", script, command, "--help", dependencies=True)
    told = re.fullmatch(r"error: quiver \w+ needs \w+, .*; pip install 'quiver-cache\[client\]'\n", asked.stderr)
    assert (asked.returncode == 1 and told) or (asked.returncode == 0 and not asked.stderr), asked.stderr
    used = in_environment(environment, "-c", script, command, *USES[command], dependencies=True)
    assert used.returncode == 1
    assert used.stderr.startswith("error: ")
    assert used.stderr.count("\n") == 1, used.stderr


def test_the_library_without_its_extra_says_what_to_install(environment: Path) -> None:
    script = "import sys; sys.modules['torch'] = None; from quiver_client import DataLoader"
    asked = in_environment(environment, "-c", script, dependencies=True)
    assert "ImportError: quiver_client.DataLoader needs torch" in asked.stderr
    assert "quiver-cache[client]" in asked.stderr


def test_the_kernel_imports_neither_torch_nor_a_server(environment: Path) -> None:
    script = "import pkgutil, sys, importlib, quiver\n" + (
        "for module in pkgutil.walk_packages(quiver.__path__, 'quiver.'):\n"
        "    importlib.import_module(module.name)\n"
        "print(*(sys.modules.keys() & {'torch', 'aiohttp', 'aetcd', 'uvloop', 'quiver_client', 'quiver_cacheserver'}))"
    )
    imported = in_environment(environment, "-c", script, dependencies=True)
    assert (imported.stdout, imported.stderr) == ("\n", "")


def test_client_and_server_install_without_each_other() -> None:
    assert requirements("client").isdisjoint(SERVER_ONLY)
    assert requirements("server").isdisjoint(CLIENT_ONLY)
    assert requirements(None).isdisjoint(SERVER_ONLY | CLIENT_ONLY)


def test_ci_installs_nothing_that_is_not_pinned() -> None:
    pins = [line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    pinned = {re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    names = {re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", line)[0]).lower() for line in asked}
    assert names - pinned == set()
