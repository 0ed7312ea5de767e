"""Groups that are trained as they complete, dealt by the first rank of several."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from harness.transfer_queue import Batch, Column, Ragged
from harness.workers.actor import ActorRole
from harness.workers.dataflow import partition_name
from harness.workers.dealing import DealtQueue, DealtReader, WorldScatter, deal, in_groups
from harness.workers.readers import CompletionReader
from harness.workers.stages import ReferenceStage
from harness.workers.training import TrainReport
from tests.support.fsdp_samples import World
from tests.support.processes import run_in_processes
from tests.support.role_setting import CPU, GROUP, GROUPS, CountingQueue, TickingClock, settle
from tests.support.trained_groups import NotingTrainer, columns, groups_of

MICRO = 2  # groups of a rank


def numbered(first: int, groups: int) -> Batch:
    """Groups of two rows; each row says which it is in a dense column, and as often in the ragged ones."""
    rows = np.arange(2 * first, 2 * (first + groups))
    ragged = Ragged.from_rows([np.full(row * row % 7, row) for row in rows], np.int64)
    many = {"dense": rows * 10, "prompt": ragged, "response": ragged}
    return Batch(f"train_{first}", rows, many, lease=first)


@given(st.integers(1, 5), st.lists(st.integers(1, 6), max_size=12))
async def test_every_rank_is_dealt_as_many_groups_and_no_row_is_lost_or_changed(ranks: int, sizes: list[int]) -> None:
    sizes.append(ranks - sum(sizes) % ranks)

    async def batches() -> AsyncIterator[Batch]:
        first = 0
        for size in sizes:
            yield numbered(first, size)
            first += size

    seen = 0
    async for shares in deal(batches(), ranks, 2):
        assert len(shares) == ranks and len({len(share) for share in shares}) == 1 and len(shares[0])
        for share in shares:
            assert share.dense("dense").tolist() == [10 * row for row in share.rows]
            assert [part.tolist() for part in share.ragged("prompt").rows()] == [[r] * (r * r % 7) for r in share.rows]
            assert (share.rows[::2] % 2 == 0).all() and (share.rows[1::2] == share.rows[::2] + 1).all(), "groups whole"
        rows = np.concatenate([share.rows for share in shares])
        assert sorted(rows) == list(range(seen, seen + len(rows))), "as they come"
        seen += len(rows)
        tokens = [len(share.ragged("prompt").values) for share in shares]
        heaviest = max(len(group.ragged("prompt").values) for share in shares for group in in_groups(share, 2))
        assert max(tokens) - min(tokens) <= heaviest
    assert seen == 2 * sum(sizes)


async def test_a_batch_that_ranks_do_not_divide_is_an_error() -> None:
    async def batches() -> AsyncIterator[Batch]:
        yield numbered(0, 3)

    with pytest.raises(ValueError, match="1 groups are left over for 2 ranks"):
        _ = [shares async for shares in deal(batches(), 2, 2)]


class Table:
    """The scatter of a world whose ranks are in this event loop."""

    def __init__(self, ranks: int) -> None:
        self._places = [asyncio.Queue[Any]() for _ in range(ranks)]

    def of(self, rank: int) -> Any:
        async def scatter(shares: Sequence[Any] | None) -> Any:
            assert (shares is None) == (rank > 0)
            for place, share in zip(self._places, shares or (), strict=False):
                place.put_nowait(share)
            return await self._places[rank].get()

        return scatter


def actors(queue: CountingQueue, ranks: int, batch: int) -> list[ActorRole]:
    table = Table(ranks)
    reader = CompletionReader(queue, rows=ranks * MICRO * GROUP, group_size=GROUP, batch=batch)

    def actor(rank: int) -> ActorRole:
        dealt = DealtReader(reader if rank == 0 else None, table.of(rank), ranks=ranks, group_size=GROUP)
        return ActorRole(NotingTrainer(), TickingClock(), rank=rank, reader=dealt, device=CPU)

    return [actor(rank) for rank in range(ranks)]


async def trained(world: list[ActorRole], iteration: int, first: Sequence[tuple[int, int]] = ()) -> list[TrainReport]:
    return await asyncio.gather(*(actor.train(iteration, first) for actor in world))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", range(8))
async def test_ranks_agree_on_every_batch_and_what_is_due_is_in_it(ranks: int, seed: int) -> None:
    """Two batches are trained of three that are started: the first `late` groups, under a limit of their own, complete
    last, and are due in the second."""
    draw, batch = random.Random(seed), 8
    queue = CountingQueue(("rollout", "actor"), order="completion", training_ranks=ranks)
    for iteration in range(3):
        await queue.admit(iteration)
    world, late = actors(queue, ranks, batch), draw.randrange(1, 5)
    await queue.start(late, below=late)
    await queue.start(3 * GROUPS - late, below=3 * GROUPS)
    others = draw.sample(range(late, 3 * GROUPS), 3 * GROUPS - late)
    due = draw.sample(range(late), late)

    async def complete(groups: list[int]) -> None:
        while groups:
            some, groups = groups[: (size := draw.randrange(1, 4))], groups[size:]
            for group in some:
                rows = range(group * GROUP, (group + 1) * GROUP)
                await queue.put(partition_name(group // GROUPS), rows, columns(rows))
            await settle()

    reports = []
    for iteration, left in ((0, 2 * batch), (1, batch)):
        training = asyncio.create_task(trained(world, iteration, first=[(late, left)]))
        await complete(others[:batch] if iteration == 0 else others[batch:])
        if iteration == 1:
            assert not training.done(), "what is due is waited for"
            await complete(due)
        reports.append(await training)
    for of_ranks in reports:
        passes = {tuple(len(part.rows) for part in report.trained) for report in of_ranks}
        assert len(passes) == 1 and max(max(sizes) for sizes in passes) <= MICRO * GROUP
    groups = [[group for report in of_ranks for group in groups_of(report)] for of_ranks in reports]
    assert [len(set(of_batch)) for of_batch in groups] == [batch, batch] and not set(groups[0]) & set(groups[1])
    assert set(range(late)) <= set(groups[1])
    assert sorted(groups[0]) == sorted(others[:batch])


class LengthScorer:
    """A scorer that notes how many samples each pass had."""

    def __init__(self) -> None:
        self.passes: list[int] = []

    async def log_probs(self, prompts: Ragged, responses: Ragged) -> Ragged:
        self.passes.append(len(prompts))
        return Ragged(np.zeros(len(responses.values), np.float32), responses.lengths)


class NotingQueue(CountingQueue):
    def __init__(self, **spec: Any) -> None:
        super().__init__(("rollout", "reference", "actor"), order="completion", **spec)
        self.scored = Counter[int]()

    async def put(self, partition: str, rows: Iterable[int], columns: Mapping[str, Column]) -> None:
        if "ref_log_probs" in columns:
            self.scored.update(rows := list(rows))
        await super().put(partition, rows, columns)


@pytest.mark.parametrize(("ranks", "together"), [(2, 1), (4, 1), (2, 2)])
async def test_a_stage_beside_the_ranks_scores_every_group_at_once(ranks: int, together: int) -> None:
    draw, queue = random.Random(ranks), NotingQueue(training_ranks=ranks, beside_actor=("reference",))
    table, scorers = Table(ranks * together), [LengthScorer() for _ in range(ranks * together)]
    stages = [
        ReferenceStage(
            scorer,
            queue=DealtQueue(queue, table.of(rank), rank=rank, ranks=ranks, group_size=GROUP, together=together),
            clock=TickingClock(),
            name=str(rank),
            rows=MICRO * GROUP,
            minimum=GROUP,
        )
        for rank, scorer in enumerate(scorers)
    ]
    await queue.admit(0)
    streaming = asyncio.gather(*(stage.stream() for stage in stages))
    groups, done = draw.sample(range(GROUPS), GROUPS), 0
    while groups:
        some, groups = groups[: (size := draw.randrange(1, 4))], groups[size:]
        for group in some:
            await queue.respond(range(group * GROUP, (group + 1) * GROUP))
        await settle()
        done += len(some)
        assert len(queue.scored) == done * GROUP, "a group waits for others to come"
    await queue.close()
    await streaming
    assert set(queue.scored) == set(range(GROUPS * GROUP)) and set(queue.scored.values()) == {1}
    assert len({len(scorer.passes) for scorer in scorers}) == 1
    assert max(max(scorer.passes) for scorer in scorers) <= MICRO * GROUP


def dealt_in_a_world(rank: int, port: int) -> list[Any]:
    store = TCPStore("127.0.0.1", port, 2, False, wait_for_workers=False)

    async def take() -> list[Any]:
        scatter, dealt = WorldScatter(60.0), [[numbered(0, 1), numbered(1, 2)], [None, 5]]
        return [await scatter(shares if rank == 0 else None) for shares in dealt]

    with World(store, rank, 2):
        return asyncio.run(take())


def test_shares_reach_the_ranks_of_a_world() -> None:
    store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    (first, nothing), (second, five) = run_in_processes(dealt_in_a_world, [(rank, store.port) for rank in range(2)], 60)
    assert (first.rows.tolist(), nothing, second.rows.tolist(), five) == ([0, 1], None, [2, 3, 4, 5], 5)
