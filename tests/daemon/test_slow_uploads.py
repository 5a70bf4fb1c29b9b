"""How long a daemon waits for the body of an upload: of a silent client, and of one that is never silent."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quiver.errors import BadRequest
from quiver_cacheserver.serving import transfers
from quiver_cacheserver.serving.transfers import PIECE_BYTES_MIN, Arriving

PIECE = bytes(PIECE_BYTES_MIN)
PIECES = 40


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the daemon wait for half a second of silence, and expect a mebibyte per second."""
    monkeypatch.setattr(transfers, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(transfers, "SLOWEST_BYTES_PER_SECOND", 1 << 20)
    monkeypatch.setattr(transfers, "caller_of", lambda request: SimpleNamespace(budget="a"))


def arriving() -> tuple[Arriving, asyncio.StreamReader]:
    content = asyncio.StreamReader(limit=1 << 24)
    return Arriving(cast(Any, SimpleNamespace(content=content))), content


@pytest.mark.fault("S3")
async def test_an_upload_that_is_never_silent_and_too_slow_is_ended() -> None:
    upload, content = arriving()

    async def send() -> None:
        for _ in range(PIECES):
            content.feed_data(PIECE)
            await asyncio.sleep(0.1)

    async def receive() -> None:
        for _ in range(PIECES):
            await upload.piece(len(PIECE))

    sending = asyncio.create_task(send())
    try:
        with pytest.raises(BadRequest, match="too slow"):
            await receive()
    finally:
        sending.cancel()


async def test_an_upload_that_comes_fast_enough_is_received() -> None:
    upload, content = arriving()
    content.feed_data(PIECE * PIECES)
    received = [await upload.piece(len(PIECE)) for _ in range(PIECES)]
    assert b"".join(received) == PIECE * PIECES
