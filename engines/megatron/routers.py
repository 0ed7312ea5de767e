"""Routers of megatron-core: experts that are given to tokens (routing replay), and what is told of their own choices.

Ranks that share layers route a slice of the sequence each, as `engines.megatron.training` fills it up to a multiple of
their number; what fills it is left out of what is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from engines.torch.experts import Routed, Routers
from engines.torch.scoring import LaidOut
from harness.rl.diagnostics import add_diagnostics

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


class Replay:
    """The experts of a router's tokens, in the place of megatron-core's `RouterReplay`: `now` of the pass that begins,
    int16 [N, k], None where the router chooses; `again` of those whose layers are still to be computed once more, of
    which the first comes first, as backward passes come in the order of forward ones."""

    def __init__(self, routers: Routers, recompute: bool) -> None:
        self._routers, self._recompute = routers, recompute
        self.now: torch.Tensor | None = None
        self.again = deque[torch.Tensor | None]()

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, groups: int | None, group_topk: int | None, compute: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [N, k] of the experts that tokens go to, and these, of scores [N, experts]."""
        again = self._recompute and torch.is_grad_enabled()
        routes = self.again.popleft() if again else self.now
        if self._recompute and not again:
            self.again.append(routes)
        found, own = compute(scores, topk, groups, group_topk)
        if routes is None:
            return found, own
        chosen = self._routers.chosen(routes, own, counts=not again)
        return scores.gather(1, chosen), chosen


class StageRouters(Routers):
    """The routers of a stage. group: of the ranks that share its layers; recompute: layers pass once without gradients,
    which counts, and once more with them."""

    def __init__(self, module: GPTModel, group: dist.ProcessGroup | None, recompute: bool) -> None:
        layers = {each.layer_number - 1: each.mlp for each in module.decoder.layers}
        routers = {number: mlp.router for number, mlp in layers.items() if hasattr(mlp, "router")}
        super().__init__(routers, self._told)
        self._group, self._recompute = group, recompute
        self._here = self._everywhere = 0  # tokens of the pass that begins
        self._replays = {layer: Replay(self, recompute) for layer in routers}
        for layer, replay in self._replays.items():
            routers[layer].router_replay = replay

    def begin(self, laid: LaidOut) -> None:
        """Begin a forward pass of these samples."""
        rows, tokens = laid.shape
        number, slices = (0, 1) if self._group is None else (self._group.rank(), self._group.size())
        size = -(-tokens // slices)
        own = slice(number * size, (number + 1) * size)
        here = len(range(tokens)[own])
        self._here, self._everywhere = here * rows, tokens * rows
        for layer, replay in self._replays.items():
            replay.now = None
            if laid.routes is not None:  # tokens of all rows stand side by side
                routes = laid.routes[:, layer].unflatten(0, laid.shape).transpose(0, 1)[own]
                replay.now = pad(routes, (0, 0, 0, 0, 0, size - here), value=-1).flatten(0, 1)

    def end(self) -> None:
        """Forget passes whose layers are not computed again."""
        for replay in self._replays.values():
            replay.again.clear()

    def sums(self) -> dict[str, float]:
        """The counts of all slices. A collective of the ranks that have one."""
        told = super().sums()
        if self._group is None or not self._replays:
            return told
        found = [told] * self._group.size()
        dist.all_gather_object(found, told, group=self._group)
        return reduce(add_diagnostics, found)

    def _told(self, router: Any, inputs: Any, output: Any) -> Routed | None:
        if torch.is_grad_enabled() == self._recompute:
            return None
        with torch.no_grad():
            logits = router.gating(inputs[0]).flatten(0, 1)[: self._here]
            return Routed(logits, output[1][: self._here].nonzero()[:, 1], self._everywhere)
