"""Rows that rollout took from the queue, until their samples are done and written."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from harness.protocols import FINISH_REASONS, Completion
from harness.runtime.runtime import Waits
from harness.transfer_queue import Batch, Column, Ragged, TransferQueue
from harness.workers.dataflow import samples_in, text_column


class OpenRows:
    """Open rows of the engine of this number. `write` runs as long as there may be some; `finish` hands it what is
    done."""

    def __init__(self, queue: TransferQueue, engine: int, waits: Waits) -> None:
        self._queue, self._engine, self._waits = queue, engine, waits
        self._row_of: dict[int, tuple[str, int]] = {}  # of samples: partition and row
        self._finished: list[Completion] = []
        self._changed = asyncio.Event()  # set when there are finished ones
        self._empty = asyncio.Event()

    def take(self, batch: Batch) -> None:
        samples = samples_in(batch).tolist()
        self._row_of |= {
            sample: (batch.partition, row) for sample, row in zip(samples, batch.rows.tolist(), strict=True)
        }

    def finish(self, samples: Sequence[Completion]) -> None:
        """Hand samples over to be written."""
        self._finished += samples
        self._changed.set()

    async def all_written(self) -> None:
        """Wait until no row is open."""
        while self._row_of:
            self._empty.clear()
            with self._waits("empty", "its last samples"):
                await self._empty.wait()

    async def write(self) -> None:
        """Consumes completions, produces rows. What finishes while a put is under way goes with the next one."""
        while True:
            with self._waits("write", "finished samples"):
                await self._changed.wait()
            self._changed.clear()
            finished, self._finished = self._finished, []
            by_partition: dict[str, list[Completion]] = {}
            for completion in finished:
                partition, _ = self._row_of[completion.sample_id]
                by_partition.setdefault(partition, []).append(completion)
            for partition, part in by_partition.items():
                rows = [self._row_of[completion.sample_id][1] for completion in part]
                await self._queue.put(partition, rows, rollout_columns(part, self._engine))
                for completion in part:
                    del self._row_of[completion.sample_id]
            if not self._row_of:
                self._empty.set()


def rollout_columns(completed: Sequence[Completion], engine: int) -> dict[str, Column]:
    """Columns that rollout writes of samples that this engine finished."""
    return {
        "response": Ragged.from_rows([c.tokens for c in completed]),
        "log_probs": Ragged.from_rows([c.log_probs for c in completed]),
        "versions": Ragged.from_rows([c.versions for c in completed]),
        "engine": np.full(len(completed), engine, np.int32),
        "started_at": np.array([c.started_at for c in completed], np.float64),
        "finished_at": np.array([c.finished_at for c in completed], np.float64),
        "loss_mask": Ragged.from_rows([_mask(c) for c in completed]),
        "finish_reason": np.array([FINISH_REASONS.index(c.finish_reason) for c in completed], np.int8),
        "turns": np.array([c.turns for c in completed], np.int32),
        "environment_reward": np.array([c.environment_reward for c in completed], np.float32),
        "failure": text_column([c.failure for c in completed]),
    }


def _mask(completion: Completion) -> np.ndarray:
    """bool [L]: True where the policy sampled."""
    return np.ones(len(completion.tokens), np.bool_) if completion.mask is None else completion.mask
