"""Micro-batches of a task as a PyTorch data set, or as a plain iterable, synchronous or not."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

from torch.utils.data import IterableDataset, get_worker_info

from harness.transfer_queue.control.spec import GetRequest
from harness.transfer_queue.queue import TransferQueue
from harness.transfer_queue.rows.columns import Batch


class StreamingDataLoader(IterableDataset[Batch]):
    """The micro-batches of a request, again and again until its partition is exhausted (or, without one, until the
    queue is closed and empty), `epochs` times each.

    `async for batch in loader` inside an event loop; `for batch in loader` in a thread or process without one, also as
    `torch.utils.data.DataLoader(loader, batch_size=None)`. Both raise what `get` raises. With num_workers > 0 the
    workers are readers of the same task, named `<consumer>.<worker>`: each batch still goes to one of them, in an order
    that depends on timing. That takes a queue that runs in a process of its own; a LocalQueue refuses.

    Replay: with epochs > 1, batches are kept as they stream by until `window_rows` rows are held (None: the whole
    partition), then the window is given epochs - 1 times more, in the same order and without asking the queue, and
    the next one begins. So fewer than window_rows + count rows are held, and with None those of the partition.

    A batch is acknowledged when the one after it is asked for: what a dead consumer was at goes out again, what it
    only meant to replay does not. A worker asks ahead of its DataLoader by its prefetch_factor.
    """

    def __init__(
        self, queue: TransferQueue, request: GetRequest, *, epochs: int = 1, window_rows: int | None = None
    ) -> None:
        if epochs < 1 or (window_rows is not None and window_rows < 1):
            raise ValueError(f"epochs and window_rows must be at least 1, not {epochs} and {window_rows}")
        self._queue = queue
        self._request = request
        self._epochs, self._window_rows = epochs, window_rows

    def set_partition(self, partition: str | None) -> None:
        """Set what the next iteration reads; one that is under way goes on with its own."""
        self._request = replace(self._request, partition=partition)

    async def __aiter__(self) -> AsyncIterator[Batch]:
        request = self._request
        window: list[Batch] = []
        while (batch := await self._get(request)) is not None:
            yield batch
            await self._queue.acknowledge(batch.lease)
            if self._epochs > 1:
                window.append(batch)
            if self._window_rows is not None and sum(map(len, window)) >= self._window_rows:
                for again in window * (self._epochs - 1):
                    yield again
                window = []
        for again in window * (self._epochs - 1):
            yield again

    def __iter__(self) -> Iterator[Batch]:
        stream = aiter(self)
        with self._queue.portal() as run:
            while (batch := run(_next(stream))) is not None:
                yield batch

    async def _get(self, request: GetRequest) -> Batch | None:
        if (worker := get_worker_info()) is not None:
            request = replace(request, consumer=f"{request.consumer}.{worker.id}")
        return await self._queue.get_batch(request)


async def _next(stream: AsyncIterator[Batch]) -> Batch | None:
    return await anext(stream, None)
