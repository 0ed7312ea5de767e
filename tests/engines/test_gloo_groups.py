"""Stores at which process groups meet: who reaches them, and how long one waits there for the others."""

import multiprocessing
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection

import psutil
import pytest
import torch
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo, TCPStore

from engines.gloo_groups import all_connected, listening_store, prove
from engines.torch.fsdp import init_world
from tests.support.forking import forking


def test_a_store_listens_on_its_address_alone() -> None:
    store = listening_store("127.0.0.2", 2, 5.0)
    socket.create_connection(("127.0.0.2", store.port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port))


def store_at(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, 3, False, timedelta(seconds=60), wait_for_workers=False)


def test_one_that_never_connects_is_named_by_all_others_within_their_limit() -> None:
    """Building does not end here, as with Gloo, which waits five times as long as it is told."""
    held, for_ever = listening_store("127.0.0.1", 3, 60.0), threading.Event()

    def said(rank: int) -> str:
        with pytest.raises(TimeoutError) as gave_up:
            all_connected(for_ever.wait, store_at(held.port), "world", rank, range(3), 0.5)
        return str(gave_up.value)

    with ThreadPoolExecutor(2) as ranks:
        assert [*ranks.map(said, (0, 2))] == [
            f"world: rank {n} waited for rank 1, and gave up after 0 s" for n in (0, 2)
        ]
    for_ever.set()


def test_those_that_connect_have_what_they_built_and_an_abort_ends_the_wait() -> None:
    held = listening_store("127.0.0.1", 3, 60.0)
    with ThreadPoolExecutor(2) as ranks:
        both = [
            ranks.submit(all_connected, lambda rank=rank: rank, store_at(held.port), "pair", rank, (0, 1), 60.0)
            for rank in (0, 1)
        ]
        assert [each.result() for each in both] == [0, 1]
    for_ever = threading.Event()
    with pytest.raises(TimeoutError, match="pair: rank 0 waited for rank 1"):
        all_connected(for_ever.wait, store_at(held.port), "pair", 0, (0, 1), 60.0, aborted=lambda: True)
    for_ever.set()


def join_world(port: int, rank: int, said: Connection) -> None:
    """Rank 1 dies once the other can know that it has come."""
    if rank == 1:
        all_connected(lambda: os._exit(9), store_at(port), "training world", rank, range(2), 60.0)
    try:
        init_world(store_at(port), rank, 2, torch.device("cpu"), timeout_s=2.0)
    except RuntimeError as error:
        said.send(str(error))


@pytest.mark.slow
def test_a_training_rank_names_the_one_that_died_while_they_connected() -> None:
    held, (answer, said) = listening_store("127.0.0.1", 2, 60.0), multiprocessing.Pipe(duplex=False)
    ranks = [forking().Process(target=join_world, args=(held.port, rank, said)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    assert answer.poll(100) and answer.recv().startswith("training world: rank 0 waited for rank 1")
    for rank in ranks:
        rank.kill()
        rank.join()


def gloo(rank: int, store: HashStore) -> ProcessGroupGloo:
    return ProcessGroupGloo(PrefixStore("pair", store), rank, 2, timedelta(seconds=60))


def test_who_took_the_place_of_a_rank_in_gloo_without_the_store_is_noticed() -> None:
    where_gloo_meets, own = HashStore(), HashStore()
    PrefixStore("proofs ", own).set("1", "5a" * 64)  # the rank itself, which got no connection
    with ThreadPoolExecutor(1) as elsewhere:
        taken = elsewhere.submit(gloo, 1, where_gloo_meets)
        group, stranger = gloo(0, where_gloo_meets), taken.result()
        _kept = stranger.send([torch.zeros(32, dtype=torch.uint8)], 0, 0)

        with pytest.raises(PermissionError, match=r"somebody else took the place of rank 1$"):
            prove(group, own)


def test_nobody_reaches_gloo_once_a_group_has_formed() -> None:
    """Who did could have the process open files up to its limit, at which Gloo ends it."""

    def listeners() -> set[tuple[str, int]]:
        return {one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN}

    def build(rank: int) -> ProcessGroupGloo:
        group = gloo(rank, store)
        prove(group, store)
        return group

    store, before = HashStore(), listeners()
    with ThreadPoolExecutor(2) as ranks:
        forming = [
            ranks.submit(all_connected, lambda rank=rank: build(rank), store, "pair", rank, (0, 1), 60.0)
            for rank in (0, 1)
        ]
        pair = [each.result() for each in forming]
    opened = listeners() - before
    assert len(opened) == 2
    for address in opened:
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=0.3)
    sums = [torch.ones(1), torch.ones(1)]
    for work in [group.allreduce([tensor]) for group, tensor in zip(pair, sums, strict=True)]:
        work.wait()
    assert [tensor.item() for tensor in sums] == [2.0, 2.0]
