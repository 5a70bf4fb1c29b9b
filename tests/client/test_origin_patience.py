"""A training loop whose origin throttles, fails or hangs: it waits, says so once, and can be ended at any moment."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from quiver.errors import Misconfigured, Unavailable
from quiver_client import DataLoader, Dataset
from quiver_client.loader import draw_wait
from quiver_client.origin_patience import patience_seconds
from tests.support.data import Files, make_files, random_files, rebased
from tests.support.origins import DRIP, HANG, HANG_IN_BODY, OK, ScriptedOrigin, Way, scripted_origin, throttle
from tests.support.scripts import Script
from tests.support.waiting import until

Make = Callable[..., Dataset]
FIELDS = ["image", "__key__"]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("small"), random_files(60, seed=5), shard_bytes="128KiB")


@pytest.fixture
def origin(local: Files) -> Iterator[ScriptedOrigin]:
    with scripted_origin(local.folder) as made:
        yield made


@pytest.fixture
def remote(local: Files, origin: ScriptedOrigin, tmp_path: Path) -> Files:
    return rebased(local, origin.url, tmp_path / "remote.quiver")


@pytest.fixture(autouse=True)
def brief_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long the order waits for something resident is not what this is about."""
    monkeypatch.setattr(draw_wait, "PATIENCE_SECONDS", 0.5)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda text: monkeypatch.setenv("QUIVER_ORIGIN_PATIENCE", text)


def cache(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'cache'}?capacity=1GiB"


def waits(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "Waiting for the origin" in record.message]


@pytest.mark.fault("O3")
@pytest.mark.parametrize("way", [throttle("1"), Way(500), throttle("", 503)], ids=["429", "500", "503"])
def test_an_epoch_waits_for_an_origin_that_is_away_and_says_so_once(
    dataset: Make, remote: Files, origin: ScriptedOrigin, tmp_path: Path, caplog: pytest.LogCaptureFixture, way: Way
) -> None:
    passing = bool(way.headers.get("Retry-After"))
    # A second that the server asks for is waited for within a read and not said; else it is away until it is said.
    origin.script = lambda name: way if (len(origin.ways(way)) < 3 if passing else not waits(caplog)) else OK
    made = dataset(remote.manifest, cache(tmp_path), fields=FIELDS)
    with contextlib.closing(DataLoader(made, batch_size=8, shuffle=True)) as loader:
        seen = {key: image for batch in loader for key, image in zip(batch["__key__"], batch["image"], strict=True)}
    assert seen == remote.content
    assert origin.ways(way), "the fault really fired"
    assert len(waits(caplog)) == (0 if passing else 1)
    assert all(origin.url in said.message for said in waits(caplog))


@pytest.mark.fault("O3", "O5")
@pytest.mark.parametrize("way", [throttle("600"), Way(500), HANG, HANG_IN_BODY, DRIP], ids=str)
def test_past_its_patience_a_read_names_the_origin_and_what_to_do(
    dataset: Make, remote: Files, origin: ScriptedOrigin, tmp_path: Path, patience: Callable[[str], None], way: Way
) -> None:
    patience("1.5s")
    origin.all(way)
    made = dataset(remote.manifest, cache(tmp_path))
    began = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        made.__getitems__(range(30))
    assert time.monotonic() - began < 9
    said = str(caught.value)
    assert origin.url in said
    assert "QUIVER_ORIGIN_PATIENCE" in said
    assert "30 samples" in said
    assert ".png" in said


@pytest.mark.fault("O5")
def test_after_that_error_a_run_resumes_exactly(
    dataset: Make, remote: Files, origin: ScriptedOrigin, tmp_path: Path, patience: Callable[[str], None]
) -> None:
    patience("1s")
    made = dataset(remote.manifest, cache(tmp_path), fields=FIELDS)
    seen: list[str] = []
    with contextlib.closing(DataLoader(made, batch_size=4, shuffle=True)) as loader:

        def loop() -> None:
            for batch in loader:
                seen.extend(batch["__key__"])
                if len(seen) == 12:
                    origin.all(Way(503))
                    made.close()
                    for shard in (tmp_path / "cache" / "shards").rglob("*"):
                        shard.unlink() if shard.is_file() else None

        with pytest.raises(Unavailable):
            loop()
        state = loader.state_dict()
    assert 12 <= len(seen) < 60
    origin.all(OK)
    with contextlib.closing(DataLoader(made, batch_size=4, shuffle=True)) as loader:
        loader.load_state_dict(state)
        for batch in loader:
            seen += batch["__key__"]
    assert sorted(seen) == sorted(remote.content)


@pytest.mark.fault("O5")
def test_what_is_resident_is_handed_out_while_the_origin_hangs(
    dataset: Make, remote: Files, origin: ScriptedOrigin, tmp_path: Path, patience: Callable[[str], None]
) -> None:
    made = dataset(remote.manifest, cache(tmp_path), fields=FIELDS)
    manifest = remote.opened()
    half = [row for row in range(60) if int(manifest.tables.blob_of[row]) < int(manifest.tables.firsts[6])]
    made.__getitems__(half)
    made.close()
    patience("2s")
    origin.all(HANG)
    seen: list[str] = []
    with contextlib.closing(DataLoader(made, batch_size=4, shuffle=True)) as loader, pytest.raises(Unavailable):
        seen.extend(key for batch in loader for key in batch["__key__"])
    assert len(half) >= 16
    assert len(seen) >= len(half) // 4 * 4, "all that was there, as far as it fills batches"
    assert {manifest.key(row) for row in half} >= set(seen)


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 300), ("0", 0), ("90", 90), ("1.5s", 1.5), ("5 m", 300), ("2h", 7200), ("1D", 86400)]
)
def test_patience_is_written_as_people_write_it(patience: Callable[[str], None], text: str, seconds: float) -> None:
    patience(text)
    assert patience_seconds() == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "5min", "1e9", "99999d", "nan"])
