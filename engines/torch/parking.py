"""Slots of samples that came to the end of a turn: what is in them is kept until somebody else needs the room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Slots(Protocol):
    """Slots that hold the keys and values of samples."""

    slots: int

    def move(self, source: int, target: int) -> None:
        """Copy a slot to another."""

    def swap(self, one: int, other: int) -> None:
        """Exchange two slots."""


class Parking:
    """Running samples have the slots 0 to n - 1; of those from n on this says who is parked where.

    A slot holds the keys and values of all tokens of its sample but the last. The sample gets them back where it goes
    on by the very same tokens.
    """

    def __init__(self, cache: Slots) -> None:
        self._cache = cache
        self._slot_of: dict[int, int] = {}  # by sample, the longest parked one first
        self._tokens: dict[int, list[int]] = {}

    def park(self, sample: int, tokens: Sequence[int], slot: int) -> None:
        """Note that a sample runs no longer; its slot is the first that no running sample has."""
        self.forget(sample)
        self._slot_of[sample], self._tokens[sample] = slot, list(tokens)

    def bring(self, sample: int, tokens: Sequence[int], slot: int) -> int:
        """Make `slot` the sample's own: the first that no running sample has. Returns for how many of its tokens keys
        and values are there, 0 for one that is not parked. Who is parked there goes to a free slot; where none is free
        the one that is parked longest makes room."""
        known = self._tokens.get(sample, [])
        if known != list(tokens[: len(known)]):
            self.forget(sample)
        if (own := self._slot_of.get(sample)) is not None:
            self._exchange(own, slot)
            self.forget(sample)
            return len(known) - 1
        self._vacate(slot)
        return 0

    def forget(self, sample: int) -> None:
        """Forget a sample, if it is parked."""
        self._slot_of.pop(sample, None)
        self._tokens.pop(sample, None)

    def clear(self) -> None:
        """Forget all samples: what is in the slots holds no longer."""
        self._slot_of.clear()
        self._tokens.clear()

    def _exchange(self, own: int, slot: int) -> None:
        if own == slot:
            return
        if (there := self._parked_at(slot)) is None:
            self._cache.move(own, slot)
        else:
            self._cache.swap(own, slot)
            self._slot_of[there] = own

    def _vacate(self, slot: int) -> None:
        if (there := self._parked_at(slot)) is None:
            return
        free = next(iter(set(range(slot + 1, self._cache.slots)) - set(self._slot_of.values())), None)
        if free is None:
            longest = next(iter(self._slot_of))
            free = self._slot_of[longest]
            self.forget(longest)
        if there in self._slot_of:
            self._cache.move(slot, free)
            self._slot_of[there] = free

    def _parked_at(self, slot: int) -> int | None:
        return next((sample for sample, at in self._slot_of.items() if at == slot), None)
