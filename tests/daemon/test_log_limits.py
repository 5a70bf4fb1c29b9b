"""How often a daemon logs the same: a few lines per situation, and in the end how many there were."""

from __future__ import annotations

import logging

from quiver_cacheserver.log_limits import DISTINCT_MAX, SITUATIONS_MAX, WINDOW_SECONDS, RepeatFilter


class Log:
    """What a handler with the filter lets pass, at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.repeats = RepeatFilter(lambda: self.now)

    def put(self, text: str, *arguments: object, level: int = logging.WARNING) -> None:
        record = logging.LogRecord("test", level, "x.py", 1, text, arguments, None)
        if self.repeats.filter(record):
            self.lines.append(record.getMessage())


def test_the_same_line_is_logged_once_and_counted() -> None:
    log = Log()
    for _ in range(127):
        log.put("a shard was not filled: %s", "it is gone")
    assert log.lines == ["a shard was not filled: it is gone"]
    log.now = WINDOW_SECONDS
    log.put("a shard was not filled: %s", "it is gone")
    assert log.lines[1].startswith("a shard was not filled: it is gone (and 126 more like it")


def test_of_one_situation_a_few_different_lines_pass_and_of_others_as_many() -> None:
    log = Log()
    for i in range(100):
        log.put("a shard was not filled: %s", i)
        log.put("quarantined: %s", i)
        log.put("a peer joined: %s", i, level=logging.INFO)
    assert sum(line.startswith("a shard") for line in log.lines) == DISTINCT_MAX
    assert sum(line.startswith("quarantined") for line in log.lines) == DISTINCT_MAX
    assert sum(line.startswith("a peer") for line in log.lines) == 100


def test_what_is_remembered_is_bounded() -> None:
    log = Log()
    for i in range(1000):
        log.put(f"a situation of its own {i}")
    assert len(log.repeats._situations) == SITUATIONS_MAX


def test_another_error_behind_the_same_words_is_another_line() -> None:
    log = Log()
    for error in (ValueError("one"), ValueError("one"), KeyError("two")):
        record = logging.LogRecord("test", logging.ERROR, "x.py", 1, "it failed", (), (type(error), error, None))
        if log.repeats.filter(record):
            log.lines.append(repr(error))
    assert log.lines == ["ValueError('one')", "KeyError('two')"]