def test_patience_that_is_none_is_refused(
    dataset: Make, local: Files, patience: Callable[[str], None], text: str
) -> None:
    patience(text)
    with pytest.raises(Misconfigured, match="QUIVER_ORIGIN_PATIENCE"):
        dataset(local.manifest)


# -- Ctrl-C and SIGTERM -----------------------------------------------------------------------------------------------

BEGIN = """
import multiprocessing, sys
multiprocessing.set_start_method("fork", force=True)
from quiver_client import DataLoader, Dataset
from quiver_client.loader import draw_wait
manifest, cache = sys.argv[1:3]
"""
LOOPS = {
    "ds[i]": "Dataset(manifest, cache)[0]",
    "a batch": "Dataset(manifest, cache).__getitems__(range(40))",
    "threads": "for batch in DataLoader(Dataset(manifest, cache), batch_size=8, shuffle=True): pass",
    "workers": "for batch in DataLoader(Dataset(manifest, cache), batch_size=8, shuffle=True, num_workers=2): pass",
    "stock": """
import torch.utils.data
for batch in torch.utils.data.DataLoader(Dataset(manifest, cache), batch_size=8, collate_fn=len): pass
""",
    "stock with workers": """
import torch.utils.data
for batch in torch.utils.data.DataLoader(Dataset(manifest, cache), batch_size=8, collate_fn=len, num_workers=2): pass
""",
}
QUIET = "import os; os.dup2(os.open(os.devnull, os.O_WRONLY), 2)\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Script]]:
    started: list[Script] = []

    def start(text: str, *arguments: object) -> Script:
        started.append(Script(QUIET + text, arguments, tmp_path / f"log{len(started)}"))
        return started[-1]

    yield start
    for script in started:
        script.kill()


def of_session(script: Script) -> list[psutil.Process]:
    """Return all living processes that a script started, and itself."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == script.pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end(script: Script, how: str) -> float:
    """Send a signal as a terminal or a batch system does; return the seconds until nothing of the script is left."""
    began = time.monotonic()
    if how == "Ctrl-C":
        os.killpg(script.pid, signal.SIGINT)
    else:
        script.signal(signal.SIGTERM)
    script.wait(20)
    ended = time.monotonic() - began
    until(lambda: not of_session(script), 10, "no orphan")
    return ended


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_job_whose_origin_hangs_is_out_in_two_seconds(
    run: Callable[..., Script], remote: Files, origin: ScriptedOrigin, tmp_path: Path, loop: str, how: str
) -> None:
    origin.all(HANG)
    script = run(BEGIN + LOOPS[loop], remote.manifest, cache(tmp_path))
    assert origin.held.acquire(timeout=30)
    assert end(script, how) < 2.5


@pytest.mark.parametrize("way", [HANG, HANG_IN_BODY, throttle("600")], ids=["hangs", "hangs in the body", "busy"])
def test_opening_a_manifest_by_url_can_be_interrupted(
    run: Callable[..., Script],
    local: Files,
    origin: ScriptedOrigin,
    tmp_path: Path,
    way: Way,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the home of who runs this may be read-only
    (local.folder / "m.quiver").write_bytes(local.manifest.read_bytes())
    origin.all(way)
    script = run(BEGIN + "Dataset(manifest, cache)", origin.url + "m.quiver", cache(tmp_path))
    until(lambda: origin.ways(way), 20)
    assert end(script, "Ctrl-C") < 2.5


def test_a_manifest_at_a_busy_url_is_waited_for(
    dataset: Make, local: Files, origin: ScriptedOrigin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (local.folder / "m.quiver").write_bytes(local.manifest.read_bytes())
    origin.first(2, Way(503))
    assert len(dataset(origin.url + "m.quiver", cache(tmp_path))) == 60
    assert len(origin.ways(Way(503))) == 2
    origin.asked.clear()
    dataset(origin.url + "m.quiver", cache(tmp_path))
    assert len(list((tmp_path / "quiver" / "fetched").iterdir())) == 1, "one version, brought once"


# -- what is said -----------------------------------------------------------------------------------------------------


def test_a_dataset_that_is_not_opened_is_not_said_to_be_read(
    dataset: Make, local: Files, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Unavailable, match="no daemon answers"):
        dataset(local.manifest, "http://127.0.0.1:9")
    assert "origin" not in caplog.text


def test_what_a_full_disk_cannot_keep_is_only_said_to_be_asked_of_the_origin(
    dataset: Make,
    remote: Files,
    origin: ScriptedOrigin,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("QUIVER_ORIGIN_PATIENCE", "0")
    origin.all(Way(500))
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(Unavailable):
        dataset(remote.manifest, cache(tmp_path))[0]
    assert "shards that are not cached are read from the origin" in caplog.text
    assert "reading from" not in caplog.text
