"""How busy do the samples of an iteration keep the event loop that runs the schedule, and how many bytes come to it?

    python -m tests.benchmarks.bench_control_plane [--sizes 1024x8192,8192x8192]

Rows of random tokens lie in a queue of its own process, as after training; the driver asks the recorder, in a worker of
its own, which reads and writes. Prints for each size seconds of CPU of the driver's thread, bytes that come to it, and
seconds until all is written. 8,192 x 8,192 tokens take about 6 GiB of memory.
"""

import argparse
import asyncio
import math
import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.metrics.arrivals import FORMAT, RunOf
from harness.metrics.parts import SampleParts
from harness.rl.diagnostics import diagnostics
from harness.runtime import messages as m
from harness.runtime.local_runtime import LocalRuntime
from harness.runtime.runtime import RealClock, RoleName
from harness.transfer_queue import Column, QueueSpec, Ragged, TaskSpec, TransferQueue
from harness.workers.dataflow import PROMPT_COLUMNS, RECORD, RECORDED, REWARD_COLUMNS, ROLLOUT_COLUMNS, text_column
from harness.workers.recording import RecordingSettings, RecordRole, TokenDecoder, TrainedIteration, WrittenSoFar
from harness.workers.training import TrainedRows, TrainReport

GROUP, MICRO_BATCH, PROMPT = 8, 64, 256
_ZEROS = torch.zeros(8)
SUMS = diagnostics(
    _ZEROS, _ZEROS, _ZEROS, _ZEROS == 0, entropies=_ZEROS, gradients=_ZEROS, unbounded=_ZEROS
)  # of a training step
COLUMNS = PROMPT_COLUMNS | ROLLOUT_COLUMNS | REWARD_COLUMNS


def columns_of(rows: np.ndarray, tokens: int) -> dict[str, Column]:
    k = rows.size

    def of_tokens(values: Any) -> Ragged:
        return Ragged(values, np.full(k, tokens))

    times = rows / 1000
    return {
        "prompt": Ragged(np.zeros(k * PROMPT, np.int64), np.full(k, PROMPT)), "admitted_at": times,
        "response": of_tokens(np.random.default_rng(0).integers(0, 150_000, k * tokens)),
        "log_probs": of_tokens(np.full(k * tokens, -0.5, np.float32)),
        "versions": of_tokens(np.zeros(k * tokens, np.int32)), "loss_mask": of_tokens(np.ones(k * tokens, np.bool_)),
        "engine": np.zeros(k, np.int32), "started_at": times + 1, "first_token_at": times + 1.5,
        "finished_at": times + 2, "finish_reason": np.zeros(k, np.int8), "turns": np.ones(k, np.int32),
        "reward": np.ones(k, np.float64), "exact_match": np.ones(k, np.bool_),
        "reward_failure": text_column([""] * k),
    }  # fmt: skip


def trained(samples: int, sums: dict[str, float], into: WrittenSoFar) -> TrainedIteration:
    parts = [
        TrainedRows(rows, rows, np.ones(rows.size), 3.0)
        for start in range(0, samples, MICRO_BATCH)
        for rows in [np.arange(start, min(samples, start + MICRO_BATCH))]
    ]
    return TrainedIteration(0, [parts], sums, [], [], refused=0, late=0, into=into)


def build(roles: Any, *, queue: TransferQueue, recording: RecordingSettings) -> dict[RoleName, Any]:
    return {(RECORD, 0): RecordRole(queue, RealClock.starting_now(), recording)}


async def record(
    runtime: LocalRuntime, told: TrainedIteration, tokens: int, recording: RecordingSettings
) -> tuple[Any, ...]:
    """Busy seconds, bytes, and seconds until all is written."""
    tasks = {RECORD: TaskSpec(RECORDED, policy="ready", lease_s=math.inf, background=True)}
    queue: Any = runtime.start_queue(QueueSpec(COLUMNS, tasks), None)
    from tests.benchmarks import bench_control_plane as importable  # as a script this module has no name to load it by

    made = partial(importable.build, queue=queue.for_role("writer"), recording=recording)
    (recorder,) = runtime.start_worker("host", (), {(RECORD, 0): RecordRole}, made)
    await recorder.role.waiting()
    rows = told.rows(GROUP)
    await queue.create_partition("train_0", rows, GROUP)
    for part in told.ranks[0]:
        await queue.put("train_0", part.rows, columns_of(part.rows, tokens))
    report = m.encode(TrainReport(told.ranks[0], told.sums))
    busy, began = time.thread_time(), time.monotonic()
    m.decode(report, TrainReport)
    recorded = await recorder.role.record(told)
    await queue.finish(RECORD, rows)
    await queue.clear_finished()
    return time.thread_time() - busy, len(report) + len(m.encode(recorded)), time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1024x8192,8192x8192", help="samples x tokens, some of them")
    print(f"{'samples x tokens':>18} {'driver busy s':>14} {'bytes':>15} {'written after s':>16}")
    for size in parser.parse_args().sizes.split(","):
        samples, tokens = map(int, size.split("x"))
        recording = RecordingSettings(TokenDecoder(), GROUP, run_of=RunOf(FORMAT, 0, 1, GROUP))
        with tempfile.TemporaryDirectory() as folder:
            with closing(SampleParts(Path(folder), (), recording.run_of)) as parts:
                told = trained(samples, SUMS, WrittenSoFar(folder, parts.sizes))
            with LocalRuntime(gpu=False, start_timeout_s=120, call_timeout_s=600) as runtime:
                busy, got, after = asyncio.run(record(runtime, told, tokens, recording))
        print(f"{size:>18} {busy:>14.4f} {got:>15,} {after:>16.2f}", flush=True)


if __name__ == "__main__":
    main()
