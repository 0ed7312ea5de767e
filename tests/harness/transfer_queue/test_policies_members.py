"""Readers that are one data-parallel rank together: each is handed what the others are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.transfer_queue import ColumnSpec, LeaseExpired, QueueSpec, TaskSpec
from harness.transfer_queue.control.asks import Answer, Ask
from harness.transfer_queue.control.controller import Controller
from harness.transfer_queue.frames import Frame, Handout

ROWS = 12


def controller(lease_s: float | None = None, ranks: int = 2, members: int = 2, rows: int = ROWS) -> Controller:
    task = TaskSpec(("reward",), policy="ready", ranks=ranks, members=members, lease_s=lease_s)
    books = Controller(QueueSpec({"reward": ColumnSpec("float32")}, {"train": task}))
    books.create("a", range(rows), 1)
    return books


def put(books: Controller, rows: list[int]) -> None:
    books.put("a", np.array(rows), Frame(len(rows), {"reward": 4 * len(rows)}, (0, 0)), {}, 0.0)


def ask(rank: int, member: int, minimum: int = 2) -> Ask:
    return Ask("train", 2, minimum, f"{rank}.{member}", rank, None, member=member)


def get(books: Controller, rank: int, member: int) -> Handout:
    handout = books.request(ask(rank, member), 0.0)
    assert isinstance(handout, Handout)
    return handout


def rows(books: Controller, rank: int, member: int) -> list[int]:
    return get(books, rank, member).rows.tolist()


def test_members_of_a_rank_get_the_same_rows_and_ranks_different_ones() -> None:
    books = controller()
    put(books, list(range(8)))
    assert [rows(books, 0, 0), rows(books, 0, 0), rows(books, 1, 1)] == [[0, 1], [4, 5], [2, 3]]
    assert [rows(books, 0, 1), rows(books, 0, 1), rows(books, 1, 0)] == [[0, 1], [4, 5], [2, 3]]


def test_a_share_is_done_when_all_members_acknowledged_it() -> None:
    books = controller(lease_s=9, ranks=1, rows=2)
    put(books, [0, 1])
    first, second = get(books, 0, 0), get(books, 0, 1)
    books.acknowledge(first.lease)
    books.acknowledge(first.lease)
    assert books.over() == [] and books.request(ask(0, 0), 0.0) is Answer.WAIT
    books.acknowledge(second.lease)
    assert books.over() == ["a"]


def test_only_the_member_whose_lease_is_lost_gets_the_share_again() -> None:
    books = controller(lease_s=9, ranks=1, rows=4)
    put(books, [0, 1, 2, 3])
    kept, lost = get(books, 0, 0), get(books, 0, 1)
    assert rows(books, 0, 1) == [2, 3]
    books.lose([lost.lease])
    assert (rows(books, 0, 1), rows(books, 0, 0)) == ([0, 1], [2, 3])
    books.acknowledge(kept.lease)
    with pytest.raises(LeaseExpired):
        books.acknowledge(lost.lease)


def test_a_partition_is_kept_for_a_member_that_has_still_to_collect_its_share() -> None:
    books = controller(ranks=1, rows=2)
    put(books, [0, 1])
    get(books, 0, 0)
    assert books.over() == []
    get(books, 0, 1)
    assert books.over() == ["a"]


def test_a_member_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="member 2 of task 'train' is outside its 2 members a rank"):
        ask(0, 2).check(controller().spec)


def test_members_would_have_to_agree_on_what_goes_first_or_is_dropped() -> None:
    books = controller(ranks=1)
    with pytest.raises(ValueError, match="1 ranks of 2 members and cannot drop rows"):
        books.drop("train", "train", 5)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data(), ranks=st.integers(1, 3), members=st.integers(1, 3), leased=st.booleans())
def test_any_order_of_readers_gives_members_the_same_shares_and_ranks_different_ones(
    data: st.DataObject, ranks: int, members: int, leased: bool
) -> None:
    books = controller(9.0 if leased else None, ranks, members)
    readers = [(rank, member) for rank in range(ranks) for member in range(members)]
    to_put = data.draw(st.permutations(range(ROWS)))
    got: dict[tuple[int, int], list[list[int]]] = {reader: [] for reader in readers}
    held: dict[int, tuple[tuple[int, int], list[int]]] = {}

    def read(reader: tuple[int, int]) -> bool:
        handout = books.request(ask(*reader, minimum=data.draw(st.integers(1, 2)) if to_put else 1), 0.0)
        if not isinstance(handout, Handout):
            return False
        held[handout.lease] = (reader, handout.rows.tolist())
        got[reader].append(handout.rows.tolist())
        return True

    for _ in range(data.draw(st.integers(5, 40))):
        what = data.draw(st.sampled_from(["put", "read", "read", "read", "end", "lose"]))
        if what == "put" and to_put:
            put(books, [to_put.pop() for _ in range(min(len(to_put), data.draw(st.integers(1, 5))))])
        elif what == "read":
            read(data.draw(st.sampled_from(readers)))
        elif held and what in ("end", "lose"):
            lease = data.draw(st.sampled_from(sorted(held)))
            reader, lost = held.pop(lease)
            if what == "end":
                books.acknowledge(lease)
            else:
                books.give_back(lease)
                got[reader].remove(lost)
    if to_put:
        put(books, list(to_put))
        to_put = []
    while any([read(reader) for reader in readers]):
        assert leased or held
    for lease in held:
        books.acknowledge(lease)
    for rank in range(ranks):
        shares = [sorted(map(tuple, got[rank, member])) for member in range(members)]
        assert shares == [shares[0]] * members, "every member was handed the same"
    if ranks * members > 1:
        assert sorted(row for rank in range(ranks) for share in got[rank, 0] for row in share) == list(range(ROWS))
    assert books.over() == ["a"]
    assert all(books.request(ask(*reader), 0.0) is Answer.WAIT for reader in readers)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data(), ranks=st.integers(1, 3), members=st.integers(2, 3))
def test_members_are_handed_their_shares_in_the_same_order(data: st.DataObject, ranks: int, members: int) -> None:
    books = controller(None, ranks, members)
    readers = [(rank, member) for rank in range(ranks) for member in range(members)]
    got: dict[tuple[int, int], list[list[int]]] = {reader: [] for reader in readers}
    to_put = data.draw(st.permutations(range(ROWS)))
    while to_put:
        put(books, [to_put.pop() for _ in range(min(len(to_put), data.draw(st.integers(1, 5))))])
        asking = data.draw(st.lists(st.sampled_from(readers), max_size=8))
        for reader in asking if to_put else asking + readers * ROWS:
            handout = books.request(ask(*reader, minimum=1), 0.0)
            if isinstance(handout, Handout):
                got[reader].append(handout.rows.tolist())
    assert all(got[rank, member] == got[rank, 0] for rank, member in readers)
    assert sorted(row for rank in range(ranks) for share in got[rank, 0] for row in share) == list(range(ROWS))
