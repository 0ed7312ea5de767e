"""Who listens to a host's bridge: which of these words cross it in clear, until standard input ends.

    python -m tests.support.eavesdropper WORD...

Says "ready", then at the end the words that one frame had, each in a line. Root only (a packet socket).
"""

import select
import socket
import sys

_ALL_FRAMES = 3  # ETH_P_ALL of linux/if_ether.h
_LONGEST = 1 << 16  # bytes of a frame, where devices leave it to each other to cut them
_BUFFER = 32 << 20


def overheard(words: list[str]) -> list[str]:
    wanted, heard = {word: word.encode() for word in words}, set[str]()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_FRAMES)) as frames:
        frames.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        print("ready", flush=True)
        while True:
            readable, _, _ = select.select([frames, sys.stdin], [], [])
            if frames in readable:
                frame = frames.recv(_LONGEST)
                heard |= {word for word, said in wanted.items() if said in frame}
            elif not sys.stdin.read(1):
                return sorted(heard)


if __name__ == "__main__":
    for word in overheard(sys.argv[1:]):
        print(word)
