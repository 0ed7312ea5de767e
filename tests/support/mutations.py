"""Files and settings spoilt at random, again the same for the same seed, and how long reading one may take."""

import random
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager

HOSTILE = (
    *("", "null", "-1", "0", "1e999", "nan", "9" * 5000, "1.5", "true", "[]", "{}", "x" * 3000, "../../x", "???"),
    *("${oc.env:HOME}", "${", "\x00", "\x1b[2J", "\n", '"', "'", "*a", "&a", "!!set", "é\u202e", "[" * 500, "{" * 500),
)


def spoilt(data: bytes, chance: random.Random) -> bytes:
    """A file with one to three changes."""
    for _ in range(chance.randint(1, 3)):
        at, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
        match chance.randrange(7):
            case 0:
                data = data[:at] + chance.randbytes(chance.randint(1, 8)) + data[at:]
            case 1:
                data = data[:at]
            case 2:
                data = data[:at] + data[end:]
            case 3:
                data = data[:end] + data[at:end] + data[end:]
            case 4:
                changed = bytes([byte ^ 1 << chance.randrange(8) for byte in data[at : at + 1]])
                data = data[:at] + changed + data[at + 1 :]
            case 5:
                lines = data.split(b"\n")
                lines.pop(chance.randrange(len(lines)))
                data = b"\n".join(lines)
            case _:
                tokens = list(re.finditer(rb"[\w.+-]+", data))
                if tokens:
                    token = chance.choice(tokens)
                    data = data[: token.start()] + chance.choice(HOSTILE).encode() + data[token.end() :]
    return data


@contextmanager
def within(seconds: int, what: str) -> Iterator[None]:
    """Raises TimeoutError, which says what, instead of hanging."""

    def late(*_: object) -> None:
        raise TimeoutError(f"{what} took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
