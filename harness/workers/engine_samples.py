"""The whereabouts of the samples of one engine: pure, no I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from harness.protocols import Completion, Request, Sampling


class EngineSamples:
    """Samples that one engine has, that are between two of their turns, or that a pause took back.

    several_turns: whether a sample goes on after a completion, until it `ended`; else its completion is its end.
    greedy: how the first sample of each group is drawn; None: as the others.
    """

    def __init__(self, group_size: int, *, several_turns: bool = False, greedy: Sampling | None = None) -> None:
        self._group_size, self._several_turns, self._greedy = group_size, several_turns, greedy
        self._in_engine: dict[int, Request] = {}  # or done there, and not `finished` here
        self.playing: set[int] = set()
        """Samples of several turns that the engine has had, and that have another turn or may."""
        self.taking_back = False
        """A pause is taking back what the engine has: its slots are empty for a moment only."""
        self._taken_back: list[int] = []
        self._again: set[int] = set()  # between two turns, to begin again

    def __contains__(self, sample: int) -> bool:
        return sample in self._in_engine

    def request(self, sample: int, prompt: np.ndarray, partial: Completion | None = None) -> Request:
        """The request of this sample, as it is drawn. prompt: int64 [n]."""
        return Request(sample, prompt, partial, self._greedy if sample % self._group_size == 0 else None)

    def submitted(self, requests: Collection[Request]) -> None:
        """The engine gets these."""
        self._in_engine |= {request.sample_id: request for request in requests}
        if self._several_turns:
            self.playing.update(request.sample_id for request in requests)
            self._again.difference_update(request.sample_id for request in requests)

    def finished(self, completions: Sequence[Completion]) -> list[Completion]:
        """Samples that are done, of what came out of the engine; what a pause took back stays here."""
        done = []
        for completion in completions:
            if self.taking_back and completion.finish_reason == "abort":
                self._taken_back.append(completion.sample_id)
            else:
                del self._in_engine[completion.sample_id]
                done.append(completion)
        return done

    def ended(self, sample: int) -> None:
        """Note that this sample of several turns has no other."""
        self._again.discard(sample)
        self.playing.remove(sample)

    def counted(self, busy: int) -> int:
        """Samples that count against the engine's share, where it has `busy` of them."""
        return len(self.playing) if self._several_turns else busy

    def all_taken_back(self, busy: int) -> bool:
        """Whether all that the engine gave up is here, where it still has `busy` samples."""
        return len(self._in_engine) <= len(self._taken_back) + busy

    def given_up(self) -> list[Request]:
        """Requests of what was taken back, from their prompts and in their order, to be submitted again. Samples that
        are between two turns begin again with the next one."""
        given_up, self._taken_back = set(self._taken_back), []
        self._again = self.playing - self._in_engine.keys()
        return [self.request(sample, made.prompt) for sample, made in self._in_engine.items() if sample in given_up]

    def begins_again(self, sample: int) -> bool:
        """Whether a sample between two turns is to begin again instead."""
        return sample in self._again
