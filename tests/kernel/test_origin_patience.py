"""A remote origin that throttles, fails, hangs or drips: one deadline, full jitter, Retry-After, nothing left over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path

import pytest

from quiver.errors import Changed, QuiverError, Unavailable
from quiver.origin import Extent, ObjectStore
from quiver.origin.gate import BACKOFF_SECONDS, BACKOFF_SECONDS_MAX, backoff_seconds, retry_after_seconds
from quiver.origin.origin_process import ProcessStore
from quiver.origin.remote import RemoteStore
from tests.support.origins import (
    DRIP,
    HANG,
    HANG_IN_BODY,
    OK,
    RESET,
    RESET_IN_BODY,
    ScriptedOrigin,
    Way,
    scripted_origin,
    throttle,
)
from tests.support.waiting import until

NAMES = tuple(f"{number}.bin" for number in range(9))
SIZE = 50_000
WITHIN = 1.0

Open = Callable[[str], ObjectStore]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("objects")
    for number, name in enumerate(NAMES):
        (where / name).write_bytes(bytes([number]) * SIZE)
    (where / "large.bin").write_bytes(os.urandom(6 << 20))
    return where


@pytest.fixture
def origin(folder: Path) -> Iterator[ScriptedOrigin]:
    with scripted_origin(folder) as made:
        yield made


@pytest.fixture(params=[RemoteStore, ProcessStore])
def store(request: pytest.FixtureRequest, origin: ScriptedOrigin) -> Iterator[ObjectStore]:
    with contextlib.closing(request.param(origin.url)) as made:
        yield made


def read(store: ObjectStore, within_seconds: float = WITHIN, names: tuple[str, ...] = NAMES) -> bytes:
    out = bytearray(len(names) * SIZE)
    store.read([Extent(name, 0, SIZE) for name in names], memoryview(out), within_seconds)
    return bytes(out)


RIGHT = b"".join(bytes([number]) * SIZE for number in range(len(NAMES)))


def timed(call: Callable[[], object]) -> tuple[float, QuiverError]:
    begun = time.monotonic()
    with pytest.raises(QuiverError) as caught:
        call()
    return time.monotonic() - begun, caught.value


@pytest.mark.parametrize("way", [HANG, HANG_IN_BODY, DRIP], ids=["before the head", "in the body", "drips"])
def test_nine_objects_that_hang_cost_one_deadline(store: ObjectStore, origin: ScriptedOrigin, way: Way) -> None:
    assert read(store) == RIGHT  # the reader is started
    origin.all(way)
    seconds, error = timed(lambda: read(store))
    assert isinstance(error, Unavailable)
    assert WITHIN - 0.1 <= seconds < 4 * WITHIN
    assert origin.url in str(error)
    assert len(origin.ways(way)) == 9, "all at once"
    origin.all(OK)
    assert read(store, 10.0) == RIGHT, "nothing of what was given up comes between"


def test_one_object_that_hangs_does_not_hold_up_another_read(store: ObjectStore, origin: ScriptedOrigin) -> None:
    read(store)
    origin.script = lambda name: HANG if name == NAMES[0] else OK
    failed: list[QuiverError] = []
    thread = threading.Thread(target=lambda: failed.append(timed(lambda: read(store, 5.0))[1]))
    thread.start()
    assert origin.held.acquire(timeout=10)
    assert read(store, 5.0, NAMES[1:]) == RIGHT[SIZE:]
    assert not failed
    store.close()
    thread.join(5)
    assert failed, "a read that waits ends when the store is closed"


@pytest.mark.parametrize("way", [RESET, RESET_IN_BODY, Way(500), Way(503), throttle()], ids=str)
def test_a_failure_that_passes_is_repeated(store: ObjectStore, origin: ScriptedOrigin, way: Way) -> None:
    origin.first(5, way)
    assert read(store, 20.0) == RIGHT
    assert len(origin.ways(way)) == 5, "the fault really fired"


def test_a_large_object_cut_off_midway_is_read_again(store: ObjectStore, origin: ScriptedOrigin) -> None:
    origin.first(1, Way(resets_at=1 << 20))
    out = bytearray(6 << 20)
    store.read([Extent("large.bin", 0, len(out))], memoryview(out), 20.0)
    assert out == (origin.folder / "large.bin").read_bytes()


def test_a_retry_after_is_honoured_by_all_requests(store: ObjectStore, origin: ScriptedOrigin) -> None:
    busy, began = throttle("2", 503), time.monotonic()
    origin.script = lambda name: busy if time.monotonic() < began + 1.5 else OK
    assert read(store, 20.0) == RIGHT
    refused = [asked.at for asked in origin.ways(busy)]
    quiet = [asked for asked in origin.asked if refused[0] + 0.7 < asked.at < refused[0] + 1.9]
    assert len(refused) <= len(NAMES) + 1, "each once, and the one that asks how long to wait"
    assert not quiet


def test_a_retry_after_past_the_deadline_fails_at_once_and_nobody_asks_meanwhile(
    store: ObjectStore, origin: ScriptedOrigin
) -> None:
    origin.all(throttle("120"))
    _, error = timed(lambda: read(store, 10.0))
    assert isinstance(error, Unavailable)
    assert 100 < error.retry_after_seconds <= 121
    assert "429" in str(error)
    seconds, error = timed(lambda: read(store, 10.0))
    assert isinstance(error, Unavailable)
    assert seconds < 5
    # Of the first read all requests may be on their way at once, and one more may have asked for how long to wait.
    repeated = sum(count - 1 for count in Counter(asked.name for asked in origin.asked).values())
    assert repeated <= 1, "it asked to be left alone"


def test_a_failing_store_is_soon_asked_by_one_request_at_a_time(store: ObjectStore, origin: ScriptedOrigin) -> None:
    origin.all(Way(500))
    timed(lambda: read(store, 20.0))
    before = len(origin.asked)
    timed(lambda: read(store, 20.0))
    assert len(origin.asked) - before <= 3, "what was begun before the others were cancelled"


@pytest.mark.parametrize("status", [400, 418])
def test_what_does_not_pass_is_not_repeated(store: ObjectStore, origin: ScriptedOrigin, status: int) -> None:
    origin.all(Way(status))
    _, error = timed(lambda: read(store, 20.0, NAMES[:1]))
    assert isinstance(error, Unavailable)
    assert error.lasting
    assert len(origin.asked) == 1


def test_an_object_that_is_gone_is_changed_and_not_waited_for(store: ObjectStore, origin: ScriptedOrigin) -> None:
    origin.script = lambda name: Way(404) if name == NAMES[3] else OK
    _, error = timed(lambda: read(store, 20.0))
    assert isinstance(error, Changed)
    assert error.url.endswith(NAMES[3])


def test_backing_off_is_full_jitter_up_to_a_bound() -> None:
    for failures in (1, 3, 40):
        most = min(BACKOFF_SECONDS * 2 ** (failures - 1), BACKOFF_SECONDS_MAX)
        drawn = [backoff_seconds(failures) for _ in range(300)]
        assert 0 <= min(drawn) < most / 4
        assert most * 3 / 4 < max(drawn) <= most


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [("7", 7, 7), ("0", 0, 0), ("999999999", 3600, 3600), ("-3", 0, 0), ("soon", 0, 0), ("", 0, 0), ("date", 50, 61)],
)
def test_a_retry_after_is_seconds_or_a_date_and_bounded(value: str, least: float, most: float) -> None:
    value = formatdate(time.time() + 60, usegmt=True) if value == "date" else value
    head = f"HTTP/1.1 429 Too Many Requests\r\nServer: x\r\nretry-after: {value}\r\n\r\n".encode()
    assert least <= retry_after_seconds(head) <= most
    assert retry_after_seconds(head.replace(b"429", b"200")) == 0


# -- the process that reads -------------------------------------------------------------------------------------------

OWNER = """
import sys, threading
from quiver.origin import Extent
from quiver.origin.origin_process import ProcessStore
store = ProcessStore(sys.argv[1])
store.read([Extent("0.bin", 0, 10)], memoryview(bytearray(10)))
print(store._reader[0].pid, flush=True)
store.read([Extent("1.bin", 0, 10)], memoryview(bytearray(10)), 60.0)
"""


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_the_reader_does_not_outlive_an_owner_that_ends_in_the_middle_of_a_request(
    origin: ScriptedOrigin, how: signal.Signals
) -> None:
    origin.script = lambda name: HANG if name == "1.bin" else OK
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, origin.url], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as owner:
        try:
            assert owner.stdout is not None
            reader = int(owner.stdout.readline())
            assert origin.held.acquire(timeout=20)
            owner.send_signal(how)
            owner.wait(2)
            until(lambda: not is_running(reader), 2)
        finally:
            owner.kill()
