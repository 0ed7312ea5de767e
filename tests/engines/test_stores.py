"""Stores at which process groups meet: who reaches them."""

import socket

import pytest

from engines.stores import listening_store


def test_a_store_listens_on_its_address_alone() -> None:
    store = listening_store("127.0.0.2", 2, 5.0)
    socket.create_connection(("127.0.0.2", store.port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port))
