"""Stores at which process groups meet: what torch asks of one, and what strangers get of one between hosts."""

import gc
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo

from engines.gloo_groups import all_connected, prove
from harness.runtime.stores import join_store, open_store

HOST = "127.0.0.1"


@pytest.mark.parametrize("between_hosts", [False, True])
def test_a_group_meets_and_a_key_that_nobody_writes_is_waited_for_so_long(between_hosts: bool, tmp_path: Path) -> None:
    store, place = open_store(HOST if between_hosts else str(tmp_path / "store"), 2, 60.0)

    def total(rank: int) -> float:
        own = join_store(place, 2, 60.0)

        def build() -> ProcessGroupGloo:
            prefixed = PrefixStore("group", own)
            group = ProcessGroupGloo(prefixed, rank, 2, timedelta(seconds=60))
            prove(group, prefixed)
            return group

        group, summed = all_connected(build, own, "pair", rank, (0, 1), 60.0), torch.ones(1)
        gc.collect()
        group.allreduce([summed]).wait()
        own.add("left", 1)
        return summed.item()

    with ThreadPoolExecutor(2) as ranks:
        assert [*ranks.map(total, (0, 1))] == [2.0, 2.0]
    assert store.add("left", 0) == 2 and store.check(["left"]) and not store.check(["left", "lacking"])
    assert store.delete_key("left") and not store.check(["left"])
    with pytest.raises(RuntimeError, match="(?i)timeout"):
        store.wait(["lacking"], timedelta(seconds=0.2))


def test_strangers_neither_read_nor_write_nor_hold_up_a_store_between_hosts() -> None:
    store, place = open_store(HOST, 2, 60.0)
    store.set("weights of 0/here 0", "")
    address, _, token = place.partition(" ")
    port = int(address.partition("#")[0].rpartition(":")[2])

    with pytest.raises(RuntimeError, match="no store of this run") as refused:
        join_store(f"{address} {'00' * 32}", 2, 60.0)
    with pytest.raises(RuntimeError, match="another certificate"):
        join_store(f"{address[:-64]}{'0' * 64} {token}", 2, 60.0)
    assert token not in str(refused.value) + repr(store)
    with ExitStack() as open_ones:
        for said in [os.urandom(4096), b"\x03set\x01a\x01b" * 100] + [b""] * 300:
            stranger = open_ones.enter_context(socket.create_connection((HOST, port)))
            stranger.sendall(said)
        assert join_store(place, 2, 60.0).get("weights of 0/here 0") == b"" and not store.check(["a"])

    del store
    gc.collect()
    with pytest.raises(RuntimeError, match="no store of this run"):
        join_store(place, 2, 5.0)
