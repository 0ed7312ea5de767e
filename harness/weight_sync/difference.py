"""A bucket as the difference to what its receivers hold: the words that changed, and a bit for each that says which.

Both ends keep each bucket as the last message over their groups left it, and new ends keep none: so all of a bucket
travels to them, as it does where that is less. Digests are of the whole bucket, however it travels, so that a receiver
that holds anything else notices. Exact: words are compared and copied, whatever numbers they are.
"""

import torch

from harness.weight_sync.plan import Bucket

_WORD = torch.int32
_BLOCK = 8 * _WORD.itemsize  # bytes whose words have a byte of bits; what is left at the end always travels

# Eight bytes of 0 or 1 become the bits of one, and again bytes: multiplied, each bit has a place that no other gets.
_GATHER, _SPREAD = 0x0102_0408_1020_4080, 0x0101_0101_0101_0101
_PICK = 0x8040_2010_0804_0201 - (1 << 64)  # as int64


class Held:
    """Buckets as they are at the other ends, or at this one: uint8 [bucket.bytes] each."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def message(self, bucket: Bucket, data: torch.Tensor, digests: torch.Tensor) -> list[torch.Tensor]:
        """Make of `data` (uint8 [>= bucket.bytes]) what travels, a head and a body, which may be `data` itself. Head:
        int64 [1 + tensors], the bytes of the body and the digests. From now on this is what the others hold."""
        new, held = data[: bucket.bytes], self._of(bucket)
        body = new if held is None else difference(new, held)
        if held is None:
            self._held[_name(bucket)] = new.clone()
        else:
            held.copy_(new)
        return [torch.cat([digests.new_tensor([len(body)]), digests]), body]

    def taken(self, bucket: Bucket, body: torch.Tensor) -> torch.Tensor:
        """The bucket as it is with this body; valid until the next one."""
        held = self._of(bucket)
        if held is None:
            held = self._held[_name(bucket)] = torch.zeros(bucket.bytes, dtype=torch.uint8, device=body.device)
        apply(body, held)
        return held

    def _of(self, bucket: Bucket) -> torch.Tensor | None:
        return self._held.get(_name(bucket))


def difference(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The body by which `apply` makes `new` of `old`, uint8 [n] both: changed words, their bits, and the last bytes; or
    `new` itself where more than half of the words changed."""
    end = len(new) // _BLOCK * _BLOCK
    words = new[:end].view(_WORD)
    changed = words != old[:end].view(_WORD)
    if 2 * int(changed.count_nonzero()) > len(words):
        return new
    bits = (changed.view(torch.int64) * _GATHER >> 56).to(torch.uint8)
    return torch.cat([words[changed].view(torch.uint8), bits, new[end:]])


def apply(body: torch.Tensor, held: torch.Tensor) -> None:
    """Change `held` (uint8 [n]) as the body says. Raises RuntimeError where its length is of no such body."""
    if len(body) == len(held):
        held.copy_(body)
        return
    end = len(held) // _BLOCK * _BLOCK
    values, bits, rest = body.split([len(body) - end // _BLOCK - len(held) + end, end // _BLOCK, len(held) - end])
    changed = (bits.to(torch.int64) * _SPREAD & _PICK).view(torch.uint8) != 0
    held[:end].view(_WORD)[changed] = values.view(_WORD)
    held[end:] = rest


def _name(bucket: Bucket) -> str:
    return bucket.tensors[0].name
