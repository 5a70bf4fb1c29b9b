"""``state_dict(merged=True)``: all ranks call it, and each returns the states of all of them, merged.

The ranks exchange their states, about a kilobyte each, through torch.distributed's store. The first rank that calls
merges; the others wait for its answer. The ranks are those that the loader deals to: where several processes read one
rank's share, the state of the first counts, and one that differs raises. Invariant: all ranks return one state, or all
raise. An error in one rank is every rank's error; where a rank does not call, the others raise after ``WAIT_SECONDS``.
"""

from __future__ import annotations

import itertools
import logging
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import msgspec
import torch.distributed

from quiver_client.loader.group_store import group_store
from quiver_client.loader.state import State, merge_states

PREFIX: Final = "quiver/state"
WAIT_SECONDS: Final = 600.0  # as NCCL's collectives: another rank may be writing a large model meanwhile
ANSWER_SECONDS: Final = 60.0  # how much longer the others wait for what the first one makes of it
log = logging.getLogger("quiver_client")

Answer = dict[str, Any]  # with "state" or with "error"
_calls = itertools.count()  # of this process: the n-th call of one rank belongs to the n-th of any other


def merged_state(own: Callable[[], State], rank: int, world_size: int) -> State:
    """Return ``merge_states`` of what ``own`` returns in each of ``world_size`` ranks.

    Raises ``ValueError`` in all ranks if ``own`` raises in one, or if the states cannot be merged; ``TimeoutError`` if
    a rank does not call.
    """
    if world_size == 1:
        return merge_states([own()])
    call = next(_calls)
    store = group_store()
    if store is None:
        raise ValueError(
            f"merged=True: this is rank {rank} of {world_size}, and torch.distributed, through which the ranks exchange"
            " their states, is not initialized here; gather what each rank's state_dict() returns, and pass it to"
            " merge_states"
        )
    return _Exchange(store, call, rank, world_size).state(own)


def trainers_state(own: Callable[[], State], rank: int, world_size: int) -> State:
    """Return ``merged_state`` where a trainer saves a checkpoint, and this rank's own state if there is none.

    A trainer that saves because one rank failed calls this in that rank alone: its checkpoint is not lost.
    """
    if world_size == 1:
        return own()
    try:
        return merged_state(own, rank, world_size)
    except (TimeoutError, ValueError) as error:
        log.warning("the checkpoint has the state of rank %d alone, and other ranks cannot resume it: %s", rank, error)
        return own()


class _Exchange:
    """One call in each of the ranks."""

    def __init__(self, store: Any, call: int, rank: int, world_size: int) -> None:
        self._store, self._call, self._rank = store, call, rank
        self._ranks = range(world_size)

    def state(self, own: Callable[[], State]) -> State:
        try:
            mine: Answer = {"state": own()}
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one: its error is theirs
            mine = _error(self._rank, error)
        packed = _packed(mine)
        is_first_of_rank = self._store.compare_set(self._key(self._rank), "", packed) == packed
        is_first = self._store.add(self._key("calls"), 1) == 1
        if is_first:
            self._forget()
            self._store.set(self._key("merged"), _packed(self._merged()))
        if not self._arrived([self._key("merged")], WAIT_SECONDS + ANSWER_SECONDS):
            raise TimeoutError(f"merged=True: the rank that merges the states did not answer rank {self._rank}")
        answer = _unpacked(self._store.get(self._key("merged")))
        if not is_first_of_rank and "error" not in mine:
            answer = {"error": f"two processes are rank {self._rank} and consumed different samples; give them mesh="}
        if "error" in answer:
            raise (TimeoutError if "missing" in answer else ValueError)(f"merged=True: {answer['error']}")
        state: State = answer["state"]
        return state

    def _merged(self) -> Answer:
        """Return what becomes of the states of all ranks."""
        keys = [self._key(rank) for rank in self._ranks]
        if not self._arrived(keys, WAIT_SECONDS):
            missing = [rank for rank, key in zip(self._ranks, keys, strict=True) if not self._store.check([key])]
            return {
                "missing": missing,
                "error": f"after {WAIT_SECONDS:g} seconds ranks {missing} of {len(keys)} have not called it: it is"
                " a collective, so call it in all ranks, and not where only one rank writes the checkpoint",
            }
        many = self._store.has_extended_api()
        values = self._store.multi_get(keys) if many else [self._store.get(key) for key in keys]
        self._delete(keys)
        answers = [_unpacked(value) for value in values]
        failed = next((answer for answer in answers if "error" in answer), None)
        if failed is not None:
            return failed
        try:
            return {"state": merge_states([answer["state"] for answer in answers])}
        except ValueError as error:
            return {"error": str(error)}

    def _arrived(self, keys: list[str], seconds: float) -> bool:
        """Wait for all keys; return whether they are there."""
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except torch.distributed.DistStoreError:
            return bool(self._store.check(keys))
        return True

    def _forget(self) -> None:
        """Delete what remains of the call before the last: all ranks have read it, since they came to the last one."""
        if self._call > 1:
            self._delete([f"{PREFIX}/{self._call - 2}/{name}" for name in ("calls", "merged")])

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            with suppress(RuntimeError):  # not every store deletes keys
                self._store.delete_key(key)

    def _key(self, name: str | int) -> str:
        return f"{PREFIX}/{self._call}/{name}"


def _error(rank: int, error: Exception) -> Answer:
    return {"error": f"rank {rank}: {type(error).__name__}: {error}"}


def _packed(answer: Answer) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(answer), 1)


def _unpacked(data: bytes) -> Answer:
    answer: Answer = msgspec.msgpack.decode(zlib.decompress(data))
    return answer
