"""How errors travel: one table, from an error to an answer and back, whichever carrier the answer comes by."""

from __future__ import annotations

import pytest

from quiver import errors
from quiver.errors import (
    MESSAGE_CHARS_MAX,
    BadRequest,
    Changed,
    Corrupt,
    DiskFailed,
    Forbidden,
    Misconfigured,
    NotFound,
    OverCapacity,
    QuiverError,
    Unauthenticated,
    Unavailable,
    answer_of,
    error_from,
)

URL = "http://d:1"
# An error of a daemon, and what it is to a client.
TRAVEL: list[tuple[QuiverError, type[QuiverError]]] = [
    (BadRequest("it"), BadRequest),
    (Misconfigured("it"), Misconfigured),
    (NotFound("it"), NotFound),
    (Corrupt("it", "an upload"), Corrupt),
    (Forbidden("it"), Forbidden),
    (Unauthenticated("it"), Unauthenticated),
    (OverCapacity("it", 2.5), OverCapacity),
    (Changed("file:///x", "vanished"), Unavailable),
    (DiskFailed("it"), Unavailable),
    (Unavailable("an origin", "is away"), Unavailable),
    (QuiverError("a bug"), Unavailable),
]


@pytest.mark.parametrize(("error", "kind"), TRAVEL, ids=[type(error).__name__ for error, _ in TRAVEL])
def test_an_error_is_to_a_client_what_it_was_to_the_daemon(error: QuiverError, kind: type[QuiverError]) -> None:
    told = answer_of(error)
    assert (told.code, told.status, told.message) == (error.code, error.status, str(error))
    got = error_from(told.code, told.message, URL, status=told.status, retry_after_seconds=told.retry_after_seconds)
    assert type(got) is kind
    assert URL in str(got)
    assert str(error) in str(got)
    if kind is not Unavailable:
        assert got.retry_after_seconds == error.retry_after_seconds


def test_the_table_has_every_code_that_there_is() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, QuiverError)]
    assert {kind.code for kind in kinds} == {error.code for error, _ in TRAVEL}


@pytest.mark.parametrize(("error", "kind"), TRAVEL, ids=[type(error).__name__ for error, _ in TRAVEL])
def test_what_is_retryable_says_when_and_is_answered_503(error: QuiverError, kind: type[QuiverError]) -> None:
    told = answer_of(error)
    assert bool(told.headers) == bool(told.retry_after_seconds) == error.retryable == (told.status == 503)
    if told.headers:
        assert int(told.headers["Retry-After"]) >= 1


def test_a_pause_is_rounded_up_to_whole_seconds_for_http() -> None:
    assert answer_of(OverCapacity("it", 2.1)).headers == {"Retry-After": "3"}
    assert answer_of(OverCapacity("it", 0.0)).headers == {"Retry-After": "1"}


@pytest.mark.parametrize(("told", "waits"), [(1.5, 1.5), (-3.0, 0.0), (1e9, 60.0), (float("nan"), 0.0)])
def test_a_daemon_cannot_make_a_client_wait_for_ever(told: float, waits: float) -> None:
    assert error_from("over_capacity", "busy", URL, retry_after_seconds=told).retry_after_seconds == waits


def test_an_answer_without_a_code_is_known_by_its_status_where_that_says_enough() -> None:
    assert type(error_from("", "Not Found", URL, status=404)) is NotFound
    assert type(error_from("http", "Not Found", URL, status=404)) is NotFound
    assert "answers 500: Internal" in str(error_from("", "Internal", URL, status=500))
    assert "answers 405 http: no" in str(error_from("http", "no", URL, status=405))
    assert "answers what: no" in str(error_from("what", "no", URL))


def test_a_long_message_is_cut() -> None:
    told = answer_of(BadRequest("x" * 100_000))
    assert len(told.message) == MESSAGE_CHARS_MAX + 1
