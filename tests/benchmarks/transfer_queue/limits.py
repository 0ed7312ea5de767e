"""What this machine can do at most, with nothing in between: copies, round trips, hand-overs in shared memory."""

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory

import numpy as np

from tests.benchmarks.transfer_queue.cases import GROUP, MICRO_BATCH
from tests.benchmarks.transfer_queue.workload import MEDIAN_TOKENS, ROLLOUT, SPREAD, TRAINING, WRITTEN, bytes_of

ROUNDS = 5
SLOTS = 16


def copy_bytes_per_s(size: int, copies: int) -> float:
    """Bytes copied a second, from one array of `size` bytes to another."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    def once() -> float:
        began = time.perf_counter()
        for _ in range(copies):
            np.copyto(target, source)
        return size * copies / (time.perf_counter() - began)

    return _median(once)


def round_trip_s(pair: Callable[[], tuple[socket.socket, socket.socket]], trips: int = 5000) -> float:
    """64 bytes to another process and back, both waiting in blocking calls: the median."""
    mine, other_end = pair()
    process = _context().Process(target=_echo, args=(other_end,))
    process.start()
    other_end.close()
    with mine:
        took = []
        for _ in range(trips):
            began = time.perf_counter()
            mine.sendall(bytes(64))
            mine.recv(64)
            took.append(time.perf_counter() - began)
    process.join()
    return statistics.median(took)


def unix_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mine = socket.create_connection(listener.getsockname())
        other_end, _ = listener.accept()
    for end in (mine, other_end):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return mine, other_end


def handed_over_per_s(size: int, messages: int) -> float:
    """Payloads a second from one process to another: copied into shared memory, announced over a socket, copied out."""

    def once() -> float:
        shared = SharedMemory(create=True, size=size * SLOTS)
        mine, other_end = unix_pair()
        process = _context().Process(target=_write, args=(shared.name, size, messages, other_end))
        try:
            process.start()
            other_end.close()
            with mine:
                return messages / _read(shared, size, messages, mine)
        finally:
            process.join()
            shared.close()
            shared.unlink()

    return _median(once)


def _read(shared: SharedMemory, size: int, messages: int, mine: socket.socket) -> float:
    """Seconds."""
    slots, own = np.ndarray((SLOTS, size), np.uint8, shared.buf), np.zeros(size, np.uint8)
    mine.sendall(bytes(SLOTS))  # so many slots are free
    began = 0.0
    done = 0
    while done < messages:
        arrived = len(mine.recv(SLOTS))
        began = began or time.perf_counter()
        for _ in range(arrived):
            np.copyto(own, slots[done % SLOTS])
            done += 1
        mine.sendall(bytes(arrived))
    return time.perf_counter() - began


def _write(name: str, size: int, messages: int, other_end: socket.socket) -> None:
    shared = SharedMemory(name=name)
    slots, own = np.ndarray((SLOTS, size), np.uint8, shared.buf), np.ones(size, np.uint8)
    free = 0
    with other_end:
        for message in range(messages):
            while not free:
                free += len(other_end.recv(SLOTS))
            np.copyto(slots[message % SLOTS], own)
            other_end.sendall(b"x")
            free -= 1
        while other_end.recv(SLOTS):  # until the reader has all
            pass
    del slots
    shared.close()


def _echo(other_end: socket.socket) -> None:
    with other_end:
        while data := other_end.recv(64):
            other_end.sendall(data)


def _median(once: Callable[[], float]) -> float:
    return statistics.median(once() for _ in range(ROUNDS))


def _context() -> multiprocessing.context.SpawnContext:
    return multiprocessing.get_context("spawn")


def stream_bound(copy: float, round_trip: float) -> float:
    """Samples/s of the four-task stream on one core that does nothing but what no queue of this kind can do without:
    each byte copied in by its writer and out by its reader, one round trip for each put and get."""
    tokens = MEDIAN_TOKENS * float(np.exp(SPREAD**2 / 2))
    moved = bytes_of((*ROLLOUT, *WRITTEN.values()), tokens) + sum(bytes_of(c, tokens) for c in TRAINING.values())
    trips = 1 / GROUP + (len(WRITTEN) + len(TRAINING)) / MICRO_BATCH
    return 1 / (moved / copy + trips * round_trip)


def measure() -> dict[str, float]:
    """Figures by name, units in the names."""
    copy = copy_bytes_per_s(256 << 20, 2)
    unix, tcp = round_trip_s(unix_pair), round_trip_s(tcp_pair)
    small, large = handed_over_per_s(16 << 10, 20_000), handed_over_per_s(1 << 20, 2000)
    return {
        "memcpy, 16 KB, GB/s": copy_bytes_per_s(16 << 10, 100_000) / 1e9,
        "memcpy, 1 MB, GB/s": copy_bytes_per_s(1 << 20, 2000) / 1e9,
        "memcpy, 256 MB, GB/s": copy / 1e9,
        "round trip, unix socket, us": 1e6 * unix,
        "round trip, TCP, us": 1e6 * tcp,
        "shared memory, 16 KB, payloads/s": small,
        "shared memory, 16 KB, GB/s": small * (16 << 10) / 1e9,
        "shared memory, 1 MB, payloads/s": large,
        "shared memory, 1 MB, GB/s": large * (1 << 20) / 1e9,
        "four-task stream on one core, copies and round trips alone, samples/s": stream_bound(copy, unix),
    }


def main() -> None:
    for name, value in measure().items():
        print(f"{name:<75} {value:>12,.1f}")


if __name__ == "__main__":
    main()
