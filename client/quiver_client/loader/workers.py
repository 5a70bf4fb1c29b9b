"""Batches from torch's own worker processes, none drawn before it can be read.

torch draws the next batch before it hands out one that is ready, so a draw that waits for the cache would hold that
batch back. Here such a draw is postponed while other batches are in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from quiver_client.failure import MARK
from quiver_client.loader.order import BatchOrder, OrderPass
from quiver_client.loader.source import Request


class NumberedBatches:
    """Iterator over ``(number, batch)`` of one pass. After a batch that raised comes the next one, as with torch's."""

    def __init__(self, workers: WorkerBatches) -> None:
        self._workers: WorkerBatches | None = workers

    def __iter__(self) -> NumberedBatches:
        return self

    def __next__(self) -> tuple[int, Any]:
        if self._workers is None:
            raise StopIteration
        batch = next(self._workers)
        return self._workers.taken, batch

    def close(self, *, wait: bool = True) -> None:
        """Release torch's iterator, which ends its processes unless they persist."""
        self._workers = None


class WorkerBatches(_MultiProcessingDataLoaderIter):
    """torch's iterator over worker processes. After ``next``, ``taken`` is the number of the batch that it returned."""

    def __init__(self, loader: Any) -> None:
        self._order: BatchOrder = loader.order
        self._is_probe: Callable[[], bool] = loader.is_probe
        self.taken = -1
        super().__init__(loader)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._epoch: OrderPass = loader.epoch
        self._postponed = 0
        super()._reset(loader, first_iter)

    def _next_index(self) -> Request:
        drawn = self._order.draw(self._epoch)
        if drawn is None:
            raise StopIteration
        return Request(self._epoch.number, drawn.rows, drawn.epochs, self._is_probe())

    def _try_put_index(self) -> None:
        if self._postponed or not self._order.poll(self._epoch):
            self._postponed += 1
        else:
            super()._try_put_index()

    def _next_data(self) -> Any:
        # If no batch is in flight, the draw delays none, so it may wait.
        while self._postponed and (not self._task_info or self._order.poll(self._epoch)):
            self._postponed -= 1
            super()._try_put_index()
        return super()._next_data()  # type: ignore[no-untyped-call]

    def _get_data(self) -> Any:
        got = super()._get_data()  # type: ignore[no-untyped-call]
        self._got = got[0]
        return got

    def _process_data(self, data: Any, *more: Any) -> Any:
        # In order, the batch handed out is the one before the next expected; out of order, the one just received.
        self.taken = self._rcvd_idx - 1 if getattr(self, "_in_order", True) else self._got
        if (
            isinstance(data, ExceptionWrapper)
            and data.exc_type is not None
            and issubclass(data.exc_type, StopIteration)
        ):
            # The loop would take it for the end of the epoch. The message contains the worker's traceback.
            rows, data.exc_type = self._epoch.rows(self.taken), RuntimeError
            data.exc_msg = f"{self._order.failure(StopIteration(), rows)}\n{data.exc_msg}"
        try:
            return super()._process_data(data, *more)  # type: ignore[no-untyped-call]
        except Exception as error:
            # torch makes an exception of the same type of the text, which a type may ignore.
            if isinstance(data, ExceptionWrapper):
                _name_samples(error, data.exc_msg)
            raise


def _name_samples(error: Exception, text: str) -> None:
    """Add the note that the worker's exception had, unless the message has it."""
    notes = [line for line in text.splitlines() if line.startswith(MARK)]
    if notes and notes[-1] not in str(error):
        error.add_note(notes[-1])
