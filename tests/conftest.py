"""Fixtures that many tests share: a small dataset, and racks that no test modifies."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import hypothesis
import pytest

from quiver.transport.liveness import IN_RACK
from tests.chaos.fault_report import FaultReport
from tests.support.daemon import Daemon, rack_of
from tests.support.data import Files, make_files, random_files
from tests.support.threads import leave_out_earlier

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job of a shell; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A machine that others share stops a process for longer than the 200 ms that an example may take by default.
hypothesis.settings.register_profile("patient", hypothesis.settings(deadline=None))
hypothesis.settings.load_profile("patient")

PATIENT_SECONDS: Final = 30.0

# Two workers run a file at a time. The run ends with the last file, so the slowest files run first, from the
# one of a minute down to those of ten seconds; pytest-xdist itself would begin with the files of most tests.
LONGEST: Final = (
    *("examples/test_demo.py", "trainers/test_trainer_examples.py", "end_to_end/test_jobs.py"),
    *("trainers/test_lightning.py", "client/test_loader_state.py", "cli/test_cache_commands.py", "fuzz/test_fuzz.py"),
    *("cli/test_verify_decode.py", "end_to_end/test_s3.py", "trainers/test_replicas.py", "docs/test_readme.py"),
    *("trainers/test_trainer.py", "end_to_end/test_mixtures.py", "client/test_bad_samples.py"),
    *(
        "client/test_fast_paths.py",
        "bench/test_commands.py",
        "client/test_handoff_tier.py",
        "examples/test_trainers.py",
    ),
    *("client/test_process_exit.py", "docs/test_substitution_report.py", "client/test_connections.py"),
    *("daemon/test_needs.py", "client/test_folder_needs.py", "kernel/test_fixed_orders.py", "client/test_forks.py"),
    *("client/test_origin_patience.py", "daemon/test_large_reads.py", "trainers/test_accelerate.py"),
    *("chaos/disk/test_crash_points.py", "simulation/test_simulation.py", "client/test_stopped_processes.py"),
    *(
        "client/test_replicas.py",
        "client/test_parts.py",
        "examples/test_language_model.py",
        "membership/test_registry.py",
    ),
    *("client/test_memory.py", "daemon/test_junk_manifests.py", "trainers/test_mix_ranks.py", "client/test_dataset.py"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", action="store_true", help="print which rows of the fault matrix survived")


SETTINGS: Final = ("CACHE", "TOKEN", "TOKEN_FILE", "TLS_CA", "TLS_CERT", "TLS_KEY", "JOB", "GROUP", "TENANT")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FaultReport(), "fault-report")
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test reads or writes the caches and settings of the user who runs it, or how much a later test logs."""
    for name in SETTINGS:
        monkeypatch.delenv(f"QUIVER_{name}", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "xdg"))
    yield
    logging.getLogger("quiver_client").setLevel(logging.NOTSET)  # the commands that tests run in-process set it


@pytest.fixture(autouse=True, scope="module")
def own_threads() -> None:
    """A file's tests look only at threads that they started themselves."""
    leave_out_earlier()


@pytest.fixture
def patient_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No read of this process is hedged or given up for lateness or silence: for tests that count what came from where.

    On a busy machine a daemon that works may be late, even with the answer to a health check, and then some of a batch
    comes from a runner-up or the origin.
    """
    for name in ("HEDGE_SECONDS_MIN", "GIVE_UP_SECONDS_MIN"):
        monkeypatch.setattr(f"quiver.health.{name}", PATIENT_SECONDS)
    waits = dict.fromkeys(("connect_seconds", "silence_seconds", "alive_seconds"), PATIENT_SECONDS)
    for name in ("IN_RACK", "AT_OPEN"):
        monkeypatch.setattr(f"quiver_client.rack.members.{name}", IN_RACK._replace(**waits))


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """150 samples in about twenty shards. Tests must not change them."""
    return make_files(tmp_path_factory.mktemp("files"), random_files(150))


@pytest.fixture(scope="session")
def rack(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Daemon]]:
    """Three daemons that may read ``files``. Tests must not stop them."""
    with rack_of(3, tmp_path_factory.mktemp("rack"), origins=[files.folder]) as daemons:
        yield daemons


@pytest.fixture(scope="session")
def lone(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A single daemon that may read ``files``. Tests must not stop it."""
    with Daemon(tmp_path_factory.mktemp("lone") / "data", origins=[files.folder]) as daemon:
        yield daemon
