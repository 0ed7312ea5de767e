"""The store where the processes of a torch.distributed group meet. torch's own listens on every address there is."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist


def listening_store(host: str, size: int, timeout_s: float) -> dist.TCPStore:
    """A store for `size` processes on a free port (`store.port`) of this address, and of no other. Whoever reaches the
    address may join."""
    family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(place)
        port: int = listener.getsockname()[1]
        return dist.TCPStore(
            host,
            port,
            size,
            True,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
