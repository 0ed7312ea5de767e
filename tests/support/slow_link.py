"""A link with delay and loss, as a process between two network devices that it makes: what is sent into one comes out
of the other, in order. The kernel need know nothing of it, and every connection goes through it.

    python -m tests.support.slow_link DEVICE DEVICE DELAY_S JITTER_S LOSS

says `ready` once both devices are there. It ends with its standard input, and says how many frames it dropped.
"""

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME = 1 << 16


def main(devices: list[str], delay_s: float, jitter_s: float, loss: float) -> int:
    """Frames that were dropped. delay_s, jitter_s: a frame is on its way for one more or less the other; loss: the
    share of frames that never arrive."""
    first, second = (_tap(name) for name in devices)
    towards, chance, dropped = {first: second, second: first}, random.Random(0), 0
    on_the_way: dict[int, deque[tuple[float, bytes]]] = {first: deque(), second: deque()}  # by where they come out
    print("ready", flush=True)
    while True:
        next_due = min((frames[0][0] for frames in on_the_way.values() if frames), default=None)
        wait_s = None if next_due is None else max(0.0, next_due - time.monotonic())
        readable, _, _ = select.select([*towards, sys.stdin], [], [], wait_s)
        if sys.stdin in readable:
            return dropped
        now = time.monotonic()
        for source in readable:
            frame, frames = os.read(source, _FRAME), on_the_way[towards[source]]
            if chance.random() < loss:
                dropped += 1
                continue
            due = now + delay_s + jitter_s * chance.uniform(-1, 1)
            frames.append((max(due, frames[-1][0] if frames else 0.0), frame))
        for sink, frames in on_the_way.items():
            while frames and frames[0][0] <= now:
                os.write(sink, frames.popleft()[1])


def _tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


if __name__ == "__main__":
    print(main(sys.argv[1:3], *map(float, sys.argv[3:6])), flush=True)
