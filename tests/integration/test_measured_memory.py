"""The plan of memory held against what training allocates: FSDP2 over Gloo in worlds of 1, 2 and 4 processes, counted
tensor by tensor."""

import multiprocessing
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from tests.support.counted_memory import CountedMemory
from tests.support.fsdp_samples import FREE, World, computed
from tests.support.training_case import TrainingCase

WITHIN = 0.05
TIMEOUT_S = 300.0


CASES = [
    TrainingCase(1, rows=4, response=100),
    TrainingCase(2, dtype="float32", vocabulary=4096, response=100),
    TrainingCase(2, dtype="float32", layout="packed", recompute=True, ff=512, layers=8, architecture="qwen3"),
    TrainingCase(1, lora_rank=8),
    TrainingCase(2, dtype="float32", layout="packed", architecture="qwen3_moe", ff=256, experts=8, spread=2),
    TrainingCase(4, recompute=True, architecture="qwen3", hidden=128, ff=1024, layers=3, rows=4, response=100),
]
"""Each way of training in one or two of them; of bfloat16, which CPUs compute slowly, as little as will do."""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_allocates_what_is_planned(case: TrainingCase) -> None:
    found, planned = measured(case), case.planned
    expected = {
        "train": max(planned[phase] for phase in ("loss", "backward", "reduce")),
        "score": planned["score"],
        "step": planned["step"],
    }
    for what, planned_bytes in expected.items():
        assert planned_bytes == pytest.approx(found[what], rel=WITHIN), what


def measured(case: TrainingCase) -> dict[str, int]:
    """Peaks of the first rank: of scoring, of a micro-batch after others, and of a step. Bytes."""
    served = multiprocessing.get_context("forkserver")  # this process has threads: a child of it may find a lock held
    served.set_forkserver_preload(["tests.support.fsdp_samples"])
    answers = served.SimpleQueue()
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ranks = [served.Process(target=_rank, args=(case, rank, store.port, answers)) for rank in range(case.world)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(TIMEOUT_S)
        assert [rank.exitcode for rank in ranks] == [0] * case.world
        return answers.get()
    finally:
        for rank in ranks:
            rank.kill()


def _rank(case: TrainingCase, rank: int, port: int, answers: Any) -> None:
    torch.set_num_threads(1)  # ranks are more than cores: threads that wait for each other would take minutes
    store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    batch, found = case.batch, {}
    with World(store, rank, case.world) as world, CountedMemory() as memory:
        engine = world.engine(FREE, case.training, case.model)

        def peak(work: Any) -> int:
            memory.forget_peak()
            computed(work)
            return memory.peak

        peak(engine.accumulate(batch))
        peak(engine.step())  # makes the optimizer's state
        peak(engine.accumulate(batch))
        found["train"] = peak(engine.accumulate(batch))
        found["score"] = peak(engine.scorer().log_probs(batch.prompts, batch.responses))
        found["step"] = peak(engine.step())
    if rank == 0:
        answers.put(found)
