"""A pool of threads that neither ``shutdown`` nor the end of the process waits for."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Future

import pytest

from quiver_client import thread_pool as pool_module
from quiver_client.thread_pool import ThreadPool
from tests.support.threads import alive
from tests.support.waiting import until


def test_a_pool_does_what_it_is_given_by_no_more_threads_than_it_may_have() -> None:
    pool = ThreadPool(3, "quiver-pooled")
    assert list(pool.map(lambda number: number * 2, range(50))) == list(range(0, 100, 2))
    assert 1 <= len(alive("quiver-pooled")) <= 3
    failing = pool.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.result(20)
    pool.shutdown()
    assert not alive("quiver-pooled")
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(print)


def test_a_pool_that_nobody_has_any_more_ends_its_threads() -> None:
    pool = ThreadPool(2, "quiver-pooled")
    assert pool.submit(int).result(20) == 0
    del pool
    until(lambda: not alive("quiver-pooled"))


def test_shutting_a_pool_down_waits_a_moment_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "END_SECONDS", 0.05)
    pool, gate = ThreadPool(1, "quiver-pooled"), threading.Event()
    wedged, waiting = pool.submit(gate.wait, 20), pool.submit(int)
    until(wedged.running)
    pool.shutdown(cancel_futures=True)
    assert wedged.running()
    assert waiting.cancelled()
    gate.set()
    until(lambda: not alive("quiver-pooled"))


def test_what_hears_of_a_cancelled_call_may_take_a_lock_under_which_others_submit() -> None:
    pool, gate, lock = ThreadPool(1, "quiver-pooled"), threading.Event(), threading.Lock()
    running = pool.submit(gate.wait, 20)
    until(running.running)
    waiting = pool.submit(int)
    refused = threading.Event()

    def submit() -> None:
        with lock:
            waiting.add_done_callback(lambda done: submitting.set())
            submitting.wait(5)
            with pytest.raises(RuntimeError, match="closed"):
                pool.submit(int)
            refused.set()

    def hear(done: Future[int]) -> None:
        with lock:
            pass

    submitting = threading.Event()
    submitter = threading.Thread(target=submit, daemon=True)
    submitter.start()
    until(lock.locked)
    waiting.add_done_callback(hear)
    closer = threading.Thread(target=pool.shutdown, kwargs={"wait": False, "cancel_futures": True}, daemon=True)
    closer.start()
    assert refused.wait(20)
    closer.join(20)
    assert not closer.is_alive()
    gate.set()
    until(lambda: not alive("quiver-pooled"))


def test_the_end_of_the_process_waits_for_no_thread_of_a_pool() -> None:
    script = """
        import threading
        from quiver_client.thread_pool import ThreadPool
        pools = [ThreadPool(2, "stuck") for _ in range(8)]
        for pool in pools:
            for _ in range(3):
                pool.submit(threading.Event().wait)
    """
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, timeout=60, check=True)
    assert time.monotonic() - begun < 10
    assert done.stderr == b""
